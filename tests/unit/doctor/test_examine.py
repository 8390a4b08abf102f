"""Each thing that can be wrong is caused, and found by its check alone; the other checks go on."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright import sandboxes
from rollwright.config import RunConfig
from rollwright.doctor import Check, Finding, found
from rollwright.doctor.examine import examine, examining, healthy
from rollwright.doctor.subject import Subject
from rollwright.e2b_server import E2BServer
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.harnesses.bundle import locate
from rollwright.harnesses.pi import Pi
from rollwright.run import Places, make_renderer
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.loopback_http import serving
from rollwright.testing.loopback_sglang import Fault, loopback_sglang
from support.e2b_rig import API_KEY, IMAGE_KEY
from support.sample import sample

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("doctor")).job.parent


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A sample to break."""
    return Path(shutil.copytree(written, tmp_path / "sample"))


async def look(folder: Path | None, *settings: str, cache: Path | None = None) -> dict[str, Finding]:
    """What the doctor finds; the bundles are those of `cache`, none by default."""
    with_places = (folder or Path("/nowhere")).parent / "places"
    places = Places(cache=cache or with_places / "cache", state=with_places / "state")
    config = None if folder is None else RunConfig.load(folder / "run.toml", settings)
    async with examining(places, config) as subject:
        findings = {finding.name: finding for finding in await examine(subject)}
    assert all(finding.fix for finding in findings.values() if finding.state in ("warn", "fail"))
    assert healthy(list(findings.values())) == (not failed(findings))
    assert not with_places.exists(), "nothing is changed on the machine"
    return findings


def failed(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.state == "fail"}


async def test_a_sample_that_can_run_has_nothing_that_failed(folder: Path) -> None:
    seen = await look(folder)
    assert failed(seen) == set()
    assert seen["harness"].state == "warn"
    assert seen["harness"].fix == "rollwright harness bundle pi"
    for name in ("namespaces", "images", "gateway", "policy", "engine", "tokenizer", "tasks", "grader command"):
        assert seen[name].state == "ok", seen[name]


async def test_without_a_run_file_the_machine_is_looked_at(tmp_path: Path) -> None:
    seen = await look(None)
    assert failed(seen) == set()
    assert seen["gateway"].seen == "answers inside a box of image host"
    assert not {"engine", "tasks", "policy"} & set(seen)


async def test_an_engine_that_is_down_is_named_and_its_tokenizer_is_not_judged(folder: Path) -> None:
    seen = await look(folder, "engine.kind=sglang", "engine.sglang.url=http://127.0.0.1:9")
    assert failed(seen) == {"engine"}
    assert "127.0.0.1:9" in seen["engine"].seen
    assert seen["tokenizer"].state == "skipped"


async def serve(folder: Path, *settings: str, fault: Fault | None = None) -> dict[str, Finding]:
    """Look at the sample in front of an SGLang server that serves the policy as `folder / served` has it."""
    served = folder / "served"
    if not served.exists():
        shutil.copytree(folder / "policy", served)
    config = RunConfig.load(folder / "run.toml", ["policy.path=served"])
    renderer = make_renderer(config)
    script = Script(script=(Rule(replies=("Hello, all is well.",)),), max_context=4096)
    async with ScriptedEngine(renderer=renderer, script=script) as engine, loopback_sglang(engine, renderer) as server:
        server.server_info["context_length"] = 4096
        if fault is not None:
            server.faults.extend([fault] * 2)
        return await look(folder, "engine.kind=sglang", f"engine.sglang.url={server.url}", *settings)


async def test_an_engine_that_answers_shows_context_logprobs_and_weights(folder: Path) -> None:
    seen = await serve(folder)
    assert failed(seen) == set()
    assert "temperature logprobs" in seen["engine"].seen
    assert seen["tokenizer"].seen == "the engine splits text and renders a conversation as policy.path does"
    assert "4 tokens sampled with logprobs, weights scripted" in seen["engine"].seen


