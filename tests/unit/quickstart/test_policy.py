"""examples/quickstart/policy: the files a demo samples from, the template they speak, and how they are made."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import make_policy
import policy_corpus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rollwright.engines.local import LocalEngine
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.types import Sampling

POLICY = make_policy.FOLDER
TOOLS = tuple(
    ToolSpec(name=name, parameters={"type": "object", "properties": {key: {"type": "string"} for key in keys}})
    for name, keys in (("bash", ("command", "timeout")), ("edit", ("path", "edits")))
)
FIRST_DIALOGUES = "d4c7bd285d52a006"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(POLICY, tool_parser="qwen3_coder")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(POLICY / "tokenizer.json"))


def as_messages(talk: policy_corpus.Dialogue, branch: int = 0) -> list[Message]:
    messages = [Message(role="system", content=talk.system), Message(role="user", content=talk.user)]
    for step in (*talk.steps, *talk.branches[branch]):
        if step.role == "tool":
            messages.append(Message(role="tool", content=step.text))
        elif call := re.search(r"<parameter=command>\n(.*)\n</parameter>", step.text):
            arguments = {"command": call.group(1)}
            messages.append(Message(role="assistant", tool_calls=(ToolCall(name="bash", arguments=arguments),)))
        else:
            messages.append(Message(role="assistant", content=step.text))
    return messages


def test_the_policy_is_at_most_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) <= 5_000_000


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200) | st.lists(st.sampled_from("<|im_end|> \n<tool_call> def 0123 é\0 x='")).map("".join))
def test_every_text_encodes_and_decodes_to_itself(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


WORDS = st.text("ab <>\n", max_size=12)
ANSWERS = st.builds(
    lambda text, commands: Message(
        role="assistant",
        content=text,
        tool_calls=tuple(ToolCall(name="bash", arguments={"command": c, "timeout": 3}) for c in commands),
    ),
    WORDS,
    st.lists(WORDS, max_size=2),
)
OTHERS = st.lists(
    st.builds(lambda role, text: Message(role=role, content=text), st.sampled_from(("user", "tool")), WORDS),
    min_size=1,
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(system=WORDS, turns=st.lists(st.tuples(OTHERS, ANSWERS), min_size=1, max_size=4))
def test_the_template_never_changes_what_was_said_before_an_answer(
    renderer: Renderer, system: str, turns: list[tuple[list[Message], Message]]
) -> None:
    messages = [Message(role="system", content=system)]
    before = ""
    for others, answer in turns:
        messages += others
        prompt = renderer.decode(renderer.render(messages, TOOLS))
        assert prompt.startswith(before)
        before = prompt
        messages.append(answer)


@pytest.mark.parametrize("seed", range(40))
def test_the_training_text_is_what_the_template_renders(renderer: Renderer, tokenizer: Tokenizer, seed: int) -> None:
    talk = policy_corpus.dialogue(random.Random(seed))
    tree = make_policy.grow(talk, tokenizer)
    messages = as_messages(talk)
    answer = max(n for n, message in enumerate(messages) if message.role == "assistant")
    branch = [i for i, number in zip(tree.ids, tree.branch, strict=True) if number == 1]
    trunk = tree.ids[: tree.trunk]
    end = len(messages) - len(talk.branches[0])
    assert renderer.render(messages[:end], TOOLS) == trunk
    said = renderer.encode(make_policy.START + "assistant\n")
    whole = renderer.render([*messages[: answer + 1], Message(role="user", content="")], TOOLS)
    assert whole[: len(trunk) + len(branch)] == trunk + branch
    assert trunk[-len(said) :] == said


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_edit_that_is_taught_changes_an_operator_that_is_shown(seed: int) -> None:
    talk = policy_corpus.dialogue(random.Random(seed), ways=99)
    listing = talk.steps[1].text if len(talk.steps) > 1 else ""
    for first, *_ in talk.branches:
        if edit := re.search(r"'/def (\w+)/,\+14s/([^/]+)/([^/]+)/'", first.text):
            function, old, new = edit.groups()
            assert f"'def {function}'" in talk.steps[0].text
            assert old in listing
            assert policy_corpus.SWAPS[old] == new


def test_the_dialogues_of_a_seed_are_always_the_same() -> None:
    rng = random.Random(0)
    text = "\0".join(make_policy.render(policy_corpus.dialogue(rng)) for _ in range(50))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FIRST_DIALOGUES


def test_the_tokenizer_of_the_folder_is_the_one_the_script_trains(tokenizer: Tokenizer) -> None:
    assert make_policy.make_tokenizer().get_vocab() == tokenizer.get_vocab()


@pytest.mark.anyio
async def test_most_sampled_turns_are_commands_that_make_sense(renderer: Renderer) -> None:
    rng = random.Random(5)
    looks = edits = 0
    talks = [talk for talk in (policy_corpus.dialogue(rng, ways=99) for _ in range(60)) if len(talk.branches) > 1][:20]
    async with LocalEngine(renderer=renderer, model=POLICY) as engine:

        async def said(messages: list[Message], request: str) -> str:
            reply = await engine.generate(
                renderer.render(messages, TOOLS),
                Sampling(max_new_tokens=128),
                stop_ids=renderer.stop_ids,
                request_id=request,
                session_key=request,
            )
            return renderer.decode(reply.ids).removesuffix(make_policy.STOP)

        for number, talk in enumerate(talks):
            messages = as_messages(talk)
            looks += await said(messages[:2], f"look {number}") == talk.steps[0].text
            end = len(messages) - len(talk.branches[0])
            edits += await said(messages[:end], f"edit {number}") in {branch[0].text for branch in talk.branches}
    assert looks >= 15
    assert edits >= 10


@pytest.mark.torch
def test_training_again_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shape = make_policy.Shape(layers=2)
    schedule = make_policy.Schedule(echoes=2, steps=3, tokens=1500, report=100)
    tokenizer = make_policy.make_tokenizer()
    for name in ("a", "b"):
        weights = make_policy.new_weights(shape, seed=1)
        make_policy.train(weights, shape, schedule, tokenizer, seed=1)
        make_policy.save(weights, shape, tokenizer, tmp_path / name)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
