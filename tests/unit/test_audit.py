"""The offline proof of a stored run: it holds for what was stored, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollwright.audit import audit_run
from rollwright.errors import StoreError
from rollwright.gateway.log import Intent, TurnLog
from rollwright.store import RolloutRecord, RunDir, RunWriter
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import prompt_digest
from rollwright.types import Failure, Sample, Stage
from support.conversation import Session, system, user

GRADED = {"status": "resolved", "reward": 1.0, "trainable": True, "counts_in_baseline": True}


@pytest.fixture
def trajectory(tmp_path: Path) -> Trajectory:
    session = Session(TemplateRenderer(tiny_tokenizer(tmp_path / "policy")))
    session.turn([system(), user()], "It is in there.")
    return session.trajectory


@pytest.fixture
def stored(tmp_path: Path, trajectory: Trajectory) -> Callable[..., RunDir]:
    """A run of one rollout, whose one turn the engine aborted after two tokens and went on with."""

    def store(*, sample: dict[str, Any] | None = None, second_call: int = 0, **changes: Any) -> RunDir:
        samples: list[Sample] = build_samples(
            trajectory,
            task_id="t1",
            group_id="a",
            rollout_id="a.1",
            reward=1.0,
            trainable=True,
            counts_in_baseline=True,
        )
        samples = [replace(each, **(sample or {})) for each in samples]
        turn = replace(trajectory.turns[0], meta={"intents": [0, 1]})
        writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={"config": {}})
        folder = writer.begin("a.1")
        log = TurnLog(folder.turns, {"rollout_id": "a.1"})
        prompt = turn.delta.tolist()
        for number, ids in enumerate((prompt, [*prompt, *turn.sampled[:2]])):
            digest = prompt_digest([*ids[:-1], ids[-1] + number * second_call])
            log.intent(
                Intent(
                    number=number,
                    parent=None,
                    prompt_tokens=len(ids),
                    prompt_digest=digest,
                    partial_tokens=2 * number,
                )
            )
        log.turn(turn, [])
        log.seal([])
        count = len(turn.sampled)
        record = RolloutRecord(
            rollout="a.1", task="a", task_id="t1", attempt=1, sampled_tokens=count, trained_tokens=count, **GRADED
        )
        writer.store(replace(record, **changes), folder, samples)
        writer.close()
        return writer.run

    return store


def test_what_was_stored_holds(stored: Callable[..., RunDir], trajectory: Trajectory) -> None:
    total = audit_run(stored())
    assert (total.violations, total.rollouts, total.trained) == ([], 1, len(trajectory.turns[0].sampled))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sample": {"reward": 0.0}}, "reward"),
        ({"sample": {"rollout_id": "b.1"}}, "rollout"),
        ({"sample": {"counts_in_baseline": False}}, "baseline"),
        ({"trainable": False}, "it is trainable, the rollout is not"),
        ({"trained_tokens": 1}, "the record counts"),
        ({"second_call": 1}, "it went on from other ids"),
    ],
)
def test_a_contradiction_is_a_violation(stored: Callable[..., RunDir], changes: dict[str, Any], says: str) -> None:
    (violation,) = audit_run(stored(**changes)).violations
    assert violation.startswith("a.1: ")
    assert says in violation


def test_samples_of_a_rollout_that_was_not_judged_are_a_violation(stored: Callable[..., RunDir]) -> None:
    failure = Failure(stage=Stage.GRADED, error="SandboxGone", message="gone", fault="infra", retryable=True)
    run = stored(failure=failure, status="ungraded", reward=None, trainable=False, counts_in_baseline=False)
    assert audit_run(run).violations == ["a.1: it was not judged and has samples"]


def test_a_call_without_a_record_is_a_violation(stored: Callable[..., RunDir]) -> None:
    run = stored()
    log = run.rollout("a.1").turns
    lines = [line for line in log.read_bytes().splitlines(keepends=True) if orjson.loads(line).get("number") != 1]
    log.write_bytes(b"".join(lines))
    assert audit_run(run).violations == ["a.1: turn 0: no record of call 1 to the engine"]


ODD: list[Any] = [None, -1, 10**12, "x", [], {}, 1.5, [1], True]
"""What no field but a free one may become unnoticed, or at worst typed."""


@pytest.mark.parametrize("name", ["turns.log", "samples.jsonl"])
def test_damage_is_told_and_never_a_crash(stored: Callable[..., RunDir], name: str) -> None:
    run = stored()
    path = run.rollout("a.1").path / name
    whole = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for at, line in enumerate(whole):
        # Each field as something else, or left out; each line left out, or twice.
        for key in line:
            spoiled = [*({**line, key: odd} for odd in ODD), {k: v for k, v in line.items() if k != key}]
            for other in spoiled:
                path.write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in (*whole[:at], other, *whole[at + 1 :])))
                audited(run)
        for lines in ([*whole[:at], *whole[at + 1 :]], [*whole[: at + 1], *whole[at:]]):
            path.write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in lines))
            told = audited(run)
            assert told, f"line {at} of {name}"


def audited(run: RunDir) -> list[str]:
    try:
        return audit_run(run).violations
    except StoreError as error:
        return [str(error)]


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        ({"temperature": 0.5}, "sampler_differs"),
        ({"logprob_kind": "raw"}, "sampler_differs"),
        ({"role": "subagent"}, "role_differs"),
        ({"truncated": True}, "excluded_miscounted"),
    ],
)
def test_a_sample_says_how_its_tokens_were_sampled(
    stored: Callable[..., RunDir], sample: dict[str, Any], kind: str
) -> None:
    (violation,) = audit_run(stored(sample=sample)).violations
    assert kind in violation
