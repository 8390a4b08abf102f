"""TRL's own trainer takes a batch of ours and trains a step; its own `RolloutSample` takes our rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollwright.integrations.record import StoredRollout, group_advantages
from rollwright.integrations.trl import GroupWorker, reward, rollout_batch, rollout_samples

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


def test_rows_are_rollout_samples(need: Need, calc: list[StoredRollout]) -> None:
    made = need("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    rows = rollout_samples(calc, number=3)
    assert len(rows) == 5
    assert all(type(row) is made for row in rows)
    assert rollout_samples([calc[1], calc[4]], number=3) == []


def test_a_group_packs_as_the_asynchronous_trainer_packs_it(need: Need, calc: list[StoredRollout]) -> None:
    packing = need("trl.experimental.async_grpo.packing")
    torch = need("torch")
    names = [name for name, made in inspect.getmembers(packing, inspect.isclass) if made.__module__ == packing.__name__]
    rows = [
        {
            "input_ids": torch.as_tensor(row.input_ids),
            "completion_mask": torch.as_tensor(row.completion_mask),
            "old_log_probs": torch.as_tensor(row.old_log_probs),
            "advantage": row.advantage,
            "group_id": row.group_id,
        }
        for row in rollout_samples(calc, number=0)
    ]
    tree = getattr(packing, names[0])()
    for row in rows:
        tree.add(row)
    assert tree.trained == sum(sum(sample.loss_mask) for rollout in calc for sample in rollout.samples)


def test_the_worker_keeps_trls_protocol(need: Need, calc: list[StoredRollout]) -> None:
    protocol = need("trl.experimental.async_grpo.async_grpo_trainer").RolloutWorkerProtocol
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            wanted = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(GroupWorker, name)).parameters) == wanted, name
    worker = GroupWorker([calc])
    worker.start()
    rows = [worker.rollout_buffer.get(timeout=60) for _ in range(5)]
    worker.stop()
    assert {row.group_id for row in rows} == {0}


def test_grpo_trainer_trains_on_a_batch_and_leaves_the_lost_rollout_out(
    need: Need, run: Any, calc: list[StoredRollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real `GRPOTrainer` on a tiny Llama: one step, on four of the five rollouts and then on all of them."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl, transformers, torch, datasets = (need(name) for name in ("trl", "transformers", "torch", "datasets"))
    policy = run.path.parent / "policy"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(policy / "tokenizer.json"), pad_token="<|im_end|>", eos_token="<|im_end|>"
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        )
    )  # fmt: skip
    seen: list[list[str]] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        seen.append(prompts)
        return rollout_batch(calc[: len(prompts)], filler=tokenizer.eos_token_id)

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        rollout_func=rollout_func,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["Fix the bug."] * 4}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=5, num_generations=5, max_steps=1,
            max_completion_length=4096, report_to=[], use_cpu=True, bf16=False, beta=0.0, learning_rate=0.1,
            logging_steps=1, save_strategy="no", scale_rewards="group",
        ),
    )  # fmt: skip
    model.train()
    scored = trainer._generate_and_score_completions([{"prompt": "Fix the bug."} for _ in range(5)])
    ours = group_advantages(calc, epsilon=1e-4).advantages
    expected = [ours.get(rollout.record.rollout, 0.0) for rollout in calc]
    assert scored["advantages"].tolist() == pytest.approx(expected, abs=1e-4)
    lost = (scored["tool_mask"] * scored["completion_mask"])[2]
    assert not lost.any()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    assert [len(prompts) for prompts in seen] == [5, 5]
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    logs = [each for each in trainer.state.log_history if "reward" in each]
    assert np.isclose(logs[0]["reward"], 0.375)
