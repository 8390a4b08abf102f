"""The contract of `rollwright.sandboxes.Attaches` as tests. A backend passes them by subclassing:

class TestMyBackend(AttachContract):
    @pytest.fixture
    def elsewhere(self, tmp_path):
        return Elsewhere("my_package:MyProvider", state_dir=str(tmp_path), survive=100)

    @pytest.fixture
    async def provider(self, elsewhere):
        async with MyProvider(**elsewhere.options) as provider:
            yield provider
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import anyio
import anyio.to_thread
import pytest

from rollwright.errors import RollwrightError, SandboxGone, UsageError
from rollwright.sandboxes import Attaches, JobSpec, Provider, Sandbox, SandboxSpec

__all__ = ["AttachContract", "Elsewhere"]

_JOB = JobSpec(
    id="5" * 32,
    argv=("sh", "-c", "echo ran >>/tmp/ran; until [ -e /tmp/go ]; do sleep 0.05; done; echo out; exit 7"),
    user="agent",
    seconds=600,
)

_ORCHESTRATOR = """
import importlib, json, sys
import anyio
from rollwright.errors import RollwrightError
from rollwright.sandboxes import JobSpec, SandboxSpec

asked = json.loads(sys.argv[1])

async def main():
    module, name = asked["provider"].split(":")
    provider = getattr(importlib.import_module(module), name)(**asked["options"])
    try:
        if asked["spec"] is None:
            box = await provider.attach(asked["key"])
        else:
            box = await provider.create(SandboxSpec(**asked["spec"]), key=asked["key"])
        if asked["job"] is not None:
            await box.start(JobSpec(**asked["job"] | {"stdin": b""}))
        print(box.id, flush=True)
        await anyio.sleep_forever()
    except RollwrightError as error:
        print(type(error).__name__, error, flush=True)

anyio.run(main)
"""


class Elsewhere:
    """How another process makes a provider that shares its boxes with the one of the tests.

    `provider`: `module:Class`; `options`: its keywords, such that JSON can carry them, `survive` among them.
    """

    def __init__(self, provider: str, **options: object) -> None:
        self.provider = provider
        self.options = options

    @asynccontextmanager
    async def opened(self, **options: object) -> AsyncGenerator[Provider]:
        """Such a provider here, with other options."""
        module, name = self.provider.split(":")
        provider: Provider = getattr(importlib.import_module(module), name)(**self.options | options)
        try:
            yield provider
        finally:
            with anyio.CancelScope(shield=True):
                await provider.close()

    @asynccontextmanager
    async def orchestrator(
        self, key: str, spec: SandboxSpec | None, job: JobSpec | None = None, **options: object
    ) -> AsyncGenerator[str]:
        """A process that makes a box of `spec`, or attaches to the one there is, and starts `job` in it. Yields what it
        says then, the box's id or an error. At the end it is killed."""
        asked = {
            "provider": self.provider,
            "options": self.options | options,
            "key": key,
            "spec": None if spec is None else asdict(spec),
            "job": None if job is None else asdict(job) | {"stdin": ""},
        }
        process = await anyio.open_process([sys.executable, "-c", _ORCHESTRATOR, json.dumps(asked)], stderr=None)
        try:
            assert process.stdout is not None
            said = b""
            while not said.endswith(b"\n"):
                said += await process.stdout.receive()
            yield said.decode().strip()
        finally:
            process.kill()
            await process.aclose()

    async def left(self, key: str, spec: SandboxSpec, job: JobSpec | None = None, **options: object) -> str:
        """The box of a process that has been killed."""
        async with self.orchestrator(key, spec, job, **options) as box:
            pass
        return box


