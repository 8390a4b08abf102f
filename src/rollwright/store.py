"""The run folder: one owner of every path in it, an append-only index, and one finished folder per rollout.

    runs/NAME/
      run.toml        the run file as it was given
      resolved.json   what was run: settings, versions, digests
      rollouts.jsonl  one small line per stored rollout
      infra.json      what failed beneath the rollouts and was borne with
      weights.json    the policy's weight versions, from the oldest to the newest
      rollouts/<task>.<attempt>/
        patch.diff  patch.json  verdict.json  turns.log  samples.jsonl  agent.log  grade.json  grade.log
      logs/           the run's own log

A rollout is *stored* when its line is in `rollouts.jsonl`; its folder is complete before that. What has no line is
owed. `work/` holds rollouts in flight and is emptied on resume.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

import orjson
from pydantic import TypeAdapter, ValidationError

from rollwright.dialects.jsonio import scrub_text
from rollwright.errors import ConfigError, RolloutSuperseded, StoreError
from rollwright.gateway.versions import read_order, write_order
from rollwright.groups import DEFAULT_QUORUM, quorum_of
from rollwright.types import SCHEMA, Failure, Sample, VersionSpan

_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


def group_id(task: str, epoch: int) -> str:
    """What the samples of one task in one pass over the tasks have in common."""
    return task if epoch == 1 else f"{task}@{epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One line of `rollouts.jsonl`. Small: no token lists, no logs."""

    rollout: str
    """`<task>.<attempt>`, the folder's name."""
    task: str
    task_id: str
    attempt: int
    status: str
    """A `VerdictStatus`, `ungraded` or `superseded`."""
    reward: float | None
    trainable: bool
    counts_in_baseline: bool
    epoch: int = 1
    """The pass over the tasks it belongs to."""
    source_id: str = ""
    """The row's own id, by which the data set's tools know the task."""
    failure: Failure | None = None
    stop_reason: str = ""
    """How the CLI ended."""
    tries: int = 1
    """1 + infrastructure retries."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Stage → seconds it took to reach it."""
    turns: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict[str, int])
    """Turns by class of traffic; `foreign` is what other programs than the CLI asked for with its key."""
    branches: int = 0
    drift: Mapping[str, int] = field(default_factory=dict[str, int])
    """Turns that could not just extend the one before them, by cause."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    excluded_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    violations: int = 0
    patch_bytes: int = 0
    versions: tuple[str, ...] = ()
    """Weight versions its tokens came from."""
    quorum: int = DEFAULT_QUORUM
    """How many rollouts of its group must count for the group to be trained (`grading.group_quorum`)."""

    @property
    def graded(self) -> bool:
        return self.failure is None

    @property
    def group(self) -> str:
        """The `group_id` of its samples."""
        return group_id(self.task, self.epoch)

    @property
    def superseded(self) -> bool:
        """Its group was rolled out again: it is no member of it any more."""
        return self.status == _SUPERSEDED

    def to_line(self) -> bytes:
        return _json({"schema": SCHEMA, **asdict(self)}) + b"\n"

    @staticmethod
    def from_line(data: Mapping[str, Any]) -> RolloutRecord:
        """Raises `StoreError` when a field is missing or of the wrong type."""
        try:
            return _checker().validate_python({key: value for key, value in data.items() if key != "schema"})
        except ValidationError as error:
            first = error.errors()[0]
            raise StoreError(f"a line of rollouts.jsonl is wrong at {first['loc']}: {first['msg']}") from error


_SUPERSEDED = "superseded"


def withdrawn(record: RolloutRecord, failure: Failure) -> RolloutRecord:
    """The record of a rollout whose verdict was taken back. What had none keeps its own reason."""
    return replace(
        record,
        status=_SUPERSEDED if failure.error == RolloutSuperseded.__name__ else "ungraded",
        reward=None,
        trainable=False,
        counts_in_baseline=False,
        failure=record.failure or failure,
        trained_tokens=0,
        excluded_tokens={},
        violations=0,
    )


@cache
def _checker() -> TypeAdapter[RolloutRecord]:
    """Made once: it costs milliseconds, and an index has thousands of lines."""
    return TypeAdapter(RolloutRecord)


@dataclass(frozen=True, slots=True)
class RolloutDir:
    """The files of one rollout."""

    path: Path

    @property
    def turns(self) -> Path:
        return self.path / "turns.log"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def patch(self) -> Path:
        return self.path / "patch.diff"

    @property
    def patch_record(self) -> Path:
        return self.path / "patch.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def agent_log(self) -> Path:
        return self.path / "agent.log"

    @property
    def grade_record(self) -> Path:
        return self.path / "grade.json"

    @property
    def grade_log(self) -> Path:
        return self.path / "grade.log"

    @property
    def held(self) -> Path:
        """There while the agent runs: what another process needs to go on with it."""
        return self.path / "held.json"

    def write_json(self, path: Path, value: Any) -> None:
        _write(path, _json(value, _INDENTED))

    def write(self, path: Path, data: bytes) -> None:
        _write(path, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A new verdict on a stored rollout."""

    record: RolloutRecord
    samples: list[Sample]
    verdict: Mapping[str, Any]
    """The new verdict.json."""
    grade_record: Mapping[str, Any] | None = None
    """The new grade.json, when the tests were run again; with its log."""
    grade_log: bytes | None = None


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run folder. Reading needs nothing more; writing goes through `RunWriter`."""

    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def resolved_file(self) -> Path:
        return self.path / "resolved.json"

    @property
    def index(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def infra_file(self) -> Path:
        return self.path / "infra.json"

    @property
    def weights_file(self) -> Path:
        return self.path / "weights.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rollout(self, name: str) -> RolloutDir:
        return RolloutDir(self.rollouts / name)

    def resolved(self) -> dict[str, Any]:
        """Raises `ConfigError` when this is no run folder, `StoreError` when it cannot be read."""
        try:
            data: dict[str, Any] = orjson.loads(self.resolved_file.read_bytes())
        except FileNotFoundError as error:
            if not self.path.exists():
                raise ConfigError(f"there is no run folder {self.path}; a run says at its end where it is") from error
            raise ConfigError(f"{self.path} is not a run folder (it has no resolved.json)") from error
        except (OSError, orjson.JSONDecodeError) as error:
            raise StoreError(f"{self.resolved_file} cannot be read: {error}") from error
        if data.get("schema") != SCHEMA:
            raise StoreError(f"{self.resolved_file} has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        return data

    def infra(self) -> dict[str, Any]:
        """What failed beneath the rollouts and was borne with (`Tally.to_json`); empty when nobody counted.

        Raises `StoreError`.
        """
        try:
            return orjson.loads(self.infra_file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, orjson.JSONDecodeError) as error:
            raise StoreError(f"{self.infra_file} cannot be read: {error}") from error

    def versions(self) -> list[str]:
        """The policy's weight versions, from the oldest to the newest, as far as anybody told. Raises `StoreError`."""
        return read_order(self.weights_file)

    def held(self) -> list[str]:
        """Rollouts that a process that is gone has left with their agents running."""
        return [path.parent.name for path in self.work.glob("*/held.json")]

    def records(self) -> list[RolloutRecord]:
        """All stored rollouts, in the order they were stored. A torn last line is not one yet.

        Raises `StoreError`; and for a line without `quorum`, which older versions wrote, what `resolved` raises: it has
        that of the folder's settings.
        """
        return self.read_lines(_lines(self.index))

    def read_lines(self, rows: Iterable[Mapping[str, Any]]) -> list[RolloutRecord]:
        """Lines of the index. Raises as `records` does."""
        quorum: int | None = None
        records: list[RolloutRecord] = []
        for row in rows:
            if "quorum" not in row:
                quorum = quorum or self._quorum()
                row = {**row, "quorum": quorum}
            records.append(RolloutRecord.from_line(row))
        return records

    def _quorum(self) -> int:
        config: dict[str, Any] = self.resolved().get("config", {})
        setting = config.get("grading", {}).get("group_quorum", DEFAULT_QUORUM)
        return quorum_of(setting, config.get("run", {}).get("attempts", 1))

    def samples(self, name: str) -> list[Sample]:
        """The samples of one stored rollout, per-token lists in full. Raises `StoreError`."""
        path = self.rollout(name).samples
        try:
            return [_sample_from_line(data) for data in _lines(path, torn_ok=False)]
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise StoreError(f"{path} is damaged: {error}") from error


