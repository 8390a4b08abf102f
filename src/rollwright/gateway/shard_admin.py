"""The admin routes of a sharded gateway: answered by the process in front, by asking the shards."""

from __future__ import annotations

import os
from typing import Any, cast

import anyio
import orjson
from starlette.requests import Request
from starlette.routing import Route

from rollwright.errors import InfraError, RollwrightError, UsageError
from rollwright.gateway.admin import NameTaken, local_route
from rollwright.gateway.admin_bodies import BenchBody, CloseBody, NoBody, OpenBody, PauseBody, ResumeBody
from rollwright.gateway.routing import shard_of
from rollwright.gateway.shard_client import NotThere, ShardClient, Unreachable
from rollwright.gateway.shard_pool import ShardPool
from rollwright.gateway.versions import merged_order

__all__ = ["shard_admin_routes", "shard_bench_routes"]


def shard_admin_routes(pool: ShardPool, shards: ShardClient, key: str) -> list[Route]:
    """Those of `admin_routes`. A rollout's name says its shard."""

    async def opened(asked: OpenBody, request: Request) -> object:
        return await _ask(pool, shards, shard_of(asked.rollout_id, pool.count), request)

    async def named(asked: NoBody | CloseBody, request: Request) -> object:
        return await _ask(pool, shards, shard_of(request.path_params["name"], pool.count), request)

    async def listed(asked: NoBody, request: Request) -> object:
        told = await _ask_all(pool, shards, request)
        return {"sessions": [state for each in told for state in each["sessions"]]}

    async def paused(asked: PauseBody, request: Request) -> object:
        pool.paused = True
        return await told_all(request)

    async def resumed(asked: ResumeBody, request: Request) -> object:
        pool.paused = False
        return await told_all(request)

    async def told_all(request: Request) -> object:
        return {"versions": merged_order([each["versions"] for each in await _ask_all(pool, shards, request)])}

    return [
        local_route("POST", "/admin/sessions", opened, key, body=OpenBody),
        local_route("GET", "/admin/sessions", listed, key, body=NoBody),
        local_route("GET", "/admin/sessions/{name}", named, key, body=NoBody),
        local_route("POST", "/admin/sessions/{name}/close", named, key, body=CloseBody),
        local_route("POST", "/admin/pause", paused, key, body=PauseBody),
        local_route("POST", "/admin/resume", resumed, key, body=ResumeBody),
    ]


def shard_bench_routes(pool: ShardPool, shards: ShardClient) -> list[Route]:
    """Those of `bench_routes`; memory and CPU are sums."""

    async def one(asked: BenchBody, request: Request) -> object:
        return await _ask(pool, shards, shard_of(asked.sid, pool.count), request)

    async def summed(asked: NoBody, request: Request) -> object:
        told = await _ask_all(pool, shards, request)
        return {
            "pid": os.getpid(),
            "open": sum(each.get("open", 0) for each in told),
            **{name: sum(each[name] for each in told) for name in ("rss", "hwm", "cpu")},
        }

    return [
        *(local_route("POST", f"/_bench/{verb}", one, None, body=BenchBody) for verb in ("open", "finish", "drop")),
        local_route("GET", "/_bench/stats", summed, None, body=NoBody),
        local_route("POST", "/_bench/gc", summed, None, body=NoBody),
    ]


async def _ask(pool: ShardPool, shards: ShardClient, index: int, request: Request) -> dict[str, Any]:
    """One shard the same. Raises `UsageError` with what it says of the request, `InfraError`."""
    headers = {"authorization": request.headers.get("authorization", "")}
    body = await request.body()
    while True:
        port = await pool.port(index)
        try:
            status, said = await shards.ask(port, request.method, request.url.path, body, headers)
        except NotThere:
            await pool.dead(index, port)
        except Unreachable as error:
            raise InfraError(f"gateway shard {index} does not answer: {error}") from error
        else:
            break
    if status in (400, 409):
        raise (NameTaken if status == 409 else UsageError)(orjson.loads(said)["error"])
    if status != 200:
        raise InfraError(f"gateway shard {index} answered {status}: {said[:1000].decode(errors='replace')}")
    return cast("dict[str, Any]", orjson.loads(said))


async def _ask_all(pool: ShardPool, shards: ShardClient, request: Request) -> list[dict[str, Any]]:
    """All at once; in order. Raises like `_ask`, once all have answered or failed."""
    told: dict[int, dict[str, Any]] = {}
    failed: list[RollwrightError] = []

    async def one(index: int) -> None:
        try:
            told[index] = await _ask(pool, shards, index, request)
        except RollwrightError as error:
            failed.append(error)

    async with anyio.create_task_group() as group:
        for index in range(pool.count):
            group.start_soon(one, index)
    if failed:
        raise failed[0]
    return [told[index] for index in sorted(told)]
