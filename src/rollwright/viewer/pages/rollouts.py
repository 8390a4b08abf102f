"""The rollouts of a run as a table: filtered, sorted and paged by the URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rollwright.viewer.index import SORTS, Filter
from rollwright.viewer.pages.site import Site

__all__ = ["rollouts_page"]

_PAGE = 100
_NAMES: Mapping[str, str] = {"text": "q", "grp": "group"}
"""Field of the filter → name in the URL, where they differ."""


def rollouts_page(site: Site, name: str, query: Mapping[str, str]) -> str:
    shown = site.run(name)
    which = Filter(
        task=query.get("task", ""),
        grp=query.get("group", ""),
        status=query.get("status", ""),
        error=query.get("error", ""),
        stage=query.get("stage", ""),
        text=query.get("q", ""),
        drift=query.get("drift", "") == "1",
    )
    order = query.get("sort", "")
    sort, down = order.removeprefix("-"), order.startswith("-")
    sort = sort if sort in SORTS else "rollout"
    count = shown.index.count(which)
    pages = 1 if site.files else max(1, -(-count // _PAGE))
    page = min(max(1, _number(query.get("page", "1"))), pages)
    rows = shown.index.rows(which, sort=sort, down=down, limit=-1 if site.files else _PAGE, offset=(page - 1) * _PAGE)
    told = {key: value for key, value in asdict(which).items() if value}
    told = {_NAMES.get(key, key): (1 if value is True else value) for key, value in told.items()}
    return site.render(
        "rollouts.html",
        ("runs", name, "rollouts"),
        run=shown,
        tab="rollouts",
        running=shown.running,
        rows=rows,
        count=count,
        total=shown.index.count(),
        page=page,
        pages=pages,
        which=which,
        told=told,
        sort=sort,
        down=down,
        statuses=shown.index.statuses(),
        first=(page - 1) * _PAGE,
    )


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1
