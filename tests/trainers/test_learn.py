"""The trainer of `make learn`: its gradient, and its verdict over the curves."""

from __future__ import annotations

import importlib.util
import math
from argparse import Namespace
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollwright.integrations.record import StoredRollout

pytestmark = pytest.mark.trainers

LEARN = Path(__file__).parents[2] / "examples" / "learn" / "learn.py"
FLAT = [0.4] * 10
RISEN = [0.4] * 5 + [0.8] * 5


@pytest.fixture
def learn(need: Callable[[str], Any]) -> Any:
    need("torch")
    need("transformers")
    spec = importlib.util.spec_from_file_location("learn", LEARN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("curves", "wrong"),
    [
        ({"trained": RISEN, "lr0": FLAT, "shuffled": FLAT}, None),
        ({"trained": FLAT, "lr0": FLAT, "shuffled": FLAT}, "not learned"),
        ({"trained": RISEN, "lr0": FLAT, "shuffled": RISEN}, "shuffled"),
        ({"trained": RISEN, "lr0": [0.4] * 5 + [0.0] * 5, "shuffled": FLAT}, "lr0"),
        ({"trained": [0.4] * 5 + [0.9] * 4 + [math.nan], "lr0": FLAT, "shuffled": FLAT}, "no graded"),
    ],
)
def test_the_verdict_wants_a_rise_of_the_trained_arm_alone(
    learn: Any, curves: dict[str, list[float]], wrong: str | None
) -> None:
    told = learn.judged(curves)
    assert told is None if wrong is None else wrong in told


def test_a_step_without_a_reward_is_not_one_of_zeros(learn: Any) -> None:
    assert math.isnan(learn.mean([None, None]))
    assert learn.mean([None, 1.0]) == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_on_fresh_samples_the_gradient_is_the_policys_own(
    learn: Any, need: Callable[[str], Any], calc: list[StoredRollout], temperature: float
) -> None:
    """Advantage times the gradient of the trained tokens' logprobs, and of no other token's."""
    torch, transformers = need("torch"), need("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).double()

    def logprobs(tokens: list[int]) -> Any:
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
        return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]

    rows: list[tuple[Any, float]] = []
    wanted = torch.zeros((), dtype=torch.float64)
    for length, advantage in ((9, 1.5), (12, -0.5)):
        tokens = [(7 * n + length) % 64 for n in range(length)]
        mask = [int(n > 3 and n % 3 != 0) for n in range(length)]
        said = logprobs(tokens)
        rows.append(
            (
                replace(
                    calc[0].samples[0],
                    tokens=array("i", tokens),
                    loss_mask=array("b", mask),
                    logprobs=array("d", [0.0, *said.tolist()]),
                    temperature=temperature,
                ),
                advantage,
            )
        )
        wanted = wanted - advantage * (said * torch.tensor(mask[1:])).sum()
    loss = learn.loss_of(model, model, rows, Namespace(clip=0.2, kl=0.0))
    ours = torch.autograd.grad(loss, list(model.parameters()))
    theirs = torch.autograd.grad(wanted, list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert any(b.abs().max() > 1e-3 for b in theirs)
