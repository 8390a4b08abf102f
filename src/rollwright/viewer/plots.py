"""The plots of the pages as inline SVG: distributions, curves with intervals, and times laid end to end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from rollwright.viewer.stats import Estimate, percentile
from rollwright.viewer.svg import Axis, Canvas, nice_ticks, polyline, short, time_ticks

__all__ = [
    "difference",
    "duration",
    "histogram",
    "lengths",
    "outcome_bar",
    "pass_curve",
    "rank",
    "solve_rates",
    "solve_times",
    "waterfall",
]

_WIDTH, _HEIGHT = 420.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 12.0, 12.0, 34.0
_ORDER = (
    "resolved",
    "unresolved",
    "empty_patch",
    "test_timeout",
    "patch_rejected",
    "tampered",
    "ungraded",
    "superseded",
)


def duration(seconds: float) -> str:
    """For people: 0.2 s, 41 s, 3 m 20 s, 2 h 05 m."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"


def outcome_bar(statuses: Mapping[str, int]) -> Markup:
    """All rollouts in one bar, by status."""
    canvas = Canvas(1000, 14, label="Rollouts by outcome")
    total = sum(statuses.values()) or 1
    x = 0.0
    for status in sorted(statuses, key=rank):
        width = 1000 * statuses[status] / total
        title = f"{status}: {statuses[status]:,} ({statuses[status] / total:.1%})"
        canvas.rect(x, 0, max(width - 1.5, 0.8), 14, f"s-{status}", title=title, rx=1.5)
        x += width
    return canvas.done()


def rank(status: str) -> tuple[int, str]:
    """The order in which outcomes are told."""
    return (_ORDER.index(status) if status in _ORDER else len(_ORDER), status)


def histogram(
    values: Sequence[float], *, label: str, x_name: str, bins: int = 20, unit: bool = True, ends: bool = False
) -> Markup:
    """Counts of values in order. `unit`: at least from 0 to 1."""
    canvas = Canvas(_WIDTH, _HEIGHT, label=label)
    low, high = (min(0.0, values[0]), max(1.0 if unit else 1e-9, values[-1])) if values else (0.0, 1.0)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    x = Axis(low, high, _LEFT, _WIDTH - _RIGHT)
    top = max(counts, default=1) or 1
    y = Axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    _frame(canvas, x, y, x_name=x_name, y_ticks=[t for t in nice_ticks(0, top, 4) if t == int(t)])
    step = (high - low) / bins
    for place, count in enumerate(counts):
        if count:
            left, right = x(low + place * step), x(low + (place + 1) * step)
            title = f"{short(low + place * step)} to {short(low + (place + 1) * step)}: {count:,}"
            canvas.rect(left + 1, y(count), right - left - 2, y(0) - y(count), "bar", title=title, rx=1)
    return canvas.done()


def solve_rates(rates: Sequence[float], attempts: int) -> Markup:
    """How many tasks have which share of their rollouts resolved; none and all stand out: they have no variance."""
    canvas = Canvas(_WIDTH, _HEIGHT, label="Solve rate of each task")
    steps = min(max(attempts, 2), 16)
    counts = [0] * (steps + 1)
    for rate in rates:
        counts[round(rate * steps)] += 1
    width = (_WIDTH - _LEFT - _RIGHT) / (steps + 1)
    x = Axis(0, 1, _LEFT + width / 2, _WIDTH - _RIGHT - width / 2)
    top = max(counts) or 1
    y = Axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    ticks = [t for t in nice_ticks(0, top, 4) if t == int(t)]
    _frame(
        canvas,
        x,
        y,
        x_name="share of a task's rollouts that resolve it",
        y_ticks=ticks,
        x_ticks=[0, 0.25, 0.5, 0.75, 1],
    )
    for place, count in enumerate(counts):
        if count:
            left = x(place / steps) - width / 2 + width * 0.1
            name = "muted-bar" if place in (0, steps) else "bar"
            title = f"{place / steps:.0%}: {count:,} tasks"
            canvas.rect(left, y(count), width * 0.8, y(0) - y(count), name, title=title, rx=1.5)
    return canvas.done()


