"""A gateway that serves alone: its admin routes, its port, its sessions over a kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.errors import ConfigError
from rollwright.gateway.keys import read_key
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.log import read_turn_log
from rollwright.gateway.standalone import serve_gateway
from rollwright.testing.loopback_gateway import scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import within_lag
from rollwright.types import Sampling

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ADMIN = {"authorization": "Bearer admin-key"}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(
    renderer: TemplateRenderer, engine: WatchedEngine | None = None, **settings: Any
) -> AsyncGenerator[httpx2.AsyncClient]:
    ready = anyio.Event()
    urls: list[str] = []

    def on_ready(url: str, sessions: int) -> None:
        urls.append(url)
        ready.set()

    given: dict[str, Any] = {"renderer": renderer, "sampling": Sampling(), "model": "policy", "port": 0, **settings}
    async with engine or scripted_engine(renderer, "said") as opened, anyio.create_task_group() as group:
        group.start_soon(partial(serve_gateway, engine=opened, on_ready=on_ready, **given))
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
        shown = (await client.get("/admin/sessions/t.1", headers=ADMIN)).json()
        assert shown == {**listed, "api_key": opened["api_key"]}
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


# --------------------------------------------------------------------------- closing


async def one_turn(client: httpx2.AsyncClient, name: str, **asked: Any) -> str:
    """A session in which a client has asked once; its key."""
    opened = (await client.post("/admin/sessions", json={"rollout_id": name, **asked}, headers=ADMIN)).json()
    assert (await client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]})).status_code == 200
    return opened["api_key"]


WRONG = (
    *(f'{{"reward": {value}}}' for value in ("NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[1]", "{}")),
    *(f'{{"reward": 1, "max_sample_tokens": {value}}}' for value in ('"100"', "2.5", "0", "-3", "true", "[1]")),
    *(f'{{"reward": 1, "accepted_versions": {value}}}' for value in ("5", '"scripted"', "[null]", '{"v1": 1}')),
    *(f'{{"reward": 1, "{field}": {value}}}' for field in ("task_id", "group_id") for value in ("[]", "1.5")),
    '{"rewards": 1}',
    '{"reward": 1',
    '["reward", 1]',
)


@pytest.mark.parametrize("logged", [True, False])
async def test_a_close_that_is_asked_wrongly_costs_no_rollout_and_one_that_is_repeated_gives_the_same(
    renderer: TemplateRenderer, tmp_path: Path, logged: bool
) -> None:
    async with served(renderer, admin_key="admin-key", folder=tmp_path if logged else None) as client:
        key = await one_turn(client, "t.1")
        for wrong in WRONG:
            answer = await client.post("/admin/sessions/t.1/close", content=wrong, headers=ADMIN)
            assert (answer.status_code, bool(answer.json()["error"])) == (400, True), wrong
        assert (await client.get("/admin/sessions/t.1", headers=ADMIN)).json()["turns"] == 1
        assert (await client.post(CHAT, json=HI, headers={"x-api-key": key})).status_code == 200
        closing = {"reward": 0.5, "accepted_versions": ["scripted", 7], "max_sample_tokens": 1000, "group_id": 3}
        first = await client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN)
        samples = first.json()["samples"]
        told = [(sample["reward"], sample["group_id"], sample["trainable"]) for sample in samples]
        assert told == [(0.5, "3", True)] * 2
        for wrong in WRONG:
            assert (await client.post("/admin/sessions/t.1/close", content=wrong, headers=ADMIN)).status_code == 400
        again = await client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN)
        assert again.json() == first.json()


async def test_a_trainer_whose_connection_broke_in_the_close_asks_again(renderer: TemplateRenderer) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        key = await one_turn(client, "t.1")
        data = b"POST /admin/sessions/t.1/close HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin-key\r\n\r\n"
        async with await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as gone:
            await gone.send(data)
            with anyio.fail_after(60):
                while (await client.post(CHAT, json=HI, headers={"x-api-key": key})).status_code == 200:
                    pass
        closed = await client.post("/admin/sessions/t.1/close", json={"reward": 1}, headers=ADMIN)
        assert closed.status_code == 200
        assert closed.json()["samples"] != []


async def test_a_name_is_taken_while_its_session_is_open_and_as_long_as_its_log_is_there(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with served(renderer, admin_key="admin-key", folder=tmp_path) as client:
        for said in ("is open already", "has its log"):
            await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)
            taken = await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)
            assert (taken.status_code, said in taken.json()["error"]) == (409, True)
            await client.post("/admin/sessions/t.1/close", headers=ADMIN)
        (tmp_path / "t.1.turns.log").unlink()
        assert (await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)).status_code == 200


async def test_a_session_without_a_log_that_has_the_name_of_an_earlier_one_has_nothing_of_it(
    renderer: TemplateRenderer,
) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        await one_turn(client, "t.1")
        path, closing = "/admin/sessions/t.1/close", {"reward": 1}
        assert len((await client.post(path, json=closing, headers=ADMIN)).json()["samples"]) == 1
        await client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN)
        for _ in range(2):
            assert (await client.post(path, json=closing, headers=ADMIN)).json()["samples"] == []


def test_what_was_closed_can_be_asked_for_in_the_next_process_also_when_the_last_was_killed_within_the_close(
    tmp_path: Path,
) -> None:
    tokenizer, folder, closing = tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "logs", {"reward": 1.0}
    closed: list[Any] = []
    with process(tokenizer, folder) as (running, url, _), httpx2.Client(base_url=url, timeout=30) as client:
        opened = client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN).json()
        assert client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]}).status_code == 200
        key = (folder / "t.1.turns.log.key").read_bytes()
        closed.append(client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN).json())
        os.kill(running.pid, signal.SIGKILL)
    # The log is sealed before the key goes: this is what a kill between the two leaves.
    (folder / "t.1.turns.log.key").write_bytes(key)
    with process(tokenizer, folder) as (_, url, sessions), httpx2.Client(base_url=url, timeout=30) as client:
        assert sessions == 0
        assert not (folder / "t.1.turns.log.key").exists()
        closed.append(client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN).json())
    assert closed[0] == closed[1]
    assert len(closed[0]["samples"]) == 1


# --------------------------------------------------------------------------- sessions of their own kind


async def test_a_session_has_what_it_was_opened_with_and_of_the_rest_what_the_gateway_has(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """Evaluation beside training."""
    engine = scripted_engine(renderer, "said")
    given = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=50)
    limits = SessionLimits(turns=1, sampled_tokens=1000, failures=3)
    settings: dict[str, Any] = {"sampling": given, "limits": limits, "history": "append_only", "admin_key": "admin-key"}
    greedy = {"temperature": 0, "top_k": 1}
    asked = {"sampling": greedy, "limits": {"turns": None, "seconds": 60}, "history": "exact", "trained": ["title"]}
    async with served(renderer, engine, folder=tmp_path, trained=frozenset({"main"}), **settings) as client:
        await one_turn(client, "train")
        await one_turn(client, "eval", **asked)
        evaluated = read_key(tmp_path / "eval.turns.log").limits
        assert evaluated == SessionLimits(turns=None, sampled_tokens=1000, seconds=60, failures=3)
        assert read_key(tmp_path / "train.turns.log").limits == limits
    assert [call.sampling for call in engine.calls] == [given, replace(given, temperature=0, top_k=1)]
    headers = [read_turn_log(tmp_path / f"{name}.turns.log").header for name in ("train", "eval")]
    assert [(header["history"], header["trained"]) for header in headers] == [
        ("append_only", ["main"]),
        ("exact", ["title"]),
    ]


async def test_with_a_seed_each_rollout_has_its_own_and_always_the_same(renderer: TemplateRenderer) -> None:
    seeds: list[list[int | None]] = []
    for _ in range(2):
        engine = scripted_engine(renderer, "said")
        async with served(renderer, engine, admin_key="admin-key", sampling=Sampling(seed=5)) as client:
            for name in ("t.1", "t.2"):
                await one_turn(client, name)
            await one_turn(client, "t.3", seed=5)
        seeds.append([call.sampling.seed for call in engine.calls])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], None}) == 4


# --------------------------------------------------------------------------- weights


async def test_weights_are_updated_between_pause_and_resume(renderer: TemplateRenderer) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        assert (await client.post("/admin/pause", json={"mode": "finish"}, headers=ADMIN)).status_code == 200
        resumed = await client.post("/admin/resume", json={"version": "2"}, headers=ADMIN)
        assert resumed.json() == {"versions": ["2"]}


ASKED_WRONGLY: tuple[tuple[str, Any, str], ...] = (
    ("/admin/sessions", {}, "rollout_id"),
    ("/admin/sessions", {"rollout_id": "../x"}, "rollout_id"),
    ("/admin/sessions", {"rollout_id": "a", "history": "rewritten"}, "history"),
    ("/admin/sessions", {"rollout_id": "a", "trained": ["tittle"]}, "tittle"),
    ("/admin/sessions", {"rollout_id": "a", "limits": {"turns": "x"}}, "limits.turns"),
    ("/admin/sessions", {"rollout_id": "a", "limits": {"tuns": 1}}, "tuns"),
    ("/admin/sessions", [], "should be an object"),
    ("/admin/sessions", {"rollout_id": "a", "seed": "x"}, "seed"),
    ("/admin/sessions", {"rollout_id": "a", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ("/admin/sessions", {"rollout_id": "a", "sampling": {"temperature": "0"}}, "sampling.temperature"),
    ("/admin/sessions", {"rollout_id": "a", "sampling": {"top_p": 0}}, "sampling.top_p"),
    ("/admin/sessions", {"rollout_id": "a", "sampling": {"seed": 1}}, "sampling.seed: there is no such field"),
    ("/admin/sessions", {"rollout_id": "a", "limits": {"turns": 0.5}}, "limits.turns"),
    ("/admin/sessions", {"rollout_id": "a", "limits": 5}, "limits"),
    ("/admin/sessions", {"rollout_id": "a", "trained": "main"}, "trained"),
    ("/admin/sessions", {"rollout_id": "a", "trained": 5}, "trained"),
    ("/admin/sessions", {"rollout_id": "a", "history": ["exact"]}, "history"),
    ("/admin/sessions", {"rollout_id": "a", "one_program": "no"}, "one_program"),
    ("/admin/sessions/b/close", {}, "no open session 'b'"),
    ("/admin/sessions/b/close", {"reward": "best"}, "reward"),
    ("/admin/sessions/b/close", {"max_sample_tokens": 0}, "max_sample_tokens"),
    ("/admin/sessions/b/close", {"accepted_versions": "2"}, "accepted_versions"),
    ("/admin/pause", {"mode": "hard"}, "mode"),
)


async def test_what_a_trainer_asks_wrongly_is_named(renderer: TemplateRenderer) -> None:
    async with served(renderer, admin_key="admin-key") as client:
        for path, body, said in ASKED_WRONGLY:
            answer = await client.post(path, json=body, headers=ADMIN)
            assert (answer.status_code, said in answer.json()["error"]) == (400, True), (path, body, answer.text)
        assert (await client.get("/admin/sessions", headers=ADMIN)).json() == {"sessions": []}


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
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.gateway.standalone import serve_gateway
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

async def main(tokenizer, folder, version):
    renderer = TemplateRenderer(Path(tokenizer))
    script = Script(script=(Rule(replies=("said",)),))
    async with ScriptedEngine(renderer=renderer, script=script, version=version) as engine:
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
    options += ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "20", "--max-new-tokens", "99", "--seed", "7"]
    options += ["--history", "append_only", "--trained", "main", "--trained", "title"]
    options += ["--max-turns", "9", "--max-sampled-tokens", "999", "--max-seconds", "600", "--max-failures", "3"]
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
                limits = read_key(folder / "rests.turns.log").limits
                assert limits == SessionLimits(turns=9, sampled_tokens=999, seconds=600, failures=3)
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
    assert (rests.header["history"], rests.header["trained"]) == ("append_only", ["main", "title"])
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, max_new_tokens=99, seed=rests.header["sampling"]["seed"])
    assert rests.header["sampling"] == asdict(sampling)
    assert len({rests.header["sampling"]["seed"], works.header["sampling"]["seed"], 7, None}) == 4


@contextmanager
def process(tokenizer: Path, folder: Path, version: str = "v1") -> Generator[tuple[subprocess.Popen[str], str, int]]:
    """A gateway that can be killed. `version`: of its engine's weights."""
    command = [sys.executable, "-c", GATEWAY, str(tokenizer), str(folder), version]
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


