"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections import Counter, deque
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rollwright.rollout import RolloutPlan
from rollwright.run import Observer
from rollwright.store import RolloutRecord
from rollwright.types import Stage

_STYLES = {"resolved": "green", "unresolved": "yellow", "empty_patch": "yellow", "ungraded": "red"}
_FRAME = 6
"""Lines of the screen that are not rows: title, head, what is cut off, the step, and room for a log line."""

_WIDE = 72
"""Columns from which on there is room for all that is known of a rollout."""


class Screen(Console):
    """Standard error. When its reader goes away, a run goes on without being watched."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display(Observer):
    """Live progress of one run. A context manager: the terminal is restored on the way out."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._active: dict[str, tuple[Stage, float]] = {}
        self._recent: deque[RolloutRecord] = deque(maxlen=200)
        self._resolved = 0
        self._ungraded = 0
        self._began = time.monotonic()
        self._step = ""
        self._drawn_for = console.size
        self._live = self._new_live() if console.is_terminal and not console.is_dumb_terminal else None

    def _new_live(self) -> Live:
        self._drawn_for = self._console.size
        return Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def resized(self) -> None:
        """The terminal has another size. Terminals differ in what they make of the lines that are there, so none of
        them is kept."""
        if self._live:
            self._live.stop()
            self._console.clear()
            self._live = self._new_live()
            self._live.start(refresh=True)

    def catch_up(self) -> None:
        """Nobody has told of a new size so far; there may have been one."""
        if self._console.size != self._drawn_for:
            self.resized()

    def already(self, done: int) -> None:
        """So many rollouts were stored before."""
        self._done = done

    def preparing(self, what: str) -> None:
        self._step = f"preparing {what}"
        if not self._live:
            self._console.print(self._step, markup=False, soft_wrap=True)

    def started(self, plan: RolloutPlan) -> None:
        self._step = ""
        self._active[plan.name] = (Stage.ADMITTED, time.monotonic())

    def entered(self, plan: RolloutPlan, stage: Stage) -> None:
        _, began = self._active.get(plan.name, (stage, time.monotonic()))
        self._active[plan.name] = (stage, began)

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None:
        self._active.pop(plan.name, None)
        self._recent.append(record)
        self._done += 1
        self._resolved += record.status == "resolved"
        self._ungraded += not record.graded
        if not self._live:
            line = f"[{self._done}/{self._total}] {describe(record)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        title = Text(self._title(), style="italic")
        wide = self._console.size.width >= _WIDE
        for name in ("rollout", "stage", "outcome", *(("reward", "tokens") if wide else ()), "seconds"):
            right = name in ("reward", "tokens", "seconds")
            table.add_column(name, justify="right" if right else "left", no_wrap=True, max_width=48)
        room = max(2, self._console.size.height - _FRAME)
        active = list(self._active.items())
        shown = active[: max(room // 2, room - len(self._recent))]
        for record in list(self._recent)[-max(1, room - len(shown)) :]:
            status = Text(str(record.status), style=_STYLES.get(str(record.status), ""))
            reward = "–" if record.reward is None else f"{record.reward:g}"
            numbers = (reward, str(record.sampled_tokens)) if wide else ()
            table.add_row(escape(record.rollout), "stored", status, *numbers, f"{sum(record.seconds.values()):.1f}")
        for name, (stage, began) in shown:
            numbers = ("", "") if wide else ()
            table.add_row(escape(name), str(stage), "", *numbers, f"{time.monotonic() - began:.1f}", style="dim")
        if len(active) > len(shown):
            stages = Counter(str(stage) for _, (stage, _) in active[len(shown) :])
            rest = ", ".join(f"{count} {stage}" for stage, count in stages.most_common())
            return Group(title, table, Text(f"and {len(active) - len(shown)} more: {rest}", style="dim"))
        return Group(title, table, Text(self._step)) if self._step else Group(title, table)

    def _title(self) -> str:
        title = f"{self._done}/{self._total} stored · {self._resolved} resolved"
        if self._ungraded:
            title += f" · {self._ungraded} ungraded"
        return f"{title} · {len(self._active)} running · {time.monotonic() - self._began:.0f} s"


def describe(record: RolloutRecord) -> str:
    """One stored rollout as one line."""
    seconds = sum(record.seconds.values())
    line = f"{record.rollout}  {record.status}"
    if record.failure is not None:
        return f"{line} at {record.failure.stage}: {record.failure.error}: {record.failure.message}  {seconds:.1f} s"
    return f"{line}  reward {record.reward:g}  {record.sampled_tokens} tokens  {record.turns} turns  {seconds:.1f} s"
