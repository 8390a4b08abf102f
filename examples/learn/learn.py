"""GRPO in plain torch on the quickstart's policy: real CLI, real sandboxes, hidden tests, new weights between steps.

    make learn                                            # three arms, at most 15 minutes on 2 cores
    python examples/learn/learn.py --arms trained --steps 30 --out runs/learn

Two arms are controls and must stay flat: `lr0` has learning rate 0, `shuffled` deals the rewards out at random
within each batch. The curves go into OUT/learn.png; OUT/ARM is a run folder like any other, for `rollwright view`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

import rollwright
from rollwright import Group, Pace, Sample
from rollwright.groups import Member, advantages
from rollwright.run import Attempt

HERE = Path(__file__).parent
POLICY = HERE.parent / "quickstart" / "policy"
ARMS = ("trained", "lr0", "shuffled")
TASKS = ("cart", "bookings", "lru", "ratelimit")
"""Of the quickstart's: the policy solves each of them sometimes, so that a group has something to say."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attempts", type=int, default=8, help="the group size")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--epochs", type=int, default=1, help="optimizer steps on each batch")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--kl", type=float, default=0.3, help="pull back to the first policy")
    parser.add_argument("--ahead", type=int, default=len(TASKS), help="groups that are rolled out at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "runs" / "learn")
    options = parser.parse_args()
    options.out = options.out.absolute()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    if options.out.exists():
        if not (options.out / "curves.json").exists():
            sys.exit(f"{options.out} exists and is not of an earlier `make learn`; choose another --out")
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    (options.out / "curves.json").write_text("{}")
    rows = (POLICY.parent / "tasks.jsonl").read_text().splitlines()
    chosen = [row for row in rows if json.loads(row)["metadata"]["remote_env_info"]["instance_id"] in TASKS]
    (options.out / "tasks.jsonl").write_text("\n".join(chosen) + "\n")
    curves: dict[str, list[float]] = {}
    for arm in options.arms.split(","):
        curves[arm] = anyio.run(learn, arm, options)
        (options.out / "curves.json").write_text(json.dumps(curves, indent=1))
        draw(curves, options.out / "learn.png")
    sys.exit(judged(curves))


def judged(curves: dict[str, list[float]]) -> str | None:
    """Say what the arms came to. Returns what is wrong with them, if anything."""
    gains = {arm: mean(rewards[-5:]) - rewards[0] for arm, rewards in curves.items()}
    for arm, rewards in curves.items():
        print(f"{arm:9} start {rewards[0]:.2f}, mean of the last 5 steps {mean(rewards[-5:]):.2f}: {gains[arm]:+.2f}")
    if any(math.isnan(reward) for rewards in curves.values() for reward in rewards):
        return "a step had no graded rollout"
    if gains.get("trained", 1.0) < 0.3:
        return "the trained arm has not learned"
    moved = [arm for arm, gain in gains.items() if arm != "trained" and abs(gain) >= 0.3]
    return f"a control is not flat: {', '.join(moved)}" if moved else None


async def learn(arm: str, options: argparse.Namespace) -> list[float]:
    """One arm. Returns the mean reward of each step's rollouts, before the step."""
    torch.manual_seed(options.seed)
    dice = random.Random(options.seed)
    policy = options.out / f"{arm}-policy"
    shutil.copytree(POLICY, policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    first = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if arm == "lr0" else options.lr, weight_decay=0.0)
    settings = (
        *(f"tasks.path={options.out / 'tasks.jsonl'}", f"policy.path={policy}", f"engine.local.model={policy}"),
        *(f"run.attempts={options.attempts}", f"run.seed={options.seed}"),
    )
    # An epoch has each task once, and a step takes one epoch: the next one is rolled out while this one is trained.
    source = rollwright.rollouts(
        HERE / "run.toml",
        *settings,
        folder=options.out / arm,
        pace=Pace(epochs=options.steps, ahead=options.ahead, max_lag=2),
    )
    rewards: list[float] = []
    batch: list[Group] = []
    began = time.monotonic()
    async with source as groups:
        async for group in groups:
            batch.append(group)
            if len(batch) < len(TASKS):
                continue
            rewards.append(mean([attempt.record.reward for each in batch for attempt in graded(each)]))
            dealt = rewards_of(batch, arm, dice)
            rows = [row for each in batch for row in rows_of(each, dealt)]
            loss = await anyio.to_thread.run_sync(train, model, first, optimizer, rows, options)
            model.save_pretrained(policy)
            await groups.load_weights(policy, f"step-{len(rewards)}")
            print(
                f"{arm:9} step {len(rewards):3}  reward {rewards[-1]:.3f}  rows {len(rows):3}  loss {loss:+.4f}  "
                f"{time.monotonic() - began:4.0f} s",
                flush=True,
            )
            batch = []
    return rewards


# ------------------------------------------------------------------------------------------------------- the batch


def graded(group: Group) -> list[Attempt]:
    """Those with a reward: our own failures are no zeros."""
    return [attempt for attempt in group.attempts if attempt.record.graded]


def rewards_of(batch: list[Group], arm: str, dice: random.Random) -> dict[str, float]:
    """Rollout → reward; in the arm `shuffled` somebody's."""
    names = [attempt.record.rollout for group in batch for attempt in graded(group)]
    rewards = [attempt.record.reward or 0.0 for group in batch for attempt in graded(group)]
    if arm == "shuffled":
        dice.shuffle(rewards)
    return dict(zip(names, rewards, strict=True))


def rows_of(group: Group, rewards: dict[str, float]) -> list[tuple[Sample, float]]:
    """The samples that are trained, each with its rollout's advantage."""
    members = [Member(rollout_id=a.record.rollout, reward=rewards[a.record.rollout]) for a in graded(group)]
    made = advantages(members).advantages
    return [(s, made[s.rollout_id]) for s in group.samples if s.trainable and made.get(s.rollout_id)]


# ----------------------------------------------------------------------------------------------------------- GRPO


def train(
    model: PreTrainedModel,
    first: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rows: list[tuple[Sample, float]],
    options: argparse.Namespace,
) -> float:
    """PPO's clipped loss over the tokens that were sampled, against the engine's own logprobs of them, and the distance
    to the first policy."""
    rows = sorted(rows, key=lambda row: len(row[0].tokens))
    trained = sum(sum(sample.loss_mask) for sample, _ in rows)
    loss = 0.0
    for _ in range(options.epochs if rows else 0):
        optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(rows), 8):
            part = loss_of(model, first, rows[start : start + 8], options) / trained
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss


