"""One run: what came out, where time and tokens went, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rollwright.types import Stage
from rollwright.viewer import plots
from rollwright.viewer.library import ShownRun
from rollwright.viewer.pages.runs import facts_of, mean_reward, solve_rate
from rollwright.viewer.pages.site import Site
from rollwright.viewer.stats import pass_at_k

__all__ = ["flattened", "run_page"]

_STAGES = [stage.value for stage in Stage]


def run_page(site: Site, name: str) -> str:
    shown = site.run(name)
    generation = shown.index.sync()
    values = site.remembered(("run", name, generation), lambda: _values(shown))
    return site.render(
        "run.html",
        ("runs", name),
        run=shown,
        tab="overview",
        facts=facts_of(shown),
        running=shown.running,
        in_flight=[] if site.files else shown.in_flight(),
        others=site.comparable(name),
        settings=flattened(shown.resolved),
        **values,
    )


def _values(shown: ShownRun) -> dict[str, Any]:
    index = shown.index
    groups = index.groups()
    statuses = index.statuses()
    judged = {group.name: (group.judged, group.resolved) for group in groups}
    points = pass_at_k(judged)
    rewards = index.numbers("reward")
    rates = sorted(rate for group in groups if (rate := group.solve_rate) is not None)
    failures = index.failures()
    sums = index.sums()
    times = index.stage_times()
    return {
        "stored": sum(statuses.values()),
        "statuses": sorted(statuses.items(), key=lambda item: plots.rank(item[0])),
        "bar": plots.outcome_bar(statuses),
        "solved": solve_rate(groups),
        "reward": mean_reward(groups),
        "best": points[-1] if points else None,
        "sums": sums,
        "zero_variance": sum(group.zero_variance for group in groups),
        "groups": len(groups),
        "reward_plot": plots.histogram(rewards, label="Rewards of all judged rollouts", x_name="reward"),
        "rate_plot": plots.solve_rates(rates, max((group.judged for group in groups), default=1)),
        "pass_plot": plots.pass_curve(points),
        "times_plot": plots.solve_times(
            index.numbers("s_agent_done", "status = 'resolved'"), sum(total for total, _ in judged.values())
        ),
        "lengths_plot": plots.lengths(index.tokens_per_turn()),
        "seconds_plot": plots.histogram(
            index.numbers("seconds"), label="Time of all rollouts", x_name="seconds from start to stored", unit=False
        ),
        "waterfall": plots.waterfall(times),
        "failures": failures,
        "stages": _stages(times, failures, sum(statuses.values())),
        "stop_reasons": index.stop_reasons(),
        "excluded": index.counted("excluded"),
        "causes": index.counted("causes"),
        "traffic": index.counted("traffic"),
        "bad_lines": index.bad_lines,
    }


def _stages(times: Mapping[str, Any], failures: list[Any], total: int) -> list[tuple[str, int, int]]:
    """Stage, how many rollouts reached it, how many failed on the way to it."""
    failed: dict[str, int] = {}
    for _, stage, _, count, *_ in failures:
        failed[stage] = failed.get(stage, 0) + count
    rows: list[tuple[str, int, int]] = []
    for stage in _STAGES:
        reached = total if stage in (Stage.ADMITTED, Stage.STORED) else len(times.get(stage, ()))
        rows.append((stage, reached, failed.get(stage, 0)))
    return rows


def flattened(resolved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Dotted name → value of all that resolved.json says."""
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in cast("dict[str, Any]", value).items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif prefix != "schema":
            told = "none" if value is None else str(cast("object", value))
            rows.append((prefix.removeprefix("config."), told))

    walk("", dict(resolved))
    return rows
