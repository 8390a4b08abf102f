"""verl's own classes take our outputs, and its own GRPO makes of them what `rollwright.groups` makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import InfraError
from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.verl import Sessions, output_fields, outputs

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


@pytest.fixture(autouse=True)
def verl(need: Need) -> None:
    need("verl.experimental.agent_loop.agent_loop")


def test_outputs_are_valid_and_become_tensors(need: Need, calc: list[StoredRollout]) -> None:
    loop = need("verl.experimental.agent_loop.agent_loop")
    for rollout in calc:
        for output, fields in zip(outputs(rollout), output_fields(rollout), strict=True):
            validated = loop.AgentLoopOutput(**fields, metrics=loop.AgentLoopMetrics(generate_sequences=2.5))
            assert output == validated
            tensors = output.as_dict()
            length = len(fields["response_ids"])
            for name in ("responses", "response_mask", "rollout_log_probs", "rm_scores"):
                assert tensors[name].shape == (length,), name
            assert tensors["rm_scores"].sum().item() == rollout.record.reward
            assert tensors["prompts"].tolist() + tensors["responses"].tolist() == (
                fields["prompt_ids"] + fields["response_ids"]
            )
            assert tensors["extra_fields"]["rollout_id"] == rollout.record.rollout


def advantages_of(need: Need, sessions: list[list[Any]], estimator: str) -> list[list[float | None]]:
    """What verl's v1 trainer makes for each output of each session: the advantage of its trained tokens, None for an
    output without. As it does it: rows padded on the right, keys `{uid}_{session}_{index}`."""
    torch = need("torch")
    algos = need("verl.trainer.ppo.core_algos")
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    for session, made in enumerate(sessions):
        for index, output in enumerate(made):
            keys.append(f"calc_{session}_{index}")
            rows.append(output.as_dict())

    def padded(name: str) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    data = need("verl.protocol").DataProto.from_dict(
        tensors={"token_level_rewards": padded("rm_scores"), "response_mask": padded("response_mask")},
        non_tensors={"uid": need("numpy").array(["calc"] * len(rows), dtype=object)},
    )
    made = (
        need("verl.trainer.ppo.v1.utils")
        .compute_advantage_for_multi_trajectories(data, keys, adv_estimator=algos.AdvantageEstimator(estimator))
        .batch["advantages"]
    )
    found: list[list[float | None]] = [[] for _ in sessions]
    for key, values, row in zip(keys, made, rows, strict=True):
        mask = row["response_mask"].bool()
        trained = values[: len(mask)][mask]
        assert values.count_nonzero() <= mask.sum()
        assert len(set(trained.tolist())) <= 1
        found[int(key.split("_")[1])].append(trained[0].item() if len(trained) else None)
    return found


def expected(rollout: StoredRollout, advantages: Mapping[str, float]) -> list[Any]:
    """The rollout's advantage for each of its samples; one output without loss where it counts and trains nothing."""
    if not rollout.samples:
        return [] if rollout.record.reward is None else [None]
    return [pytest.approx(advantages[rollout.record.rollout], abs=1e-5) for _ in rollout.samples]


def test_verls_grpo_gives_every_sample_the_advantage_of_its_rollout(need: Need, calc: list[StoredRollout]) -> None:
    found = advantages_of(need, [outputs(rollout) for rollout in calc], "grpo")
    ours = group_advantages(calc, epsilon=1e-6).advantages
    for session, rollout in zip(found, calc, strict=True):
        assert session == expected(rollout, ours)


def test_verls_other_estimators_take_each_output_for_a_rollout(need: Need, calc: list[StoredRollout]) -> None:
    """So the docs say: with them, a rollout that fanned out weighs as often in the baseline."""
    found = advantages_of(need, [outputs(rollout) for rollout in calc], "rloo")
    ours = group_advantages(calc, estimator="rloo").advantages
    assert found[0][0] != pytest.approx(ours["calc.1"], abs=1e-3)
    alone = [replace(rollout, samples=rollout.samples[-1:]) for rollout in calc]
    for session, rollout in zip(advantages_of(need, [outputs(each) for each in alone], "rloo"), alone, strict=True):
        assert session == expected(rollout, ours)


@pytest.mark.anyio
async def test_the_sessions_of_a_prompt_are_one_group_and_a_lone_survivor_fails_it(
    need: Need, calc: list[StoredRollout]
) -> None:
    """As its worker does it: a loop for each session, each run at once with the prompt's row."""
    base = need("verl.experimental.agent_loop.agent_loop").AgentLoopBase
    asked: list[tuple[str, int]] = []

    async def roll_out(row: Mapping[str, Any], count: int) -> list[StoredRollout]:
        asked.append((row["task"], count))
        await anyio.lowlevel.checkpoint()
        return {"calc": calc, "lone": [calc[0], calc[2]]}[row["task"]]

    sessions = Sessions(roll_out)

    class Loop(base):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
            return await sessions.outputs(row)

    found: dict[tuple[str, int], Any] = {}

    async def run(uid: str, task: str, session: int) -> None:
        loop = Loop.__new__(Loop)
        try:
            found[uid, session] = await loop.run({}, uid=uid, task=task, session_id=session)
        except InfraError as error:
            found[uid, session] = error

    async with anyio.create_task_group() as group:
        for uid, task, count in (("u1", "calc", 5), ("u2", "lone", 2)):
            for session in range(count):
                group.start_soon(run, uid, task, session)
    assert asked == [("calc", 5), ("lone", 2)]
    made = [found["u1", session] for session in range(5)]
    assert made == [outputs(rollout) for rollout in calc]
    assert [len(session) for session in made] == [1, 3, 0, 1, 1]
    assert "1 of the 2 rollouts of a prompt count" in str(found["u2", 0])
    assert isinstance(found["u2", 1], InfraError), "no session of it has a row: verl takes the prompt for failed"
    alone = advantages_of(need, [outputs(calc[0])], "grpo")
    assert alone == [[pytest.approx(1.0, abs=1e-5)]], "what verl makes of a lone reward"
