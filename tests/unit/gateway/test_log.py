"""The durable turn log: what is written is what is read, torn ends are forgiven, damage is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import StoreError
from rollwright.gateway.log import TurnLog, read_turn_log
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import prompt_digest
from rollwright.types import VersionSpan


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def conversation(renderer: TemplateRenderer, log: TurnLog, turns: int = 3) -> Trajectory:
    """A trajectory with calls and a fork, written turn by turn."""
    trajectory = Trajectory("task.1")
    tools = [ToolSpec(name="bash", description="Run it.", parameters={"type": "object"})]
    messages = [Message(role="user", content="Fix the bug.")]
    for index in range(turns):
        plan = trajectory.plan(messages, tools, renderer)
        call = ToolCall(name="bash", arguments={"command": f"ls {index}", "n": 1.5, "x": None}, id=f"call_{index}")
        reply = Message(
            role="assistant", content="é\u2028", reasoning="hm", tool_calls=(call,), carriers=(f"rw{index}", call.id)
        )
        sampled = renderer.encode(f"said {index}")
        turn = trajectory.commit(
            plan,
            sampled=sampled,
            logprobs=[-0.1 * (index + 1) for _ in sampled],
            finish="stop",
            versions=[VersionSpan("v1", 0, 1), VersionSpan("v2", 1, len(sampled))],
            reply=reply,
            role="main",
            ill_formed=None if index else "broken",
            meta={"intents": [index], "asked": {"temperature": 0.5}},
        )
        log.turn(turn, tools)
        log.delivery(turn.index, delivered=True)
        messages += [reply, Message(role="tool", content="ok", tool_call_id=call.id, tool_name="bash")]
        if index == 1:
            messages[0] = Message(role="user", content="Fix another bug.")
    return trajectory


def test_a_sealed_log_reads_back_as_the_very_trajectory(renderer: TemplateRenderer, tmp_path: Path) -> None:
    path = tmp_path / "turns.log"
    log = TurnLog(path, {"rollout_id": "task.1", "model": "m"})
    trajectory = conversation(renderer, log)
    trajectory.mark_undelivered(2)
    log.seal([2])
    logged = read_turn_log(path)
    assert logged.sealed
    assert logged.header["model"] == "m"
    assert logged.trajectory.rollout_id == "task.1"
    assert logged.trajectory.turns == trajectory.turns
    assert logged.trajectory.turns[2].drift is not None
    assert [len(tools) for tools in logged.tools.values()] == [1]
    assert lines(path)[0]["schema"] == 1
    # The tree works as before: it can be asked for the next turn.
    messages = [*trajectory.turns[0].messages, Message(role="user", content="go on")]
    tools = next(iter(logged.tools.values()))
    assert logged.trajectory.plan(messages, tools, renderer) == trajectory.plan(messages, tools, renderer)


@pytest.mark.parametrize("missing", [1, 20, 400])
def test_a_torn_end_is_not_read_and_the_rest_is(renderer: TemplateRenderer, tmp_path: Path, missing: int) -> None:
    path = tmp_path / "turns.log"
    log = TurnLog(path, {"rollout_id": "task.1"})
    trajectory = conversation(renderer, log)
    log.seal([])
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if b'"kind":"turn"' in line]
    cut = path.read_bytes().index(whole[2]) + len(whole[2]) - missing
    path.write_bytes(path.read_bytes()[:cut])
    logged = read_turn_log(path)
    assert not logged.sealed
    assert logged.trajectory.turns == trajectory.turns[:2]


def test_without_a_seal_a_turn_is_delivered_by_a_mark_or_by_a_later_turn(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    path = tmp_path / "turns.log"
    log = TurnLog(path, {"rollout_id": "task.1"})
    conversation(renderer, log, turns=2)
    log.seal([])
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if b"delivered" not in line]
    path.write_bytes(b"".join(kept))
    assert [turn.delivered for turn in read_turn_log(path).trajectory.turns] == [True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.replace(b'"kind":"turn"', b'"kind":"tu\x00rn"', 1), ":3: damaged line"),
        (lambda data: data.replace(b"[", b"", 1), ":2: damaged line"),
        (lambda data: b"\n" + data, ":1: damaged line"),
        (lambda data: data.split(b"\n", 1)[1], ":1: damaged line: the header"),
        (lambda data: data.replace(b'"schema":1', b'"schema":9'), "schema 9 is not 1"),
        (lambda data: data + data.split(b"\n", 1)[1], "a line after the seal"),
        (lambda data: data.replace(b'"kind":"delivered"', b'"kind":"posted"'), "unknown kind 'posted'"),
        (lambda data: data.replace(b'"finish":', b'"finished":', 1), ":3: damaged line"),
        (lambda data: b"", "no header line"),
    ],
)
def test_damage_is_an_error_that_names_the_line(
    renderer: TemplateRenderer, tmp_path: Path, change: Any, said: str
) -> None:
    path = tmp_path / "turns.log"
    log = TurnLog(path, {"rollout_id": "task.1"})
    conversation(renderer, log)
    log.seal([])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StoreError) as caught:
        read_turn_log(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        read_turn_log(tmp_path / "none")


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    TurnLog(tmp_path / "turns.log", {"rollout_id": "a"}).seal([])
    with pytest.raises(StoreError, match="File exists"):
        TurnLog(tmp_path / "turns.log", {"rollout_id": "b"})


def test_a_delivery_after_the_seal_changes_nothing(tmp_path: Path) -> None:
    log = TurnLog(tmp_path / "turns.log", {"rollout_id": "a"})
    log.seal([])
    before = (tmp_path / "turns.log").read_bytes()
    log.delivery(0, delivered=True)
    assert (tmp_path / "turns.log").read_bytes() == before


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_prompt_digests_are_equal_for_equal_ids_only(one: list[int], other: list[int]) -> None:
    assert (prompt_digest(one) == prompt_digest(other)) == (one == other)


GATEWAY = """
import sys
from pathlib import Path
import anyio
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.tokens.render_template import TemplateRenderer

async def main(tokenizer, log):
    renderer = TemplateRenderer(Path(tokenizer))
    engine = scripted_engine(renderer, "I will look at the file first.")
    async with loopback_gateway(renderer, engine, log=Path(log)) as loop:
        print(loop.url, loop.session.secret, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        engine.hold()
        print("held", flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


def test_a_killed_gateway_leaves_every_reply_its_client_saw(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from rollwright.testing.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    log = tmp_path / "turns.log"
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, str(tokenizer), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url, secret = process.stdout.readline().split()
        messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]
        with httpx2.Client(base_url=url, headers={"x-api-key": secret}, timeout=30) as client:
            for _ in range(3):
                reply = client.post("/v1/chat/completions", json={"messages": messages}).json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "held\n"
            body = {"messages": messages, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                    response.read()
    logged = read_turn_log(log)
    assert not logged.sealed
    assert [turn.parent for turn in logged.trajectory.turns] == [None, 0, 1]
    assert sorted(logged.intents) == [0, 1, 2, 3]
    for turn in logged.trajectory.turns:
        (number,) = turn.meta["intents"]
        prompt = logged.trajectory.ids(turn.index)[: -len(turn.sampled)]
        assert logged.intents[number].prompt_digest == prompt_digest(prompt)
    said = [turn.reply.content for turn in logged.trajectory.turns]
    assert said == [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.anyio
async def test_what_the_log_promises_is_on_the_disk_before_the_reply_ends(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    path = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=path) as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers) as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            await client.post("/v1/chat/completions", json=body)
            assert [line["kind"] for line in lines(path)][:4] == ["header", "intent", "tools", "turn"]
