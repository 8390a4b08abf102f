"""A program on a terminal, and what is on its screen."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import pyte


class Terminal:
    """An emulated terminal of so many columns and lines, with one program on it."""

    def __init__(self, process: subprocess.Popen[bytes], keyboard: int, columns: int, lines: int) -> None:
        self.process = process
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._keyboard = keyboard

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def resize(self, columns: int, lines: int) -> None:
        """Break the lines that do not fit, as most terminals do, and tell the program."""
        _set_size(self._keyboard, columns, lines)
        shown = self.lines[: self.screen.cursor.y + 1]
        parts = [line[at : at + columns] for line in shown for at in range(0, max(1, len(line)), columns)]
        hidden = self.screen.cursor.hidden
        self._stream.detach(self.screen)
        self.screen = pyte.Screen(columns, lines)
        self._stream.attach(self.screen)
        self._stream.feed("\r\n".join(parts[-lines:]).encode())
        self.screen.cursor.hidden = hidden
        self.process.send_signal(signal.SIGWINCH)

    def until(self, true: Callable[[list[str]], bool], what: str) -> None:
        """Go on showing what the program writes until the screen is so."""
        deadline = time.monotonic() + 60
        while not true(self.lines):
            assert time.monotonic() < deadline, f"{what} did not come:\n" + "\n".join(self.lines)
            assert self._show(), f"{what} did not come, the program ended:\n" + "\n".join(self.lines)

    def ended(self) -> int:
        """Its exit code, after everything it wrote was shown."""
        while self._show():
            pass
        return self.process.wait(timeout=60)

    def _show(self) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], 1.0)
        if not ready:
            return True
        try:
            data = os.read(self._keyboard, 1 << 16)
        except OSError:  # the program has closed its side
            return False
        self._stream.feed(data)
        return bool(data)


@contextmanager
def terminal(
    argv: Sequence[str], *, env: Mapping[str, str], columns: int = 100, lines: int = 30
) -> Generator[Terminal]:
    """Start a program on a new terminal; it is killed at the end."""
    ours, theirs = os.openpty()
    _set_size(ours, columns, lines)
    # What runs these tests may tell of a terminal of its own.
    own = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(argv, env=own, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        yield Terminal(process, ours, columns, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def _set_size(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