def pass_curve(points: Sequence[tuple[int, Estimate]]) -> Markup:
    """pass@k with its intervals."""
    canvas = Canvas(_WIDTH, _HEIGHT, label="pass@k with 95 % intervals")
    most = points[-1][0] if points else 1
    x = Axis(1, max(most, 2), _LEFT + 6, _WIDTH - _RIGHT - 6)
    y = Axis(0, 1, _HEIGHT - _BOTTOM, _TOP)
    ticks = sorted({round(tick) for tick in nice_ticks(1, most, 7)} | {1, most})
    _frame(canvas, x, y, x_name="k attempts", y_ticks=[0, 0.25, 0.5, 0.75, 1], x_ticks=[float(t) for t in ticks])
    if len(points) > 1:
        upper = [(x(k), y(e.value if e.high is None else e.high)) for k, e in points]
        lower = [(x(k), y(e.value if e.low is None else e.low)) for k, e in reversed(points)]
        canvas.put("polygon", points=polyline([*upper, *lower]), class_="band")
        canvas.put("polyline", points=polyline([(x(k), y(e.value)) for k, e in points]), class_="curve")
    for k, estimate in points:
        if len(points) == 1 and estimate.low is not None and estimate.high is not None:
            canvas.line(x(k), y(estimate.low), x(k), y(estimate.high), "whisker")
        canvas.put("circle", title=f"pass@{k}: {_told(estimate)}", cx=x(k), cy=y(estimate.value), r=3, class_="dot")
    return canvas.done()


