"""The admin routes of a sharded gateway: answered by the process in front, by asking the shards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import anyio
import orjson
from starlette.requests import Request
from starlette.routing import Route

from rollwright.errors import InfraError, RollwrightError, UsageError
from rollwright.gateway.admin import local_route
from rollwright.gateway.routing import shard_of
from rollwright.gateway.shard_client import NotThere, ShardClient, Unreachable
from rollwright.gateway.shard_pool import ShardPool

__all__ = ["shard_admin_routes", "shard_bench_routes"]


def shard_admin_routes(pool: ShardPool, shards: ShardClient, key: str) -> list[Route]:
    """Those of `admin_routes`. A rollout's name says its shard."""

    async def opened(asked: Mapping[str, Any], request: Request) -> object:
        return await _ask(pool, shards, shard_of(str(asked.get("rollout_id")), pool.count), request, asked)

    async def named(asked: Mapping[str, Any], request: Request) -> object:
        return await _ask(pool, shards, shard_of(request.path_params["name"], pool.count), request, asked)

    async def listed(asked: Mapping[str, Any], request: Request) -> object:
        told = await _ask_all(pool, shards, request, asked)
        return {"sessions": [state for each in told for state in each["sessions"]]}

    async def paused(asked: Mapping[str, Any], request: Request) -> object:
        before, pool.paused = pool.paused, True
        try:
            return await told_all(asked, request)
        except UsageError:
            pool.paused = before
            raise

    async def resumed(asked: Mapping[str, Any], request: Request) -> object:
        pool.paused = False
        return await told_all(asked, request)

    async def told_all(asked: Mapping[str, Any], request: Request) -> object:
        told = await _ask_all(pool, shards, request, asked)
        return {"versions": list(dict.fromkeys(version for each in told for version in each["versions"]))}

    return [
        local_route("POST", "/admin/sessions", opened, key),
        local_route("GET", "/admin/sessions", listed, key),
        local_route("GET", "/admin/sessions/{name}", named, key),
        local_route("POST", "/admin/sessions/{name}/close", named, key),
        local_route("POST", "/admin/pause", paused, key),
        local_route("POST", "/admin/resume", resumed, key),
    ]


def shard_bench_routes(pool: ShardPool, shards: ShardClient) -> list[Route]:
    """Those of `bench_routes`; memory and CPU are sums."""

    async def one(asked: Mapping[str, Any], request: Request) -> object:
        return await _ask(pool, shards, shard_of(str(asked.get("sid")), pool.count), request, asked)

    async def summed(asked: Mapping[str, Any], request: Request) -> object:
        told = await _ask_all(pool, shards, request, asked)
        return {
            "pid": os.getpid(),
            "open": sum(each.get("open", 0) for each in told),
            **{name: sum(each[name] for each in told) for name in ("rss", "hwm", "cpu")},
        }

    return [
        *(local_route("POST", f"/_bench/{verb}", one, None) for verb in ("open", "finish", "drop")),
        local_route("GET", "/_bench/stats", summed, None),
        local_route("POST", "/_bench/gc", summed, None),
    ]


async def _ask(
    pool: ShardPool, shards: ShardClient, index: int, request: Request, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """One shard the same. Raises `UsageError` with what it says of the request, `InfraError`."""
    headers = {"authorization": request.headers.get("authorization", "")}
    body = orjson.dumps(asked)
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
    if status == 400:
        raise UsageError(orjson.loads(said)["error"])
    if status != 200:
        raise InfraError(f"gateway shard {index} answered {status}: {said[:1000].decode(errors='replace')}")
    return cast("dict[str, Any]", orjson.loads(said))


async def _ask_all(
    pool: ShardPool, shards: ShardClient, request: Request, asked: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All at once; in order. Raises like `_ask`, once all have answered or failed."""
    told: dict[int, dict[str, Any]] = {}
    failed: list[RollwrightError] = []

    async def one(index: int) -> None:
        try:
            told[index] = await _ask(pool, shards, index, request, asked)
        except RollwrightError as error:
            failed.append(error)

    async with anyio.create_task_group() as group:
        for index in range(pool.count):
            group.start_soon(one, index)
    if failed:
        raise failed[0]
    return [told[index] for index in sorted(told)]
