"""Several gateway processes behind one address."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.routing import head_of, secret_of, shard_of, shard_prefix
from rollwright.gateway.shards import serve_shards
from rollwright.testing.loopback_gateway import load_scripted
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def serve(tokenizer: Path, count: int, **settings: Any) -> None:
    load = partial(load_scripted, tokenizer, "said")
    told: dict[str, Any] = {"sampling": Sampling(), "model": "policy", "port": 0, "admin_key": "admin-key", **settings}
    await serve_shards(count=count, load=load, **told)


@asynccontextmanager
async def served(tokenizer: Path, count: int, **settings: Any) -> AsyncGenerator[httpx2.AsyncClient]:
    """A trainer's client. It keeps one connection, for keys of any shard and the admin routes."""
    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str, sessions: int) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as group:
        group.start_soon(partial(serve, tokenizer, count, on_ready=on_ready, **settings))
        await ready.wait()
        one = httpx2.Limits(max_connections=1)
        async with httpx2.AsyncClient(base_url=urls[0], timeout=60, limits=one, trust_env=False) as client:
            yield client
        group.cancel_scope.cancel()


def says(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


async def opened(client: httpx2.AsyncClient, *names: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for name in names:
        reply = await client.post("/admin/sessions", json={"rollout_id": name}, headers=ADMIN)
        assert reply.status_code == 200, reply.text
        keys[name] = reply.json()["api_key"]
    return keys


async def ask(client: httpx2.AsyncClient, key: str, *texts: str) -> httpx2.Response:
    return await client.post(CHAT, json=says(*texts), headers={"x-api-key": key})


# --------------------------------------------------------------------------- which shard


@given(count=st.integers(1, 9), number=st.integers(0, 8), token=st.text(max_size=40))
def test_a_key_says_its_shard_and_any_other_text_always_the_same_one(count: int, number: int, token: str) -> None:
    if number < count:
        assert shard_of(shard_prefix(number) + token, count) == number
    assert 0 <= shard_of(token, count) < count
    assert shard_of(token, count) == shard_of(token, count)


@given(cut=st.integers(0, 70))
def test_the_head_of_a_request_is_read_once_it_is_whole(cut: int) -> None:
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s1.abc\r\n\r\n"
    assert head_of(head[:cut]) is None or cut >= len(head)
    path, headers = head_of(head + b'{"a": 1}') or ("", {})
    assert (path, secret_of(headers)) == ("/v1/messages", "s1.abc")


# --------------------------------------------------------------------------- one address


async def test_sessions_of_all_shards_are_served_at_one_address_over_one_connection(
    tokenizer: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"history": "append_only", "trained": frozenset({"main"}), "sampling": Sampling(seed=5)}
    async with served(tokenizer, 2, folder=tmp_path, **settings) as client:
        keys = await opened(client, *(f"t.{number}" for number in range(8)))
        assert {shard_of(key, 2) for key in keys.values()} == {0, 1}
        for key in keys.values():
            assert (await ask(client, key, "hi")).json()["choices"][0]["message"]["content"] == "said"
        listed = (await client.get("/admin/sessions", headers=ADMIN)).json()["sessions"]
        assert {state["rollout_id"]: state["turns"] for state in listed} == dict.fromkeys(keys, 1)
        assert logged_in(tmp_path) == {"shard-0", "shard-1"}
        headers = headers_in(tmp_path)
        assert {header["history"] for header in headers} == {"append_only"}
        assert {tuple(header["trained"]) for header in headers} == {("main",)}
        assert len({header["sampling"]["seed"] for header in headers}) == len(keys)
        for name in keys:
            closed = await client.post(f"/admin/sessions/{name}/close", json={"reward": 1.0}, headers=ADMIN)
            assert [sum(sample["loss_mask"]) > 0 for sample in closed.json()["samples"]] == [True]
        assert (await client.get("/admin/sessions", headers=ADMIN)).json() == {"sessions": []}


async def test_what_is_wrong_is_told_as_by_one_process(tokenizer: Path, tmp_path: Path) -> None:
    async with served(tokenizer, 2, folder=tmp_path) as client:
        assert (await ask(client, "s1.nobody", "hi")).status_code == 401
        assert (await client.get("/admin/sessions", headers={"authorization": "Bearer x"})).status_code == 401
        unnamed = await client.post("/admin/sessions", json={}, headers=ADMIN)
        assert (unnamed.status_code, "rollout_id" in unnamed.json()["error"]) == (400, True)
        await ask(client, (await opened(client, "t.1"))["t.1"], "hi")
        taken = await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)
        assert (taken.status_code, "open already" in taken.json()["error"]) == (409, True)
        path = "/admin/sessions/t.1/close"
        for wrong in (
            '{"reward": NaN}',
            '{"reward": 1e999}',
            '{"reward": "1"}',
            '{"reward": 1, "max_sample_tokens": 0}',
        ):
            assert (await client.post(path, content=wrong, headers=ADMIN)).status_code == 400
        closed = [(await client.post(path, json={"reward": 1}, headers=ADMIN)).json() for _ in range(2)]
        assert closed[0] == closed[1]
        assert [sample["reward"] for sample in closed[0]["samples"]] == [1.0]
        taken = await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)
        assert (taken.status_code, "has its log" in taken.json()["error"]) == (409, True)
        wrong_mode = await client.post("/admin/pause", json={"mode": "x"}, headers=ADMIN)
        assert (wrong_mode.status_code, "mode" in wrong_mode.json()["error"]) == (400, True)
        assert (await client.post("/admin/pause", json={}, headers=ADMIN)).json() == {"versions": ["scripted"]}
        resumed = await client.post("/admin/resume", json={"version": "7"}, headers=ADMIN)
        assert resumed.json() == {"versions": ["scripted", "7"]}


