"""Each real CLI in a real box, through the real gateway: not one sampled token is lost, none is trained twice."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.errors import Unsupported
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import SessionLimits
from rollwright.harnesses import AgentReport, Endpoint, Harness
from rollwright.harnesses.claude_code import ClaudeCode
from rollwright.harnesses.codex import Codex
from rollwright.harnesses.opencode import OpenCode
from rollwright.harnesses.pi import Pi
from rollwright.harnesses.qwen_code import QwenCode
from rollwright.sandboxes import JobResult, JobSpec, Mount, SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render import load_renderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import VerifyReport, verify
from rollwright.types import Sample, Sampling
from support.cli_runner import bundle_of
from support.clis import CLAUDE, CODEX, EVERY_WAY, OPENCODE, PI, QWEN, Cli

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a CLI's run left."""

    report: AgentReport
    result: JobResult
    trajectory: Trajectory
    samples: list[Sample]
    proof: VerifyReport


async def run_in_box(
    harness: Harness, script: Script, folder: Path, prompt: str = "Fix a.py.", *, window: int = 1_000_000
) -> Ran:
    """As the agent user, the bundle shown read-only, and nothing but the gateway's socket in the network."""
    bundle = await to_thread.run_sync(bundle_of, harness)
    renderer = load_renderer(tiny_tokenizer(folder / "policy", thinking=True))
    target = f"/opt/rollwright/{harness.name}"
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(NamespacesProvider(state_dir=folder / "state"))
        try:
            await provider.probe()
        except Unsupported as error:
            pytest.skip(error.message)
        engine = await stack.enter_async_context(ScriptedEngine(renderer=renderer, script=script))
        gateway = await stack.enter_async_context(
            Gateway(engine=engine, renderer=renderer, sampling=Sampling(max_new_tokens=512), model="policy")
        )
        mount = Mount(source=bundle.path, target=target)
        box = await provider.create(SandboxSpec(image="host", network="gateway_only", mounts=(mount,)), key="one")
        stack.push_async_callback(box.close)
        version = await box.exec(harness.version_argv(target), user="agent")
        assert bundle.version.removesuffix("-linux-x64") in version.stdout.decode()
        await box.exec(["install", "-d", "-o", "agent", "-g", "agent", "/repo"])
        session = gateway.open("task.1", log=None, limits=SessionLimits(), one_program=True)
        launch = harness.launch(
            bundle=target,
            home="/home/agent",
            workdir="/repo",
            prompt=prompt,
            endpoint=Endpoint(
                base_url="http://127.0.0.1:18001",
                api_key=session.secret,
                model="policy",
                context_window=window,
                max_output_tokens=512,
            ),
        )
        for path, content in launch.files.items():
            await box.put(path, content, user="agent", mode=0o600)
        spec = JobSpec(
            id="ab" * 16, argv=launch.argv, env=launch.env, cwd="/repo", user="agent", stdin=launch.stdin, seconds=90
        )
        assert box.gateway_socket is not None
        async with gateway.listening(box.gateway_socket, session):
            result = await box.run(spec)
        trajectory = await session.close()
        left = await box.exec(["ls", "-A", "/repo"])
    assert left.stdout == b"", "the CLI leaves nothing of its own in the repository"
    assert result.survivors == 0
    samples = build_samples(
        trajectory, task_id="t", group_id="g", rollout_id="task.1", reward=1.0, trainable=True, counts_in_baseline=True
    )
    return Ran(
        report=harness.report(result),
        result=result,
        trajectory=trajectory,
        samples=samples,
        proof=verify(trajectory, samples, None),
    )


@pytest.mark.parametrize("cli", EVERY_WAY)
async def test_every_token_of_seven_turns_is_trained_on_one_branch(cli: Cli, tmp_path: Path) -> None:
    """Thoughts, white space around text, parallel calls, a failed command, non-ASCII text; a long prompt."""
    replies = (
        "First I look.\n</think>\n\nI look.\n" + cli.markup("echo marker-$((6*7))"),
        "Two at once.\n</think>\n\n" + cli.markup("echo one") + "\n" + cli.markup("echo two"),
        "</think>\n\n" + cli.markup("echo 'no thought, no text'"),
        "  Indented thought.\n\n\n</think>\n\n  Ünïcode 🙂 text.\n\n" + cli.markup("exit 3"),
        "</think>\n\n" + "\n".join(cli.markup(f"printf '%s' \"{n} & <x>\"") for n in range(3)),
        "Nearly.\n</think>\n\nNearly done.\n" + cli.markup("seq 1 200"),
        "The end.\n</think>\n\n" + cli.done_markup(),
    )
    ran = await run_in_box(
        cli.harness,
        Script(script=(Rule(replies=replies),), max_context=1_000_000),
        tmp_path,
        "Fix a.py. " + "x" * cli.prompt_bytes + " THE END",
    )
    assert ran.report == AgentReport(ok=True, reason="completed"), (ran.report, ran.result.stderr.text())
    turns = ran.trajectory.turns
    assert [(turn.parent, turn.drift, turn.delivered, turn.role) for turn in turns] == [
        (None if index == 0 else index - 1, None, True, "main") for index in range(len(replies))
    ]
    assert "marker-42" in turns[1].messages[0].content
    assert len(turns[5].messages) == 4, "three results, then the reply"
    assert len(ran.samples) == 1
    assert ran.proof.violations == ()
    assert (ran.proof.trained, dict(ran.proof.excluded)) == (ran.proof.sampled, {})
    assert sum(ran.samples[0].loss_mask) == sum(len(turn.sampled) for turn in turns)


