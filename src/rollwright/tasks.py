"""Reads a data set: rows from a source (a JSONL file, a folder of task folders), each parsed by the grader of its
protocol, all of them before step 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import orjson

from rollwright import plugins
from rollwright.errors import TaskError
from rollwright.graders import Grader
from rollwright.graders.rows import Row
from rollwright.types import Task

MAX_ROW_BYTES = 32 << 20


class TaskSource(Protocol):
    """Turns what `tasks.path` names into rows. Registered in the entry-point group `rollwright.tasks`."""

    def claims(self, path: Path) -> bool:
        """Whether `path` is of this kind. Looks at names only."""
        ...

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Where a row is (for error messages) and the row. Raises `TaskError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of one data set under the names their rollouts are stored by."""

    tasks: Mapping[str, Task]
    """Name → task, in file order. Names are unique and safe as folder names."""

    @property
    def protocols(self) -> list[str]:
        """The graders that judge them."""
        return sorted({task.grader.protocol for task in self.tasks.values()})


def load_tasks(path: Path, graders: Mapping[str, Grader], *, default_protocol: str) -> TaskSet:
    """Parse every row. A row's own `metadata.protocol` wins over `default_protocol`, the run file's; a row that has the
    marks of another protocol than it is given to is an error of that protocol's `parse`.

    Raises `TaskError` naming file, place and field.
    """
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    for where, row in _source_of(path).rows(path):
        grader = graders[protocol_of(row, default_protocol, graders, where=where)]
        task = grader.parse(row, where=where)
        name = slug(task.grader.source_id) or task.id
        if name in tasks:
            raise TaskError(f"{where}: the same task as {places[name]} ({task.grader.source_id})", row=where)
        tasks[name] = task
        places[name] = where
    if not tasks:
        raise TaskError(f"{path} holds no rows")
    return TaskSet(tasks=tasks)


def protocol_of(row: Mapping[str, Any], default: str, graders: Mapping[str, Grader], *, where: str) -> str:
    """The protocol a row is graded by. Raises `TaskError` for one that is not known here."""
    _, named = Row(row, where).find("metadata.protocol")
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


class JsonLines:
    """A file of rows, one JSON object a line."""

    def claims(self, path: Path) -> bool:
        return not path.is_dir()

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise TaskError(f"the data set {path} cannot be read: {error.strerror}", field="tasks.path") from error
        for number, line in enumerate(raw.split(b"\n"), start=1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            if len(line) > MAX_ROW_BYTES:
                raise TaskError(f"{where}: a row of {len(line)} bytes is over {MAX_ROW_BYTES}", row=number)
            try:
                row: Any = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TaskError(f"{where} is not JSON: {error}", row=number) from error
            if not isinstance(row, dict):
                raise TaskError(f"{where}: a row must be a JSON object", row=number)
            yield where, cast("dict[str, Any]", row)


class HarborFolders:
    """A Harbor task folder, or a folder of them."""

    def claims(self, path: Path) -> bool:
        return path.is_dir()

    def rows(self, path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        folders = [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.glob("*/task.toml"))
        if not folders:
            raise TaskError(f"{path} holds no task folders (none has a task.toml)", field="tasks.path")
        for folder in folders:
            yield f"{folder.name}/task.toml", {"metadata": {"protocol": "harbor", "task_dir": str(folder.resolve())}}


def _source_of(path: Path) -> TaskSource:
    """The source that claims the path; one of another package wins over ours."""
    ours: dict[str, TaskSource] = {"jsonl": JsonLines(), "harbor": HarborFolders()}
    others = [plugins.find("tasks", name)() for name in plugins.names("tasks") if name not in ours]
    sources: list[TaskSource] = [*others, *ours.values()]
    return next(source for source in sources if source.claims(path))
