"""A run folder as a SQLite file that can be thrown away: it is made from the folder again, and follows it as it grows.

The folder itself is never written: it may be read-only, or on a file system that SQLite's locks do not work on. The
index lives in the user's cache, or in memory where that cannot be written either.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollwright.errors import RollwrightError
from rollwright.quorum import of_size
from rollwright.store import RolloutRecord, RunDir
from rollwright.types import Stage
from rollwright.viewer.facts import TurnFacts, turn_facts

__all__ = ["SORTS", "Filter", "Group", "RolloutRow", "RunIndex"]

_SCHEMA = 4
"""Of the index. Another one in the file: it is made anew."""
_TAIL = 64
"""Bytes before the place read up to, by which an index knows that the file is still the one it read."""
_FIRST_LINE = 400
_STAGES = tuple(stage.value for stage in Stage)
_TIMED = tuple(stage for stage in _STAGES if stage not in (Stage.ADMITTED, Stage.STORED))

_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY, rollout TEXT UNIQUE, task TEXT, grp TEXT, attempt INTEGER, status TEXT, reward REAL,
    trainable INTEGER, baseline INTEGER, stage TEXT, error TEXT, message TEXT, fault TEXT, evidence TEXT,
    stop_reason TEXT, tries INTEGER, seconds REAL, turns INTEGER, branches INTEGER, prompt_tokens INTEGER,
    sampled_tokens INTEGER, trained_tokens INTEGER, excluded TEXT, traffic TEXT,
    drift INTEGER, causes TEXT, violations INTEGER,
    patch_bytes INTEGER, quorum INTEGER,
    {", ".join(f"s_{stage} REAL" for stage in _TIMED)}
);
CREATE INDEX by_task ON rollouts (task, attempt);
CREATE INDEX by_group ON rollouts (grp);
CREATE TABLE facts (
    rollout TEXT PRIMARY KEY, turns INTEGER, ill_formed INTEGER,
    undelivered INTEGER, resubmitted INTEGER, sampled TEXT, problem TEXT
) WITHOUT ROWID;
"""

SORTS: Mapping[str, str] = {
    "stored": "seq",
    "rollout": "task {0}, attempt",
    "status": "status",
    "reward": "reward",
    "turns": "r.turns",
    "branches": "branches",
    "sampled": "sampled_tokens",
    "trained": "trained_tokens",
    "patch": "patch_bytes",
    "drift": "drift",
    "seconds": "seconds",
}
"""Name in a URL → column."""

