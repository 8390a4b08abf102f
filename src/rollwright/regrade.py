"""Judges a stored run again: from its logs, or by running the tests once more on the stored patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import anyio
import orjson
from pydantic import TypeAdapter, ValidationError

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError, StoreError
from rollwright.graders import Grader, RawRun
from rollwright.graders.grading import Grading, GradingLimits, grade, judge_run
from rollwright.graders.patch import Patch
from rollwright.rollout import box_spec
from rollwright.run import Places, load_graders, make_provider
from rollwright.sandboxes import Provider
from rollwright.store import Revision, RolloutDir, RolloutRecord, RunDir, RunWriter
from rollwright.tasks import load_tasks
from rollwright.types import SCHEMA, Task, Verdict

__all__ = ["Regraded", "regrade_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One rollout judged again."""

    rollout: str
    before: Verdict | None
    """None: it had none."""
    after: Verdict | None
    """None: it could not be judged; `problem` says why."""
    problem: str = ""
    grading: Grading | None = None
    """The new run of the tests, if there was one."""

    @property
    def changed(self) -> bool:
        """Whether anything differs that a trainer would see."""
        return self.after is not None and (self.before is None or _seen(self.before) != _seen(self.after))

    def describe(self) -> str:
        """One line for people; empty when nothing changed."""
        if self.problem:
            return f"{self.rollout}: {self.problem}"
        if not self.changed or self.after is None:
            return ""
        old = "ungraded" if self.before is None else _words(self.before)
        return f"{self.rollout}: {old} → {_words(self.after)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout,
            "before": None if self.before is None else asdict(self.before),
            "after": None if self.after is None else asdict(self.after),
            "changed": self.changed,
            "problem": self.problem,
        }


async def regrade_run(
    folder: Path,
    places: Places,
    *,
    rerun: bool = False,
    write: bool = False,
    say: Callable[[str], None],
) -> list[Regraded]:
    """Judge every stored rollout of a run again, with the graders of now and the run's own settings.

    `rerun`: run the tests again in sandboxes, on the stored patches. `write`: put changed verdicts, and the rewards of
    their samples, into the run; the old verdicts stay beside them. A rollout without a verdict has no samples and is
    never written: `resume --ungraded` runs it again. One that another was made in place of is left out.
    Raises `UsageError` for what is no run folder or has lost its data set, `StoreError` for unreadable files.
    """
    run = RunDir(folder)
    data: dict[str, Any] = run.resolved()["config"]
    config = RunConfig.resolve(data, base=Path(data.pop("base")), where=str(run.resolved_file))
    graders = load_graders(config)
    tasks = load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol).tasks
    records = [record for record in run.records() if not record.superseded]
    if rerun:
        done = await _rerun_all(run, records, tasks, graders, config, places, say)
    else:
        done = [_rejudge(run, record, tasks.get(record.task), graders) for record in records]
    for each in done:
        if line := each.describe():
            say(line)
    if write:
        by_name = {record.rollout: record for record in records}
        revisions = [_revision(run, by_name[d.rollout], d) for d in done if d.changed and d.before is not None]
        if revisions:
            writer = RunWriter.reopen(folder)
            try:
                writer.revise(revisions)
            finally:
                writer.close()
        say(f"wrote {len(revisions)} verdicts")
    return done


def _rejudge(run: RunDir, record: RolloutRecord, task: Task | None, graders: Mapping[str, Grader]) -> Regraded:
    """From the stored log alone."""
    folder = run.rollout(record.rollout)
    before = _stored_verdict(folder)
    if problem := _not_the_same(record, task):
        return Regraded(rollout=record.rollout, before=before, after=None, problem=problem)
    assert task is not None
    stored = _json(folder.grade_record) if folder.grade_record.exists() else {}
    if "state" not in stored:
        if before is not None:  # the patch decided without a run: empty, or refused
            return Regraded(rollout=record.rollout, before=before, after=before)
        return Regraded(rollout=record.rollout, before=None, after=None, problem="has no stored test run")
    raw = RawRun.restore(stored, _bytes(folder.grade_log))
    try:
        after = judge_run(graders[task.grader.protocol], task, raw)
    except RollwrightError as error:  # what cannot be judged must not hide the others
        return Regraded(rollout=record.rollout, before=before, after=None, problem=_problem(error))
    return Regraded(rollout=record.rollout, before=before, after=after)


