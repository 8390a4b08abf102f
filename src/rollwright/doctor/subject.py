"""What is looked at, and the values that several checks need: each made once, its failure told by one check alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from rollwright import plugins
from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.graders import Grader
from rollwright.harnesses import Harness
from rollwright.run import Places, load_graders, make_harness, make_renderer
from rollwright.sandboxes import Capabilities, Provider
from rollwright.tasks import TaskSet, load_tasks
from rollwright.tokens import Renderer

T = TypeVar("T")


class Blocked(Exception):
    """A check cannot look, because the value of another check is missing."""


class Shared(Generic[T]):
    """A value made by the first that asks. `own` raises what went wrong, for the check whose matter that is; `get`
    raises `Blocked` instead."""

    def __init__(self, name: str, make: Callable[[], Awaitable[T]]) -> None:
        self._name = name
        self._make = make
        self._lock = anyio.Lock()
        self._value: list[T] = []
        self._error: RollwrightError | None = None

    async def own(self) -> T:
        async with self._lock:
            if self._error is not None:
                raise self._error
            if not self._value:
                try:
                    self._value.append(await self._make())
                except RollwrightError as error:
                    self._error = error
                    raise
            return self._value[0]

    async def get(self) -> T:
        try:
            return await self.own()
        except RollwrightError as error:
            raise Blocked(f"needs {self._name}") from error


class Subject:
    """A machine, and a run file where one is given."""

    def __init__(
        self,
        *,
        places: Places,
        state: Path,
        config: RunConfig | None,
        tasks: TaskSet | None,
        e2b_key: bool,
        ray_address: str | None,
    ) -> None:
        """`state`: where boxes are registered while we look. `tasks`: the data set; None: what the run file says is
        read. `e2b_key`: whether the E2B SDK will find a key in the
        environment. `ray_address`: of the cluster the environment names."""
        self.places = places
        self.state = state
        self.config = config
        self.e2b_key = e2b_key
        self.ray_address = ray_address
        self.renderer: Shared[Renderer] = Shared("the policy", lambda: _thread(make_renderer, config))
        self.harness: Shared[Harness] = Shared("the harness", lambda: _thread(make_harness, config))
        self.graders: Shared[dict[str, Grader]] = Shared("the graders' options", lambda: _thread(load_graders, config))
        self.tasks: Shared[TaskSet] = Shared("the data set", self._load_tasks)
        self._given_tasks = tasks
        self._providers: dict[str, Shared[tuple[Provider, Capabilities]]] = {}
        self._opened: list[Provider] = []

    @property
    def backend(self) -> str:
        """The sandboxes a run would use."""
        return "namespaces" if self.config is None else self.config.sandbox.kind

    async def image(self) -> str:
        """One that a run would boot. Raises `Blocked`."""
        if self.config is None:
            return "host"
        tasks = await self.tasks.get()
        return next(iter(tasks.tasks.values())).agent.image

    def provider(self, kind: str) -> Shared[tuple[Provider, Capabilities]]:
        """A backend's provider and what it can do here."""
        if kind not in self._providers:

            async def probe() -> tuple[Provider, Capabilities]:
                options = {} if self.config is None else self.config.sandbox.options.get(kind, {})
                provider = await anyio.to_thread.run_sync(self._make_provider, kind, options)
                self._opened.append(provider)
                return provider, await provider.probe()

            self._providers[kind] = Shared("a sandbox", probe)
        return self._providers[kind]

    async def close(self) -> None:
        """Let go of every provider; the boxes of checks that were cut off go with them."""
        for provider in self._opened:
            await provider.close()

    def pulls(self) -> bool:
        """Whether a run would fetch an image that is not there."""
        return self.config is not None and bool(self.config.sandbox.chosen.get("pull"))

    def _make_provider(self, kind: str, options: Mapping[str, Any]) -> Provider:
        base = Path.cwd() if self.config is None else self.config.base
        quiet = {name: value for name, value in options.items() if name != "pull"}  # nothing is downloaded
        cache = self.places.cache / "images"
        return plugins.make(
            "sandboxes",
            kind,
            quiet,
            table=f"sandbox.{kind}",
            base=base,
            state_dir=self.state,
            cache_dir=cache if cache.is_dir() else self.state / "images",
        )

    async def _load_tasks(self) -> TaskSet:
        if self._given_tasks is not None:
            return self._given_tasks
        config, graders = self.config, await self.graders.own()
        assert config is not None
        return await anyio.to_thread.run_sync(
            lambda: load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol)
        )


async def _thread(make: Callable[[RunConfig], T], config: RunConfig | None) -> T:
    assert config is not None, "asked for by checks of a run file only"
    return await anyio.to_thread.run_sync(make, config)
