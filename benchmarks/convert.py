"""What converting a sample costs: `python benchmarks/convert.py [--samples 10000] [--tokens 40000]`.

For each trainer: milliseconds a sample, what the result holds, and what was allocated beside it on the way, as a share
of the sample's token array: a second copy of it would be at least 1. Harbor's form repeats the prompt at each turn;
"bare copies" is what slicing the tokens into that form alone costs. slime wants the text of the reply too, which is
decoded by the quickstart's tokenizer. With `--classes` the trainers' own classes are made too, where they are installed
(make test-trainers).
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from rollwright.integrations import harbor, openrlhf, prime_rl, skyrl, tinker, trl, verl
from rollwright.integrations.arrays import views
from rollwright.integrations.record import Rollout, StoredRollout, group_advantages
from rollwright.integrations.slime.samples import Filler
from rollwright.store import RolloutRecord
from rollwright.tokens.render import load_renderer
from rollwright.types import Sample, VersionSpan

TURNS = 40
POLICY = Path(__file__).parents[1] / "examples/quickstart/policy"
SAMPLED = 0.15
"""Of the tokens, as in coding rollouts."""


def rollout(number: int, tokens: int) -> StoredRollout:
    """One sample of `TURNS` turns, its tokens as scattered as those of a real vocabulary."""
    generator = np.random.default_rng(number)
    ids = array("i", generator.integers(300, 150_000, tokens, dtype=np.int32).tobytes())
    mask = np.zeros(tokens, np.int8)
    turn = tokens // TURNS
    for start in range(turn - int(turn * SAMPLED), tokens, turn):
        mask[start : start + int(turn * SAMPLED)] = 1
    logprobs = array("d", (np.where(mask, -generator.random(tokens), 0.0)).tobytes())
    name = f"calc.{number}"
    sample = Sample(
        task_id="t", group_id="calc", rollout_id=name, segment_index=0, n_segments=1, role="main", tokens=ids,
        loss_mask=array("b", mask.tobytes()), logprobs=logprobs, versions=[VersionSpan("7", 0, tokens)],
        prompt_length=int(np.argmax(mask)), reward=float(number % 2), weight=1.0, trainable=True,
        counts_in_baseline=True,
    )  # fmt: skip
    record = RolloutRecord(
        rollout=name, task="calc", task_id="t", attempt=number, status="resolved", reward=float(number % 2),
        trainable=True, counts_in_baseline=True, turns=TURNS,
    )  # fmt: skip
    return StoredRollout(record=record, samples=[sample])


def converters(group: list[StoredRollout], *, classes: bool) -> Iterator[tuple[str, Callable[[StoredRollout], Any]]]:
    found = group_advantages(group)

    def of(convert: Callable[[list[Rollout]], Any]) -> Callable[[StoredRollout], Any]:
        return lambda each: convert([each])

    yield "verl fields", verl.output_fields
    yield "TRL rollout_func", of(lambda one: trl.rollout_batch(one, filler=0, quorum=1))
    yield "TRL async fields", of(lambda one: list(trl.sample_fields(one, found, number=0)))
    yield "SkyRL step-wise", of(lambda one: skyrl.generator_output([(None, one[0])], quorum=1))
    yield "prime-rl", of(lambda one: list(prime_rl.training_samples(one, found, env_name="swe")))
    yield "OpenRLHF, of two", of(lambda one: openrlhf.responses([*one, group[0]], prompt="", label=""))
    yield "tinker fields", of(lambda one: list(tinker.datum_fields(one, found)))
    yield "Harbor details", harbor.rollout_details
    yield "  its bare copies", bare_copies
    renderer = load_renderer(POLICY, kind="auto", tool_parser="qwen3_coder", reasoning_parser=None)
    yield "slime Sample", slime_samples(group, renderer.decode, renderer.vocab_size)
    yield "  without its text", slime_samples(group, lambda ids: "", renderer.vocab_size)
    if classes:
        yield "verl AgentLoopOutput", verl.outputs
        yield "tinker Datum", of(lambda one: tinker.data(one, found))


def bare_copies(each: StoredRollout) -> list[Any]:
    """What Harbor's form asks for of a sample, and no more: at each turn the prompt, the completion, its logprobs."""
    (sample,) = each.samples
    tokens, logprobs = sample.tokens.tolist(), sample.logprobs
    spans = sample.trained_spans()
    return [
        [tokens[:start] for start, _ in spans],
        [tokens[start:end] for start, end in spans],
        [logprobs[start:end].tolist() for start, end in spans],
    ]


@dataclass
class SlimeSample:
    """As slime's `Sample`, as far as it is filled."""

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    index: int = 0
    group_index: int = 0
    rollout_id: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def slime_samples(
    group: list[StoredRollout], decode: Callable[[Sequence[int]], str], vocabulary: int
) -> Callable[[StoredRollout], Any]:
    filler, base = Filler(decode=decode), SlimeSample()
    spelled = {each.record.rollout: in_vocabulary(each, vocabulary) for each in group}
    return lambda each: filler.samples(base, spelled[each.record.rollout], evaluation=False)


def in_vocabulary(each: StoredRollout, size: int) -> StoredRollout:
    """With tokens that a tokenizer of that size can decode."""
    (sample,) = each.samples
    tokens = array("i", (np.asarray(sample.tokens) % size).astype(np.int32).tobytes())
    return replace(each, samples=[replace(sample, tokens=tokens)])


def measure(convert: Callable[[StoredRollout], Any], group: list[StoredRollout], count: int) -> tuple[float, int, int]:
    """Milliseconds a sample, bytes the result holds, and bytes at the peak beside it."""
    convert(group[0])
    start = time.process_time()
    for each in islice(cycle(group), count):
        convert(each)
    milliseconds = (time.process_time() - start) / count * 1000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    result = convert(group[0])
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return milliseconds, after - before, peak - after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--classes", action="store_true")
    asked = parser.parse_args()
    group = [rollout(number, asked.tokens) for number in range(32)]
    for sample in (each.samples[0] for each in group):
        for view, buffer in zip(views(sample), (sample.tokens, sample.loss_mask, sample.logprobs), strict=True):
            assert np.shares_memory(view, np.frombuffer(buffer, view.dtype))
    print(
        f"{asked.samples} samples of {asked.tokens} tokens, {SAMPLED:.0%} sampled; views share memory with the sample"
    )
    print(f"{'':22} {'ms/sample':>9} {'holds KiB':>10} {'beside it, of a token array':>28}")
    spent: dict[str, float] = {}
    for name, convert in converters(group, classes=asked.classes):
        spent[name], held, beside = measure(convert, group, asked.samples)
        print(f"{name:22} {spent[name]:9.3f} {held / 1024:10.0f} {beside / (4 * asked.tokens):28.3f}", flush=True)
    ratio = spent["Harbor details"] / spent["  its bare copies"]
    print(f"Harbor's details cost {ratio:.2f} times the bare copies of its form.")


if __name__ == "__main__":
    main()
