"""The verbs put together, and the entry point."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from cyclopts import App, CycloptsError, Group
from rich.console import Console

from rollwright import __version__
from rollwright.cli.doctor import doctor
from rollwright.cli.e2b_server import e2b_server
from rollwright.cli.export import export
from rollwright.cli.gateway import gateway
from rollwright.cli.harness import bundle, harness_list
from rollwright.cli.init import init
from rollwright.cli.list import list_
from rollwright.cli.output import BROKEN_PIPE, INTERRUPTED, OK, USAGE, say
from rollwright.cli.regrade import regrade
from rollwright.cli.resume import resume
from rollwright.cli.run import run
from rollwright.cli.sandbox import reap, sandbox_ls
from rollwright.cli.validate import validate
from rollwright.cli.verify import verify
from rollwright.cli.view import view
from rollwright.errors import RollwrightError, UsageError

_NO_WRAP = 1000

_NOT_OURS_TO_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""What a file system says where a person, not we, can help."""

_WHERE = "XDG_STATE_HOME, XDG_CACHE_HOME and run.output say what is kept where; rollwright doctor looks at them"

Verb = Callable[..., int]

_GROUPS: Mapping[str, tuple[Verb, ...]] = {
    "Run": (init, run, resume),
    "Trust": (doctor, validate, verify, regrade),
    "Use": (view, export, gateway, e2b_server),
}
_NESTED: Mapping[str, tuple[str, Mapping[str, Verb]]] = {
    "sandbox": ("Sandboxes, and what a killed run left of them.", {"ls": sandbox_ls, "reap": reap}),
    "harness": ("Coding-agent CLIs and their bundles.", {"list": harness_list, "bundle": bundle}),
}


def make_app() -> App:
    """Every verb with its help, its examples from the docstring, and completion for the shell."""
    make_group = cast("Callable[[str], Group]", Group.create_ordered)  # pyright: ignore[reportUnknownMemberType]
    groups = {name: make_group(name) for name in (*_GROUPS, "Machine", "Commands", "Options")}
    app = App(
        name="rollwright",
        version=__version__,
        help="Turns coding tasks into RL training data a trainer can trust.",
        help_format="plaintext",
        help_epilogue="New here? rollwright init my-run; rollwright run my-run/run.toml\n"
        "Exit codes: 0 all is well, 1 wrong usage or a failed doctor check, 2 rollouts ungraded or stored data wrong, "
        "130 interrupted.",
        group_commands=groups["Options"],
    )
    for name, verbs in _GROUPS.items():
        for place, verb in enumerate(verbs):
            app.command(verb, group=groups[name], sort_key=place, help_epilogue=_examples(verb))
    for name, (about, verbs) in _NESTED.items():
        nested = App(
            name=name, help=about, group=groups["Machine"], help_epilogue="", group_commands=groups["Commands"]
        )
        for inner, verb in verbs.items():
            nested.command(verb, name=inner, help_epilogue=_examples(verb))
        app.command(nested)
    app.command(list_, name="list", group=groups["Machine"], help_epilogue=_examples(list_))
    app.register_install_completion_command(  # pyright: ignore[reportUnknownMemberType]
        help="Set up completion of verbs and options in this shell."
    )
    return app


def _examples(verb: Verb) -> str:
    """The docstring's section, for the end of the help."""
    _, _, lines = inspect.cleandoc(verb.__doc__ or "").partition("Examples\n--------\n")
    return "Examples:\n\n" + "\n".join(f"  {line}" for line in lines.splitlines())


app = make_app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: errors of ours are one line, never a traceback. `arguments`: those of the process when None."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough, as `| head` does
        for stream in (sys.stdout, sys.stderr):  # or the interpreter would complain on its way out
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    if not sys.stdout.isatty():  # no boxes, and no lines broken, where a program or a file reads
        app.help_formatter = "plain"
        app.console = Console(width=_NO_WRAP)
    try:
        code: Any = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        say(_misused(error))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except RollwrightError as error:  # before the first rollout: what fails in one is in its record
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        more = "" if isinstance(error, UsageError) else " (rollwright doctor RUN.toml looks at everything a run needs)"
        say(f"rollwright: {kind}{error}{more}")
        return USAGE
    except OSError as error:
        if error.errno not in _NOT_OURS_TO_WRITE or error.filename is None:
            raise
        say(f"rollwright: {error.filename}: {error.strerror}; {_WHERE}")
        return USAGE
    return code if isinstance(code, int) else OK


def _misused(error: CycloptsError) -> str:
    """As all our errors look, with the help that has the right words."""
    chain = " ".join(("rollwright", *(error.command_chain or ())))
    return f"rollwright: {error}\nsee {chain} --help"
