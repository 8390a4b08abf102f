"""Two runs side by side: what changed for each task, and how sure the differences are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.viewer import plots
from rollwright.viewer.index import Group
from rollwright.viewer.library import ShownRun
from rollwright.viewer.pages.run import flattened
from rollwright.viewer.pages.runs import mean_reward, solve_rate
from rollwright.viewer.pages.site import Site
from rollwright.viewer.plots import duration
from rollwright.viewer.stats import Estimate, mean_over_tasks

__all__ = ["compare_page"]


@dataclass(frozen=True, slots=True)
class _Pair:
    task: str
    left: Group
    right: Group

    @property
    def solve(self) -> float | None:
        return _minus(self.right.solve_rate, self.left.solve_rate)

    @property
    def reward(self) -> float | None:
        return _minus(self.right.mean, self.left.mean)

    @property
    def seconds(self) -> float:
        return self.right.seconds - self.left.seconds

    @property
    def sampled(self) -> float:
        return self.right.sampled - self.left.sampled


_SORTS: Mapping[str, Callable[[_Pair], Any]] = {
    "task": lambda pair: pair.task,
    "solve": lambda pair: pair.solve or 0.0,
    "reward": lambda pair: pair.reward or 0.0,
    "seconds": lambda pair: pair.seconds,
    "sampled": lambda pair: pair.sampled,
}
_SHOWN = 2000


def compare_page(site: Site, left: str, right: str, query: Mapping[str, str]) -> str:
    one, two = site.run(left), site.run(right)
    before = {group.name: group for group in one.index.groups()}
    after = {group.name: group for group in two.index.groups()}
    pairs = [_Pair(task, group, after[task]) for task, group in before.items() if task in after]
    order = query.get("sort", "-change")
    sort, down = order.removeprefix("-"), order.startswith("-")
    changes = query.get("show", "") == "changed"
    listed = [pair for pair in pairs if not changes or pair.solve or pair.reward]
    listed.sort(key=_SORTS.get(sort, lambda pair: (abs(pair.solve or 0.0), abs(pair.reward or 0.0))), reverse=down)
    return site.render(
        "compare.html",
        ("compare", left, right),
        left=one,
        right=two,
        sides=[_side(one, list(before.values())), _side(two, list(after.values()))],
        plot=plots.difference(_differences(pairs)) if pairs else None,
        pairs=listed[: None if site.files else _SHOWN],
        common=len(pairs),
        only=(len(before) - len(pairs), len(after) - len(pairs)),
        better=sum((pair.solve or 0) > 0 for pair in pairs),
        worse=sum((pair.solve or 0) < 0 for pair in pairs),
        settings=_changed(one.resolved, two.resolved),
        sort=sort if sort in _SORTS else "",
        down=down,
        changes=changes,
    )


def _side(shown: ShownRun, groups: list[Group]) -> dict[str, Any]:
    statuses = shown.index.statuses()
    return {
        "run": shown,
        "stored": sum(statuses.values()),
        "bar": plots.outcome_bar(statuses),
        "solved": solve_rate(groups),
        "reward": mean_reward(groups),
        "ungraded": statuses.get("ungraded", 0),
    }


def _differences(pairs: list[_Pair]) -> list[tuple[str, Estimate, str]]:
    """Means of the differences within tasks: what makes one task harder than another is not in them."""
    rows: list[tuple[str, Estimate, str]] = []
    forms: tuple[tuple[str, Callable[[_Pair], float | None], Callable[[float], str]], ...] = (
        ("solve rate", lambda pair: pair.solve, lambda value: f"{_signed(value * 100, 1)} pp"),
        ("mean reward", lambda pair: pair.reward, lambda value: _signed(value, 3)),
        ("time", lambda pair: pair.seconds, lambda value: ("−" if value < 0 else "+") + duration(abs(value))),
        ("sampled tokens", lambda pair: pair.sampled, lambda value: _signed(value, 0)),
    )
    for name, of, form in forms:
        values = [value for pair in pairs if (value := of(pair)) is not None]
        bounded = name == "solve rate" or (name == "mean reward" and all(_unit(pair) for pair in pairs))
        estimate = mean_over_tasks(values, low=-1.0, high=1.0) if bounded else mean_over_tasks(values)
        if estimate is None:
            continue
        told = form(estimate.value)
        if estimate.low is not None and estimate.high is not None:
            told += f"   ({form(estimate.low)} to {form(estimate.high)})"
        rows.append((name, estimate, told))
    return rows


def _unit(pair: _Pair) -> bool:
    """Whether all its rewards lie between 0 and 1."""
    ends = (pair.left.lowest, pair.left.highest, pair.right.lowest, pair.right.highest)
    return all(end is None or 0 <= end <= 1 for end in ends)


def _changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings and versions that are not the same."""
    one, two = dict(flattened(left)), dict(flattened(right))
    names = [name for name in {**one, **two} if name not in ("run.name", "run.output", "base")]
    return [(name, one.get(name, "–"), two.get(name, "–")) for name in names if one.get(name) != two.get(name)]


def _signed(value: float, digits: int) -> str:
    return f"{value:+,.{digits}f}".replace("-", "−")


def _minus(right: float | None, left: float | None) -> float | None:
    return None if right is None or left is None else right - left
