"""Makes `policy/`: a tiny Llama that acts in the form of the quickstart's tasks, with its own tokenizer.

    python examples/quickstart/make_policy.py            # needs the torch extra; about half an hour on one core

Seeded and single-threaded: on the same machine and torch, the same bytes. Nothing is downloaded; the text it learns
from is invented by `policy_corpus.py`, where the edit to make is drawn at random, so the policy learns to write
commands, not which bug a task has.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from policy_corpus import Dialogue, Step, dialogue
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent / "policy"
SEED = 7
VOCAB = 1536
CONTEXT = 2048

TOOLS = "Tools: bash(command, timeout), edit(path, edits)"
"""How the chat template writes the tools that pi offers with `--tools bash,edit`."""

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CALL_OPEN = "\n<function=bash>\n<parameter=command>\n"
_CALL_CLOSE = "\n</parameter>\n</function>\n"
_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", _CALL_OPEN, _CALL_CLOSE)

_PIECES = (
    r"[a-z]+|[A-Z]"  # words, so that a name has the same pieces wherever it is written
    r"|[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))"  # pairs of digits from the right: lines shown differ in their last pair
    r"|[<>=!]=|->|\*\*|//|\"\"\"|[()\[\]:,]+| +|\n+"
    r"|[^A-Za-z0-9 \n()\[\]:,]"
)


# --------------------------------------------------------------------------- tokenizer


def make_tokenizer(seed: int = SEED) -> Tokenizer:
    """A byte-level BPE: every text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    texts = [render(dialogue(rng)) for _ in range(3000)]
    texts += [f"{n:02}" for n in range(100)] * 500
    added = len((END, START, STOP, *_MARKUP))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    for markup in (*_MARKUP, START, STOP):
        texts = [text.replace(markup, " ") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (END, START, STOP)])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in _MARKUP])
    return tokenizer


# --------------------------------------------------------------------------- dialogues as ids


def opening(talk: Dialogue) -> str:
    return f"{START}system\n{talk.system}\n\n{TOOLS}{STOP}\n{START}user\n{talk.user}{STOP}\n{START}assistant\n"


def spoken(steps: Sequence[Step]) -> list[tuple[str, bool]]:
    """The text of steps and whether it is learned; begins and ends where an assistant's turn begins."""
    parts: list[tuple[str, bool]] = []
    for step in steps:
        if step.role == "assistant":
            parts += [(step.text + STOP, step.learn), ("\n", False)]
        else:
            parts.append(
                (f"{START}user\n<tool_response>\n{step.text}\n</tool_response>{STOP}\n{START}assistant\n", False)
            )
    return parts