_ROW = """r.seq, r.rollout, r.task, r.grp, r.attempt, r.status, r.reward, r.trainable, r.stage, r.error, r.message,
r.fault, r.evidence, r.stop_reason, r.tries, r.seconds, r.turns, r.branches, r.prompt_tokens, r.sampled_tokens,
r.trained_tokens, r.violations, r.patch_bytes, r.drift, f.ill_formed"""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One stored rollout as lists show it."""

    seq: int
    rollout: str
    task: str
    group: str
    attempt: int
    status: str
    reward: float | None
    trainable: int
    stage: str | None
    error: str | None
    message: str | None
    fault: str | None
    evidence: str | None
    stop_reason: str
    tries: int
    seconds: float
    turns: int
    branches: int
    prompt_tokens: int
    sampled_tokens: int
    trained_tokens: int
    violations: int
    patch_bytes: int
    drift: int
    ill_formed: int | None
    """None: its turn log has not been read yet."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in one pass over the tasks."""

    name: str
    task: str
    rollouts: int
    judged: int
    resolved: int
    counted: int
    """In its statistics."""
    mean: float | None
    """Reward of those."""
    lowest: float | None
    highest: float | None
    seconds: float
    """Mean over all."""
    sampled: float
    made_with: int
    """The quorum of its rollouts."""

    @property
    def quorum(self) -> int:
        """How many of them must count."""
        return of_size(self.made_with, self.rollouts)

    @property
    def ungraded(self) -> int:
        return self.rollouts - self.judged

    @property
    def solve_rate(self) -> float | None:
        return self.resolved / self.judged if self.judged else None

    @property
    def zero_variance(self) -> bool:
        """It teaches a group-normalised trainer nothing: all its rollouts that count have the same reward."""
        return self.counted > 0 and self.lowest == self.highest


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rollouts a list shows. Empty: all."""

    task: str = ""
    grp: str = ""
    status: str = ""
    error: str = ""
    stage: str = ""
    text: str = ""
    drift: bool = False

    def where(self) -> tuple[str, list[object]]:
        clauses: list[str] = []
        values: list[object] = []
        for column in ("task", "grp", "status", "error", "stage"):
            if value := getattr(self, column):
                clauses.append(f"r.{column} = ?")
                values.append(value)
        for word in self.text.split()[:8]:
            clauses.append("(instr(lower(r.rollout), ?) OR instr(lower(coalesce(r.message, '')), ?))")
            values += [word.lower()] * 2
        if self.drift:
            clauses.append("r.drift > 0")
        return ("WHERE " + " AND ".join(clauses) if clauses else ""), values


class RunIndex:
    """The index of one run. Thread-safe: each call holds its lock for as long as SQLite takes."""

    def __init__(self, run: RunDir, *, cache: Path | None) -> None:
        """`cache`: folder for the file; None keeps the index in memory."""
        self.run = run
        self._lock = threading.RLock()
        self._file = None if cache is None else _file_in(cache, run)
        self._base = self._opened()

    def close(self) -> None:
        with self._lock:
            self._base.close()

    # ------------------------------------------------------------------ following the folder

    def sync(self) -> int:
        """Take over what was stored since the last time. The number that changes whenever the index does."""
        with self._lock:
            try:
                return self._sync()
            except sqlite3.DatabaseError:
                self._base.close()
                if self._file is not None:
                    self._file.unlink(missing_ok=True)
                self._base = self._opened()
                return self._sync()

    def _sync(self) -> int:
        try:
            descriptor = os.open(self.run.index, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return self._forget() if self._meta("offset", 0) else self._meta("generation", 0)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            with self._writing():
                offset = self._meta("offset", 0)
                same = self._meta("file", "") == f"{status.st_dev}:{status.st_ino}" and status.st_size >= offset
                if same and offset:
                    file.seek(max(0, offset - _TAIL))
                    same = file.read(min(_TAIL, offset)) == self._meta("tail", b"")
                if not same:
                    self._forget()
                    offset = 0
                    self._set(file=f"{status.st_dev}:{status.st_ino}")
                if status.st_size > offset:
                    self._read_on(file, offset)
                return self._meta("generation", 0)

    def _read_on(self, file: Any, offset: int) -> None:
        file.seek(offset)
        began = offset
        bad = self._meta("bad_lines", 0)
        tail = self._meta("tail", b"")
        rows: list[tuple[object, ...]] = []
        for line in file:
            if not line.endswith(b"\n"):  # torn, or still being written
                break
            offset += len(line)
            tail = (tail + line)[-_TAIL:]
            try:
                (record,) = self.run.read_lines([orjson.loads(line)])
                rows.append(_values(record))
            except (RollwrightError, ValueError, TypeError, AttributeError):
                bad += 1
        marks = ", ".join("?" * (28 + len(_TIMED)))
        self._base.executemany(f"INSERT OR REPLACE INTO rollouts VALUES (NULL, {marks})", rows)
        if offset > began:
            self._set(offset=offset, tail=tail, bad_lines=bad, generation=self._meta("generation", 0) + 1)

    def read_facts(self, most: int) -> int:
        """Read the turn logs of up to `most` rollouts. How many it read: 0 when all are known."""
        missing = self._all(
            "SELECT r.rollout FROM rollouts r LEFT JOIN facts f USING (rollout) WHERE f.rollout IS NULL "
            "ORDER BY r.seq LIMIT ?",
            most,
        )
        found = [(name, turn_facts(self.run.rollout(name).turns)) for (name,) in missing]
        if found:
            with self._lock, self._writing():
                self._base.executemany(
                    "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [_facts_values(name, facts) for name, facts in found],
                )
                self._set(generation=self._meta("generation", 0) + 1)
        return len(found)

    # ------------------------------------------------------------------ asking

    @property
    def bad_lines(self) -> int:
        """Lines of rollouts.jsonl that are no rollouts."""
        with self._lock:
            return self._meta("bad_lines", 0)

    def count(self, which: Filter | None = None) -> int:
        where, values = (which or Filter()).where()
        return self._all(f"SELECT count(*) FROM rollouts r LEFT JOIN facts f USING (rollout) {where}", *values)[0][0]

    def rows(
        self,
        which: Filter | None = None,
        *,
        sort: str = "stored",
        down: bool = False,
        limit: int = -1,
        offset: int = 0,
    ) -> list[RolloutRow]:
        where, values = (which or Filter()).where()
        order = "DESC" if down else "ASC"
        column = SORTS.get(sort, "seq")
        column = column.format(order) if "{0}" in column else column
        found = self._all(
            f"SELECT {_ROW} FROM rollouts r LEFT JOIN facts f USING (rollout) {where} "
            f"ORDER BY {column} {order} NULLS LAST, seq LIMIT ? OFFSET ?",
            *values,
            limit,
            offset,
        )
        return [RolloutRow(*row) for row in found]

    def row(self, rollout: str) -> RolloutRow | None:
        found = self._all(
            f"SELECT {_ROW} FROM rollouts r LEFT JOIN facts f USING (rollout) WHERE r.rollout = ?", rollout
        )
        return RolloutRow(*found[0]) if found else None

    def neighbours(self, row: RolloutRow) -> tuple[str | None, str | None]:
        """The rollouts before and after, by task and attempt."""
        around: list[str | None] = []
        for sign, order in (("<", "DESC"), (">", "ASC")):
            found = self._all(
                f"SELECT rollout FROM rollouts WHERE (task, attempt) {sign} (?, ?) "
                f"ORDER BY task {order}, attempt {order} LIMIT 1",
                row.task,
                row.attempt,
            )
            around.append(found[0][0] if found else None)
        return around[0], around[1]

    def groups(self) -> list[Group]:
        return [
            Group(*row)
            for row in self._all(
                "SELECT grp, min(task), count(*), count(reward), sum(status = 'resolved'),"
                " count(CASE WHEN baseline THEN reward END), avg(CASE WHEN baseline THEN reward END),"
                " min(CASE WHEN baseline THEN reward END), max(CASE WHEN baseline THEN reward END),"
                " avg(seconds), avg(sampled_tokens), max(quorum) FROM rollouts WHERE status != 'superseded'"
                " GROUP BY grp ORDER BY min(seq)"
            )
        ]

    def statuses(self) -> dict[str, int]:
        return dict(self._all("SELECT status, count(*) FROM rollouts GROUP BY status ORDER BY count(*) DESC, status"))

    def failures(self) -> list[tuple[str, str, str, int, str, str, str]]:
        """Per error class and stage: how often, an example, its message and its first line of evidence."""
        return self._all(
            "SELECT error, stage, fault, count(*), rollout, message, evidence FROM rollouts "
            "WHERE error IS NOT NULL AND error != 'RolloutSuperseded' "
            "GROUP BY error, stage ORDER BY count(*) DESC, error"
        )

    def stop_reasons(self) -> dict[str, int]:
        return dict(
            self._all(
                "SELECT stop_reason, count(*) FROM rollouts WHERE stop_reason != '' "
                "GROUP BY stop_reason ORDER BY count(*) DESC, stop_reason"
            )
        )

    def sums(self) -> dict[str, float]:
        """Totals over all rollouts, and over the turn logs read so far (`known`: how many)."""
        names = ("prompt_tokens", "sampled_tokens", "trained_tokens", "violations", "turns", "branches", "drift")
        totals = self._all(f"SELECT {', '.join(f'coalesce(sum({name}), 0)' for name in names)} FROM rollouts")[0]
        facts = ("ill_formed", "undelivered", "resubmitted")
        counted = self._all(
            f"SELECT count(*), {', '.join(f'coalesce(sum({name}), 0)' for name in facts)}, "
            "coalesce(sum(problem != ''), 0) FROM facts"
        )[0]
        retried = self._all("SELECT coalesce(sum(tries > 1), 0) FROM rollouts")[0]
        return dict(zip((*names, "known", *facts, "problems", "retried"), (*totals, *counted, *retried), strict=True))

    def counted(self, what: str) -> dict[str, int]:
        """Sums of the counters by name: `excluded` tokens, turns by `traffic`, drift `causes`."""
        total: dict[str, int] = {}
        for (line,) in self._all(f"SELECT {what} FROM rollouts WHERE {what} != '{{}}'"):
            for name, count in orjson.loads(line).items():
                total[name] = total.get(name, 0) + count
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def numbers(self, column: str, where: str = "1") -> list[float]:
        """All values of a column that are not null, in order. Both arguments are ours, never a client's."""
        found = self._all(f"SELECT {column} FROM rollouts WHERE {column} IS NOT NULL AND {where}")
        return sorted(value for (value,) in found)

    def stage_times(self) -> dict[str, list[float]]:
        """Stage → seconds it took to reach it, in order."""
        rows = self._all(f"SELECT {', '.join(f's_{stage}' for stage in _TIMED)} FROM rollouts")
        columns = zip(_TIMED, zip(*rows, strict=True), strict=True) if rows else ()
        times = {stage: sorted(value for value in column if value is not None) for stage, column in columns}
        return {stage: found for stage, found in times.items() if found}

    def tokens_per_turn(self) -> list[list[int]]:
        """For each turn of the main role, the lengths of all replies, in order."""
        lengths: list[list[int]] = []
        for (line,) in self._all("SELECT sampled FROM facts WHERE sampled != '[]'"):
            for turn, count in enumerate(orjson.loads(line)):
                if turn == len(lengths):
                    lengths.append([])
                lengths[turn].append(count)
        for found in lengths:
            found.sort()
        return lengths

    # ------------------------------------------------------------------ the file

    def _opened(self) -> sqlite3.Connection:
        if self._file is not None:
            try:
                return _connected(self._file)
            except (OSError, sqlite3.DatabaseError):  # damaged, or of another program: it is only a copy
                pass
            try:
                self._file.unlink(missing_ok=True)
                return _connected(self._file)
            except (OSError, sqlite3.DatabaseError):
                self._file = None
        return _connected(None)

    @contextmanager
    def _writing(self) -> Generator[None]:
        """A transaction of which there is one at a time, also among viewers of the same run."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    def _forget(self) -> int:
        generation = self._meta("generation", 0) + 1
        for table in ("rollouts", "facts", "meta"):
            self._base.execute(f"DELETE FROM {table}")
        self._set(generation=generation)
        return generation

    def _meta(self, key: str, default: Any) -> Any:
        found = self._base.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if found is None else found[0]

    def _set(self, **values: object) -> None:
        self._base.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    def _all(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._base.execute(query, values).fetchall()


def _connected(file: Path | None) -> sqlite3.Connection:
    """An open index of this schema. Raises `OSError`, `sqlite3.DatabaseError`."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    base = sqlite3.connect(file or ":memory:", timeout=10, isolation_level=None, check_same_thread=False)
    try:
        base.execute("PRAGMA synchronous = OFF")
        base.execute("BEGIN IMMEDIATE")
        if base.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA:
            for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                base.execute(f'DROP TABLE "{name}"')
            for statement in _TABLES.split(";\n"):
                base.execute(statement)
            base.execute(f"PRAGMA user_version = {_SCHEMA}")
        base.execute("COMMIT")
        for table in ("meta", "rollouts", "facts"):
            base.execute(f"SELECT * FROM {table} LIMIT 1")
        if base.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("damaged")
    except BaseException:
        base.close()
        raise
    return base


