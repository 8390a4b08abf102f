"""What comes to a session that closes: whatever a request was waiting for, nothing is sampled after the trajectory was
handed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollwright.dialects.anthropic import Anthropic
from rollwright.gateway.exchange import Refused
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.receipt import Receipt
from rollwright.gateway.turn import read_request
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer

pytestmark = pytest.mark.anyio

SAYS: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": SAYS,
    "/v1/messages/count_tokens": SAYS,
    "/v1/chat/completions": SAYS,
    "/v1/responses": {"model": "policy", "input": "hi"},
}


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_whose_body_ends_after_the_close_is_refused_and_changes_nothing(
    renderer: TemplateRenderer, tmp_path: Path, path: str, logged: bool
) -> None:
    log = tmp_path / "turns.log" if logged else None
    async with loopback_gateway(renderer, scripted_engine(renderer, "said"), log=log) as loop:
        data = json.dumps(BODIES[path]).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {loop.session.secret}\r\nexpect: 100-continue\r\n"
        async with await anyio.connect_tcp("127.0.0.1", int(loop.url.rpartition(":")[2])) as client:
            await client.send(f"{head}content-length: {len(data)}\r\n\r\n".encode())
            # The gateway asks for the body: its key has been accepted.
            assert (await client.receive()).startswith(b"HTTP/1.1 100")
            await client.send(data[:10])
            trajectory = await loop.session.close()
            await client.send(data[10:])
            answer = b""
            with anyio.fail_after(30):
                while b"closed" not in answer:
                    answer += await client.receive()
        assert answer.startswith(b"HTTP/1.1 400")
        assert loop.engine.calls == []
        assert trajectory.turns == []
        assert (loop.session.last_error, loop.session.turns) == (None, 0)
    if log is not None:
        assert read_turn_log(log).intents == {}


async def test_a_session_that_waits_for_its_last_turn_takes_no_other(renderer: TemplateRenderer) -> None:
    """Not while it closes, and not for the reply of a turn that it has."""
    engine = scripted_engine(renderer, "said")
    asked = read_request(Anthropic(), json.dumps(SAYS).encode(), {})
    async with loopback_gateway(renderer, engine) as loop, anyio.create_task_group() as group:
        first = loop.session.join(asked)
        await first.done.wait()
        group.start_soon(loop.session.close)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Refused):
            loop.session.join(asked)
        with pytest.raises(Refused):
            await loop.session.count(asked)
        await loop.session.leave(first, Receipt())
    assert len(engine.calls) == 1
