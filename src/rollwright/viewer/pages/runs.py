"""The list of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rollwright.viewer.index import Group
from rollwright.viewer.library import ShownRun
from rollwright.viewer.pages.site import Site
from rollwright.viewer.plots import outcome_bar
from rollwright.viewer.stats import Estimate, mean_over_tasks

__all__ = ["facts_of", "mean_reward", "runs_page", "solve_rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    run: ShownRun
    stored: int
    statuses: dict[str, int]
    solved: Estimate | None
    reward: Estimate | None
    sampled: float
    running: bool
    facts: list[tuple[str, str]]
    bar: Markup


def runs_page(site: Site) -> str:
    return site.render("runs.html", (), runs=[_listed(site, shown) for shown in site.library.runs()])


def _listed(site: Site, shown: ShownRun) -> _Listed:
    generation = shown.index.sync()
    return site.remembered(("runs", shown.name, generation, shown.running), lambda: _make(shown))


def _make(shown: ShownRun) -> _Listed:
    statuses, groups = shown.index.statuses(), shown.index.groups()
    return _Listed(
        run=shown,
        stored=sum(statuses.values()),
        statuses=statuses,
        solved=solve_rate(groups),
        reward=mean_reward(groups),
        sampled=shown.index.sums()["sampled_tokens"],
        running=shown.running,
        facts=facts_of(shown),
        bar=outcome_bar(statuses),
    )


def solve_rate(groups: Sequence[Group]) -> Estimate | None:
    """Over groups, so that a task with more attempts does not count more."""
    rates = [rate for group in groups if (rate := group.solve_rate) is not None]
    return mean_over_tasks(rates, low=0.0, high=1.0)


def mean_reward(groups: Sequence[Group]) -> Estimate | None:
    """Over groups. Rewards that all lie between 0 and 1 are taken to be of that range."""
    known = [group for group in groups if group.mean is not None]
    unit = all((group.lowest or 0) >= 0 and (group.highest or 0) <= 1 for group in known)
    means = [group.mean for group in known if group.mean is not None]
    return mean_over_tasks(means, low=0.0, high=1.0) if unit else mean_over_tasks(means)


def facts_of(shown: ShownRun) -> list[tuple[str, str]]:
    """What was run, in a few words."""
    facts: list[tuple[str, str]] = []
    for name, setting in (
        ("harness", "harness.kind"),
        ("policy", "policy.model"),
        ("engine", "engine.kind"),
        ("sandbox", "sandbox.kind"),
    ):
        value = shown.setting(setting)
        if isinstance(value, str):
            facts.append((name, value))
    count, attempts = shown.setting("tasks.count", top=True), shown.setting("run.attempts")
    if isinstance(count, int) and isinstance(attempts, int) and shown.planned:
        facts.append(("plan", f"{shown.planned // attempts:,} tasks × {attempts} attempts"))
    return facts
