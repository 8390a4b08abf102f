"""Reads a data set: JSONL rows, each parsed by the grader of its protocol, all of them before step 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from rollwright.errors import TaskError
from rollwright.graders import Grader
from rollwright.types import Task

MAX_ROW_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of one data set under the names their rollouts are stored by."""

    tasks: Mapping[str, Task]
    """Name → task, in file order. Names are unique and safe as folder names."""


def load_tasks(path: Path, graders: Mapping[str, Grader], *, default_protocol: str) -> TaskSet:
    """Parse every row. A row's own `metadata.protocol` wins over `default_protocol`.

    Raises `TaskError` naming file, line and field.
    """
    tasks: dict[str, Task] = {}
    lines: dict[str, int] = {}
    for number, row in _rows(path):
        where = f"{path.name} line {number}"
        grader = graders[protocol_of(row, default_protocol, graders, where=where)]
        task = grader.parse(row, where=where)
        name = slug(task.grader.source_id) or task.id
        if name in tasks:
            raise TaskError(f"{where}: the same task as line {lines[name]} ({task.grader.source_id})", row=number)
        tasks[name] = task
        lines[name] = number
    if not tasks:
        raise TaskError(f"{path} holds no rows")
    return TaskSet(tasks=tasks)


def protocol_of(row: Mapping[str, Any], default: str, graders: Mapping[str, Grader], *, where: str) -> str:
    """The protocol a row is graded by. Raises `TaskError` for one that is not known here."""
    metadata = row.get("metadata")
    named: object = cast("Mapping[str, Any]", metadata).get("protocol") if isinstance(metadata, Mapping) else None
    protocol = default if named is None else named
    if protocol not in graders:
        raise TaskError(
            f"{where}: metadata.protocol {protocol!r} is not a known grading protocol; there are: "
            f"{', '.join(sorted(graders))}",
            field="metadata.protocol",
        )
    return str(protocol)


def slug(text: str) -> str:
    """A folder name that people recognise: at most 80 letters, digits, `.`, `_`, `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80]


def _rows(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TaskError(f"the data set {path} cannot be read: {error.strerror}", field="tasks.path") from error
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(line) > MAX_ROW_BYTES:
            raise TaskError(
                f"{path.name} line {number}: a row of {len(line)} bytes is over {MAX_ROW_BYTES}", row=number
            )
        try:
            row: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TaskError(f"{path.name} line {number} is not JSON: {error}", row=number) from error
        if not isinstance(row, dict):
            raise TaskError(f"{path.name} line {number}: a row must be a JSON object", row=number)
        rows.append((number, cast("dict[str, Any]", row)))
    return rows
