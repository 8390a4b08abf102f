"""A gateway that serves alone: its admin routes, its port, its sessions over a kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.errors import ConfigError
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.standalone import serve_gateway
from rollwright.testing.loopback_gateway import scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer admin-key"}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(renderer: TemplateRenderer, **settings: Any) -> AsyncGenerator[httpx2.AsyncClient]:
    ready = anyio.Event()
    urls: list[str] = []

    def on_ready(url: str, sessions: int) -> None:
        urls.append(url)
        ready.set()

    async with scripted_engine(renderer, "said") as engine, anyio.create_task_group() as group:

        async def serve() -> None:
            await serve_gateway(
                engine=engine,
                renderer=renderer,
                sampling=Sampling(),
                model="policy",
                port=0,
                on_ready=on_ready,
                **settings,
            )

        group.start_soon(serve)
        await ready.wait()
        async with httpx2.AsyncClient(base_url=urls[0], timeout=30) as client:
            yield client
        group.cancel_scope.cancel()


async def test_a_trainer_opens_a_session_a_client_uses_it_and_its_samples_come_back(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with served(renderer, admin_key="admin-key", folder=tmp_path / "logs") as client:
        asked = {"rollout_id": "t.1", "limits": {"turns": 5}, "seed": 3, "history": "append_only", "trained": ["main"]}
        opened = (await client.post("/admin/sessions", json=asked, headers=ADMIN)).json()
        assert opened["rollout_id"] == "t.1"
        assert (await client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]})).status_code == 200
        (listed,) = (await client.get("/admin/sessions", headers=ADMIN)).json()["sessions"]
        assert (listed["rollout_id"], listed["turns"], listed["last_error"]) == ("t.1", 1, None)
        assert (await client.get("/admin/sessions/t.1", headers=ADMIN)).json() == listed
        closing = {"reward": 0.5, "group_id": "g", "task_id": "t"}
        closed = await client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN)
        (sample,) = closed.json()["samples"]
        assert (sample["reward"], sample["group_id"], sample["history"]) == (0.5, "g", "append_only")
        assert sum(sample["loss_mask"]) == len(sample["tokens"]) - sample["prompt_length"]
        assert (await client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]})).status_code == 400
        assert (await client.get("/admin/sessions", headers=ADMIN)).json() == {"sessions": []}
    logged = read_turn_log(tmp_path / "logs" / "t.1.turns.log")
    assert logged.sealed
    assert (logged.header["trained"], logged.header["history"]) == (["main"], "append_only")


async def test_a_trainer_that_missed_the_samples_asks_again(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with served(renderer, admin_key="admin-key", folder=tmp_path / "logs") as client:
        opened = (await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)).json()
        assert (await client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]})).status_code == 200
        path, closing = "/admin/sessions/t.1/close", {"reward": 0.5}
        assert (await client.post(path, json={"reward": "best"}, headers=ADMIN)).status_code == 400
        first = await client.post(path, json=closing, headers=ADMIN)
        again = await client.post(path, json=closing, headers=ADMIN)
        assert len(again.json()["samples"]) == 1
        assert again.json() == first.json()


async def test_weights_are_updated_between_pause_and_resume(renderer: TemplateRenderer) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        assert (await client.post("/admin/pause", json={"mode": "finish"}, headers=ADMIN)).status_code == 200
        resumed = await client.post("/admin/resume", json={"version": "2"}, headers=ADMIN)
        assert resumed.json() == {"versions": ["2"]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/admin/sessions", {}, "rollout_id"),
        ("/admin/sessions", {"rollout_id": "../x"}, "rollout_id"),
        ("/admin/sessions", {"rollout_id": "a", "history": "rewritten"}, "history"),
        ("/admin/sessions", {"rollout_id": "a", "trained": ["tittle"]}, "tittle"),
        ("/admin/sessions", {"rollout_id": "a", "limits": {"turns": "x"}}, "limits.turns"),
        ("/admin/sessions", {"rollout_id": "a", "limits": {"tuns": 1}}, "tuns"),
        ("/admin/sessions", [], "must be an object"),
        ("/admin/sessions", {"rollout_id": "a", "seed": "x"}, "seed"),
        ("/admin/sessions/b/close", {}, "no open session 'b'"),
        ("/admin/sessions/b/close", {"reward": "best"}, "reward"),
        ("/admin/sessions/b/close", {"max_sample_tokens": 0}, "max_sample_tokens"),
        ("/admin/sessions/b/close", {"accepted_versions": "2"}, "accepted_versions"),
        ("/admin/pause", {"mode": "hard"}, "mode"),
    ],
)
async def test_what_a_trainer_asks_wrongly_is_named(
    renderer: TemplateRenderer, path: str, body: Any, said: str
) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        answer = await client.post(path, json=body, headers=ADMIN)
        assert answer.status_code == 400
        assert said in answer.json()["error"]


async def test_admin_routes_want_their_key_and_are_there_only_when_asked_for(renderer: TemplateRenderer) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await client.get("/admin/sessions", headers=headers)).status_code == 401
        assert (await client.get("/_bench/stats")).status_code == 404
    async with served(renderer) as client:
        assert (await client.get("/admin/sessions", headers=ADMIN)).status_code == 404


async def test_admin_routes_are_for_this_machine_only(renderer: TemplateRenderer) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    async with served(renderer, admin_key="admin-key", bench_admin=True, host="0.0.0.0") as client:
        port = client.base_url.port
        async with httpx2.AsyncClient(base_url=f"http://{address}:{port}") as outside:
            assert (await outside.get("/admin/sessions", headers=ADMIN)).status_code == 404
            assert (await outside.get("/_bench/stats")).status_code == 404
            assert (await outside.get("/v1/models")).status_code == 401


async def test_a_load_client_opens_finishes_and_drops_sessions_by_its_own_ids(renderer: TemplateRenderer) -> None:
    async with served(renderer, bench_admin=True) as client:
        for sid in ("a~1", "b~1"):
            assert (await client.post("/_bench/open", json={"sid": sid})).status_code == 200
            assert (await client.post(CHAT, json=HI, headers={"authorization": f"Bearer {sid}"})).status_code == 200
        assert (await client.get("/_bench/stats")).json()["open"] == 2
        finished = (await client.post("/_bench/finish", json={"sid": "a~1", "tokens": True})).json()
        (sample,) = finished["samples"]
        assert sample["n_tokens"] == len(sample["tokens"])
        assert sample["trained"] == sum(sample["loss_mask"]) == sample["response_length"]
        assert finished["seconds"] > 0
        assert finished["rss_peak"] >= finished["rss_before"] > 0
        assert (await client.post("/_bench/drop", json={"sid": "b~1"})).status_code == 200
        assert (await client.post("/_bench/gc")).json()["rss"] > 0
        assert (await client.get("/_bench/stats")).json()["open"] == 0
        assert (await client.post("/_bench/finish", json={"sid": "a~1"})).status_code == 400
        assert (await client.post("/_bench/open", json={})).status_code == 400


@pytest.mark.parametrize(("port", "said"), [(None, "is in use"), (99999, "between 0 and 65535")])
async def test_a_port_that_cannot_be_had_is_one_clear_error(
    renderer: TemplateRenderer, port: int | None, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = scripted_engine(renderer, "x")
        with pytest.raises(ConfigError, match=said) as caught:
            await serve_gateway(
                engine=engine,
                renderer=renderer,
                sampling=Sampling(),
                model="m",
                port=taken.getsockname()[1] if port is None else port,
            )
        assert caught.value.details == {"field": "port"}


GATEWAY = """
import sys
from pathlib import Path
import anyio
from rollwright.gateway.standalone import serve_gateway
from rollwright.testing.loopback_gateway import scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

