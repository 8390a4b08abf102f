"""Reading rows of coding data sets: fields under several names, ids in several encodings, rows of other protocols."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from rollwright.errors import TaskError

__all__ = ["Row", "fields", "looks_like", "statement", "whole_lines", "workdir"]

_MARKS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    ("swebench_pro", (frozenset({"swepro"}), frozenset({"before_repo_set_cmd"}), frozenset({"dockerhub_tag"}))),
    ("swerebench_v2", (frozenset({"install_config"}),)),
    ("r2e_gym", (frozenset({"parsed_commit_content"}), frozenset({"expected_output_json"}))),
    ("multi_swe_bench", (frozenset({"fix_patch", "test_patch"}),)),
    ("swebench_live", (frozenset({"test_cmds", "print_cmds"}),)),
    ("swesmith", (frozenset({"image_name", "patch", "FAIL_TO_PASS"}),)),
    ("swebench", (frozenset({"eval_script", "log_parser"}), frozenset({"test_patch", "version", "base_commit"}))),
    ("scaleswe", (frozenset({"f2p_script"}), frozenset({"f2p_patch"}), frozenset({"eval_cmd"}))),
)
_SWE_GYM_REPOS = {
    "Project-MONAI/MONAI",
    "bokeh/bokeh",
    "conan-io/conan",
    "dask/dask",
    "facebookresearch/hydra",
    "getmoto/moto",
    "iterative/dvc",
    "modin-project/modin",
    "pandas-dev/pandas",
    "pydantic/pydantic",
    "python/mypy",
}
"""SWE-Gym's rows have SWE-bench's columns; only their repositories tell them apart."""


class Row:
    """One row. Field names are dotted paths; a step that is a JSON string is parsed. Errors name row and field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def error(self, field: str, problem: str) -> TaskError:
        return TaskError(f"{self.where}: field {field!r} {problem}", row=self.where, field=field)

    def find(self, *names: str) -> tuple[str, Any]:
        """The first name whose value is there and not empty; (first name, None) when none is."""
        for name in names:
            value = self._get(name)
            if value is not None and value not in ("", [], {}):
                return name, value
        return names[0], None

    def text(self, *names: str) -> str | None:
        """A string field. Raises `TaskError` when it is something else or cannot be written as UTF-8."""
        name, value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, f"is {_kind(value)}, not a string")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise self.error(name, f"is not valid text: {e.reason}") from e
        return value

    def require(self, *names: str) -> str:
        """A string field that must be there."""
        value = self.text(*names)
        if value is None:
            also = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise self.error(names[0], f"is missing{also}")
        return value

    def lines(self, *names: str) -> tuple[str, ...]:
        """Shell lines: a list of strings, or one string in which line ends may be written as backslash-n."""
        name, value = self.find(*names)
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple((self.text(name) or "").replace("\\n", "\n").split("\n"))
        return self._strings(name, value)

    def ids(self, *names: str) -> tuple[str, ...]:
        """Test ids: a list, a JSON list in a string, or a Python list in a string."""
        name, value = self.find(*names)
        if value is None:
            return ()
        if isinstance(value, str):
            value = self._literal(name, value)
        return self._strings(name, value)

    def must_be(self, protocol: str, field: str) -> None:
        """Raise `TaskError`, with `field` as the place, when this is a row of another protocol."""
        other = looks_like(self.data)
        if other is not None and other != protocol:
            raise self.error(field, f"does not fit: this looks like a row of the {other} protocol, not of {protocol}")

    def digest(self) -> str:
        """The row's opaque id: 16 hex digits of its content."""
        text = json.dumps(self.data, sort_keys=True, ensure_ascii=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _get(self, name: str) -> Any:
        value: Any = self.data
        for step in name.split("."):
            if isinstance(value, str) and value.lstrip().startswith("{"):
                try:
                    value = json.loads(value)
                except ValueError as e:
                    raise self.error(name, f"is inside a string that is not JSON: {e}") from e
            if not isinstance(value, Mapping):
                return None
            value = cast(Mapping[str, Any], value).get(step)
        return value

    def _literal(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as e:
            raise self.error(name, "is neither a JSON list nor a Python list") from e

    def _strings(self, name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise self.error(name, f"is {_kind(value)}, not a list of strings")
        items = cast("list[Any] | tuple[Any, ...]", value)
        for item in items:
            if not isinstance(item, str):
                raise self.error(name, f"holds {_kind(item)} where a string is expected")
            try:
                item.encode()
            except UnicodeEncodeError as e:
                raise self.error(name, f"is not valid text: {e.reason}") from e
        return tuple(items)


def looks_like(row: Mapping[str, Any]) -> str | None:
    """The protocol whose marks a row carries (flat, in `metadata` or in `metadata.remote_env_info`), else None."""
    reader = Row(row, "row")
    layers = [row]
    for name in ("metadata", "metadata.remote_env_info"):
        _, layer = reader.find(name)
        if isinstance(layer, Mapping):
            layers.append(cast(Mapping[str, Any], layer))
    for protocol, alternatives in _MARKS:
        for layer in layers:
            present = {key for key, value in layer.items() if value not in (None, "", [], {})}
            if any(marks <= present for marks in alternatives):
                repo = layer.get("repo")
                known = isinstance(repo, str) and repo in _SWE_GYM_REPOS
                gym = protocol == "swebench" and "log_parser" not in present and known
                return "swe_gym" if gym else protocol
    return None


def fields(name: str) -> tuple[str, ...]:
    """Where a field may be: in slime's `metadata`, in its `remote_env_info`, flat."""
    return f"metadata.{name}", f"metadata.remote_env_info.{name}", name


def statement(row: Row) -> str:
    """What the CLI is to do: `problem_statement`, else the `prompt` column, a string or chat messages of which the
    first user message counts."""
    found = row.text(*fields("problem_statement"))
    if found is not None:
        return found
    _, value = row.find("prompt")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        for index in range(len(value)):  # pyright: ignore[reportUnknownArgumentType]
            message = Row({"prompt": value[index]}, row.where)
            if message.text("prompt.role") == "user":
                return message.require("prompt.content")
    raise row.error("metadata.problem_statement", "is missing (or prompt)")


def workdir(row: Row, default: str | None = None) -> str:
    """The absolute path of the repository in the image. Without a `default` the row must say it."""
    names = fields("workdir")
    path = row.require(*names) if default is None else row.text(*names) or default
    if not path.startswith("/") or "/../" in path + "/" or path.rstrip("/") == "":
        raise row.error(names[0], f"is not an absolute path of a folder: {path!r}")
    return path.rstrip("/")


def whole_lines(patch: str) -> bytes:
    """A patch as git wants it: with a line end at its end."""
    return patch.encode() if patch.endswith("\n") else patch.encode() + b"\n"


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
