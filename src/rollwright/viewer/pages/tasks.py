"""The groups of a run: one row a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollwright.viewer.index import Group
from rollwright.viewer.pages.site import Site

__all__ = ["tasks_page"]

_SORTS: Mapping[str, Callable[[Group], Any]] = {
    "task": lambda group: group.name,
    "rollouts": lambda group: group.rollouts,
    "solve": lambda group: -1 if group.solve_rate is None else group.solve_rate,
    "reward": lambda group: -1e300 if group.mean is None else group.mean,
    "ungraded": lambda group: group.ungraded,
    "sampled": lambda group: group.sampled,
    "seconds": lambda group: group.seconds,
}
_SHOWN = 2000


def tasks_page(site: Site, name: str, query: Mapping[str, str]) -> str:
    shown = site.run(name)
    groups = shown.index.groups()
    order = query.get("sort", "")
    sort, down = order.removeprefix("-"), order.startswith("-")
    sort = sort if sort in _SORTS else "task"
    text, kind = query.get("q", "").lower(), query.get("kind", "")
    kinds = {group.name: _kind(group) for group in groups}
    found = [group for group in groups if text in group.name.lower() and kind in ("", kinds[group.name])]
    found.sort(key=_SORTS[sort], reverse=down)
    return site.render(
        "tasks.html",
        ("runs", name, "tasks"),
        run=shown,
        tab="tasks",
        running=shown.running,
        groups=found[: None if site.files else _SHOWN],
        count=len(found),
        total=len(groups),
        sort=sort,
        down=down,
        text=query.get("q", ""),
        kind=kind,
        kinds={name: sum(found == name for found in kinds.values()) for name in ("mixed", "all", "none", "below")},
        kind_of=kinds,
    )


def _kind(group: Group) -> str:
    """Whether it teaches, and if not, why."""
    if group.counted < group.quorum:
        return "below"
    if not group.zero_variance:
        return "mixed"
    return "all" if group.resolved == group.judged else "none" if group.resolved == 0 else "equal"
