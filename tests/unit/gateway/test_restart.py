"""A gateway that was killed and started again: same secrets, same turns, and clients that just ask again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.engines.scripted import Fault
from rollwright.errors import StoreError
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.log import read_turn_log
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway, scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import verify
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def body(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def crashed(loop: LoopbackGateway, log: Path, folder: Path) -> Path:
    """The files of an open session as a kill at this moment would leave them."""
    copy = folder / log.name
    folder.mkdir()
    for path in (log, log.with_name(log.name + ".key")):
        shutil.copy(path, folder / path.name)
    return copy


async def ask(url: str, key: str, content: dict[str, Any], **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=url, headers={"x-api-key": key, **headers}, timeout=30) as client:
        return await client.post(CHAT, json=content)


# --------------------------------------------------------------------------- the key file


async def test_the_secret_is_in_a_file_of_its_own_for_as_long_as_the_session_is_open(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    key = tmp_path / "turns.log.key"
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=log) as loop:
        await ask(loop.url, loop.session.secret, body("hi"))
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert loop.session.secret in key.read_text()
        assert loop.session.secret not in log.read_text()
        await loop.session.close()
        assert not key.exists()


# --------------------------------------------------------------------------- resuming


async def test_a_reply_the_crash_swallowed_is_sent_again_without_the_engine(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, "first"), log=log) as loop:
        secret = loop.session.secret
        before = await ask(loop.url, secret, body("hi"))
        copy = crashed(loop, log, tmp_path / "crashed")
    lines = copy.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(line for line in lines if b'"delivered"' not in line))

    engine = scripted_engine(renderer, "another")
    async with loopback_gateway(renderer, engine) as loop:
        (session,) = loop.gateway.reopen_all(tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            async with loop.gateway.listening(sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                after = await ask(url, secret, body("hi"))
        trajectory = await session.close()
    assert after.json() == before.json()
    assert engine.calls == []
    assert [turn.delivered for turn in trajectory.turns] == [True]
    assert read_turn_log(copy).trajectory.turns == trajectory.turns


async def test_a_conversation_goes_on_where_the_dead_gateway_left_it(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    engine = scripted_engine(renderer, "first", faults=[Fault(call=1, kind="abort", after_tokens=2)])
    limits = SessionLimits(turns=2, sampled_tokens=1000, seconds=600)
    async with loopback_gateway(renderer, engine, log=log, limits=limits, sampling=Sampling(seed=5)) as loop:
        secret = loop.session.secret
        content = body("hi")
        reply = await ask(loop.url, secret, content)
        copy = crashed(loop, log, tmp_path / "crashed")
        counted = (loop.session.turns, loop.session.prompt_tokens, loop.session.sampled_tokens)
    with copy.open("ab") as file:
        file.write(b'{"kind":"turn","index":1,"del')  # what the process was writing when it died

    content["messages"] += [reply.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
    engine = scripted_engine(renderer, "second")
    async with loopback_gateway(renderer, engine) as loop:
        session = loop.gateway.reopen(copy)
        assert (session.secret, session.limits) == (secret, limits)
        assert (session.turns, session.prompt_tokens, session.sampled_tokens) == counted
        with socket.create_server(("127.0.0.1", 0)) as sock:
            async with loop.gateway.listening(sock, session):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                assert (await ask(url, secret, content)).status_code == 200
                assert (await ask(url, secret, body("more"))).status_code == 400
        assert session.limit_reason == "turns"
        trajectory = await session.close()
    assert [(turn.parent, turn.drift, turn.delivered) for turn in trajectory.turns] == [
        (None, None, True),
        (0, None, True),
    ]
    logged = read_turn_log(copy)
    assert logged.sealed
    assert logged.trajectory.turns == trajectory.turns
    assert sorted(logged.intents) == [0, 1, 2]
    assert trajectory.turns[1].meta["intents"] == [2]
    # The seed is the session's, not the new gateway's.
    assert engine.calls[0].sampling.seed is not None


async def test_a_session_whose_time_ran_out_while_the_gateway_was_down_is_over(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    limits = SessionLimits(seconds=0.2)
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=log, limits=limits) as loop:
        copy = crashed(loop, log, tmp_path / "crashed")
        await loop.session.limit_reached.wait()
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        session = loop.gateway.reopen(copy)
        await session.limit_reached.wait()
        assert session.limit_reason == "seconds"


async def test_a_client_that_comes_before_its_session_is_reopened_waits_for_that(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    log = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=log) as loop:
        secret = loop.session.secret
        copy = crashed(loop, log, tmp_path / "crashed")
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        loop.gateway.expect(tmp_path)
        answers: list[int] = []

        async def early() -> None:
            answers.append((await ask(url, secret, body("hi"))).status_code)

        with socket.create_server(("127.0.0.1", 0)) as sock:
            async with loop.gateway.listening(sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                async with anyio.create_task_group() as group:
                    group.start_soon(early)
                    expected = loop.gateway._expected[secret]
                    while not expected.statistics().tasks_waiting:  # noqa: ASYNC110 - it has no event
                        await anyio.sleep(0.01)
                    assert (await ask(url, "another", body("hi"))).status_code == 401, "at once"
                    assert answers == []
                    session = loop.gateway.reopen(copy)
                assert answers == [200]
                assert (await ask(url, secret, body("hi"))).status_code == 200
                await session.close()
                assert (await ask(url, secret, body("hi"))).status_code != 200


async def test_what_cannot_be_resumed_is_an_error_that_says_why(renderer: TemplateRenderer, tmp_path: Path) -> None:
    log = tmp_path / "turns.log"
    async with loopback_gateway(renderer, scripted_engine(renderer, "x"), log=log) as loop:
        with pytest.raises(StoreError, match="being written by another process"):
            loop.gateway.reopen(log)
        copy = crashed(loop, log, tmp_path / "crashed")
        other = TemplateRenderer(tiny_tokenizer(tmp_path / "other", thinking=True))
        async with loopback_gateway(other, scripted_engine(other, "x")) as theirs:
            with pytest.raises(StoreError, match="another tokenizer"):
                theirs.gateway.reopen(copy)
        await loop.session.close()
        with pytest.raises(StoreError, match=r"session key .* cannot be read"):
            loop.gateway.reopen(log)
        shutil.copy(copy.with_name("turns.log.key"), log.with_name("turns.log.key"))
        with pytest.raises(StoreError, match="is sealed"):
            loop.gateway.reopen(log)
        log.with_name("turns.log.key").write_text("{}")
        with pytest.raises(StoreError, match=r"session key .* is damaged"):
            loop.gateway.reopen(log)


# --------------------------------------------------------------------------- a real process

GATEWAY = """
import socket, sys
from pathlib import Path
import anyio
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.server import Gateway
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

