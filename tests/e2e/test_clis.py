"""The real CLIs, unmodified: against a scripted model for their manners and faults, and against the gateway."""

from __future__ import annotations

import json
import socket
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from anyio import to_thread

from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.errors import Unsupported
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import SessionLimits
from rollwright.harnesses import AgentReport, Endpoint, Harness
from rollwright.harnesses.claude_code import ClaudeCode
from rollwright.harnesses.pi import Pi
from rollwright.sandboxes import JobSpec, Mount, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render import load_renderer
from rollwright.tokens.samples import build_samples
from rollwright.types import Sampling
from support.cli_runner import bundle_of, run
from support.model_server import Reply, serve

PROMPT_200_KIB = "Fix a.py. " + "x" * (200 << 10) + " THE END"

pi_chat = pytest.param(Pi(), "bash", id="pi-chat", marks=pytest.mark.pi)
pi_anthropic = pytest.param(Pi(api="anthropic"), "bash", id="pi-anthropic", marks=pytest.mark.pi)
claude_code = pytest.param(ClaudeCode(), "Bash", id="claude-code", marks=pytest.mark.claude_code)
claude_bare = pytest.param(ClaudeCode(bare=True), "Bash", id="claude-code-bare", marks=pytest.mark.claude_code)
every_cli = pytest.mark.parametrize(("harness", "shell"), [pi_chat, pi_anthropic, claude_code, claude_bare])


def call(shell: str, command: str) -> tuple[str, dict[str, str]]:
    return shell, {"command": command}


@every_cli
def test_a_session_with_one_shell_call_completes(harness: Harness, shell: str, tmp_path: Path) -> None:
    script = (
        Reply(thinking="Let me think.", text="I look.", calls=(call(shell, "echo marker-$((6*7)) | tee out.txt"),)),
        Reply(text="Done."),
    )
    with serve(*script) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert (report.ok, report.reason) == (True, "completed"), result.stderr.text()
    assert len(model.requests) == 2
    assert "marker-42" in json.dumps(model.requests[1])
    assert (tmp_path / "workdir/out.txt").read_text() == "marker-42\n"
    assert sorted(path.name for path in (tmp_path / "workdir").iterdir()) == ["a.py", "out.txt"]


@every_cli
def test_the_history_comes_back_as_it_was_sent(harness: Harness, shell: str, tmp_path: Path) -> None:
    script = (
        Reply(thinking="First.", text="One.", calls=(call(shell, "true"), call(shell, "echo two"))),
        Reply(text="Two.", calls=(call(shell, "exit 3"),)),
        Reply(text="Done."),
    )
    with serve(*script) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url)
    assert len(model.requests) == 3
    said = [_without_cache_marks(request["messages"]) for request in model.requests]
    assert said[1][: len(said[0])] == said[0]
    assert said[2][: len(said[1])] == said[1]


@every_cli
def test_a_200_kib_prompt_reaches_the_model_whole(harness: Harness, shell: str, tmp_path: Path) -> None:
    with serve(Reply(text="Done.")) as model:
        result = run(harness, tmp_path, PROMPT_200_KIB, model.base_url)
    assert harness.report(result).ok
    assert PROMPT_200_KIB in json.dumps(model.requests[0])


@every_cli
def test_a_prompt_that_looks_like_a_command_is_a_prompt(harness: Harness, shell: str, tmp_path: Path) -> None:
    with serve(Reply(text="Done.")) as model:
        result = run(harness, tmp_path, "/compact is broken, fix it", model.base_url)
    assert harness.report(result).ok
    assert "/compact is broken, fix it" in json.dumps(model.requests[0])


@every_cli
def test_an_api_error_is_reported_whatever_the_exit_code(harness: Harness, shell: str, tmp_path: Path) -> None:
    with serve(Reply(status=400, text="session closed")) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert not report.ok
    assert report.reason.startswith("api_error: ")
    assert "session closed" in report.reason
    assert result.exit_code == (0 if harness.name == "pi" else 1)
    assert len(model.requests) == 1


@every_cli
def test_a_full_context_is_the_policys_end(harness: Harness, shell: str, tmp_path: Path) -> None:
    too_long = Reply(status=400, text="prompt is too long: 40000 tokens > 32768 maximum")
    with serve(Reply(calls=(call(shell, "true"),)), too_long) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert (report.ok, report.reason) == (True, "prompt_too_long")
    assert len(model.requests) == 2


