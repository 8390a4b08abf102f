"""The durable turn log: one JSONL file a rollout, from which its trajectory can be rebuilt and checked.

    {"kind": "header", "schema": 1, "rollout_id": ..., model, renderer, sampling, history}
    {"kind": "intent", "number": 0, "parent": null, "prompt_tokens": n, "prompt_digest": ...}   before an engine call
    {"kind": "tools", "key": ..., "tools": [...]}                                               once for each set
    {"kind": "turn", "index": 0, delta, sampled, logprobs, versions, messages, ...}             fsynced
    {"kind": "delivered" | "undelivered", "index": 0}
    {"kind": "resumed", "at": ...}                                              another process goes on from here
    {"kind": "sealed", "undelivered": []}

A turn's line is on the disk before the last byte of its reply is sent. A line without its newline at the end of the
file is what a killed process was writing, and is not read.
"""

from __future__ import annotations

import fcntl
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from rollwright.dialects.jsonio import dumps, loads
from rollwright.errors import EngineProtocolError, StoreError
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.tokens.tree import Drift, Trajectory, Turn, checked_spans
from rollwright.types import SCHEMA, VersionSpan

__all__ = ["Intent", "LoggedTrajectory", "TurnLog", "read_turn_log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One call of the engine, as announced before it was made."""

    number: int
    parent: int | None
    """Index of the turn whose ids the prompt begins with."""
    prompt_tokens: int
    prompt_digest: str
    """Of everything the engine was given."""
    partial_tokens: int = 0
    """How many ids at the prompt's end are the aborted beginning of this same turn."""
    at: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTrajectory:
    """What a log says."""

    header: Mapping[str, Any]
    trajectory: Trajectory
    intents: Mapping[int, Intent]
    """By number; `Turn.meta["intents"]` names those of a turn."""
    tools: Mapping[str, tuple[ToolSpec, ...]]
    """By `tools_key`."""
    sealed: bool
    """False: the process died with the session open."""


class TurnLog:
    """Writes one log. Thread-safe; every method may block on the disk. Raises `StoreError`."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Make the file. It must not exist: no session writes over another's log."""
        self._start(path, "xb", "made")
        self._append({"kind": "header", "schema": SCHEMA, **header}, durable=False)

    @classmethod
    def resume(cls, path: Path, at: float) -> tuple[Self, LoggedTrajectory]:
        """Go on with the log of a process that died with its session open; what it was writing last is cut off.

        `at`: now, in seconds since the epoch. Raises `StoreError` for a log that is sealed (`details["sealed"]`),
        damaged, or still written by a living process.
        """
        log = cls.__new__(cls)
        log._start(path, "r+b", "opened")
        try:
            logged = read_turn_log(path)
            if logged.sealed:
                raise StoreError(f"the turn log {path} is sealed: its session is over", path=str(path), sealed=True)
            log._cut_torn_end()
        except BaseException:
            log._file.close()
            raise
        log._tools.update(logged.tools)
        log._append({"kind": "resumed", "at": at}, durable=True)
        return log, logged

    def _start(self, path: Path, mode: Literal["xb", "r+b"], verb: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._tools: set[str] = set()
        self._torn = False
        """The end of the file is no whole line, so nothing may follow it."""
        try:
            self._file: BinaryIO = path.open(mode, buffering=0)
            # Gone with the process, however it ends: a log has one writer.
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise StoreError(f"the turn log {path} is being written by another process", path=str(path)) from error
        except OSError as error:
            raise StoreError(f"the turn log {path} cannot be {verb}: {error.strerror}", path=str(path)) from error

    def _cut_torn_end(self) -> None:
        try:
            self._file.seek(0)
            whole = self._file.read().rfind(b"\n") + 1
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise StoreError(f"the turn log {self.path} cannot be repaired: {error.strerror}") from error

    def intent(self, intent: Intent) -> None:
        """An engine call is about to be made."""
        self._append({"kind": "intent", **_fields(intent)}, durable=False)

    def turn(self, turn: Turn, tools: Sequence[ToolSpec]) -> None:
        """A turn was committed. On return it is on the disk."""
        if turn.tools_key not in self._tools:
            self._append({"kind": "tools", "key": turn.tools_key, "tools": list(tools)}, durable=False)
            self._tools.add(turn.tools_key)
        fields = _fields(turn)
        for name in ("delta", "sampled", "logprobs", "carriers"):
            fields[name] = list(fields[name])
        del fields["delivered"]
        self._append({"kind": "turn", **fields}, durable=True)

    def delivery(self, index: int, *, delivered: bool) -> None:
        """The client got, or did not get, the whole reply of this turn. The last such line of a turn counts.

        After the seal nothing is written: by then the question is decided.
        """
        with self._lock:
            if not self._file.closed:
                self._append({"kind": "delivered" if delivered else "undelivered", "index": index}, durable=False)

    def release(self) -> None:
        """Close the file as it is: another process may go on with it."""
        with self._lock:
            self._file.close()

    def seal(self, undelivered: Sequence[int]) -> None:
        """Nothing follows: these turns' replies no client got whole. Closes the file."""
        with self._lock:
            try:
                self._append({"kind": "sealed", "undelivered": list(undelivered)}, durable=True)
            finally:
                self._file.close()

    def _append(self, record: Mapping[str, Any], *, durable: bool) -> None:
        line = dumps(record) + b"\n"
        with self._lock:
            try:
                # Unbuffered, and one write a line: a killed process leaves whole lines and at most one torn end.
                written = 0 if self._torn else self._file.write(line)
                if written != len(line):
                    self._torn = True
                    raise OSError(None, "a line could not be written whole")
                if durable:
                    os.fsync(self._file.fileno())
            except OSError as error:
                message = f"the turn log {self.path} cannot be written: {error.strerror}"
                raise StoreError(message, path=str(self.path)) from error


def read_turn_log(path: Path) -> LoggedTrajectory:
    """Rebuild the trajectory from its log.

    Without a seal, a turn counts as delivered when the log says so or when a later turn continues it. Raises
    `StoreError` on a file that cannot be read, on any line that is damaged, and on an unknown schema.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the turn log {path} cannot be read: {error.strerror}", path=str(path)) from error
    reader = _Reader()
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            reader.take(loads(line))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise StoreError(f"{path}:{number}: damaged line: {error}", path=str(path), line=number) from error
    if not reader.header:
        raise StoreError(f"{path}: no header line", path=str(path))
    try:
        return reader.result()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: damaged: {error}", path=str(path)) from error


class _Reader:
    """Takes the records in order and puts the trajectory together."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self._turns: list[Turn] = []
        self._intents: dict[int, Intent] = {}
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._delivered: dict[int, bool] = {}
        self._undelivered: list[int] | None = None

    def take(self, record: dict[str, Any]) -> None:
        kind = record.pop("kind")
        if (kind == "header") == bool(self.header):
            raise ValueError("the header must be the first line and the only one")
        if self._undelivered is not None:
            raise ValueError("a line after the seal")
        match kind:
            case "header":
                if record["schema"] != SCHEMA:
                    raise ValueError(f"schema {record['schema']} is not {SCHEMA}")
                self.header = record
            case "intent":
                intent = Intent(**record)
                if intent.number in self._intents:
                    raise ValueError(f"call {intent.number!r} of the engine is announced twice")
                self._intents[intent.number] = intent
            case "tools":
                if record["key"] in self._tools:
                    raise ValueError("a set of tools stands there twice")
                self._tools[record["key"]] = tuple(ToolSpec(**tool) for tool in record["tools"])
            case "turn":
                turn = _fitting(_turn(record), len(self._turns))
                if turn.tools_key not in self._tools:
                    raise ValueError(f"turn {turn.index} has tools that stand nowhere")
                self._turns.append(turn)
            case "resumed":
                pass
            case "delivered" | "undelivered":
                self._delivered[record["index"]] = kind == "delivered"
            case "sealed":
                self._undelivered = record["undelivered"]
            case _:
                raise ValueError(f"unknown kind {kind!r}")

    def result(self) -> LoggedTrajectory:
        trajectory = Trajectory.restore(
            self.header["rollout_id"], self._turns, history=self.header.get("history", "exact")
        )
        unmarked = [turn.index for turn in self._turns if not self._delivered.get(turn.index, False)]
        for index in unmarked if self._undelivered is None else self._undelivered:
            if not 0 <= index < len(self._turns):
                raise ValueError(f"the seal names turn {index!r}, there is none")
            trajectory.mark_undelivered(index)
        return LoggedTrajectory(
            header=self.header,
            trajectory=trajectory,
            intents=self._intents,
            tools=self._tools,
            sealed=self._undelivered is not None,
        )


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _turn(record: dict[str, Any]) -> Turn:
    drift = record["drift"]
    record |= {
        "delta": array("i", record["delta"]),
        "sampled": array("i", record["sampled"]),
        "logprobs": array("d", _finite(record["logprobs"])),
        "versions": tuple(VersionSpan(**span) for span in record["versions"]),
        "keys": tuple(record["keys"]),
        "carriers": frozenset(record["carriers"]),
        "messages": tuple(_message(message) for message in record["messages"]),
        "drift": None if drift is None else Drift(**drift),
    }
    return Turn(**record)


def _fitting(turn: Turn, index: int) -> Turn:
    """Raises `ValueError` for one that cannot be the next."""
    if turn.index != index:
        raise ValueError(f"turn {turn.index!r} stands where turn {index} belongs")
    if turn.parent is not None and (type(turn.parent) is not int or not 0 <= turn.parent < index):
        raise ValueError(f"turn {index} cannot follow turn {turn.parent!r}")
    if len(turn.logprobs) != len(turn.sampled) or len(turn.keys) != len(turn.messages) or not turn.messages:
        raise ValueError(f"turn {index} has lists that do not fit each other")
    try:
        checked_spans(turn.versions, len(turn.sampled))
    except EngineProtocolError as error:
        raise ValueError(f"turn {index}: {error.message}") from error
    return turn


def _finite(values: Sequence[float | None]) -> Iterator[float]:
    """JSON has no NaN: null stands for it."""
    return (float("nan") if value is None else value for value in values)


def _message(record: dict[str, Any]) -> Message:
    record["tool_calls"] = tuple(ToolCall(**call) for call in record["tool_calls"])
    record["carriers"] = tuple(record["carriers"])
    return Message(**record)
