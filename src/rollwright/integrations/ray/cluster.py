"""The one door to Ray: a cluster, and the `Node` actors on it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from rollwright.errors import ConfigError
from rollwright.integrations.ray.node import Node

__all__ = ["Actor", "Cluster", "NodeLost", "connected"]

T = TypeVar("T")

_CONNECT_SECONDS = 10.0


class NodeLost(Exception):
    """A node's process is gone, or Ray cannot ask it."""


class Actor:
    """A `Node` on a machine of the cluster, which may not be there yet, or not any more."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray = ray
        self._handle = handle

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Raises what the node's method raised, and `NodeLost`."""
        errors = self._ray.exceptions
        try:
            return await getattr(self._handle, method).remote(*arguments, **named)
        except errors.RayError as error:
            cause = error.cause if isinstance(error, errors.RayTaskError) else error
            if isinstance(cause, errors.RayError):  # of a task, too: it was cancelled, because its node ends
                raise NodeLost(f"{type(cause).__name__}: {cause}") from error
            raise cause from error

    def kill(self) -> None:
        """End its process now, if there is one, and with it what hangs on it."""
        self._ray.kill(self._handle)


class Cluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        """`ray`: the module."""
        self._ray = ray
        self._actor_class = ray.remote(Node)

    def nodes(self) -> dict[str, str]:
        """Id → address of the nodes that are alive and may run something. Blocks for a moment."""
        nodes: list[dict[str, Any]] = self._ray.nodes()
        able = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        return {node["NodeID"]: node["NodeManagerAddress"] for node in sorted(able, key=lambda node: node["NodeID"])}

    def actor_on(self, node: str, *arguments: Any) -> Actor:
        """A new `Node` there, made of `arguments`."""
        options = self._actor_class.options(max_restarts=0, max_concurrency=10_000, **_only_on(node))
        return Actor(self._ray, options.remote(*arguments))

    async def on_each(
        self, function: Callable[..., T], *arguments: Any, seconds: float
    ) -> list[tuple[str, T | Exception]]:
        """Call a function on every node: its address, and what came of it there, `TimeoutError` after `seconds`."""
        task = self._ray.remote(function)
        errors = self._ray.exceptions
        nodes = await anyio.to_thread.run_sync(self.nodes)
        seen: dict[str, T | Exception] = {}

        async def one(node: str) -> None:
            try:
                with anyio.fail_after(seconds):
                    seen[node] = await task.options(max_retries=0, **_only_on(node)).remote(*arguments)
            except errors.RayTaskError as error:
                seen[node] = error.cause
            except (errors.RayError, TimeoutError) as error:
                seen[node] = error

        async with anyio.create_task_group() as group:
            for node in nodes:
                group.start_soon(one, node)
        return [(address, seen[node]) for node, address in nodes.items()]


def _only_on(node: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


@asynccontextmanager
async def connected(address: str) -> AsyncGenerator[Cluster]:
    """The cluster that the host process is connected to already, else that of `address`, for as long as this lasts.

    Raises `ConfigError` for no Ray and no cluster.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield Cluster(ray)
        return
    await _answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray.address: there is no Ray cluster at {address}: {error}", field="ray.address") from error
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


async def _answers(address: str) -> None:
    """Ray itself would try for minutes. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # `auto`, `local`, a client's URL
    try:
        with anyio.fail_after(_CONNECT_SECONDS):
            stream = await anyio.connect_tcp(host, int(port))
        await stream.aclose()
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"ray.address: there is no Ray cluster at {address}: {error}", field="ray.address") from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "run.executor = 'ray' needs Ray: pip install 'rollwright[ray]'", field="run.executor"
        ) from error
    return ray