@pytest.mark.parametrize(
    ("harness", "shell"),
    [
        pytest.param(Pi(compaction=True), "bash", id="pi", marks=pytest.mark.pi),
        pytest.param(ClaudeCode(compaction=True), "Bash", id="claude-code", marks=pytest.mark.claude_code),
    ],
)
def test_with_compaction_a_full_context_is_summarized_and_the_work_goes_on(
    harness: Harness, shell: str, tmp_path: Path
) -> None:
    long_output = Reply(calls=(call(shell, "seq 100000000 100002000"),))
    too_long = Reply(status=400, text="prompt is too long: 40000 tokens > 32768 maximum")
    script = (*[long_output] * 3, too_long, Reply(text="<summary>We looked.</summary>"), Reply(text="Done."))
    with serve(*script) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    assert harness.report(result) == AgentReport(ok=True, reason="completed")
    assert len(model.requests) == 6
    assert "We looked." in json.dumps(model.requests[5])
    assert len(json.dumps(model.requests[5])) < len(json.dumps(model.requests[3]))


@every_cli
def test_a_cut_reply_is_the_policys_end(harness: Harness, shell: str, tmp_path: Path) -> None:
    with serve(Reply(text="and then", cut=True)) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert (report.ok, report.reason) == (True, "length")


def scripted(shell: str) -> Script:
    command = "<parameter=command>\necho marker-$((6*7))\n</parameter>"
    look = f"<tool_call>\n<function={shell}>\n{command}\n</function>\n</tool_call>"
    twice = "I look.\n" + look + "\n" + look
    return Script(script=(Rule(replies=(twice, look, "Done.")),), max_context=1_000_000)


@every_cli
@pytest.mark.anyio
async def test_every_token_sampled_through_the_gateway_is_trained_once(
    harness: Harness, shell: str, tmp_path: Path
) -> None:
    """Three turns, one with parallel calls: one branch, no drift, nothing lost."""
    renderer = load_renderer(tiny_tokenizer(tmp_path / "policy"))
    sampling = Sampling(max_new_tokens=512)
    async with (
        ScriptedEngine(renderer=renderer, script=scripted(shell)) as engine,
        Gateway(engine=engine, renderer=renderer, sampling=sampling, model="policy") as gateway,
    ):
        session = gateway.open("task.1", log=tmp_path / "turns.log", limits=SessionLimits())
        listener = socket.create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with gateway.listening(listener, session):
            start = partial(run, harness, tmp_path, "Fix a.py.", base_url, secret=session.secret)
            result = await to_thread.run_sync(start)
        trajectory = await session.close()
    assert harness.report(result) == AgentReport(ok=True, reason="completed")
    assert [(turn.parent, turn.drift, turn.delivered) for turn in trajectory.turns] == [
        (None, None, True),
        (0, None, True),
        (1, None, True),
    ]
    assert trajectory.turns[1].messages[0].content.strip() == "marker-42"
    sampled = sum(len(turn.sampled) for turn in trajectory.turns)
    (sample,) = build_samples(
        trajectory, task_id="t", group_id="g", rollout_id="task.1", reward=1.0, trainable=True, counts_in_baseline=True
    )
    assert sum(sample.loss_mask) == sampled


