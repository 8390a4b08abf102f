"""Pictures of one rollout: the tree of its branches, and its time line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from rollwright.tokens.tree import Trajectory
from rollwright.viewer.plots import duration
from rollwright.viewer.svg import Axis, Canvas, nice_ticks, short, time_ticks
from rollwright.viewer.tokenview import Fates

__all__ = ["time_line", "tree"]

_LANE = 26.0
_WIDTH = 1000.0
_MOST_LANES = 40


def tree(trajectory: Trajectory, fates: Fates, *, current: int | None, href: Callable[[int], str]) -> Markup:
    """Each leaf's line in a lane of its own: as long as its tokens, thick where sampled, linked where it parted."""
    leaves = trajectory.leaves()
    left_out = max(0, len(leaves) - _MOST_LANES)
    leaves = leaves[:_MOST_LANES]
    height = 36 + _LANE * (len(leaves) + (1 if left_out else 0))
    canvas = Canvas(_WIDTH, height, label=f"The tree of {len(leaves)} branches")
    ends = _ends(trajectory)
    x = Axis(0, max(ends, default=1), 96, _WIDTH - 70)
    for tick in nice_ticks(0, max(ends, default=1), 8):
        canvas.line(x(tick), 4, x(tick), height - 24, "grid")
        canvas.text(x(tick), height - 8, short(tick), anchor="middle")
    drawn: dict[int, float] = {}
    """Turn → the height of the lane it was drawn in."""
    for lane, leaf in enumerate(leaves):
        y = 18 + lane * _LANE
        turn = trajectory.turns[leaf]
        chosen = leaf == current
        canvas.open_link(href(leaf), f"branch that ends in turn {leaf}, {turn.role}")
        if chosen:
            canvas.rect(4, y - 11, _WIDTH - 8, 22, "lane-chosen", rx=4)
        canvas.text(84, y + 4, turn.role, "name strong" if chosen else "name", anchor="end")
        for index in trajectory.path(leaf):
            if index not in drawn:
                _turn(canvas, trajectory, fates, index, x, y, ends, drawn)
        canvas.text(x(ends[leaf]) + 10, y + 4, f"turn {leaf}", "tick")
        canvas.close_link()
    if left_out:
        canvas.text(96, 18 + len(leaves) * _LANE, f"… {left_out} more branches", "tick")
    return canvas.done()


def _turn(
    canvas: Canvas,
    trajectory: Trajectory,
    fates: Fates,
    index: int,
    x: Axis,
    y: float,
    ends: Sequence[int],
    drawn: dict[int, float],
) -> None:
    turn = trajectory.turns[index]
    start = 0 if turn.parent is None else ends[turn.parent]
    middle = start + len(turn.delta)
    if turn.parent is not None and drawn.get(turn.parent, y) != y:
        above = drawn[turn.parent]
        canvas.put("path", d=f"M{x(start):.1f} {above:.1f} V{y:.1f}", class_="fork")
    if turn.drift is not None and turn.drift.turn in drawn:
        at = x(turn.drift.token_index)
        title = (
            f"{turn.drift.cause}: turn {index} parts from turn {turn.drift.turn} at token {turn.drift.token_index:,}"
        )
        canvas.put("path", title=title, d=f"M{at:.1f} {drawn[turn.drift.turn]:.1f} V{y:.1f}", class_="drift")
        canvas.put("circle", title=title, cx=at, cy=y, r=3.5, class_="drift-mark")
    drawn[index] = y
    canvas.line(x(start), y, x(middle), y, "prompt-line")
    reasons = fates.of(turn)
    trained = reasons.count("")
    kind = "trained" if trained else "excluded"
    told = f"{trained:,} trained" if trained else "not trained" + (f": {reasons[0]}" if reasons else "")
    title = f"turn {index}, {turn.role}: {len(turn.delta):,} prompt + {len(turn.sampled):,} sampled tokens, {told}"
    width = max(x(ends[index]) - x(middle), 3.0)
    canvas.rect(x(middle), y - 5, width, 10, f"k-{kind}", title=title, rx=2)


def _ends(trajectory: Trajectory) -> list[int]:
    """Turn → how many tokens there are from the root through it."""
    ends: list[int] = []
    for turn in trajectory.turns:
        start = 0 if turn.parent is None else ends[turn.parent]
        ends.append(start + len(turn.delta) + len(turn.sampled))
    return ends


def time_line(
    stages: Sequence[tuple[str, float]], turns: Sequence[tuple[int, float, float]], *, failed: str = ""
) -> Markup:
    """Stages end to end; below, the engine's part of the agent's time. `turns`: index, begin, end in seconds of any
    clock. The last turn is taken to end with the agent: what a CLI does after its last reply is short. `failed`: the
    stage that was not reached."""
    total = sum(seconds for _, seconds in stages) or 1.0
    canvas = Canvas(_WIDTH, 76, label="Time line of the rollout")
    x = Axis(0, total, 6, _WIDTH - 6)
    for tick in time_ticks(total, 8):
        canvas.line(x(tick), 6, x(tick), 56, "grid")
        canvas.text(x(tick), 71, duration(tick) if tick else "0", anchor="middle" if tick else "start")
    at = 0.0
    agent_end: float | None = None
    for stage, seconds in stages:
        begin, end = x(at), x(at + seconds)
        kind = {"agent_done": "stage-agent", "graded": "stage-grade"}.get(stage, "stage")
        title = f"{stage.replace('_', ' ')}: {duration(seconds)}"
        canvas.rect(begin, 10, max(end - begin - 1, 0.8), 18, kind, title=title, rx=2)
        name = {"agent_done": "agent", "graded": "grading", "agent_running": "start"}.get(stage, stage)
        if end - begin > 7 * len(name) + 10:
            canvas.text(begin + 8, 23, name, "on-bar" if kind == "stage-agent" else "in-bar")
        at += seconds
        if stage == "agent_done":
            agent_end = at
    if failed:
        title = f"failed on the way to {failed.replace('_', ' ')}"
        canvas.rect(x(at) - 4, 8, 4, 22, "stage-failed", title=title, rx=1)
    if turns and agent_end is not None:
        last = max(end for _, _, end in turns)
        for index, begin, end in turns:
            left, right = x(max(0.0, agent_end - (last - begin))), x(max(0.0, agent_end - (last - end)))
            canvas.rect(
                left, 36, max(right - left, 1.2), 12, "k-trained", title=f"turn {index}: {duration(end - begin)}", rx=1
            )
    return canvas.done()