def _told(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def solve_times(solved: Sequence[float], total: int) -> Markup:
    """Which share of all judged rollouts was solved within how many seconds of the agent's work."""
    canvas = Canvas(_WIDTH, _HEIGHT, label="Share of rollouts solved within a time")
    end = solved[-1] * 1.05 if solved else 1.0
    x = Axis(0, end, _LEFT, _WIDTH - _RIGHT)
    share = len(solved) / total if total else 0.0
    top = next(limit for limit in (0.1, 0.25, 0.5, 1.0) if limit >= share)
    y = Axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    _frame(canvas, x, y, x_name="seconds of the agent's work", y_ticks=nice_ticks(0, top, 4), percent=True)
    if solved and total:
        points = [(x(0), y(0))]
        step = max(1, len(solved) // 400)
        for place in [*range(0, len(solved), step), len(solved) - 1]:
            at = x(solved[place])
            points += [(at, points[-1][1]), (at, y((place + 1) / total))]
        points.append((x(end), points[-1][1]))
        canvas.put("polyline", points=polyline(points), class_="curve")
        middle = percentile(solved, 0.5)
        half = bisect_right(solved, middle) / total
        canvas.put("circle", title=f"half of them by {duration(middle)}", cx=x(middle), cy=y(half), r=3, class_="dot")
        canvas.text(x(middle) + 7, y(half) + 12, f"median {duration(middle)}", "note")
    return canvas.done()


def lengths(turns: Sequence[Sequence[int]]) -> Markup:
    """Tokens sampled in each turn: median, and the middle half of the rollouts that got there."""
    canvas = Canvas(_WIDTH, _HEIGHT, label="Tokens sampled per turn")
    most = max(len(turns), 2)
    top = max((percentile(found, 0.75) for found in turns), default=1.0) or 1.0
    x = Axis(1, most, _LEFT + 6, _WIDTH - _RIGHT - 6)
    y = Axis(0, top * 1.08, _HEIGHT - _BOTTOM, _TOP)
    ticks = sorted({max(1, round(tick)) for tick in nice_ticks(1, most, 7)} | {1})
    _frame(canvas, x, y, x_name="turn", y_ticks=nice_ticks(0, top * 1.08, 4), x_ticks=[float(t) for t in ticks])
    marks = [
        (turn, *(percentile(found, share) for share in (0.25, 0.5, 0.75)), len(found))
        for turn, found in enumerate(turns, start=1)
    ]
    if len(marks) > 1:
        band = [(x(turn), y(high)) for turn, _, _, high, _ in marks]
        band += [(x(turn), y(low)) for turn, low, _, _, _ in reversed(marks)]
        canvas.put("polygon", points=polyline(band), class_="band")
        canvas.put("polyline", points=polyline([(x(t), y(middle)) for t, _, middle, _, _ in marks]), class_="curve")
    for turn, low, middle, high, count in marks if len(marks) <= 24 else ():
        title = f"turn {turn}: median {middle:.0f} tokens ({low:.0f} to {high:.0f}) in {count:,} rollouts"
        canvas.put("circle", title=title, cx=x(turn), cy=y(middle), r=2.5, class_="dot")
    return canvas.done()


def waterfall(stages: Mapping[str, Sequence[float]]) -> Markup:
    """Median time of each stage, laid end to end, with the spread from the 10th to the 90th percentile."""
    row, left, right = 26.0, 110.0, 64.0
    width, height = 1130.0, 30.0 + row * len(stages)
    canvas = Canvas(width, height, label="Time per stage, median of all rollouts, end to end")
    medians = {stage: percentile(times, 0.5) for stage, times in stages.items()}
    late = list(pairwise([0.0, *_running(list(medians.values()))]))
    end = max(
        (
            start + max(percentile(times, 0.9), medians[stage])
            for (start, _), (stage, times) in zip(late, stages.items(), strict=True)
        ),
        default=1.0,
    )
    x = Axis(0, end or 1.0, left, width - right)
    for tick in time_ticks(end, 6):
        canvas.line(x(tick), 2, x(tick), height - 24, "grid")
        canvas.text(x(tick), height - 8, duration(tick) if tick else "0", anchor="middle")
    for place, ((start, stop), (stage, times)) in enumerate(zip(late, stages.items(), strict=True)):
        y = place * row + 5
        low, high = percentile(times, 0.1), percentile(times, 0.9)
        canvas.text(left - 12, y + 12, stage.replace("_", " "), "name", anchor="end")
        title = (
            f"{stage}: median {duration(medians[stage])}, 10th to 90th percentile {duration(low)} to {duration(high)}"
        )
        canvas.rect(x(start), y + 2, max(x(stop) - x(start), 1.5), row - 11, "bar", title=title, rx=1.5)
        canvas.line(x(start + low), y + row / 2 - 3.5, x(start + high), y + row / 2 - 3.5, "whisker")
        canvas.text(max(x(stop), x(start + high)) + 8, y + 12, duration(medians[stage]), "value")
    return canvas.done()


def difference(rows: Sequence[tuple[str, Estimate, str]]) -> Markup:
    """Differences with their intervals around zero: name, estimate, how it is told. Each row has its own scale."""
    row, left, right = 36.0, 130.0, 260.0
    width, height = 1130.0, row * len(rows) + 8
    canvas = Canvas(width, height, label="Differences with 95 % intervals")
    middle = (left + width - right) / 2
    canvas.line(middle, 2, middle, height - 2, "axis")
    for place, (name, estimate, told) in enumerate(rows):
        y = place * row + row / 2 + 4
        low = estimate.value if estimate.low is None else estimate.low
        high = estimate.value if estimate.high is None else estimate.high
        reach = max(abs(low), abs(high), 1e-9) * 1.1
        x = Axis(-reach, reach, left, width - right)
        sure = low > 0 or high < 0
        canvas.text(left - 14, y + 4, name, "name", anchor="end")
        canvas.line(x(low), y, x(high), y, "interval" if sure else "interval unsure")
        for end in (low, high):
            canvas.line(x(end), y - 4, x(end), y + 4, "interval" if sure else "interval unsure")
        canvas.put("circle", title=told, cx=x(estimate.value), cy=y, r=4, class_="dot" if sure else "dot unsure")
        canvas.text(width - right + 18, y + 4, told, "value")
    return canvas.done()


def _running(values: Sequence[float]) -> list[float]:
    total = 0.0
    sums: list[float] = []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _frame(
    canvas: Canvas,
    x: Axis,
    y: Axis,
    *,
    x_name: str,
    y_ticks: Sequence[float],
    x_ticks: Sequence[float] | None = None,
    percent: bool = False,
) -> None:
    for tick in y_ticks:
        canvas.line(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick), "grid" if tick else "axis")
        canvas.text(_LEFT - 7, y(tick) + 3.5, f"{tick:.0%}" if percent else short(tick), anchor="end")
    for tick in nice_ticks(x.low, x.high) if x_ticks is None else x_ticks:
        canvas.text(x(tick), _HEIGHT - _BOTTOM + 15, short(tick), anchor="middle")
    canvas.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, x_name, "axis-name", anchor="middle")