async def main(tokenizer, folder, port):
    renderer = TemplateRenderer(Path(tokenizer))
    rules = [Rule(match=f"step {n}", replies=(f"answer {n}",)) for n in (4, 3, 2, 1)]
    script = Script(script=tuple(rules))
    engine = ScriptedEngine(renderer=renderer, script=script, seconds_per_turn=0.1)
    with socket.create_server(("127.0.0.1", int(port))) as sock:
        policy = dict(engine=engine, renderer=renderer, sampling=Sampling(), model="m")
        async with engine, Gateway(**policy, keepalive_seconds=0.01) as gateway:
            sessions = gateway.reopen_all(Path(folder))
            if not sessions:
                sessions = [gateway.open("task.1", log=Path(folder, "turns.log"), limits=SessionLimits())]
            async with gateway.listening(sock):
                print(sessions[0].secret, sessions[0].turns, flush=True)
                if await anyio.to_thread.run_sync(sys.stdin.readline):
                    await sessions[0].close()
                    print("closed", flush=True)

anyio.run(main, *sys.argv[1:])
"""


@contextmanager
def process(tokenizer: Path, folder: Path, port: int) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, str(tokenizer), str(folder), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def started(running: subprocess.Popen[str]) -> tuple[str, int]:
    assert running.stdout is not None
    secret, turns = running.stdout.readline().split()
    return secret, int(turns)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_client_outlives_kill_9_and_no_turn_is_lost_or_doubled(tmp_path: Path, renderer: TemplateRenderer) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "logs"
    folder.mkdir()
    port = free_port()
    messages: list[Any] = []
    with process(tokenizer, folder, port) as first:
        secret, _ = started(first)
        client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": secret}, timeout=30)
        with client:
            for step in (1, 2):
                messages.append({"role": "user", "content": f"step {step}"})
                reply = client.post(CHAT, json={"messages": messages}).json()
                messages.append(reply["choices"][0]["message"])
            messages.append({"role": "user", "content": "step 3"})
            with client.stream("POST", CHAT, json={"messages": messages, "stream": True}) as response:
                os.kill(first.pid, signal.SIGKILL)
                with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                    response.read()
            first.wait()
            with process(tokenizer, folder, port) as second:
                assert started(second) == (secret, 2)
                for step in (3, 4):
                    reply = client.post(CHAT, json={"messages": messages}).json()
                    messages += [reply["choices"][0]["message"], {"role": "user", "content": f"step {step + 1}"}]
                assert second.stdin is not None
                assert second.stdout is not None
                second.stdin.write("close\n")
                second.stdin.flush()
                assert second.stdout.readline() == "closed\n"
    logged = read_turn_log(folder / "turns.log")
    assert logged.sealed
    assert [turn.parent for turn in logged.trajectory.turns] == [None, 0, 1, 2]
    assert [turn.reply.content for turn in logged.trajectory.turns] == [f"answer {step}" for step in (1, 2, 3, 4)]
    samples = build_samples(
        logged.trajectory,
        task_id="t",
        group_id="g",
        rollout_id="task.1",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )
    sent = {turn.index: logged.intents[turn.meta["intents"][0]].prompt_digest for turn in logged.trajectory.turns}
    report = verify(logged.trajectory, samples, sent)
    assert report.violations == ()
    assert (report.trained, len(samples)) == (report.sampled, 1)
