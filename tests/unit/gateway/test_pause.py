"""Weight updates: engine calls are held or cut, clients see one slow reply, each token keeps its version."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.dialects.openai_chat import OpenAIChat
from rollwright.engines.scripted import Fault, Rule, Script, ScriptedEngine
from rollwright.errors import EngineUnreachable, UsageError
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.turn import read_request
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import VersionSpan

pytestmark = pytest.mark.anyio

SAID = "I will look at the file first."
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


async def read(loop: LoopbackGateway, into: list[bytes], alive: anyio.Event | None = None) -> None:
    """The whole stream; `alive` is set at its third keep-alive."""
    headers = {"x-api-key": loop.session.secret}
    async with (
        httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        async for chunk in response.aiter_bytes():
            into.append(chunk)
            if alive is not None and b"".join(into).count(b'"delta":{}') >= 3:
                alive.set()


async def test_a_call_made_in_a_pause_waits_and_its_stream_stays_alive(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID)
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine, keepalive_seconds=0.02) as loop:
        await loop.gateway.pause()
        async with anyio.create_task_group() as group:
            alive = anyio.Event()
            group.start_soon(read, loop, seen, alive)
            with anyio.fail_after(5):
                await alive.wait()
            assert engine.calls == []
            loop.gateway.resume()
        assert SAID.encode() in b"".join(seen)
        assert len(engine.calls) == 1


async def test_a_running_call_is_cut_and_goes_on_with_the_new_weights(renderer: TemplateRenderer) -> None:
    faults = [Fault(call=1, kind="delay", seconds=10), Fault(call=2, kind="version", version="v2")]
    engine = scripted_engine(renderer, SAID, faults=faults)
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        group.start_soon(read, loop, seen)
        await engine.called(1)
        await anyio.sleep(15 / len(renderer.encode(SAID)))  # time for one token and a half, of the ten seconds for all
        await loop.gateway.pause("abort")
        assert [call.outcome for call in engine.calls] == ["done"]
        part = engine.calls[0].generation
        assert part is not None
        assert part.finish == "abort"
        assert 0 < len(part.ids) < len(renderer.encode(SAID))
        loop.gateway.resume("v2")
        await engine.called(2)
        await engine.settled()
        (turn,) = (await loop.session.close()).turns
        assert loop.gateway.versions == ["scripted", "v2"]
    assert turn.finish == "stop"
    assert turn.versions == (
        VersionSpan("scripted", 0, len(part.ids)),
        VersionSpan("v2", len(part.ids), len(turn.sampled)),
    )
    assert SAID.encode() in b"".join(seen)


async def test_a_pause_that_lets_calls_finish_waits_for_them(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID, seconds_per_turn=0.1)
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        group.start_soon(read, loop, seen)
        await engine.called(1)
        await loop.gateway.pause("finish")
        assert [call.generation.finish for call in engine.calls if call.generation] == ["stop"]
        loop.gateway.resume()


async def test_a_pause_that_keeps_calls_does_not_wait_for_them(renderer: TemplateRenderer) -> None:
    engine = scripted_engine(renderer, SAID)
    engine.hold()
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        group.start_soon(read, loop, seen)
        await engine.called(1)
        with anyio.fail_after(1):
            await loop.gateway.pause("keep")
        engine.release()
        await engine.settled()
        assert [call.outcome for call in engine.calls] == ["done"]


class Deaf(ScriptedEngine):
    """An engine that cannot be reached while calls run."""

    async def abort(self, request_id: str) -> None:
        raise EngineUnreachable(f"{request_id} cannot be aborted")


async def test_a_pause_whose_aborts_fail_says_what_the_engine_said_and_stays_in_force(
    renderer: TemplateRenderer,
) -> None:
    script = Script(script=(Rule(replies=(SAID,)),))
    engine = WatchedEngine(Deaf(renderer=renderer, script=script))
    engine.hold()
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        group.start_soon(read, loop, seen)
        await engine.called(1)
        with pytest.raises(EngineUnreachable, match="cannot be aborted"):
            await loop.gateway.pause()
        engine.release()
        await engine.settled()
        later = loop.gateway.open("task.2", log=None, limits=SessionLimits())
        flight = later.join(read_request(OpenAIChat(), json.dumps(BODY).encode(), {}))
        await flight.planned.wait()
        await anyio.wait_all_tasks_blocked()
        assert len(engine.calls) == 1
        loop.gateway.resume()
        await flight.done.wait()
        assert len(engine.calls) == 2
        await later.leave(flight, Receipt())


async def test_a_pause_that_is_given_up_aborts_nothing_more(renderer: TemplateRenderer) -> None:
    """Its trainer has waited too long and resumes: turns that are made from then on must not be cut again and again."""
    engine = scripted_engine(renderer, SAID)
    engine.hold()
    seen: list[bytes] = []
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        group.start_soon(read, loop, seen)
        await engine.called(1)

        async def pause() -> None:
            with pytest.raises(UsageError, match="calls are running"):
                await loop.gateway.pause()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as pausing:
                pausing.start_soon(pause)
                await anyio.wait_all_tasks_blocked()
                loop.gateway.resume()
        # The pause has ended, and the call it waited for is still held.
        assert [call.outcome for call in engine.calls] == ["running"]
        engine.release()
    assert SAID.encode() in b"".join(seen)


async def test_a_client_that_leaves_in_a_pause_and_a_session_that_closes_are_not_held_up(
    renderer: TemplateRenderer,
) -> None:
    engine = scripted_engine(renderer, SAID)
    async with loopback_gateway(renderer, engine) as loop:
        await loop.gateway.pause()
        with anyio.move_on_after(0.1):
            await read(loop, [])
        with anyio.fail_after(5):
            assert (await loop.session.close()).turns == []
    assert engine.calls == []


async def test_the_time_of_a_pause_is_not_the_agents(renderer: TemplateRenderer) -> None:
    """A policy must not run out of its time because its weights were changed."""
    limits = SessionLimits(seconds=2)
    async with loopback_gateway(renderer, scripted_engine(renderer, SAID), limits=limits) as loop:
        await loop.gateway.pause()
        await anyio.sleep(2.5)
        assert loop.session.limit_reason is None
        loop.gateway.resume()
        with anyio.fail_after(30):
            await loop.session.limit_reached.wait()
        assert loop.session.limit_reason == "seconds"
