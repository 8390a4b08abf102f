"""Finds implementations by kind and name: entry points, or a `module:Class` path. Imports only what is asked for."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollwright.errors import ConfigError, PluginError

KINDS = ("sandboxes", "harnesses", "graders", "engines", "tasks", "exporters", "telemetry")


def names(kind: str) -> list[str]:
    """Registered names of a kind, sorted."""
    return sorted(_registered(kind))


def find(kind: str, name: str) -> type[Any]:
    """The class registered as `name`, or the one a `module:Class` path leads to.

    Raises `PluginError`: unknown name (with the nearest one), a name two packages claim, or a failed import.
    """
    if ":" in name:
        return _load(EntryPoint(name=name, value=name, group=f"rollwright.{kind}"))
    known = _registered(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"no {kind} implementation is called {name!r}; there are: {', '.join(sorted(known))}.{hint}")
    found = known[name]
    if len(found) > 1:
        owners = " and ".join(sorted(f"{p.dist.name if p.dist else '?'} ({p.value})" for p in found))
        raise PluginError(f"two packages register the {kind} name {name!r}: {owners}; uninstall one")
    return _load(found[0])


def make(kind: str, name: str, options: Mapping[str, Any], *, table: str, base: Path, **given: Any) -> Any:
    """Construct an implementation from the options of a run file's table.

    Options are checked against the constructor's annotations; a relative `Path`, also one in a `Mapping[str, Path]`, is
    taken from `base`, the run file's folder. `given` are the objects we hand in; one that the constructor does not name
    is left out.
    Raises `ConfigError` naming the option.
    """
    cls = find(kind, name)
    parameters = {
        p.name: p
        for p in inspect.signature(cls).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    hints = typing.get_type_hints(cls.__init__)
    arguments = {key: value for key, value in given.items() if key in parameters}
    for key, value in options.items():
        if key not in parameters or key in given:
            near = difflib.get_close_matches(key, [p for p in parameters if p not in given], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"[{table}] has no option {key!r}.{hint}", field=f"{table}.{key}")
        try:
            checked = TypeAdapter[Any](hints.get(key, Any)).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"[{table}] {key}: {error.errors()[0]['msg']}", field=f"{table}.{key}") from error
        arguments[key] = _placed(hints.get(key), checked, base)
    for p in parameters.values():
        if p.default is p.empty and p.name not in arguments:
            raise ConfigError(f"[{table}] needs the option {p.name!r}", field=f"{table}.{p.name}")
    return cls(**arguments)


def options(kind: str, name: str) -> frozenset[str]:
    """The names of an implementation's options."""
    return frozenset(inspect.signature(find(kind, name)).parameters)


def _placed(hint: object, value: Any, base: Path) -> Any:
    """Its paths from `base`. One annotated `Path | str` comes out of the check as text."""
    if isinstance(value, Path) or (isinstance(value, str) and Path in typing.get_args(hint)):
        return base / value
    if isinstance(value, dict):
        table = typing.cast("dict[str, Any]", value)
        return {name: base / inner if isinstance(inner, Path) else inner for name, inner in table.items()}
    return value


def _registered(kind: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"rollwright.{kind}"):
        same = found.setdefault(point.name, [])
        if point.value not in [p.value for p in same]:
            same.append(point)
    return found


def _load(point: EntryPoint) -> type[Any]:
    try:
        module = importlib.import_module(point.module)
        return getattr(module, point.attr)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{point.group} {point.name!r} ({point.value}) cannot be imported: {error}") from error