def loss_of(
    model: PreTrainedModel, first: PreTrainedModel, rows: list[tuple[Sample, float]], options: argparse.Namespace
) -> torch.Tensor:
    """Sum over the trained tokens of a few rows."""
    width = max(len(sample.tokens) for sample, _ in rows)
    tokens, mask, old = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.long, torch.bool, torch.float))
    for index, (sample, _) in enumerate(rows):
        length = len(sample.tokens)
        tokens[index, :length] = torch.tensor(sample.tokens)
        mask[index, :length] = torch.tensor(sample.loss_mask, dtype=torch.bool)
        old[index, :length] = torch.tensor(sample.logprobs)
    gain = torch.tensor([advantage for _, advantage in rows])[:, None]
    temperature = torch.tensor([sample.temperature for sample, _ in rows])[:, None, None]

    def logprobs(of: PreTrainedModel) -> torch.Tensor:
        logits = of(tokens).logits[:, :-1] / temperature
        return torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None])[..., 0]

    new = logprobs(model)
    with torch.no_grad():
        away = logprobs(first) - new.detach()
    ratio = torch.exp(new - old[:, 1:])
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - options.clip, 1 + options.clip) * gain)
    # The gradient of exp(d) - d - 1, an estimate of the divergence, where d is the first policy's logprob less ours.
    pull = (1 - torch.exp(away.clamp(max=5.0))) * new
    return ((options.kl * pull - surrogate) * mask[:, 1:]).sum()


# -------------------------------------------------------------------------------------------------------- the curves


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    labels = {"trained": "trained", "lr0": "learning rate 0", "shuffled": "shuffled rewards"}
    for arm, rewards in curves.items():
        axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label=labels[arm], lw=2 if arm == "trained" else 1)
    axes.set(xlabel="step", ylabel="mean reward of the rollouts", ylim=(0, 1), title="GRPO through the whole system")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def mean(values: Sequence[float | None]) -> float:
    """NaN of none: a step without a reward is not one of zeros."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


if __name__ == "__main__":
    main()
