"""What every verb says and how: results on stdout, everything else on stderr; exit codes."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

OK, USAGE, UNGRADED, INTERRUPTED = 0, 1, 2, 130
"""All graded; usage or configuration; some rollouts ungraded, or a check that failed; Ctrl-C."""
BROKEN_PIPE = 141
"""As a shell has it for a command that SIGPIPE ended."""

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print the result as JSON.")]


def say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more, which is no reason to stop
        print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def shown(path: Path) -> Path:
    """As short as it can be typed here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