_UNFINISHED = frozenset(
    {"rollouts", "work", "logs", ".lock", "run.toml", "run.toml.new", "resolved.json.new"},
)
"""All that there may be before resolved.json, which says that the folder is one."""


class RunWriter:
    """The one writer of a run folder (held by a file lock)."""

    def __init__(self, run: RunDir, lock: int) -> None:
        self.run = run
        self._lock = lock
        self._index = os.open(run.index, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @classmethod
    def create(cls, path: Path, *, run_file: bytes, resolved: Mapping[str, Any]) -> Self:
        """Make a new run folder, or go on making one. Raises `ConfigError` when there is other content in it."""
        run = RunDir(path)
        try:
            if path.exists() and not _UNFINISHED.issuperset(entry.name for entry in path.iterdir()):
                raise ConfigError(f"{path} exists; `rollwright resume {path}` goes on with it, or choose run.name")
            for folder in (run.rollouts, run.work, run.logs):
                folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(run)
            _write(run.run_file, run_file)
            _write(
                run.resolved_file,
                orjson.dumps({"schema": SCHEMA, **resolved}, option=_INDENTED),
            )
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
        return cls(run, lock)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Take over a run folder whose writer is gone: drop a torn last line, and of what was in flight all but the
        rollouts whose agent may still run (see `held`)."""
        run = RunDir(path)
        run.resolved()
        try:
            for folder in (run.rollouts, run.work, run.logs):
                folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(run)
            _cut_torn_line(run.index)
            for folder in run.work.iterdir():
                if not RolloutDir(folder).held.exists():
                    shutil.rmtree(folder)
            records = run.records()
            stored = {record.rollout for record in records}
            for folder in run.rollouts.iterdir():
                if folder.name not in stored:
                    shutil.rmtree(folder)
        except OSError as error:
            raise StoreError(f"{path} cannot be reopened: {error.strerror or error}") from error
        writer = cls(run, lock)
        writer._finish_withdrawals(records)
        return writer

    def held(self, name: str) -> tuple[RolloutDir, Mapping[str, Any]] | None:
        """The folder of a rollout that an earlier process left with its agent running, and what it wrote for us."""
        folder = RolloutDir(self.run.work / name)
        try:
            data: Any = orjson.loads(folder.held.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError) as error:
            raise StoreError(f"{folder.held} cannot be read: {error}") from error
        if not isinstance(data, dict) or cast("dict[str, Any]", data).get("schema") != SCHEMA:
            return None
        return folder, cast("dict[str, Any]", data)

    def begin(self, name: str) -> RolloutDir:
        """An empty folder for a rollout in flight."""
        folder = RolloutDir(self.run.work / name)
        try:
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.path.mkdir(parents=True)
        except OSError as error:
            raise StoreError(f"{folder.path} cannot be made: {error.strerror or error}") from error
        return folder

    def store(self, record: RolloutRecord, folder: RolloutDir, samples: list[Sample]) -> None:
        """Make a finished rollout durable: samples, then its folder in place, then its line."""
        line = record.to_line()
        try:
            _write(folder.samples, b"".join(_sample_to_line(sample) for sample in samples))
            folder.held.unlink(missing_ok=True)
            _sync_folder(folder.path)
            target = self.run.rollouts / record.rollout
            if target.exists():
                shutil.rmtree(target)
            folder.path.rename(target)
            _sync_folder(self.run.rollouts)
            self._append(line)
        except OSError as error:
            raise StoreError(f"{record.rollout} cannot be stored: {error.strerror or error}") from error

    def infra(self) -> dict[str, Any]:
        """See `RunDir.infra`."""
        return self.run.infra()

    def store_infra(self, borne: Mapping[str, Any]) -> None:
        """See `RunDir.infra`."""
        try:
            _write(self.run.infra_file, _json({"schema": SCHEMA, **borne}, orjson.OPT_INDENT_2))
        except OSError as error:
            raise StoreError(f"{self.run.infra_file} cannot be written: {error.strerror or error}") from error

    def versions(self) -> list[str]:
        """See `RunDir.versions`."""
        return self.run.versions()

    def store_versions(self, versions: Sequence[str]) -> None:
        """See `RunDir.versions`. Raises `StoreError`."""
        write_order(self.run.weights_file, versions)

    def _append(self, line: bytes) -> None:
        """The whole line or nothing of it: the next one must not follow half of one."""
        before = os.fstat(self._index).st_size
        try:
            written = os.write(self._index, line)
            if written != len(line):
                raise StoreError(f"{self.run.index} took {written} of {len(line)} bytes; is the disk full?")
            os.fsync(self._index)
        except (OSError, StoreError):
            os.ftruncate(self._index, before)
            raise

    def revise(self, revisions: Sequence[Revision]) -> None:
        """Put new verdicts in the place of stored ones, which stay beside them as `verdict.N.json`.

        Samples first, then the index, each rollout's verdict.json last: whoever finds an old verdict does it all again.
        """
        new = {revision.record.rollout: revision for revision in revisions}
        for name, revision in new.items():
            folder = self.run.rollout(name)
            _keep_beside(folder.verdict)
            _write(folder.samples, b"".join(_sample_to_line(sample) for sample in revision.samples))
            if revision.grade_record is not None:
                _keep_beside(folder.grade_record)
                folder.write_json(folder.grade_record, revision.grade_record)
            if revision.grade_log is not None:
                _keep_beside(folder.grade_log)
                folder.write(folder.grade_log, revision.grade_log)
        self._rewrite((new[r.rollout].record if r.rollout in new else r).to_line() for r in self.run.records())
        for name, revision in new.items():
            folder = self.run.rollout(name)
            folder.write_json(folder.verdict, revision.verdict)

    def withdraw(self, names: Collection[str], failure: Failure) -> list[RolloutRecord]:
        """Take the verdicts of stored rollouts back, all at once: they end as `failure` and have no samples. What they
        were stays beside it as `verdict.N.json`. Returns the records that are others now.

        One that was ungraded stays as it is, unless it is superseded. The index comes first: from then on nobody takes
        them for graded. What a kill leaves undone after it is done by `reopen`.
        """
        taken: list[RolloutRecord] = []
        lines: list[bytes] = []
        for row in _lines(self.run.index):
            if row["rollout"] in names:
                (before,) = self.run.read_lines([row])
                after = withdrawn(before, failure)
                if before.graded or (after.superseded and not before.superseded):
                    taken.append(after)
                    lines.append(after.to_line())
                    continue
            lines.append(_json(row) + b"\n")
        if taken:
            self._rewrite(lines)
        for record in taken:
            self._take_back(record)
        return taken

    def _take_back(self, record: RolloutRecord) -> None:
        """The files of a withdrawn rollout. The samples last: where there are some left, this is not done."""
        folder = self.run.rollout(record.rollout)
        assert record.failure is not None
        verdict = _json({"schema": SCHEMA, "ungraded": asdict(record.failure)}, _INDENTED)
        if not folder.verdict.exists() or folder.verdict.read_bytes() != verdict:
            _keep_beside(folder.verdict)
            _write(folder.verdict, verdict)
        _write(folder.samples, b"")

    def _finish_withdrawals(self, records: Iterable[RolloutRecord]) -> None:
        for record in records:
            samples = self.run.rollout(record.rollout).samples
            if not record.graded and samples.exists() and samples.stat().st_size:
                self._take_back(record)

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        _write(self.run.index, b"".join(lines))
        _sync_folder(self.run.path)
        os.close(self._index)
        self._index = os.open(self.run.index, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def drop(self, names: set[str]) -> None:
        """Forget stored rollouts, so that they are owed again."""
        self._rewrite(record.to_line() for record in self.run.records() if record.rollout not in names)
        for name in names:
            shutil.rmtree(self.run.rollouts / name, ignore_errors=True)

    def close(self) -> None:
        if self.run.work.exists() and not any(self.run.work.iterdir()):
            self.run.work.rmdir()
        os.close(self._index)
        os.close(self._lock)


def _take_lock(run: RunDir) -> int:
    descriptor = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"{run.path} is being written by another process") from error
    return descriptor


def _write(path: Path, data: bytes) -> None:
    """Whole file or old file: write beside it, sync, rename."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _json(value: Any, option: int = 0) -> bytes:
    """What a CLI or a test has said may hold half a character or a number of any length: a run must not end by it."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(_plain(value), option=option)


def _plain(value: Any) -> Any:
    """As near to `value` as JSON comes."""
    match value:
        case str():
            return scrub_text(value)
        case int() if -(2**63) <= value < 2**63:
            return value
        case None | float():
            return value
        case Mapping():
            return {scrub_text(str(key)): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in cast("Sequence[Any]", value)]
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case _:
            return scrub_text(str(value))


def _keep_beside(path: Path) -> None:
    """A copy under the next free number, unless the last copy is already of these bytes."""
    if not path.exists():
        return
    data = path.read_bytes()
    number = 1
    while (beside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        if beside.read_bytes() == data:
            return
        number += 1
    _write(beside, data)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def _lines(path: Path, *, torn_ok: bool = True) -> Iterator[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if torn_ok:
            return
        raise StoreError(f"{path} is missing") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    *lines, rest = data.split(b"\n")
    if rest and not torn_ok:
        raise StoreError(f"{path} ends in the middle of a line")
    for number, line in enumerate(lines, start=1):
        try:
            row: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise StoreError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or cast("dict[str, Any]", row).get("schema") != SCHEMA:
            raise StoreError(f"{path} line {number} is not of schema {SCHEMA}")
        yield cast("dict[str, Any]", row)


def _sample_to_line(sample: Sample) -> bytes:
    """Masks as spans and only trained logprobs: a third of the size of dense lists."""
    spans = sample.trained_spans()
    packed = array("d")
    for start, end in spans:
        packed += sample.logprobs[start:end]
    data = sample.to_json() | {"loss_spans": spans, "logprobs": packed.tolist()}
    data["versions"] = [[span.version, span.start, span.end] for span in sample.versions]
    del data["loss_mask"]
    return orjson.dumps({"schema": SCHEMA, **data}) + b"\n"


def _sample_from_line(data: Mapping[str, Any]) -> Sample:
    fields = {key: value for key, value in data.items() if key not in ("schema", "loss_spans")}
    length = len(fields["tokens"])
    mask = bytearray(length)
    logprobs = array("d", bytes(8 * length))
    packed = array("d", fields["logprobs"])
    at = 0
    for start, end in data["loss_spans"]:
        mask[start:end] = b"\1" * (end - start)
        logprobs[start:end] = packed[at : at + end - start]
        at += end - start
    if not len(mask) == len(logprobs) == length or at != len(packed):
        raise StoreError(
            f"sample {fields['segment_index']} of {fields['rollout_id']}: loss_spans do not fit its logprobs"
        )
    fields |= {"loss_mask": array("b", bytes(mask)), "logprobs": logprobs}
    fields["versions"] = [VersionSpan(version, start, end) for version, start, end in fields["versions"]]
    return Sample(**fields)
