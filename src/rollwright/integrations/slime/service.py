"""What all rollouts of a slime process share, on a thread of its own.

slime calls `generate` for each sample and has no place for what the calls share, nor an end at which it would close it.
So the first call starts a daemon thread with an event loop, in which gateway, sandboxes and engine are opened; slime's
own loop only waits. It is closed by `shutdown`, at the latest when the interpreter exits.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import InfraError, LimitError, TaskError
from rollwright.integrations.background import Background
from rollwright.integrations.slime.rows import check_data, row_of, task_of
from rollwright.integrations.slime.samples import Filler
from rollwright.integrations.slime.settings import sampling_of, to_be_stored
from rollwright.quorum import quorum_of
from rollwright.rollout import RolloutPlan
from rollwright.run import Attempt, LocalExecutor, Observer, Parts, Places, Silent, make_parts, opened
from rollwright.store import RunDir, RunWriter
from rollwright.tasks import slug
from rollwright.telemetry import listeners_of, listening

__all__ = ["Service"]

log = logging.getLogger(__name__)

OUTPUT = "ROLLWRIGHT_OUTPUT"
"""Environment name of the folder that run folders are made in."""
_RUN_FILE = b"# made from slime's arguments and environment; resolved.json has the settings\n"
_STOP_SECONDS = 60.0
_ABORT_POLL_SECONDS = 0.25


class AbortFlag(Protocol):
    """slime's own state of a rollout step."""

    aborted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """What is open while the service runs."""

    executor: LocalExecutor
    observer: Observer
    run: RunDir
    parts: Parts
    filler: Filler


class Service:
    """Rolls out slime's samples. Made by the first `generate`; safe to use from any event loop."""

    def __init__(self, args: Any, config: RunConfig, environ: Mapping[str, str], places: Places) -> None:
        self._args = args
        self._config = config
        self._environ = environ
        self._places = places
        self._attempts: dict[str, itertools.count[int]] = {}
        self._background = Background(self._open, name="rollwright-slime")

    def start(self) -> None:
        """Begin to open everything; `generate` waits for it."""
        self._background.start()
        # Not `atexit`: then no thread can be started any more, and closing needs some.
        threading.Thread(target=self._stop_with_main, name="rollwright-slime-end", daemon=False).start()

    def _stop_with_main(self) -> None:
        """The interpreter waits for this thread before it exits."""
        threading.main_thread().join()
        self.stop()

    def stop(self) -> None:
        """End every rollout and close everything; returns when that is done. Idempotent."""
        if not self._background.stop(_STOP_SECONDS):
            log.error("rollouts did not end within %g s; see `rollwright sandbox reap`", _STOP_SECONDS)

    async def generate(self, sample: Any, parameters: Mapping[str, Any], *, evaluation: bool) -> list[Any]:
        """See `rollwright.integrations.slime.generate`. Cancelled, it returns when the rollout's boxes are gone."""
        abort = _abort_flag(self._args)
        return await self._background.call(self._roll_out, sample, parameters, evaluation, abort)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[_Open]:
        config = self._config
        parts = make_parts(config, self._places)
        check_data(self._args, parts.graders, config, self._environ)
        output = Path(self._environ.get(OUTPUT) or config.run.output)
        name = config.run.name or f"slime-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        listeners = listeners_of(config, RunDir(output / name))
        async with opened(parts, self._places, Silent()) as tools:
            writer = RunWriter.create(output / name, run_file=_RUN_FILE, resolved=to_be_stored(parts.resolved()))
            log.info("rollouts are stored in %s", writer.run.path)
            try:
                async with listening(Silent(), listeners) as observer:
                    yield _Open(
                        executor=LocalExecutor(tools, writer),
                        observer=observer,
                        run=writer.run,
                        parts=parts,
                        filler=Filler(
                            decode=parts.renderer.decode,
                            reward_key=getattr(self._args, "reward_key", None),
                            run=str(writer.run.path),
                            quorum=quorum_of(
                                config.grading.group_quorum, getattr(self._args, "n_samples_per_prompt", None) or 1
                            ),
                        ),
                    )
            finally:
                writer.close()

    async def _roll_out(
        self, service: _Open, sample: Any, parameters: Mapping[str, Any], evaluation: bool, abort: AbortFlag | None
    ) -> list[Any]:
        try:
            plan = self._plan(service, sample, parameters, evaluation=evaluation)
            attempt = await self._attempt(service, plan, abort)
        except (TaskError, InfraError, LimitError) as error:
            log.error("a sample is aborted: %s: %s", type(error).__name__, error.message)
            return service.filler.aborted(sample, f"{type(error).__name__}: {error.message}")
        return service.filler.samples(sample, attempt, evaluation=evaluation)

    async def _attempt(self, service: _Open, plan: RolloutPlan, abort: AbortFlag | None) -> Attempt:
        """Cut when its time is up, or when slime has enough."""
        cut, attempts = anyio.Event(), list[Attempt]()
        with plain_errors():
            async with anyio.create_task_group() as watching:
                watching.start_soon(_set_later, cut, self._config.run.rollout_seconds)
                if abort is not None:
                    watching.start_soon(_set_when_aborted, cut, abort)
                attempts.append(await service.executor.run(plan, service.observer, cut=cut))
                watching.cancel_scope.cancel()
        return attempts[0]

    def _plan(self, service: _Open, sample: Any, parameters: Mapping[str, Any], *, evaluation: bool) -> RolloutPlan:
        row = row_of(sample.prompt, sample.label, sample.metadata)
        where = f"slime's sample {sample.index}"
        graders = service.parts.graders
        task = task_of(row, graders, self._config, self._environ, evaluation=evaluation, where=where)
        name = slug(task.grader.source_id) or task.id
        name = f"eval-{name}" if evaluation else name
        return RolloutPlan(
            run=service.run.path.name,
            task_name=name,
            task=task,
            attempt=next(self._attempts.setdefault(name, itertools.count(1))),
            # slime numbers its groups on and on, so the same task in a later step is another group
            epoch=1 + (sample.group_index or 0),
            sampling=sampling_of(parameters, self._config.sampling.sampling(None)),
        )


def _abort_flag(args: Any) -> AbortFlag | None:
    """slime's own rollout function tells the samples in flight by a flag that it has enough."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return None if module is None else module.GenerateState(args)


async def _set_later(cut: anyio.Event, seconds: float) -> None:
    await anyio.sleep(seconds)
    cut.set()


async def _set_when_aborted(cut: anyio.Event, abort: AbortFlag) -> None:
    while not abort.aborted:  # noqa: ASYNC110 - slime has only a flag
        await anyio.sleep(_ABORT_POLL_SECONDS)
    cut.set()
