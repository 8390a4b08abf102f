"""Interpreter settings of a process of ours whose event loop must answer at once, whatever its threads do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["responsive"]

_SWITCH_SECONDS = 0.001
"""After so long a thread that parses or renders hands the interpreter to the event loop; Python's own is 5 ms."""


@contextmanager
def responsive() -> Generator[None]:
    """Enter it when everything is open: what there is by then, a tokenizer and every module, is left out of garbage
    collections, of which each would stop the process for tens of milliseconds.

    For a process that is ours alone: a trainer's has its own ways.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
