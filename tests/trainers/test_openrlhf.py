"""OpenRLHF's own `Experience` and its own baseline, from our results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rollwright.errors import InfraError
from rollwright.integrations.openrlhf import agent_executor, responses
from rollwright.integrations.record import StoredRollout, group_advantages

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


@pytest.fixture(autouse=True)
def without_gpu_packages(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules import vLLM and DeepSpeed for what stands beside the code tested here."""
    need("openrlhf")
    for name, members in {
        "vllm": ("SamplingParams",),
        "deepspeed": (),
        "openrlhf.trainer.ray.vllm_engine": ("batch_vllm_engine_call",),
        "openrlhf.trainer.ray.launcher": ("RayActorGroup",),
        "openrlhf.models.actor": ("Actor",),
        "openrlhf.models.model": ("get_llm_for_sequence_regression",),
    }.items():
        stub = ModuleType(name)
        for member in members:
            setattr(stub, member, object)
        monkeypatch.setitem(sys.modules, name, stub)


def experiences_of(need: Need, results: list[dict[str, Any]]) -> list[Any]:
    """As `SamplesGenerator` makes them."""
    generator = need("openrlhf.trainer.ppo_utils.samples_generator").SamplesGenerator
    maker = generator.__new__(generator)
    return [maker._process_response_into_experience(response, max_len=100_000) for response in results]


def with_advantages(need: Need, experiences: list[Any], estimator: str, *, prompts: int = 1) -> list[Any]:
    """As its `RemoteExperienceMaker` makes them, after the models."""
    made = need("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    torch = need("torch")
    maker = made.__new__(made)
    advantage = SimpleNamespace(
        estimator=estimator, gamma=1.0, no_std_norm=True, lambd=1.0, use_kl_loss=False, is_correction_level="off"
    )
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=len(experiences) // prompts),
        algo=SimpleNamespace(advantage=advantage, kl=SimpleNamespace(init_coef=0.0, use_loss=False)),
        reward=SimpleNamespace(overlong_buffer_len=None, stop_properly_penalty_coef=None, clip_range=None),
    )
    maker.strategy = SimpleNamespace(args=args)
    maker.advantage_estimator = estimator
    maker.kl_ctl = SimpleNamespace(value=0.0)
    for number, each in enumerate(experiences):
        each.index = [number]
        each.kl = torch.zeros_like(each.action_mask, dtype=torch.float32)
    return maker.compute_advantages_and_returns(experiences)


@pytest.fixture
def experiences(need: Need, calc: list[StoredRollout]) -> list[Any]:
    return experiences_of(need, responses(calc, prompt="Fix it.", label="calc"))


def test_experiences_have_the_mask_and_logprobs_of_the_sample(
    experiences: list[Any], calc: list[StoredRollout]
) -> None:
    (sample,) = calc[0].samples
    made = experiences[0]
    assert made.sequences[0].tolist() == sample.tokens.tolist()
    assert made.action_mask[0].tolist() == sample.loss_mask[1:].tolist()
    assert made.rollout_log_probs[0].tolist() == pytest.approx(sample.logprobs[1:].tolist(), abs=1e-6)
    assert [each.truncated.item() for each in experiences] == [False, False, False, True, False]


def test_they_batch(need: Need, experiences: list[Any]) -> None:
    module = need("openrlhf.trainer.ppo_utils.experience")
    batch = module.Experience.concat_experiences(experiences, pad_token_id=0)
    assert batch.sequences.shape[0] == 5
    assert batch.action_mask.shape[1] == batch.sequences.shape[1] - 1


def test_its_own_baseline_is_ours_for_every_rollout_that_was_graded(
    need: Need, experiences: list[Any], calc: list[StoredRollout]
) -> None:
    torch = need("torch")
    done = with_advantages(need, experiences, "dr_grpo")
    ours = group_advantages(calc, estimator="dr_grpo").advantages
    for each, rollout in zip(done, calc, strict=True):
        trained = each.advantages[each.action_mask.bool()]
        expected = ours.get(rollout.record.rollout, 0.0)
        assert torch.allclose(trained, torch.full_like(trained, expected), atol=1e-6)


@pytest.mark.parametrize(
    "estimator", ["rloo", "reinforce_baseline", "dr_grpo", "group_norm", "reinforce", "flash_reinforce"]
)
def test_a_lost_group_moves_nobody_and_is_in_no_mean_as_a_zero(
    need: Need, calc: list[StoredRollout], estimator: str
) -> None:
    """A batch of two prompts, of which the second was lost altogether."""
    torch = need("torch")
    mean = 0.375  # of what was graded
    lost = responses([calc[2]] * 5, prompt="", label="", neutral=mean)
    graded = responses(calc, prompt="", label="")
    done = with_advantages(need, experiences_of(need, graded + lost), estimator, prompts=2)
    alone = with_advantages(need, experiences_of(need, graded), estimator)
    for each, other in zip(done[:5], alone, strict=True):
        assert torch.allclose(each.advantages, other.advantages, atol=1e-6)
    for each in done:
        assert torch.isfinite(each.advantages).all()
    for each in done[5:]:
        assert not (each.advantages * each.action_mask).any()
    assert torch.cat([each.info["reward"] for each in done]).mean().item() == pytest.approx(mean)


