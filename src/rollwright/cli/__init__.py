"""The command line. The only place that reads the environment, handles signals, installs logging and prints results.

Results go to stdout, progress and logs to stderr. Exit codes: 0 all graded, 1 usage or configuration, 2 some rollouts
ungraded (or a check that failed), 130 interrupted. One verb a file; a verb imports what it needs when it runs.
"""

from rollwright.cli.app import app, main

__all__ = ["app", "main"]