@pytest.mark.parametrize(("harness", "shell"), [pi_chat, claude_code])
@pytest.mark.anyio
async def test_it_works_as_the_agent_user_of_a_box_that_reaches_only_the_gateway(
    harness: Harness, shell: str, tmp_path: Path
) -> None:
    """The bundle is shown read-only, the prompt is large, and nothing but the gateway's socket is in the network."""
    bundle = await to_thread.run_sync(bundle_of, harness)
    renderer = load_renderer(tiny_tokenizer(tmp_path / "policy"))
    target = f"/opt/rollwright/{harness.name}"
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(NamespacesProvider(state_dir=tmp_path / "state"))
        try:
            await provider.probe()
        except Unsupported as error:
            pytest.skip(error.message)
        engine = await stack.enter_async_context(ScriptedEngine(renderer=renderer, script=scripted(shell)))
        gateway = await stack.enter_async_context(
            Gateway(engine=engine, renderer=renderer, sampling=Sampling(max_new_tokens=512), model="policy")
        )
        mount = Mount(source=bundle.path, target=target)
        box = await provider.create(SandboxSpec(image="host", network="gateway_only", mounts=(mount,)), key="one")
        stack.push_async_callback(box.close)
        version = await box.exec(harness.version_argv(target), user="agent")
        assert bundle.version in version.stdout.decode()
        await box.exec(["install", "-d", "-o", "agent", "-g", "agent", "/repo"])
        session = gateway.open("task.1", log=None, limits=SessionLimits())
        launch = harness.launch(
            bundle=target,
            home="/home/agent",
            workdir="/repo",
            prompt=PROMPT_200_KIB,
            endpoint=Endpoint(
                base_url="http://127.0.0.1:18001",
                api_key=session.secret,
                model="policy",
                context_window=1_000_000,
                max_output_tokens=512,
            ),
        )
        for path, content in launch.files.items():
            await box.put(path, content, user="agent", mode=0o600)
        spec = JobSpec(
            id="ab" * 16, argv=launch.argv, env=launch.env, cwd="/repo", user="agent", stdin=launch.stdin, seconds=60
        )
        assert box.gateway_socket is not None
        async with gateway.listening(box.gateway_socket, session):
            result = await box.run(spec)
        trajectory = await session.close()
    assert harness.report(result) == AgentReport(ok=True, reason="completed"), result.stderr.text()
    assert result.survivors == 0
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert "THE END" in renderer.decode(trajectory.turns[0].delta)


@pytest.mark.pi
def test_pi_sends_a_small_request_when_told_to(tmp_path: Path) -> None:
    harness = Pi(system_prompt="You fix bugs.", tools=("bash", "edit"), context_files=False)
    with serve(Reply(text="Done.")) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url)
    request = model.requests[0]
    cwd = f"<cwd>\n{tmp_path}/workdir\n</cwd>"
    assert request["messages"][0] == {"role": "system", "content": f"You fix bugs.\n\n{cwd}"}
    assert [tool["function"]["name"] for tool in request["tools"]] == ["bash", "edit"]
    assert len(json.dumps(request)) < 2600
    assert request["max_completion_tokens"] == 512
    assert model.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.pi
def test_pi_finds_a_model_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    with serve(Reply(text="Done.")) as model:
        run(Pi(), tmp_path, "Fix a.py.", model.base_url, model="Org/Model-4B:high*")
    assert model.requests[0]["model"] == "Org/Model-4B:high*"


@pytest.mark.claude_code
def test_claude_code_says_who_asks_and_with_which_limits(tmp_path: Path) -> None:
    harness = ClaudeCode(system_prompt="You fix bugs.", tools=("Bash", "Edit"), bare=True)
    with serve(Reply(text="Done.")) as model:
        run(harness, tmp_path, "Fix a.py.", model.base_url)
    request, headers = model.requests[0], model.headers[0]
    assert request["system"][-1]["text"] == "You fix bugs."
    assert [tool["name"] for tool in request["tools"]] == ["Bash", "Edit"]
    assert request["max_tokens"] == 512
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-claude-code-request-class"] == "main"
    assert "Co-Authored-By" not in json.dumps(request)


@pytest.mark.claude_code
def test_claude_code_stops_at_its_turn_limit(tmp_path: Path) -> None:
    harness = ClaudeCode(max_turns=2, bare=True)
    with serve(Reply(calls=(call("Bash", "true"),))) as model:
        result = run(harness, tmp_path, "Fix a.py.", model.base_url)
    report = harness.report(result)
    assert (report.ok, report.reason, result.exit_code) == (True, "max_turns", 1)
    assert len(model.requests) == 2


def _without_cache_marks(value: object) -> object:
    """Messages as they mean: no cache marks, and a lone text block is its text."""
    if isinstance(value, dict):
        plain = {key: _without_cache_marks(item) for key, item in value.items() if key != "cache_control"}
        if isinstance(plain.get("content"), str) and "role" in plain:
            plain["content"] = [{"type": "text", "text": plain["content"]}]
        return plain
    if isinstance(value, list):
        return [_without_cache_marks(item) for item in value]
    return value