@pytest.mark.anyio
class AttachContract:
    """Needs the fixtures `provider`, an opened one that may attach, and `elsewhere`."""

    spec: SandboxSpec = SandboxSpec(image="host", network="none", disk_mb=64, env={"GIVEN": "kept"})

    async def attach(self, provider: Provider, key: str) -> Sandbox:
        assert isinstance(provider, Attaches)
        return await provider.attach(key)

    async def test_a_killed_process_is_followed_by_another_and_that_by_a_third(
        self, provider: Provider, elsewhere: Elsewhere
    ) -> None:
        assert (await provider.probe()).attach
        made = await elsewhere.left("the key", self.spec, _JOB)
        (waiting,) = await provider.list()
        assert (waiting.id, waiting.alive, waiting.owner_alive) == (made, True, False)
        assert await provider.reap() == [], "it waits"

        async with elsewhere.orchestrator("the key", None, _JOB) as taken:
            assert taken == made
            with pytest.raises(UsageError, match="in use by process"):
                await self.attach(provider, "the key")
            (theirs,) = await provider.list()
            assert theirs.owner_alive, "its maker is dead, but not who has it"
            assert await provider.reap() == []

        box = await self.attach(provider, "the key")
        assert box.id == made
        assert await self.attach(provider, "the key") is box
        async with elsewhere.orchestrator("the key", None) as refused:
            assert refused.startswith("UsageError")
        if box.gateway_socket is not None:
            assert await self.said_through(box, box.gateway_socket) == b"served: hello\n"
        await box.put("/tmp/go", b"")
        # As a restarted orchestrator does it: by the same spec, whether it had started it or not.
        result = await box.run(_JOB)
        assert (result.exit_code, result.stdout.data()) == (7, b"out\n")
        assert await box.get("/tmp/ran") == b"ran\n"
        assert (await box.exec(["sh", "-c", "echo $GIVEN; id -un"], user="agent")).stdout == b"kept\nagent\n"
        assert (await box.exec(["sh", "-c", "echo $HOME"], user="agent")).stdout == b"/home/agent\n"
        await box.renew(50)
        await box.close()
        with pytest.raises(SandboxGone):
            await self.attach(provider, "the key")
        assert await provider.list() == []

    async def said_through(self, box: Sandbox, gateway: socket.socket) -> bytes:
        """What the box hears from who listens on its gateway's port."""
        gateway.settimeout(20)

        def serve() -> None:
            client, _ = gateway.accept()
            with client:
                client.sendall(b"served: " + client.recv(100))

        said: list[bytes] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, serve)
            script = "exec 3<>/dev/tcp/127.0.0.1/18001; echo hello >&3; cat <&3"
            said.append((await box.exec(["bash", "-c", script])).stdout)
        return said[0]

    async def test_a_new_box_of_the_key_takes_the_place_of_one_that_waits(
        self, provider: Provider, elsewhere: Elsewhere
    ) -> None:
        made = await elsewhere.left("the key", self.spec)
        box = await provider.create(self.spec, key="the key")
        assert box.id != made
        assert [info.id for info in await provider.list()] == [box.id]

    async def test_a_box_that_need_not_survive_is_not_waited_for(
        self, provider: Provider, elsewhere: Elsewhere
    ) -> None:
        await elsewhere.left("the key", replace(self.spec, survives=False))
        with pytest.raises(SandboxGone):
            await self.attach(provider, "the key")
        with anyio.fail_after(100):
            while await provider.list():
                await provider.reap()

    async def test_a_box_that_nobody_takes_over_ends(self, provider: Provider, elsewhere: Elsewhere) -> None:
        for survive in (0.5, 1, 2, 4, 8, 16):  # seconds; a slow machine gets more
            made = await elsewhere.left("the key", self.spec, survive=survive)
            if " " not in made:
                break
        else:
            raise AssertionError(f"no box came up: {made}")
        with anyio.fail_after(100):
            while any(info.id == made and info.alive for info in await provider.list()):  # noqa: ASYNC110 - no event
                await anyio.sleep(0.1)
        with pytest.raises(SandboxGone):
            await self.attach(provider, "the key")
        await provider.reap()
        assert await provider.list() == []

    async def test_a_box_lives_on_while_it_is_used(self, elsewhere: Elsewhere) -> None:
        for survive in (0.5, 1, 2, 4, 8, 16):  # seconds; a slow machine gets more
            async with elsewhere.opened(survive=survive) as provider:
                try:
                    box = await provider.create(self.spec, key="the key")
                    assert (await box.exec(["sleep", str(2.5 * survive)], seconds=100)).exit_code == 0
                    return
                except RollwrightError:  # it ended too early, and there are many ways to notice
                    continue
        raise AssertionError("its lease was not renewed in time")

    async def test_a_box_that_died_is_not_given_out_again(self, provider: Provider) -> None:
        box = await provider.create(self.spec, key="the key")
        await self.end(provider, box)
        with pytest.raises(SandboxGone):
            await self.attach(provider, "the key")
        again = await provider.create(self.spec, key="the key")
        assert again.id != box.id
        assert (await again.exec(["true"])).exit_code == 0
        await self.end(provider, again)
        assert (await (await provider.create(self.spec, key="the key")).exec(["true"])).exit_code == 0

    async def end(self, provider: Provider, box: Sandbox) -> None:
        """End a box behind its provider's back."""
        pytest.fail("a contract's user says how a box of theirs is ended")