async def _rerun_all(
    run: RunDir,
    records: Sequence[RolloutRecord],
    tasks: Mapping[str, Task],
    graders: Mapping[str, Grader],
    config: RunConfig,
    places: Places,
    say: Callable[[str], None],
) -> list[Regraded]:
    provider = make_provider(config, places)
    found: dict[str, Regraded] = {}
    owed = iter(records)
    try:
        await provider.probe()
        with plain_errors():
            async with anyio.create_task_group() as group:
                for _ in range(config.run.concurrency):
                    group.start_soon(_rerun_worker, owed, run, tasks, graders, config, provider, found, say)
    finally:
        with anyio.CancelScope(shield=True):
            await provider.close()
    return [found[record.rollout] for record in records]


async def _rerun_worker(
    owed: Iterator[RolloutRecord],
    run: RunDir,
    tasks: Mapping[str, Task],
    graders: Mapping[str, Grader],
    config: RunConfig,
    provider: Provider,
    found: dict[str, Regraded],
    say: Callable[[str], None],
) -> None:
    for record in owed:
        found[record.rollout] = await _rerun(run, record, tasks.get(record.task), graders, config, provider)
        say(f"{record.rollout}: tests run again")


async def _rerun(
    run: RunDir,
    record: RolloutRecord,
    task: Task | None,
    graders: Mapping[str, Grader],
    config: RunConfig,
    provider: Provider,
) -> Regraded:
    folder = run.rollout(record.rollout)
    before = _stored_verdict(folder)
    if problem := _not_the_same(record, task):
        return Regraded(rollout=record.rollout, before=before, after=None, problem=problem)
    assert task is not None
    if not folder.patch_record.exists():
        return Regraded(rollout=record.rollout, before=before, after=None, problem="has no stored patch")
    try:
        patch = Patch.restore(_bytes(folder.patch), _json(folder.patch_record))
        done = await grade(
            provider=provider,
            spec=box_spec(config, await provider.probe(), image=task.agent.image, labels={"regrade": record.rollout}),
            task=task,
            patch=patch,
            grader=graders[task.grader.protocol],
            key=f"regrade/{run.path.name}/{record.rollout}",
            limits=GradingLimits(boot_seconds=config.grading.boot_seconds, step_seconds=config.grading.step_seconds),
        )
    except RollwrightError as error:  # a failure of ours is no verdict, and must not hide the others
        return Regraded(rollout=record.rollout, before=before, after=None, problem=_problem(error))
    return Regraded(rollout=record.rollout, before=before, after=done.verdict, grading=done)


def _revision(run: RunDir, record: RolloutRecord, done: Regraded) -> Revision:
    verdict = done.after
    assert verdict is not None
    rewarded = {"reward": verdict.reward, "trainable": verdict.trainable}
    raw = None if done.grading is None else done.grading.raw
    return Revision(
        record=replace(record, status=str(verdict.status), **rewarded),
        samples=[
            replace(sample, reward=verdict.reward, trainable=verdict.trainable and any(sample.loss_mask))
            for sample in run.samples(record.rollout)
        ],
        verdict={"schema": SCHEMA, "graded": asdict(verdict)},
        grade_record=None if done.grading is None else {"schema": SCHEMA, **done.grading.record()},
        grade_log=None if raw is None else raw.log,
    )


def _not_the_same(record: RolloutRecord, task: Task | None) -> str:
    if task is None:
        return "its task is no longer in the data set"
    return "" if task.id == record.task_id else "its task has changed since"


def _stored_verdict(folder: RolloutDir) -> Verdict | None:
    graded = _json(folder.verdict).get("graded")
    try:
        return None if graded is None else TypeAdapter(Verdict).validate_python(graded)
    except ValidationError as error:
        raise StoreError(f"{folder.verdict} cannot be read: {error.errors()[0]['msg']}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        data: Any = orjson.loads(_bytes(path))
    except orjson.JSONDecodeError as error:
        raise StoreError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or cast("dict[str, Any]", data).get("schema") != SCHEMA:
        raise StoreError(f"{path} is not of schema {SCHEMA}")
    return cast("dict[str, Any]", data)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


def _problem(error: RollwrightError) -> str:
    return f"{type(error).__name__}: {error.message}"


def _seen(verdict: Verdict) -> tuple[str, float, bool]:
    return str(verdict.status), verdict.reward, verdict.trainable


def _words(verdict: Verdict) -> str:
    return f"{verdict.status} {verdict.reward:g}" + ("" if verdict.trainable else " (not trainable)")