async def main(tokenizer, folder):
    renderer = TemplateRenderer(Path(tokenizer))
    async with scripted_engine(renderer, "said") as engine:
        await serve_gateway(
            engine=engine, renderer=renderer, sampling=Sampling(), model="m", port=0, folder=Path(folder),
            admin_key="admin-key", on_ready=lambda url, sessions: print(url, sessions, flush=True),
        )

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_gateway_that_is_stopped_seals_its_sessions(tmp_path: Path, sign: signal.Signals) -> None:
    """The command itself; one session is at rest, one has a turn in the making."""
    script = tmp_path / "script.toml"
    script.write_text("[[script]]\nreplies = ['said']\n[[fault]]\ncall = 2\nkind = 'delay'\nseconds = 3600\n")
    folder = tmp_path / "logs"
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "rollwright.cli", "gateway", f"script={script}"]
    options = ["--engine", "scripted", "--tokenizer", tokenizer, "--port", "0", "--folder", folder]
    env = os.environ | {"ROLLWRIGHT_ADMIN_KEY": "admin-key"}
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stderr is not None
        try:
            url = running.stderr.readline().strip()
            with httpx2.Client(base_url=url, timeout=30) as client:
                keys = [
                    client.post("/admin/sessions", json={"rollout_id": name}, headers=ADMIN).json()["api_key"]
                    for name in ("rests", "works")
                ]
                assert client.post(CHAT, json=HI, headers={"x-api-key": keys[0]}).status_code == 200
                with client.stream("POST", CHAT, json=HI | {"stream": True}, headers={"x-api-key": keys[1]}):
                    running.send_signal(sign)
                    _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, "Traceback" in said) == (0, False), said
    rests, works = (read_turn_log(folder / f"{name}.turns.log") for name in ("rests", "works"))
    assert (rests.sealed, works.sealed) == (True, True)
    assert [turn.delivered for turn in rests.trajectory.turns] == [True]
    assert (works.trajectory.turns, len(works.intents)) == ([], 1)
    assert list(folder.glob("*.key")) == []


@contextmanager
def process(tokenizer: Path, folder: Path) -> Generator[tuple[subprocess.Popen[str], str, int]]:
    command = [sys.executable, "-c", GATEWAY, str(tokenizer), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        url, sessions = running.stdout.readline().split()
        try:
            yield running, url, int(sessions)
        finally:
            running.kill()


def test_sessions_outlive_a_killed_process_and_are_closed_by_the_next(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "logs"
    with process(tokenizer, folder) as (running, url, sessions):
        assert sessions == 0
        with httpx2.Client(base_url=url, timeout=30) as client:
            opened = client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN).json()
            assert client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]}).status_code == 200
        os.kill(running.pid, signal.SIGKILL)
    with process(tokenizer, folder) as (_, url, sessions), httpx2.Client(base_url=url, timeout=30) as client:
        assert sessions == 1
        more = {"messages": [*HI["messages"], {"role": "assistant", "content": "said"}, *HI["messages"]]}
        assert client.post(CHAT, json=more, headers={"x-api-key": opened["api_key"]}).status_code == 200
        (sample,) = client.post("/admin/sessions/t.1/close", json={"reward": 1}, headers=ADMIN).json()["samples"]
        assert sample["turns"] == [0, 1]
