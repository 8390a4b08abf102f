"""Pointers to tests (`file::name`), and whether they lead to one."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def _names_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dangling(pointers: Iterable[str]) -> list[str]:
    """Those that lead nowhere."""
    found: list[str] = []
    for pointer in pointers:
        file, name = pointer.split("::")
        if not (ROOT / file).is_file() or name not in _names_in(ROOT / file):
            found.append(pointer)
    return found
