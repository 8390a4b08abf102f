"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rollwright.rollout import RolloutPlan
from rollwright.run import Observer
from rollwright.store import RolloutRecord
from rollwright.types import Stage

_STYLES = {"resolved": "green", "unresolved": "yellow", "empty_patch": "yellow", "ungraded": "red"}


class Display(Observer):
    """Live progress of one run. A context manager: the terminal is restored on the way out."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._active: dict[str, tuple[Stage, float]] = {}
        self._recent: deque[RolloutRecord] = deque(maxlen=max(5, console.size.height - 12))
        self._resolved = 0
        self._ungraded = 0
        self._began = time.monotonic()
        self._step = ""
        self._live = (
            Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

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

    def _table(self) -> Table:
        seconds = time.monotonic() - self._began
        title = f"{self._done}/{self._total} stored · {self._resolved} resolved · {seconds:.0f} s"
        if self._ungraded:
            title += f" · {self._ungraded} ungraded"
        table = Table(title=title, title_justify="left", expand=False, box=None, pad_edge=False)
        table.add_column("rollout", no_wrap=True, max_width=48)
        table.add_column("stage", no_wrap=True)
        table.add_column("outcome", no_wrap=True)
        for name in ("reward", "tokens", "seconds"):
            table.add_column(name, justify="right")
        for record in self._recent:
            status = Text(str(record.status), style=_STYLES.get(str(record.status), ""))
            reward = "–" if record.reward is None else f"{record.reward:g}"
            seconds = f"{sum(record.seconds.values()):.1f}"
            table.add_row(escape(record.rollout), "stored", status, reward, str(record.sampled_tokens), seconds)
        for name, (stage, began) in self._active.items():
            table.add_row(escape(name), str(stage), "", "", "", f"{time.monotonic() - began:.1f}", style="dim")
        if self._step:
            table.add_row(escape(self._step))
        return table


def describe(record: RolloutRecord) -> str:
    """One stored rollout as one line."""
    seconds = sum(record.seconds.values())
    line = f"{record.rollout}  {record.status}"
    if record.failure is not None:
        return f"{line} at {record.failure.stage}: {record.failure.error}: {record.failure.message}  {seconds:.1f} s"
    return f"{line}  reward {record.reward:g}  {record.sampled_tokens} tokens  {record.turns} turns  {seconds:.1f} s"