def _file_in(cache: Path, run: RunDir) -> Path:
    place = str(run.path.resolve()).encode(errors="surrogateescape")
    return cache / f"{hashlib.blake2b(place, digest_size=12).hexdigest()}.sqlite"


def _values(record: RolloutRecord) -> tuple[object, ...]:
    """Raises `ValueError` for a number that no SQLite column takes."""
    failure = record.failure
    values: tuple[object, ...] = (
        record.rollout,
        record.task,
        record.group,
        record.attempt,
        str(record.status),
        record.reward,
        record.trainable,
        record.counts_in_baseline,
        None if failure is None else str(failure.stage),
        None if failure is None else failure.error,
        None if failure is None else failure.message[:_FIRST_LINE],
        None if failure is None else failure.fault,
        None if failure is None else _first_line(failure.evidence),
        record.stop_reason,
        record.tries,
        sum(record.seconds.values()),
        record.turns,
        record.branches,
        record.prompt_tokens,
        record.sampled_tokens,
        record.trained_tokens,
        _counts(record.excluded_tokens),
        _counts(record.traffic),
        sum(record.drift.values()),
        _counts(record.drift),
        record.violations,
        record.patch_bytes,
        record.quorum,
        *(record.seconds.get(stage) for stage in _TIMED),
    )
    if any(isinstance(value, int) and abs(value) >= 1 << 63 for value in values):
        raise ValueError("a number is too large")
    return values


def _first_line(evidence: str) -> str:
    return next((line.strip()[:_FIRST_LINE] for line in evidence[:65536].splitlines() if line.strip()), "")


def _facts_values(name: str, facts: TurnFacts) -> tuple[object, ...]:
    return (
        name,
        facts.turns,
        facts.ill_formed,
        facts.undelivered,
        facts.resubmitted,
        orjson.dumps(facts.sampled).decode(),
        facts.problem,
    )


def _counts(counter: Mapping[str, int]) -> str:
    return orjson.dumps(dict(counter)).decode()
