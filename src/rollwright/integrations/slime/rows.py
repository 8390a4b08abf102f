"""slime's samples and prompt data as rows of a data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rollwright.config import RunConfig
from rollwright.errors import ConfigError, TaskError
from rollwright.graders import Grader
from rollwright.integrations.slime.settings import prompt_of, protocol_for
from rollwright.tasks import JsonLines, protocol_of
from rollwright.types import Task

__all__ = ["check_data", "row_of", "task_of"]

_SLICE = re.compile(r"@\[\d*:\d*\]$")
"""slime's way to take a part of a file."""


def row_of(prompt: Any, label: Any, metadata: Any) -> dict[str, Any]:
    """The row that a slime sample was made of."""
    row: dict[str, Any] = {"prompt": _text(prompt), "metadata": metadata or {}}
    if label is not None:
        row["label"] = label
    return row


def task_of(
    row: Mapping[str, Any],
    graders: Mapping[str, Grader],
    config: RunConfig,
    environ: Mapping[str, str],
    *,
    evaluation: bool,
    where: str,
) -> Task:
    """Its task, checked. Raises `TaskError`."""
    default = protocol_for(config, environ, evaluation=evaluation)
    grader = graders[protocol_of(row, default, graders, where=where)]
    task = grader.parse(row, where=where)
    for problem in grader.check(task):
        raise TaskError(f"{where}: {problem}", row=where)
    prompt = prompt_of(task.agent.prompt, environ)
    return replace(task, agent=replace(task.agent, prompt=prompt))


def check_data(args: Any, graders: Mapping[str, Grader], config: RunConfig, environ: Mapping[str, str]) -> None:
    """Every row that slime was given, before the first rollout, and what their protocols need on this machine.

    Files that are not JSON lines on this machine are left to slime. Raises `TaskError` naming the row, `ConfigError`
    what is missing here.
    """
    for name, evaluation in (("SWE_TRAIN_PROTOCOL", False), ("SWE_EVAL_PROTOCOL", True)):
        protocol = protocol_for(config, environ, evaluation=evaluation)
        if protocol not in graders:
            raise ConfigError(
                f"{name}: {protocol!r} is not a known grading protocol; there are: {', '.join(sorted(graders))}",
                field=name,
            )
    protocols: set[str] = set()
    for data in _data_sets(args):
        for where, row in JsonLines().rows(data.path):
            task = task_of(data.row(row), graders, config, environ, evaluation=data.evaluation, where=where)
            protocols.add(task.grader.protocol)
    for protocol in sorted(protocols):
        for problem in graders[protocol].preflight():
            raise ConfigError(f"grader {protocol}: {problem}")


_KEYS = (("input_key", "prompt"), ("label_key", "label"), ("metadata_key", "metadata"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataSet:
    """A file of rows that slime hands out one by one."""

    path: Path
    keys: Sequence[str]
    """Where a row has its prompt, label and metadata."""
    evaluation: bool = False
    with_metadata: Callable[[Any], Any] = lambda metadata: metadata
    """slime's own changes of a row's metadata."""

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """As `generate` gets it."""
        prompt, label, metadata = (row.get(key) for key in self.keys)
        return row_of(prompt, label, self.with_metadata(metadata))


def _data_sets(args: Any) -> Iterator[_DataSet]:
    """Those that come to our `generate`, of files that are here."""
    train = _data_path(getattr(args, "prompt_data", None))
    if train is not None:
        yield _DataSet(path=train, keys=_keys(args))
    sets: Sequence[Any] = getattr(args, "eval_datasets", None) or ()
    for each in sets:
        path, function = _data_path(each.path), getattr(each, "custom_generate_function_path", None)
        if path is not None and function in (None, getattr(args, "custom_generate_function_path", None)):
            yield _DataSet(path=path, keys=_keys(each, args), evaluation=True, with_metadata=each.inject_metadata)
    # a slime without that takes evaluation sets as: name file name file ...
    files: Sequence[str] = () if sets else getattr(args, "eval_prompt_data", None) or ()
    for path in map(_data_path, files[1::2]):
        if path is not None:
            yield _DataSet(path=path, keys=_keys(args), evaluation=True)


def _keys(*tables: Any) -> list[str]:
    """Of the first table that says them."""
    found = [[getattr(table, name, None) for table in tables] for name, _ in _KEYS]
    return [next(filter(None, keys), other) for keys, (_, other) in zip(found, _KEYS, strict=True)]


def _data_path(name: Any) -> Path | None:
    """A file of JSON lines on this machine."""
    path = Path(_SLICE.sub("", str(name))) if name else None
    return path if path is not None and path.suffix == ".jsonl" and path.is_file() else None


def _text(prompt: Any) -> str:
    """A prompt as text: itself, or what the first user message of a conversation says."""
    if isinstance(prompt, str):
        return prompt
    for message in _tables(prompt):
        if message.get("role") == "user":
            content: Any = message.get("content")
            parts = [content] if isinstance(content, str) else [part.get("text") for part in _tables(content)]
            return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; nothing of anything else."""
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("Mapping[str, Any]", item) for item in items if isinstance(item, Mapping)]
