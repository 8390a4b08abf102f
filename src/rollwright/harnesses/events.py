"""What every CLI's report is read from: its JSON lines on stdout, and how the job ended when they say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import orjson

from rollwright.harnesses import AgentReport
from rollwright.sandboxes import Captured, JobResult

REASON_CHARS = 500


def last_lines(output: Captured) -> Iterator[bytes]:
    """Lines from the end. When output was dropped, only those after the gap, of which the first may be cut."""
    data = output.tail if output.truncated else output.head + output.tail
    return reversed(data.split(b"\n"))


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The line's JSON object, or None."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return cast("dict[str, Any]", event) if isinstance(event, dict) else None


def not_exited(result: JobResult) -> AgentReport | None:
    """The report of a job that we or the box ended; None when the CLI ended by itself."""
    return None if result.state == "exited" else AgentReport(ok=False, reason=result.state)


def without_result(result: JobResult) -> AgentReport:
    """The report of a CLI that ended without its result event."""
    if result.signal is not None:
        return AgentReport(ok=False, reason=f"signal {result.signal}")
    if result.exit_code == 0:
        return AgentReport(ok=False, reason="no_result")
    said = next((line for line in last_lines(result.stderr) if line.strip()), b"")
    text = said.decode("utf-8", errors="replace").strip()[:REASON_CHARS]
    return AgentReport(ok=False, reason=f"exit {result.exit_code}" + (f": {text}" if text else ""))