@pytest.fixture
def ray(need: Need) -> Iterator[Any]:
    ray = need("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def test_dynamic_filtering_drops_a_lost_group_and_keeps_the_score_of_the_others(
    need: Need, experiences: list[Any], calc: list[StoredRollout], ray: Any
) -> None:
    """Through its own generator, whose engine is the results."""
    generator = need("openrlhf.trainer.ppo_utils.samples_generator")
    results = {
        "calc": responses(calc, prompt="calc", label=""),
        "lost": responses([calc[2]] * 5, prompt="lost", label="", neutral=0.5),
    }

    class Generator(generator.SamplesGenerator):
        def __init__(self) -> None:
            self.args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_range=(0.3, 0.6)))

        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **_: Any) -> list[Any]:
            return [ray.put(results[prompt]) for prompt in prompts]

    rows = iter([("", [prompt], [""], [None]) for prompt in ("lost", "calc")])
    accepted, consumed, _ = Generator()._generate_vllm(rows, 1, True, max_len=100_000)
    assert [each.prompts for each in accepted] == [["calc"]] * 5
    assert consumed == 2


@pytest.mark.anyio
async def test_the_samples_of_a_prompt_are_one_group(need: Need, calc: list[StoredRollout]) -> None:
    """As its engine does it: an executor, and `execute` for all samples of a prompt at once."""
    base = need("openrlhf.utils.agent").AgentExecutorBase
    asked: list[tuple[str, str, int]] = []

    async def roll_out(prompt: str, label: str, count: int) -> list[StoredRollout]:
        asked.append((prompt, label, count))
        await anyio.lowlevel.checkpoint()
        return calc[:count]

    made = agent_executor(roll_out)
    assert issubclass(made, base)
    executor = made()
    found: dict[tuple[str, int], Any] = {}

    async def execute(prompt: str, number: int) -> None:
        found[prompt, number] = await executor.execute(
            prompt=prompt, label="calc", sampling_params=None, max_length=1, hf_tokenizer=None, llm_engine=None
        )

    async with anyio.create_task_group() as group:
        for prompt, count in (("a", 5), ("b", 2)):
            for number in range(count):
                group.start_soon(execute, prompt, number)
    assert asked == [("a", "calc", 5), ("b", "calc", 2)]
    assert [found["a", n] for n in range(5)] == responses(calc, prompt="a", label="calc")
    assert [found["b", n] for n in range(2)] == responses(calc[:2], prompt="b", label="calc")


@pytest.mark.anyio
async def test_a_group_that_fails_fails_for_each_of_its_samples(need: Need) -> None:
    async def roll_out(prompt: str, label: str, count: int) -> list[StoredRollout]:
        raise OSError("no engine")

    executor = agent_executor(roll_out)()
    errors: list[str] = []

    async def execute() -> None:
        try:
            await executor.execute(prompt="a", label="b")
        except (OSError, InfraError) as error:
            errors.append(str(error))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(execute)
    assert len(errors) == 3
    assert "no engine" in errors


@pytest.mark.anyio
async def test_a_lost_group_waits_for_the_first_reward_of_another(need: Need, calc: list[StoredRollout]) -> None:
    need("openrlhf.utils.agent")
    lost_done = anyio.Event()

    async def roll_out(prompt: str, label: str, count: int) -> list[StoredRollout]:
        if prompt == "lost":
            lost_done.set()
            return [calc[2]] * count
        await lost_done.wait()
        return calc[:count]

    executor = agent_executor(roll_out)()
    found: dict[str, list[Any]] = {"lost": [], "calc": []}

    async def execute(prompt: str) -> None:
        found[prompt].append(await executor.execute(prompt=prompt, label=""))

    async with anyio.create_task_group() as group:
        for prompt in ("lost", "lost", "calc", "calc", "calc"):
            group.start_soon(execute, prompt)
    assert [each["reward"] for each in found["lost"]] == [0.5, 0.5]
    assert sorted(each["reward"] for each in found["calc"]) == [0.0, 0.5, 1.0]
    with pytest.raises(InfraError, match="none of 1 rollouts was graded"):
        await agent_executor(roll_out)().execute(prompt="lost", label="")
