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
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from rollwright.config import RunConfig
from rollwright.errors import InfraError, LimitError, TaskError
from rollwright.integrations.background import Background
from rollwright.integrations.executors import executor_of
from rollwright.integrations.ray.node import with_own_address
from rollwright.integrations.slime.attempt import AbortFlag, rolled_out
from rollwright.integrations.slime.rows import check_data, row_of, task_of
from rollwright.integrations.slime.samples import Filler
from rollwright.integrations.slime.sampling import check_sampling, sampling_of
from rollwright.integrations.slime.settings import seconds_needed, to_be_stored
from rollwright.integrations.slime.unsupported import check_options
from rollwright.quorum import quorum_of
from rollwright.rollout import RolloutPlan
from rollwright.run import Executor, Observer, Parts, Places, Prepared, Silent, make_parts
from rollwright.store import RunDir, RunWriter
from rollwright.tasks import TaskSet, slug
from rollwright.telemetry import listeners_of, listening

__all__ = ["Service"]

log = logging.getLogger(__name__)

OUTPUT = "ROLLWRIGHT_OUTPUT"
"""Environment name of the folder that run folders are made in."""
_RUN_FILE = b"# made from slime's arguments and environment; resolved.json has the settings\n"
_STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """What is open while the service runs."""

    executor: Executor
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
        check_options(self._args, sample)
        abort = _abort_flag(self._args)
        return await self._background.call(self._roll_out, sample, parameters, evaluation, abort)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[_Open]:
        config = self._config
        if config.run.executor == "local":
            config = with_own_address(config)  # slime's rollout manager may be on any node
        parts = make_parts(config, self._places)
        check_sampling(self._args, config.sampling.sampling(None), parts.renderer.stop_ids)
        check_data(self._args, parts.graders, config, self._environ)
        needed = seconds_needed(config)
        if config.run.rollout_seconds < needed:
            log.warning(
                "a rollout's guard is %g s, but agent and tests may take %g s: what only takes its time is aborted",
                config.run.rollout_seconds,
                needed,
            )
        output = Path(self._environ.get(OUTPUT) or config.run.output)
        name = config.run.name or f"slime-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
        run = RunDir(output / name)
        listeners = listeners_of(config, run)

        def create() -> RunWriter:
            return RunWriter.create(run.path, run_file=_RUN_FILE, resolved=to_be_stored(parts.resolved()))

        # slime hands out its rows one by one, so no task is known before it comes
        prepared = Prepared(parts=parts, tasks=TaskSet(tasks={}))
        async with (
            executor_of(prepared, self._places, Silent(), create) as (executor, _),
            listening(Silent(), listeners) as observer,
        ):
            log.info("rollouts are stored in %s", run.path)
            yield _Open(
                executor=executor,
                observer=observer,
                run=run,
                parts=parts,
                filler=Filler(
                    decode=parts.renderer.decode,
                    reward_key=getattr(self._args, "reward_key", None),
                    eval_reward_key=getattr(self._args, "eval_reward_key", None),
                    run=str(run.path),
                    quorum=quorum_of(
                        config.grading.group_quorum, getattr(self._args, "n_samples_per_prompt", None) or 1
                    ),
                ),
            )

    async def _roll_out(
        self, service: _Open, sample: Any, parameters: Mapping[str, Any], evaluation: bool, abort: AbortFlag | None
    ) -> list[Any]:
        try:
            plan = self._plan(service, sample, parameters, evaluation=evaluation)
            attempt = await rolled_out(
                plan,
                service.executor,
                service.observer,
                guard_seconds=self._config.run.rollout_seconds,
                abort=abort,
            )
        except (TaskError, InfraError, LimitError) as error:
            log.error("a sample is aborted: %s: %s", type(error).__name__, error.message)
            return service.filler.aborted(sample, error, evaluation=evaluation)
        # The text of a long rollout takes milliseconds to decode, in which no CLI would be served.
        fill = partial(service.filler.samples, sample, attempt, evaluation=evaluation)
        return await anyio.to_thread.run_sync(fill)

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
            sampling=sampling_of(parameters, self._config.sampling.sampling(None), service.parts.renderer.stop_ids),
            quorum=1 if evaluation else service.filler.quorum,
        )


def _abort_flag(args: Any) -> AbortFlag | None:
    """slime's own rollout function tells the samples in flight by a flag that it has enough."""
    module = sys.modules.get("slime.rollout.sglang_rollout")
    return None if module is None else module.GenerateState(args)
