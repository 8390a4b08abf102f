"""Reading rows of coding data sets: fields under several names, ids in several encodings, rows of other protocols."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from rollwright.errors import TaskError

__all__ = ["Row", "looks_like"]

_MARKS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    ("swebench_pro", (frozenset({"swepro"}), frozenset({"before_repo_set_cmd"}), frozenset({"dockerhub_tag"}))),
    ("swerebench_v2", (frozenset({"install_config"}),)),
    ("r2e_gym", (frozenset({"parsed_commit_content"}), frozenset({"expected_output_json"}))),
    ("multi_swe_bench", (frozenset({"fix_patch", "test_patch"}),)),
    ("swebench_live", (frozenset({"test_cmds", "print_cmds"}),)),
    ("swesmith", (frozenset({"image_name", "patch", "FAIL_TO_PASS"}),)),
    ("swebench", (frozenset({"eval_script", "log_parser"}), frozenset({"test_patch", "version", "base_commit"}))),
)


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
        except ValueError:
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
                return protocol
    return None


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
