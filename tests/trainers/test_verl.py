"""verl's own classes take our outputs, and its own GRPO makes of them what `rollwright.groups` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.verl import output_fields, outputs

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


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


def test_verls_grpo_gives_every_sample_the_advantage_of_its_rollout(need: Need, calc: list[StoredRollout]) -> None:
    """As the trainer does: rows padded on the right, keys `{uid}_{session}_{index}`, the last output's advantage."""
    torch = need("torch")
    protocol = need("verl.protocol")
    algos = need("verl.trainer.ppo.core_algos")
    utils = need("verl.trainer.ppo.v1.utils")
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    for session, rollout in enumerate(calc):
        for index, output in enumerate(outputs(rollout)):
            keys.append(f"calc_{session}_{index}")
            rows.append(output.as_dict())

    def padded(name: str) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    data = protocol.DataProto.from_dict(
        tensors={"token_level_rewards": padded("rm_scores"), "response_mask": padded("response_mask")},
        non_tensors={"uid": need("numpy").array(["calc"] * len(rows), dtype=object)},
    )
    made = utils.compute_advantage_for_multi_trajectories(
        data, keys, adv_estimator=algos.AdvantageEstimator.GRPO
    ).batch["advantages"]
    ours = group_advantages(calc, epsilon=1e-6)
    owners = [calc[int(key.split("_")[1])] for key in keys]
    for row, fields, rollout in zip(made, rows, owners, strict=True):
        mask = fields["response_mask"].bool()
        trained = row[: len(mask)][mask]
        advantage = ours.advantages[rollout.record.rollout]
        assert torch.allclose(trained, torch.full_like(trained, advantage), atol=1e-5)
        assert row.count_nonzero() <= mask.sum()
