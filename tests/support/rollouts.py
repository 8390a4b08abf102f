"""A stored group as a real run leaves it: made by the tree, the log and the writer, without a sandbox."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollwright.gateway.log import TurnLog
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.types import Failure, Stage
from support.conversation import TOOLS, Session, call_text, system, tool, user

LOST = Failure(
    stage=Stage.GRADED,
    error="SandboxGone",
    message="the box died",
    fault="infra",
    retryable=True,
)


def stored_run(folder: Path) -> RunDir:
    """One group, `calc`: .1 solved it; .2 failed with a sub-agent and a compacted history; .3 was lost; .4 is half
    right and ran out of tokens; .5 failed without a word."""
    renderer = TemplateRenderer(tiny_tokenizer(folder / "policy"))
    writer = RunWriter.create(folder / "run", run_file=b"", resolved={"config": {"policy": {"model": "tiny"}}})
    _store(writer, 1, _line(renderer, ["7", "8"]), 1.0)
    _store(writer, 2, _with_forks(renderer), 0.0)
    _store(writer, 3, _line(renderer, ["7"]), None)
    _store(writer, 4, _cut(renderer), 0.5)
    _store(writer, 5, Session(renderer), 0.0)
    writer.close()
    return writer.run


def _line(renderer: Renderer, versions: list[str]) -> Session:
    session = Session(renderer)
    messages = [system(), user()]
    for version in versions:
        _, reply = session.turn(messages, f"I look.\n{call_text('ls')}", version=version)
        messages += [reply, *(tool("a.py", call.id) for call in reply.tool_calls)]
    return session


def _with_forks(renderer: Renderer) -> Session:
    session = Session(renderer)
    messages = [system(), user()]
    _, reply = session.turn(messages, f"I ask a helper.\n{call_text('ask')}", version="7")
    session.turn([system("You help."), user("Look.")], "It is in a.py.", role="subagent", version="7")
    messages += [reply, *(tool("It is in a.py.", call.id) for call in reply.tool_calls)]
    session.turn(messages, "Found it.", version="7")
    session.turn([system(), user("So far: it is in a.py. Go on.")], "Done.", version="8")
    return session


def _cut(renderer: Renderer) -> Session:
    session = Session(renderer)
    session.turn([system(), user()], "I think that", finish="length", version="8")
    return session


def _store(writer: RunWriter, attempt: int, session: Session, reward: float | None) -> None:
    name = f"calc.{attempt}"
    session.trajectory.rollout_id = name
    folder = writer.begin(name)
    folder.write(folder.patch, f"diff of {name}\n".encode() if reward is not None else b"")
    log = TurnLog(folder.turns, {"rollout_id": name, "model": "tiny"})
    for turn in session.trajectory.turns:
        log.turn(replace(turn, meta={"at": 1.0}), TOOLS)
        log.delivery(turn.index, delivered=True)
    log.seal([])
    samples = (
        []
        if reward is None
        else build_samples(
            session.trajectory,
            task_id="t1",
            group_id="calc",
            rollout_id=name,
            reward=reward,
            trainable=True,
            counts_in_baseline=True,
        )
    )
    turns = session.trajectory.turns
    record = RolloutRecord(
        rollout=name,
        task="calc",
        task_id="t1",
        source_id="org__calc-1",
        attempt=attempt,
        status="ungraded" if reward is None else "resolved" if reward == 1.0 else "unresolved",
        reward=reward,
        trainable=reward is not None,
        counts_in_baseline=reward is not None,
        failure=LOST if reward is None else None,
        stop_reason="completed",
        seconds={"agent_done": 2.5},
        turns=len(turns),
        sampled_tokens=sum(len(turn.sampled) for turn in turns),
        trained_tokens=sum(sum(sample.loss_mask) for sample in samples),
    )
    writer.store(record, folder, samples)
