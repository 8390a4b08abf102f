"""The groups of a run: one row a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollwright.viewer.index import Group
from rollwright.viewer.pages.site import Site

__all__ = ["tasks_page"]

_SORTS: Mapping[str, Callable[[Group], Any]] = {
    "task": lambda group: group.task,
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
    found = [group for group in groups if text in group.task.lower() and _is(group, kind)]
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
        kinds={
            "mixed": sum(_is(group, "mixed") for group in groups),
            "all": sum(_is(group, "all") for group in groups),
            "none": sum(_is(group, "none") for group in groups),
        },
    )


def _is(group: Group, kind: str) -> bool:
    match kind:
        case "mixed":
            return not group.zero_variance and group.judged > 0
        case "all":
            return group.zero_variance and group.resolved == group.judged
        case "none":
            return group.zero_variance and group.resolved == 0
        case _:
            return True