async def test_a_killed_shard_comes_back_with_its_sessions_while_the_others_serve(
    tokenizer: Path, tmp_path: Path
) -> None:
    async with served(tokenizer, 2, folder=tmp_path) as client:
        keys = await opened(client, *(f"t.{number}" for number in range(8)))
        for key in keys.values():
            await ask(client, key, "hi")
        victim = next(key for key in keys.values() if shard_of(key, 2) == 1)
        other = next(key for key in keys.values() if shard_of(key, 2) == 0)
        for pid in shard_processes(tmp_path / "shard-1"):
            os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(60):
            while True:
                try:
                    again = await ask(client, victim, "hi", "more")
                    break
                except httpx2.TransportError:
                    # Its connection died with it: as every CLI does, once more.
                    continue
        assert again.status_code == 200
        assert (await ask(client, other, "hi", "more")).status_code == 200
        listed = (await client.get("/admin/sessions", headers=ADMIN)).json()["sessions"]
        assert {state["rollout_id"] for state in listed} == set(keys)
        turns = {state["rollout_id"]: state["turns"] for state in listed}
        assert turns[next(name for name, key in keys.items() if key == victim)] == 2


async def test_a_shard_that_is_started_again_within_a_pause_waits_for_its_end(tokenizer: Path, tmp_path: Path) -> None:
    replies: list[httpx2.Response] = []
    async with served(tokenizer, 2, folder=tmp_path) as client, anyio.create_task_group() as group:
        keys = await opened(client, *(f"t.{number}" for number in range(8)))
        name, victim = next((name, key) for name, key in keys.items() if shard_of(key, 2) == 1)
        assert (await client.post("/admin/pause", json={"mode": "hard"}, headers=ADMIN)).status_code == 400
        assert (await client.post("/admin/pause", json={}, headers=ADMIN)).status_code == 200
        for pid in shard_processes(tmp_path / "shard-1"):
            os.kill(pid, signal.SIGKILL)

        async def insist() -> None:
            async with httpx2.AsyncClient(base_url=client.base_url, timeout=60, trust_env=False) as cli:
                while not replies:
                    with suppress(httpx2.TransportError):
                        replies.append(await ask(cli, victim, "hi"))

        group.start_soon(insist)
        lines = b""
        with anyio.fail_after(60):
            while b'"intent"' not in lines:
                await anyio.sleep(0.01)
                lines = (tmp_path / "shard-1" / f"{name}.turns.log").read_bytes()
        for _ in range(20):
            assert (await client.get("/admin/sessions", headers=ADMIN)).status_code == 200
        assert replies == []
        assert (await client.post("/admin/resume", json={"version": "7"}, headers=ADMIN)).json() == {"versions": ["7"]}
    assert [reply.status_code for reply in replies] == [200]


async def test_many_connections_at_once_all_reach_their_shard(tokenizer: Path) -> None:
    async with served(tokenizer, 2) as client:
        keys = await opened(client, *(f"t.{number}" for number in range(60)))
        port = client.base_url.port
        answers: list[bytes] = []

        async def one(key: str) -> None:
            body = orjson.dumps(says("a long file " * 2000))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(head.encode() + body)
                answers.append(await stream.receive(12))

        async with anyio.create_task_group() as group:
            for key in keys.values():
                group.start_soon(one, key)
    assert answers == [b"HTTP/1.1 200"] * 60


def logged_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.rglob("*.turns.log")}


def headers_in(folder: Path) -> list[Mapping[str, Any]]:
    return [read_turn_log(log).header for log in folder.rglob("*.turns.log")]


def shard_processes(folder: Path) -> list[int]:
    """The process that holds this folder's logs open."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                files = [str(file.readlink()) for file in (process / "fd").iterdir()]
            except OSError:
                continue
            if any(file.startswith(f"{folder}/") for file in files):
                found.append(int(process.name))
    assert found
    return found


async def test_what_a_shard_cannot_be_made_of_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        await serve(tmp_path, 2)


async def test_a_folder_with_open_sessions_of_more_shards_is_not_taken(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "shard-2").mkdir()
    (tmp_path / "shard-2" / "t.1.turns.log.key").write_text("{}")
    with pytest.raises(ConfigError, match="another number of shards"):
        await serve(tokenizer, 2, folder=tmp_path)