def agent_call(tool: str, kind: str) -> str:
    return (
        f"<tool_call>\n<function={tool}>\n<parameter=description>\nlook\n</parameter>\n"
        "<parameter=prompt>\nSUBTASK: say what you see.\n</parameter>\n"
        f"<parameter=subagent_type>\n{kind}\n</parameter>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("cli", "call"),
    [
        pytest.param(CLAUDE, agent_call("Agent", "general-purpose"), id="claude-code", marks=pytest.mark.claude_code),
        pytest.param(OPENCODE, agent_call("task", "general"), id="opencode", marks=pytest.mark.opencode),
    ],
)
async def test_a_sub_agent_is_a_branch_of_its_own(cli: Cli, call: str, tmp_path: Path) -> None:
    main = ("Let somebody look.\n</think>\n\n" + call, "</think>\n\n" + cli.markup("true"), "So.\n</think>\n\nDone.")
    sub = ("I look.\n</think>\n\n" + cli.markup("echo sub"), "I saw.\n</think>\n\nNothing much.")
    rules = (Rule(match="Fix a.py.", replies=main), Rule(match="SUBTASK", replies=sub))
    ran = await run_in_box(cli.harness, Script(script=rules, max_context=1_000_000), tmp_path)
    assert ran.report == AgentReport(ok=True, reason="completed"), (ran.report, ran.result.stderr.text())
    assert sorted(turn.role for turn in ran.trajectory.turns) == ["main"] * 3 + ["subagent"] * 2
    assert sorted(sample.role for sample in ran.samples) == ["main", "subagent"]
    assert ran.proof.violations == ()
    assert (ran.proof.trained, dict(ran.proof.excluded)) == (ran.proof.sampled, {})


COMPACTS = {
    "claude-code": (ClaudeCode(compaction=True, bare=True), CLAUDE, "TEXT ONLY", pytest.mark.claude_code),
    "codex": (Codex(compaction=True), CODEX, "CHECKPOINT COMPACTION", pytest.mark.codex),
    "pi": (Pi(compaction=True), PI, "context summarization", pytest.mark.pi),
    "opencode": (OpenCode(compaction=True), OPENCODE, "context summarization", pytest.mark.opencode),
    "qwen-code": (QwenCode(bare=False, compaction=True), QWEN, "summarizes a conversation", pytest.mark.qwen_code),
}
"""Harness, its tool, and a sign of the request for a summary."""


def compacting(*names: str) -> list[Any]:
    return [pytest.param(*COMPACTS[name][:3], id=name, marks=COMPACTS[name][3]) for name in names]


def until_full(cli: Cli, sign: str, max_context: int) -> Script:
    """The policy looks at long files; when it has been summed up it ends."""
    looks = tuple("Look.\n</think>\n\n" + cli.markup(f"seq 1{n:02}000000 1{n:02}000400") for n in range(40))
    return Script(
        script=(
            Rule(match="We saw numbers", replies=("On.\n</think>\n\n" + cli.markup("true"), "</think>\n\nDone.")),
            Rule(match=sign, replies=("Sum up.\n</think>\n\n<summary>\nWe saw numbers.\n</summary>",)),
            Rule(replies=looks),
        ),
        max_context=max_context,
    )


@pytest.mark.parametrize(("harness", "cli", "sign"), compacting("claude-code", "codex", "pi", "opencode"))
async def test_a_compaction_starts_a_branch_and_trains_nothing_twice(
    harness: Harness, cli: Cli, sign: str, tmp_path: Path
) -> None:
    """The CLI reads from the true token counts that its context is nearly full, sums up and goes on."""
    ran = await run_in_box(harness, until_full(cli, sign, 100_000), tmp_path, window=60_000)
    assert ran.report == AgentReport(ok=True, reason="completed"), (ran.report, ran.result.stderr.text())
    roles = [turn.role for turn in ran.trajectory.turns]
    assert (roles.count("compaction"), set(roles)) == (1, {"main", "compaction"})
    assert len(ran.samples) >= 2
    assert ran.proof.violations == ()
    assert (ran.proof.trained, dict(ran.proof.excluded)) == (ran.proof.sampled, {})


@pytest.mark.parametrize(("harness", "cli", "sign"), compacting("claude-code", "opencode", "qwen-code"))
async def test_a_prompt_that_is_too_long_is_compacted_and_nothing_is_lost(
    harness: Harness, cli: Cli, sign: str, tmp_path: Path
) -> None:
    """The CLI takes the context for larger than it is, and learns better from our refusal."""
    ran = await run_in_box(harness, until_full(cli, sign, 80_000), tmp_path)
    assert ran.report == AgentReport(ok=True, reason="completed"), (ran.report, ran.result.stderr.text())
    assert "compaction" in {turn.role for turn in ran.trajectory.turns}
    assert ran.proof.violations == ()
    assert (ran.proof.trained, dict(ran.proof.excluded)) == (ran.proof.sampled, {})
