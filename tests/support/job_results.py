"""Job results as values, for reading reports from recorded output."""

from __future__ import annotations

from rollwright.harnesses import Endpoint
from rollwright.sandboxes import Captured, JobResult, JobState

ENDPOINT = Endpoint(
    base_url="http://127.0.0.1:18001", api_key="s3cret", model="m", context_window=8192, max_output_tokens=512
)


def ended(
    stdout: bytes,
    *,
    exit_code: int | None = 0,
    stderr: bytes = b"",
    state: JobState = "exited",
    keep_last: int | None = None,
) -> JobResult:
    """`exit_code` None: signal 9. `keep_last`: only the first 10 and so many last bytes of stdout were kept."""
    out = Captured(head=stdout, tail=b"", total=len(stdout))
    if keep_last is not None and keep_last + 10 < len(stdout):
        out = Captured(head=stdout[:10], tail=stdout[-keep_last:], total=len(stdout))
    return JobResult(
        id="0" * 32,
        state=state,
        exit_code=exit_code,
        signal=None if exit_code is not None else 9,
        seconds=1.0,
        stdout=out,
        stderr=Captured(head=stderr, tail=b"", total=len(stderr)),
    )