def render(talk: Dialogue, branch: int = 0) -> str:
    """The whole conversation along one branch, as the chat template renders it."""
    return opening(talk) + "".join(text for text, _ in spoken((*talk.steps, *talk.branches[branch])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A dialogue with its branches side by side: what comes before them is read once. Arrays of one length."""

    ids: list[int]
    branch: list[int]
    """0: the trunk, which every branch sees."""
    position: list[int]
    target: list[int]
    learn: list[bool]
    trunk: int

    def __len__(self) -> int:
        return len(self.ids)


def grow(talk: Dialogue, tokenizer: Tokenizer, *, drill: bool = False) -> Tree:
    """`drill`: without what the system and the user said, so without learning the first command."""
    ids: list[int] = []
    branch: list[int] = []
    position: list[int] = []
    target: list[int] = []
    learn: list[bool] = []

    def add(parts: list[tuple[str, bool]], number: int, start: int) -> None:
        encoded = [(tokenizer.encode(text).ids, taught) for text, taught in parts]
        flat = [(i, taught) for part, taught in encoded for i in part]
        ids.extend(i for i, _ in flat)
        branch.extend(number for _ in flat)
        position.extend(range(start, start + len(flat)))
        target.extend([i for i, _ in flat[1:]] + [0])
        learn.extend([taught for _, taught in flat[1:]] + [False])

    if drill:
        first, *rest = talk.steps
        add([(f"{START}assistant\n", False), *spoken([replace(first, learn=False), *rest])], 0, 0)
    else:
        add([(opening(talk), False), *spoken(talk.steps)], 0, 0)
    trunk = len(ids)
    for number, steps in enumerate(talk.branches, 1):
        parts = spoken(steps)
        while not parts[-1][1]:
            parts.pop()
        first = len(ids)
        add(parts, number, trunk)
        target[trunk - 1], learn[trunk - 1] = ids[first], True
    return Tree(ids=ids, branch=branch, position=position, target=target, learn=learn, trunk=trunk)


# --------------------------------------------------------------------------- model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the Llama."""

    hidden: int = 128
    layers: int = 5
    heads: int = 4
    middle: int = 320
    vocab: int = VOCAB
    theta: float = 100000.0
    epsilon: float = 1e-5

    def config(self) -> dict[str, Any]:
        """`config.json` of the folder."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": None,
            "dtype": "float16",
            "eos_token_id": None,
            "head_dim": self.hidden // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.middle,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "pad_token_id": None,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_theta": self.theta, "rope_type": "default"},
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab,
        }


Weights = dict[str, "torch.Tensor"]


def new_weights(shape: Shape, seed: int) -> Weights:
    """Fresh float32 weights under their Hugging Face names."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / math.sqrt(columns)

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    for n in range(shape.layers):
        layer = f"model.layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{layer}self_attn.{name}.weight"] = matrix(shape.hidden, shape.hidden)
        weights[f"{layer}self_attn.o_proj.weight"] = matrix(shape.hidden, shape.hidden, 0.03)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}mlp.{name}.weight"] = matrix(shape.middle, shape.hidden)
        weights[f"{layer}mlp.down_proj.weight"] = matrix(shape.hidden, shape.middle, 0.03)
        weights[f"{layer}input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = torch.ones(shape.hidden)
    plant_copying(weights, shape, generator)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def plant_copying(w: Weights, shape: Shape, generator: torch.Generator) -> None:
    """Starts two layers as induction heads, which small models otherwise take thousands of steps to grow.

    Layer 0 writes the token before into each place; layer 1 looks for places whose token before is the current one and
    says what stands there. Feature 0 is the same in every embedding: the only thing a look at fixed distance needs.
    """
    import torch

    size = shape.hidden // shape.heads
    rates = shape.theta ** (-torch.arange(0, size, 2).float() / size)
    slow = torch.arange(size // 2 - 10, size // 2)  # rotations that hardly turn over a prompt: content, not distance
    slow = torch.cat((slow, slow + size // 2))
    w["model.embed_tokens.weight"][:, 0] = 4 / math.sqrt(shape.hidden)

    def look(layer: int, name: str) -> torch.Tensor:
        return w[f"model.layers.{layer}.self_attn.{name}_proj.weight"]

    def subspace() -> torch.Tensor:
        rows = torch.linalg.qr(torch.randn(shape.hidden, size, generator=generator))[0].T
        rows[:, 0] = 0
        return rows

    for head, distance in enumerate((1, 1, 2)):
        rows = slice(head * size, (head + 1) * size)
        for name, angles in (("q", -distance * rates), ("k", 0 * rates)):
            look(0, name)[rows] *= 0.1
            look(0, name)[rows, 0] = 3 * torch.cat((angles.cos(), angles.sin()))
        if distance > 1:
            continue
        read, written, said = subspace(), subspace(), subspace()
        look(0, "v")[rows], look(0, "o")[:, rows] = read, 0.15 * written.T
        for name, what in (("q", read), ("k", written)):
            look(1, name)[rows] = 0
            look(1, name)[slow + rows.start] = 1.5 * what[: len(slow)]
        look(1, "v")[rows], look(1, "o")[:, rows] = said, 0.15 * said.T


def hidden_states(
    w: Weights, shape: Shape, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Final states (batch, length, hidden). `mask` (batch, 1, length, length): true where a token may look."""
    import torch
    import torch.nn.functional as F

    size = shape.hidden // shape.heads
    rates = shape.theta ** (-torch.arange(0, size, 2).float() / size)
    angles = (positions[..., None].float() * rates).repeat(1, 1, 2)[:, None]
    cos, sin = angles.cos(), angles.sin()

    def turn(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (shape.hidden,), w[name + ".weight"], shape.epsilon)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[name + ".weight"]).unflatten(-1, (shape.heads, size)).transpose(1, 2)

    x = w["model.embed_tokens.weight"][ids]
    for n in range(shape.layers):
        layer = f"model.layers.{n}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        h = norm(x, layer + "input_layernorm")
        query, key = turn(heads(h, attn + "q_proj")), turn(heads(h, attn + "k_proj"))
        seen = F.scaled_dot_product_attention(query, key, heads(h, attn + "v_proj"), attn_mask=mask)
        x = x + F.linear(seen.transpose(1, 2).flatten(2), w[attn + "o_proj.weight"])
        h = norm(x, layer + "post_attention_layernorm")
        gate, up = F.linear(h, w[mlp + "gate_proj.weight"]), F.linear(h, w[mlp + "up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, w[mlp + "down_proj.weight"])
    return norm(x, "model.norm")


# --------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trees padded to one length, as tensors (batch, length)."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    learn: torch.Tensor
    text: torch.Tensor
    """Whether the position has a next token at all."""
    mask: torch.Tensor


def collate(trees: Sequence[Tree]) -> Batch:
    import torch

    length = max(map(len, trees))

    def pad(rows: list[list[Any]], value: int) -> np.ndarray[Any, Any]:
        return np.array([[*row, *[value] * (length - len(row))] for row in rows])

    branch = pad([t.branch for t in trees], -1)
    ids = pad([t.ids for t in trees], 0)
    same = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == 0)
    mask = same & np.tri(length, dtype=bool)
    ends = np.ones_like(branch, dtype=bool)
    ends[:, :-1] = branch[:, 1:] != branch[:, :-1]
    learn = pad([t.learn for t in trees], 0).astype(bool)
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(pad([t.position for t in trees], 0)),
        targets=torch.from_numpy(pad([t.target for t in trees], 0)),
        learn=torch.from_numpy(learn),
        text=torch.from_numpy((branch >= 0) & (~ends | learn)),
        mask=torch.from_numpy(mask[:, None]),
    )


def echo(rng: random.Random, length: int) -> Tree:
    """Random tokens, said twice."""
    once = [rng.randrange(VOCAB) for _ in range(length)]
    return Tree(
        ids=once * 2,
        branch=[0] * (2 * length),
        position=list(range(2 * length)),
        target=[*(once * 2)[1:], 0],
        learn=[False] * length + [True] * (length - 1) + [False],
        trunk=2 * length,
    )


def batches(rng: random.Random, tokenizer: Tokenizer, echoes: int, steps: int, tokens: int) -> Iterator[Batch]:
    """`echoes` batches to practise copying, then `steps` batches of dialogues; each of about `tokens` tokens.

    The dialogues grow from short to full length over the first 60 %.
    """
    for _ in range(echoes):
        length = rng.choice((12, 16, 24, 32))
        yield collate([echo(rng, length) for _ in range(tokens // (2 * length))])
    pool: list[Tree] = []
    for step in range(steps):
        if not pool or len(pool) < 4:
            grown = min(1.0, 0.1 + 0.9 * step / (0.6 * steps))
            for _ in range(160):
                reach = grown if rng.random() < 0.7 else grown * rng.random()
                talk = dialogue(rng, words=int(6 + 74 * reach), lines=int(4 + 11 * reach), ways=8)
                pool.append(grow(talk, tokenizer, drill=rng.random() < 0.7 - 0.5 * grown))
            pool.sort(key=len)
        middle = rng.randrange(len(pool))
        count = max(1, min(len(pool), tokens // len(pool[middle])))
        first = max(0, min(middle - count // 2, len(pool) - count))
        yield collate(pool[first : first + count])
        del pool[first : first + count]


def token_losses(w: Weights, shape: Shape, batch: Batch, where: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the targets at the true places of `where`."""
    import torch.nn.functional as F

    states = hidden_states(w, shape, batch.ids, batch.positions, batch.mask)[where]
    return F.cross_entropy(states @ w["model.embed_tokens.weight"].T, batch.targets[where], reduction="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and how fast to train."""

    echoes: int = 100
    steps: int = 2400
    tokens: int = 4000
    rate: float = 0.006
    table_rate: float = 0.001
    warmup: int = 20
    report: int = 100


def train(w: Weights, shape: Shape, schedule: Schedule, tokenizer: Tokenizer, seed: int) -> None:
    """Changes `w` in place."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    matrices = [p for name, p in w.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in w.items() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=schedule.table_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    held_out = random.Random(seed + 1)
    exam = [grow(dialogue(held_out, ways=99), tokenizer) for _ in range(60)]
    began = time.monotonic()
    mean = 0.0
    for step, batch in enumerate(
        batches(random.Random(seed), tokenizer, schedule.echoes, schedule.steps, schedule.tokens)
    ):
        done = max(0, step - schedule.echoes) / schedule.steps
        factor = min((step + 1) / schedule.warmup, 2 * (1 - done) + 0.01, 1.0)
        for optimizer, rate in zip(optimizers, (schedule.rate, schedule.table_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        losses = token_losses(w, shape, batch, batch.text)
        taught = batch.learn[batch.text].float()
        # Reading the context well grows the copying heads early; later only the policy's own turns count.
        weight = taught / taught.sum() + (1 - taught) / (1 - taught).sum() * max(0.02, 0.1 * (1 - 2 * done)) * (
            step >= schedule.echoes
        )
        loss = (losses * weight).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        mean = 0.95 * mean + 0.05 * float((losses.detach() * taught).sum() / taught.sum())
        if (step + 1) % schedule.report == 0 or step + 1 == schedule.echoes + schedule.steps:
            first, second = well_formed(w, shape, exam)
            seconds = time.monotonic() - began
            print(f"step {step + 1:5} loss {mean:.4f} look {first:.3f} edit {second:.3f} ({seconds:.0f} s)", flush=True)


def well_formed(w: Weights, shape: Shape, exam: Sequence[Tree]) -> tuple[float, float]:
    """Exact chances, at temperature 1, of the right first command and of some edit that stands on a shown line.

    The second is the sum over all edits of a dialogue: `exam` must hold every branch.
    """
    import torch

    looks: list[float] = []
    edits: list[float] = []
    with torch.no_grad():
        for tree in exam:
            batch = collate([tree])
            losses = (
                torch.zeros(1, len(tree))
                .masked_scatter(batch.text, token_losses(w, shape, batch, batch.text))[0]
                .tolist()
            )
            first = tree.learn.index(True)
            last = first
            while tree.learn[last]:
                last += 1
            looks.append(math.exp(-sum(losses[first:last])))
            chance = 0.0
            for number in range(1, max(tree.branch) + 1):
                start = tree.branch.index(number)
                stop = start
                while stop < len(tree) and tree.branch[stop] == number and tree.learn[stop]:
                    stop += 1
                chance += math.exp(-sum(losses[start:stop]) - losses[tree.trunk - 1])
            edits.append(chance)
    return sum(looks) / len(looks), sum(edits) / len(edits)


# --------------------------------------------------------------------------- files


def save(w: Weights, shape: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes all but `chat_template.jinja`, which is written by hand."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(p.detach().numpy().astype(np.float16)) for name, p in sorted(w.items())}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    stop, pad = tokenizer.token_to_id(STOP), tokenizer.token_to_id(END)
    config = shape.config() | {"eos_token_id": stop, "pad_token_id": pad}
    facts = {
        "config.json": config,
        "generation_config.json": {"do_sample": True, "eos_token_id": stop, "pad_token_id": pad, "temperature": 1.0},
        "tokenizer_config.json": {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": STOP,
            "model_max_length": CONTEXT,
            "pad_token": END,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, value in facts.items():
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=Schedule().steps)
    options = parser.parse_args()
    shape = Shape()
    tokenizer = make_tokenizer()
    if tokenizer.get_vocab_size() != shape.vocab:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {shape.vocab}")
    weights = new_weights(shape, SEED)
    print(f"{sum(p.numel() for p in weights.values()):,} parameters")
    train(weights, shape, Schedule(steps=options.steps), tokenizer, SEED)
    save(weights, shape, tokenizer, options.out)


if __name__ == "__main__":
    main()
