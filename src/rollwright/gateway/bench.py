"""Admin routes for load clients: what a session costs to seal, and what the process holds. Off unless asked for."""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.requests import Request
from starlette.routing import Route

from rollwright.errors import UsageError
from rollwright.gateway.admin import local_route
from rollwright.gateway.admin_bodies import BenchBody, NoBody
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import Session
from rollwright.tokens.samples import build_samples
from rollwright.types import Sample

__all__ = ["bench_routes"]


def bench_routes(gateway: Gateway, folder: Path | None) -> list[Route]:
    """`/_bench/open|finish|drop|stats|gc`. A session's id is also its key and its engine key, as load clients want."""
    sessions: dict[str, Session] = {}

    async def opened(asked: BenchBody, request: Request) -> object:
        sid = asked.sid
        if sid not in sessions:
            log = None if folder is None else folder / f"bench-{secrets.token_hex(8)}.turns.log"
            sessions[sid] = gateway.open(sid, log=log, limits=SessionLimits(), secret=sid, routing=sid)
        return {}

    def found(asked: BenchBody) -> Session:
        session = sessions.pop(asked.sid, None)
        if session is None:
            raise UsageError("there is no such session")
        return session

    async def finished(asked: BenchBody, request: Request) -> object:
        session = found(asked)
        await anyio.to_thread.run_sync(Path("/proc/self/clear_refs").write_text, "5")
        before, since = _memory(), time.perf_counter()
        trajectory = await session.close()
        samples = await anyio.to_thread.run_sync(
            partial(
                build_samples,
                trajectory,
                task_id="bench",
                group_id="bench",
                rollout_id=session.rollout_id,
                reward=1.0,
                trainable=True,
                counts_in_baseline=True,
            )
        )
        seconds, after = time.perf_counter() - since, _memory()
        return {
            "seconds": seconds,
            "cpu": after["cpu"] - before["cpu"],
            "rss_before": before["rss"],
            "rss_after": after["rss"],
            "rss_peak": after["hwm"],
            "samples": [_row(sample, tokens=asked.tokens) for sample in samples],
        }

    async def dropped(asked: BenchBody, request: Request) -> object:
        await found(asked).close()
        return {}

    async def stats(asked: NoBody, request: Request) -> object:
        return {"pid": os.getpid(), "open": len(sessions), **_memory()}

    async def collected(asked: NoBody, request: Request) -> object:
        gc.collect()
        await anyio.to_thread.run_sync(ctypes.CDLL(None).malloc_trim, 0)  # tens of milliseconds
        return _memory()

    return [
        local_route("POST", "/_bench/open", opened, None, body=BenchBody),
        local_route("POST", "/_bench/finish", finished, None, body=BenchBody),
        local_route("POST", "/_bench/drop", dropped, None, body=BenchBody),
        local_route("GET", "/_bench/stats", stats, None, body=NoBody),
        local_route("POST", "/_bench/gc", collected, None, body=NoBody),
    ]


def _row(sample: Sample, *, tokens: bool) -> dict[str, Any]:
    length = len(sample.tokens) - sample.prompt_length
    row: dict[str, Any] = {
        "n_tokens": len(sample.tokens),
        "response_length": length,
        "trained": sum(sample.loss_mask),
        "reward": sample.reward,
    }
    if tokens:
        start = sample.prompt_length
        row |= {
            "tokens": sample.tokens.tolist(),
            "loss_mask": sample.loss_mask[start:].tolist(),
            "logprobs": sample.logprobs[start:].tolist(),
        }
    return row


def _memory() -> dict[str, Any]:
    """Bytes, and CPU seconds, of this process."""
    kilobytes: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            kilobytes[name] = int(value.split()[0])
    times = os.times()
    return {"rss": kilobytes["VmRSS"] * 1024, "hwm": kilobytes["VmHWM"] * 1024, "cpu": times.user + times.system}