async def test_a_policy_folder_of_another_model_is_found(folder: Path) -> None:
    shutil.copytree(folder / "policy", folder / "served")
    tokenizer = json.loads((folder / "served" / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:50]
    (folder / "served" / "tokenizer.json").write_text(json.dumps(tokenizer))
    seen = await serve(folder)
    assert failed(seen) == {"tokenizer"}
    assert "not of one policy" in seen["tokenizer"].seen
    assert seen["engine"].state == "ok"


async def test_an_engine_with_another_chat_template_is_warned_of(folder: Path) -> None:
    shutil.copytree(folder / "policy", folder / "served")
    template = (folder / "served" / "chat_template.jinja").read_text()
    (folder / "served" / "chat_template.jinja").write_text(
        template.replace("<|im_start|>user\\n", "<|im_start|>human\\n")
    )
    seen = await serve(folder)
    assert failed(seen) == set()
    assert seen["tokenizer"].state == "warn"
    assert "chat template" in seen["tokenizer"].seen


async def test_an_engine_without_logprobs_is_found(folder: Path) -> None:
    assert failed(await serve(folder, fault="no_logprobs")) == {"engine"}


async def test_a_reply_longer_than_the_context_is_found(folder: Path) -> None:
    seen = await serve(folder, "sampling.max_new_tokens=4096")
    assert failed(seen) == {"engine"}
    assert "max_new_tokens" in seen["engine"].fix


async def test_a_template_without_tools_is_found_and_what_needs_it_is_not_judged(folder: Path) -> None:
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    (folder / "policy" / "chat_template.jinja").write_text(template)
    seen = await look(folder)
    assert failed(seen) == {"policy"}
    assert {seen["engine"].state, seen["gateway"].state} == {"skipped"}
    assert seen["engine"].seen == "needs the policy"
    assert seen["grader command"].state == "ok"


async def test_a_missing_image_is_counted_and_named(folder: Path) -> None:
    shutil.rmtree(folder / "images" / "greet")
    seen = await look(folder)
    assert failed(seen) == {"images"}
    assert seen["gateway"].seen == "needs image greet"
    assert seen["images"].seen.startswith("1 of 1 are missing, the first: image 'greet'")
    assert seen["engine"].state == seen["tasks"].state == "ok"


async def test_a_broken_row_is_named_and_the_engine_is_still_looked_at(folder: Path) -> None:
    row = json.loads((folder / "tasks.jsonl").read_text())
    del row["metadata"]["workdir"]
    (folder / "tasks.jsonl").write_text(json.dumps(row))
    seen = await look(folder)
    assert failed(seen) == {"tasks"}
    assert "workdir" in seen["tasks"].seen
    assert seen["engine"].state == "ok"
    assert seen["images"].state == "skipped"


async def test_a_proxy_in_the_image_that_takes_the_gateways_traffic_is_found(folder: Path) -> None:
    image = folder / "images" / "greet" / "image.json"
    described: dict[str, Any] = json.loads(image.read_text())
    image.write_text(json.dumps(described | {"env": {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}}))
    seen = await look(folder)
    assert failed(seen) == {"gateway"}
    assert "http_proxy" in seen["gateway"].fix


async def test_a_bundle_that_does_not_start_is_found(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    locate(Pi(), cache).path.mkdir(parents=True)
    seen = await look(folder, cache=cache)
    assert failed(seen) == {"harness"}
    assert "does not start in image greet" in seen["harness"].seen


async def test_no_npm_matters_only_where_the_bundle_is_not_there(folder: Path) -> None:
    seen = await look(folder, "harness.npm=npm-is-not-here")
    assert failed(seen) == {"harness"}
    assert "npm-is-not-here" in seen["harness"].seen
    assert "apt-get install npm" in seen["harness"].fix


async def test_more_rollouts_than_the_machine_holds_are_warned_of(folder: Path) -> None:
    seen = await look(folder, "run.concurrency=90000", "run.attempts=90000000")
    assert seen["memory"].state == "warn"
    assert seen["disk"].state in ("warn", "fail")


async def test_a_backend_that_is_configured_and_not_there_fails(folder: Path) -> None:
    seen = await look(folder, "sandbox.kind=docker", "sandbox.docker.url=unix:///nowhere/docker.sock")
    assert failed(seen) == {"docker"}
    assert seen["gateway"].state == "skipped"
    assert seen["namespaces"].state == "ok"


async def test_boxes_on_other_machines_knock_at_the_gateways_public_address(folder: Path, tmp_path: Path) -> None:
    held = socket.socket()  # bound, not listening: nobody else is given this port, and the gateway can have it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    with held:
        await knock_from_a_cluster(folder, tmp_path, port)


async def knock_from_a_cluster(folder: Path, tmp_path: Path, port: int) -> None:
    async with (
        NamespacesProvider(state_dir=tmp_path / "cluster", images=folder / "images") as boxes,
        E2BServer(provider=boxes, api_key=API_KEY, image_metadata_key=IMAGE_KEY, allowed_port=port) as server,
    ):
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        settings = ["sandbox.kind=e2b", f"sandbox.e2b.image_metadata_key={IMAGE_KEY}", f"sandbox.e2b.api_url={url}"]
        settings += [f"sandbox.e2b.sandbox_url={url}", "sandbox.e2b.patience_seconds=2", "gateway.bind=127.0.0.1"]
        async with server.listening(sock):
            wrong = await look(folder, *settings, "sandbox.e2b.api_key=e2b_9876543210")
            settings.append(f"sandbox.e2b.api_key={API_KEY}")
            unset = await look(folder, *settings)
            told = await look(folder, *settings, "gateway.public_host=127.0.0.1", f"gateway.public_port={port}")
        assert failed(wrong) == {"e2b"}
        assert "key" in wrong["e2b"].seen
        assert wrong["gateway"].state == "skipped"
        assert failed(unset) == {"gateway"}
        assert "gateway.public_host" in unset["gateway"].fix + unset["gateway"].seen
        assert failed(told) == set()
        assert told["gateway"].seen == "answers inside a box of image greet"
        assert server.boxes.all() == []


async def test_a_ray_cluster_is_looked_for_only_by_a_run_that_uses_it(folder: Path) -> None:
    assert (await look(folder))["ray"].state == "skipped"
    seen = await look(folder, "run.executor=ray", "ray.address=127.0.0.1:9")
    assert failed(seen) == {"ray"}
    assert "ray" in seen["ray"].fix


KNOCKERS = ("python3", "curl", "wget", "bash")


def only(tool: str | None, folder: Path) -> None:
    """A folder for PATH with the shell and this tool alone."""
    for name in ("sh", *([tool] if tool else [])):
        path = sys.executable if name == "python3" else shutil.which(name)
        if path is None:
            pytest.skip(f"there is no {name} here")
        (folder / name).symlink_to(Path(path).resolve())


@pytest.mark.parametrize("tool", [*KNOCKERS, None])
async def test_whatever_an_image_has_can_knock(tool: str | None, tmp_path: Path) -> None:
    """The script a box runs, where only one of the tools is in PATH."""
    keys: list[str | None] = []

    async def answer(request: Request) -> Response:
        keys.append(request.headers.get("authorization"))
        return Response("no", 401 if request.url.path != "/v1/models" else 200)

    only(tool, tmp_path)
    script = (Path(sandboxes.__file__).parent / "knock.sh").read_bytes()
    async with serving(Starlette(routes=[Route("/{path:path}", answer)])) as url:
        argv = [str(tmp_path / "sh"), "-s", "--", f"{url}/v1/models", "secret"]
        done = await anyio.run_process(argv, input=script, check=False, env={"PATH": str(tmp_path)})
        closed = await anyio.run_process(
            [*argv[:3], "http://127.0.0.1:9/v1/models", "secret"],
            input=script,
            check=False,
            env={"PATH": str(tmp_path)},
        )
    if tool is None:
        assert done.returncode == 3
        return
    assert (done.returncode, done.stdout, keys) == (0, b"200\n", ["Bearer secret"])
    assert closed.returncode != 0


async def test_a_check_that_hangs_or_breaks_hides_no_other() -> None:
    async def hang(subject: Subject) -> list[Finding]:
        await anyio.sleep_forever()
        raise AssertionError

    async def broken(subject: Subject) -> list[Finding]:
        raise ZeroDivisionError("oops")

    async def fine(subject: Subject) -> list[Finding]:
        return found("fine", "ok", "all is well")

    checks = [
        Check(name="hang", look=hang, fix="wake it", seconds=0.01),
        Check(name="broken", look=broken, fix="report it"),
        Check(name="fine", look=fine, fix=""),
    ]
    async with examining(Places(cache=Path("/nowhere"), state=Path("/nowhere")), None) as subject:
        hung, broke, ok = await examine(subject, checks)
    assert (hung.state, hung.seen, hung.fix) == ("fail", "no answer in 0.01 s", "wake it")
    assert (broke.state, broke.seen) == ("fail", "the check itself broke: ZeroDivisionError: oops")
    assert ok.state == "ok"
