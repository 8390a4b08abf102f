"""The task lockfile: what `rollwright validate` has proved of a data set, and the check that a run's tasks are in it.

It lies beside the data set: `tasks.lock.json` for `tasks.jsonl` or the folder `tasks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import orjson
from pydantic import TypeAdapter, ValidationError

from rollwright.errors import ConfigError, StoreError, TaskError
from rollwright.sandboxes import Provider
from rollwright.types import SCHEMA, Task

__all__ = ["KnowsImages", "LockedTask", "check_images", "check_lock", "lock_path", "read_lock", "write_lock"]


@runtime_checkable
class KnowsImages(Protocol):
    """A backend that can say what an image is made of."""

    async def image_digest(self, image: str) -> str:
        """Changes when the image does; empty when it cannot be told. Raises `ConfigError` when there is no such
        image."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTask:
    """One proved task."""

    task: str
    """The task's id: it changes with the row."""
    image: str
    image_digest: str
    """What the image was made of, by its backend; empty where the backend cannot say."""
    base_tree: str
    """Git tree hash of the workdir before any patch."""
    grader: str
    grader_version: str
    gold_runs: int
    gold_seconds_p95: float
    """Of the tests alone."""
    fail_to_pass: tuple[str, ...] = ()
    """Tests that failed without the gold patch and passed in each run with it."""
    pass_to_pass: tuple[str, ...] = ()
    flaky: Mapping[str, float] = field(default_factory=dict[str, float])
    """Test → share of the gold runs that it did not pass."""

    @classmethod
    def read(cls, data: Any) -> Self:
        return TypeAdapter(cls).validate_python(data)


def lock_path(data_set: Path) -> Path:
    return data_set.with_name(f"{data_set.stem if data_set.suffix else data_set.name}.lock.json")


def read_lock(data_set: Path) -> dict[str, LockedTask]:
    """Name → proof; empty when there is no lockfile. Raises `ConfigError` for one that cannot be read."""
    path = lock_path(data_set)
    try:
        data: Any = orjson.loads(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path} has schema {data['schema']!r}; this version reads {SCHEMA}")
        return {name: LockedTask.read(entry) for name, entry in data["tasks"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError, ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; run `rollwright validate` again") from error


def write_lock(data_set: Path, tasks: Mapping[str, LockedTask]) -> Path:
    """Whole file or old file. Raises `StoreError`."""
    path = lock_path(data_set)
    data = {"schema": SCHEMA, "tasks": {name: asdict(task) for name, task in sorted(tasks.items())}}
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        temporary.rename(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def check_lock(data_set: Path, tasks: Mapping[str, Task], grader_versions: Mapping[str, str]) -> None:
    """Raises `TaskError` naming the first task that is not proved as it is now."""
    locked = read_lock(data_set)
    for name, task in tasks.items():
        proof = locked.get(name)
        why = ""
        if proof is None:
            why = "is not in it"
        elif proof.task != task.id:
            why = "was another row when it was proved"
        elif proof.image != task.agent.image:
            why = f"was proved with image {proof.image!r}"
        elif (proof.grader, proof.grader_version) != (task.grader.protocol, grader_versions[task.grader.protocol]):
            why = f"was proved by grader {proof.grader} {proof.grader_version}"
        if why:
            raise TaskError(
                f"tasks.require_lock: {lock_path(data_set).name}: task {name} {why}; run `rollwright validate`",
                task=name,
                field="tasks.require_lock",
            )


async def check_images(data_set: Path, images: Collection[str], provider: Provider) -> None:
    """Raises `TaskError` naming a task whose image is made of something else than when it was proved, as far as the
    backend can tell."""
    if not isinstance(provider, KnowsImages):
        return
    found: dict[str, str] = {}
    for name, proof in read_lock(data_set).items():
        if proof.image not in images or not proof.image_digest:
            continue
        if proof.image not in found:
            found[proof.image] = await provider.image_digest(proof.image)
        if found[proof.image] not in ("", proof.image_digest):
            raise TaskError(
                f"tasks.require_lock: {lock_path(data_set).name}: task {name} was proved in image {proof.image} as "
                f"{proof.image_digest}, which is now {found[proof.image]}; run `rollwright validate`",
                task=name,
                field="tasks.require_lock",
            )
