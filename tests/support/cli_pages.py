"""The part of docs/cli/*.md that says what `--help` says. `python tests/support/cli_pages.py` writes it anew."""

from __future__ import annotations

import re
from inspect import Parameter
from pathlib import Path

from cyclopts import App

from rollwright.cli import app

PAGES = Path(__file__).parents[2] / "docs" / "cli"
_BLOCK = re.compile(r"<!-- help: ([a-z0-9 -]+) -->\n.*?<!-- end of help -->\n", re.DOTALL)


def verbs(of: App = app, above: str = "") -> dict[str, App]:
    """Every verb by its full name, `sandbox ls` too."""
    found: dict[str, App] = {}
    for name in of:
        if not name.startswith("-"):
            inner = verbs(of[name], f"{above}{name} ")
            found |= inner or {f"{above}{name}": of[name]}
    return found


def page_of(verb: str) -> Path:
    """Verbs of one word share their group's page."""
    return PAGES / f"{verb.split(' ')[0]}.md"


def block(verb: str) -> str:
    """Usage, and each argument and option with its default and meaning."""
    lines = [f"<!-- help: {verb} -->"]
    usage, rows = [f"rollwright {verb}"], list[str]()
    for argument in verbs()[verb].assemble_argument_collection(parse_docstring=True):
        names = ", ".join(f"`{name}`" for name in argument.names)
        default = argument.field_info.default
        if argument.field_info.required:
            shown = "required"
        elif default is None or default is False or default is Parameter.empty or default in ("", ()):
            shown = "–"
        else:
            shown = f"`{default}`"
        if argument.index is not None:
            many = " ..." if argument.field_info.kind is Parameter.VAR_POSITIONAL else ""
            word = f"{argument.name}{many}"
            usage.append(word if argument.field_info.required else f"[{word}]")
        rows.append(f"| {names} | {shown} | {(argument.parameter.help or '').replace('|', chr(92) + '|')} |")
    if any("--" in row for row in rows):
        usage.append("[OPTIONS]")
    lines += ["", f"    {' '.join(usage)}", "", "| argument, option | default | |", "|---|---|---|", *rows]
    return "\n".join([*lines, "", "<!-- end of help -->", ""])


def renewed(text: str) -> str:
    """A page with its blocks as they should be."""
    return _BLOCK.sub(lambda found: block(found[1]) if found[1] in verbs() else found[0], text)


def told(text: str) -> set[str]:
    """The verbs a page has a block for."""
    return {found[1] for found in _BLOCK.finditer(text)}


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(renewed(page.read_text()))
