"""The verbs put together, and the entry point."""

from __future__ import annotations

import logging
import sys
from typing import Any

from cyclopts import App, CycloptsError

from rollwright import __version__
from rollwright.cli.doctor import doctor
from rollwright.cli.e2b_server import e2b_server
from rollwright.cli.export import export
from rollwright.cli.gateway import gateway
from rollwright.cli.harness import harness_app
from rollwright.cli.init import init
from rollwright.cli.list import list_
from rollwright.cli.output import INTERRUPTED, OK, USAGE
from rollwright.cli.regrade import regrade
from rollwright.cli.resume import resume
from rollwright.cli.run import run
from rollwright.cli.sandbox import sandbox_app
from rollwright.cli.validate import validate
from rollwright.cli.verify import verify
from rollwright.errors import RollwrightError, UsageError

app = App(name="rollwright", version=__version__, help="Turns coding tasks into RL training data a trainer can trust.")
for verb in (
    init,
    run,
    resume,
    validate,
    verify,
    regrade,
    export,
    doctor,
    gateway,
    e2b_server,
    sandbox_app,
    harness_app,
):
    app.command(verb)
app.command(list_, name="list")


def main() -> None:
    """Entry point: errors of ours are one line, never a traceback."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        code: Any = app(sys.argv[1:], exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RollwrightError as error:  # before the first rollout: what fails in one is in its record
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        print(f"rollwright: {kind}{error}", file=sys.stderr)
        sys.exit(USAGE)
    sys.exit(code if isinstance(code, int) else OK)