def test_the_order_of_the_weights_outlives_a_killed_process_so_that_what_is_fresh_is_trained(tmp_path: Path) -> None:
    """v1 was sampled with, v2 only told of, v3 sampled with by the next process."""
    tokenizer, folder = tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "logs"
    with process(tokenizer, folder, "v1") as (running, url, _), httpx2.Client(base_url=url, timeout=30) as client:
        opened = client.post("/admin/sessions", json={"rollout_id": "t.1"}, headers=ADMIN).json()
        assert client.post(CHAT, json=HI, headers={"x-api-key": opened["api_key"]}).status_code == 200
        client.post("/admin/resume", json={"version": "v2"}, headers=ADMIN)
        os.kill(running.pid, signal.SIGKILL)
    with process(tokenizer, folder, "v3") as (_, url, _), httpx2.Client(base_url=url, timeout=30) as client:
        more = {"messages": [*HI["messages"], {"role": "assistant", "content": "said"}, *HI["messages"]]}
        assert client.post(CHAT, json=more, headers={"x-api-key": opened["api_key"]}).status_code == 200
        versions = client.post("/admin/resume", headers=ADMIN).json()["versions"]
        assert versions == ["v1", "v2", "v3"]
        for lag, trained in ((2, {"v1", "v3"}), (1, {"v3"})):
            closing = {"reward": 1.0, "accepted_versions": sorted(within_lag(versions, lag))}
            (sample,) = client.post("/admin/sessions/t.1/close", json=closing, headers=ADMIN).json()["samples"]
            mask = sample["loss_mask"]
            fresh = {span["version"] for span in sample["versions"] if any(mask[span["start"] : span["end"]])}
            assert fresh == trained
