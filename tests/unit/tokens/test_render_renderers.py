from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import ToolCall
from rollwright.tokens.render import load_renderer
from rollwright.tokens.render_renderers import RenderersRenderer
from rollwright.tokens.render_template import TemplateRenderer
from support.conversation import TOOLS, assistant, call_text, system, tool, user

HERMES = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def test_a_bridge_returns_only_what_is_new(qwen3: RenderersRenderer) -> None:
    prompt = qwen3.render([system(), user()], TOOLS)
    sampled = qwen3.encode("I look.\n" + HERMES + "<|im_end|>")
    history = [system(), user(), assistant("I look.", ("bash", {"command": "ls"}, "call_0"))]
    tail = [tool("a.py", "call_0"), user("<reminder>")]
    new = qwen3.bridge(prompt, sampled, history, tail, TOOLS)
    assert new is not None
    assert prompt + sampled + new == qwen3.render([*history, *tail], TOOLS)
    # What was said before the last turn's own prompt does not matter.
    assert qwen3.bridge(prompt[-3:], sampled, history, tail, TOOLS) == new


def test_a_turn_that_ran_out_of_tokens_is_closed(qwen3: RenderersRenderer) -> None:
    prompt = qwen3.render([user()], [])
    for said, closing in (("one two", "<|im_end|>"), ("<think>\none", "</think><|im_end|>")):
        new = qwen3.bridge(prompt, qwen3.encode(said), [user(), assistant("x")], [user("more")], [])
        assert new is not None
        assert qwen3.decode(new).startswith(closing + "\n<|im_start|>user\nmore")


def test_a_user_word_after_thoughts_is_bridged_too(qwen3: RenderersRenderer) -> None:
    prompt = qwen3.render([user()], [])
    sampled = qwen3.encode("<think>\ndeep\n</think>\n\nAnswer.<|im_end|>")
    new = qwen3.bridge(prompt, sampled, [user(), assistant("Answer.", reasoning="deep")], [user("more")], [])
    assert new is not None
    assert qwen3.decode(new) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_of_another_origin_is_refused(qwen3: RenderersRenderer) -> None:
    prompt = qwen3.render([user()], [])
    sampled = qwen3.encode("a<|im_end|>")
    assert qwen3.bridge(prompt, sampled, [user(), assistant("a")], [assistant("b"), user()], []) is None
    assert qwen3.bridge(prompt, sampled, [user(), assistant("a")], [], []) is None


def test_every_call_is_kept_and_the_broken_ones_are_text(qwen3: RenderersRenderer) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {\n</tool_call>'
    unknown = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
    turn = qwen3.parse(qwen3.encode(f"Look.\n{HERMES}\n{broken}\n{unknown}<|im_end|>"), TOOLS)
    assert turn.tool_calls == (
        ToolCall(name="bash", arguments={"command": "ls"}),
        ToolCall(name="nope", arguments={}),
    )
    assert turn.content == f"Look.\n{broken}"
    assert turn.ill_formed


def test_a_family_reads_its_own_calls(qwen35: RenderersRenderer) -> None:
    turn = qwen35.parse(qwen35.encode(f"hm\n</think>\n\nLook.\n{call_text('ls')}<|im_end|>"), TOOLS)
    assert (turn.reasoning, turn.content, turn.ill_formed) == ("hm", "Look.", None)
    assert turn.tool_calls == (ToolCall(name="bash", arguments={"command": "ls"}),)


def test_an_open_thought_is_ill_formed(qwen35: RenderersRenderer) -> None:
    turn = qwen35.parse(qwen35.encode("hm, and"), TOOLS)
    assert (turn.content, turn.tool_calls) == ("", ())
    assert (turn.reasoning or "").strip() == "hm, and"
    assert turn.ill_formed


def test_a_conversation_the_family_does_not_know_is_refused(qwen3: RenderersRenderer) -> None:
    with pytest.raises(UsageError, match="renderers:qwen3 refuses"):
        qwen3.render([], [])


def test_a_wrong_family_is_one_clear_error(plain_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown family 'qwen9': one of .*qwen3"):
        RenderersRenderer(plain_folder, family="qwen9")
    with pytest.raises(ConfigError, match="no tokenizer of family llama-3"):
        RenderersRenderer(plain_folder, family="llama-3")


def test_without_a_template_a_family_can_still_be_named(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    (folder / "chat_template.jinja").unlink()
    assert RenderersRenderer(folder, family="qwen3").render([user()], [])
    with pytest.raises(ConfigError, match="name its family"):
        RenderersRenderer(folder)


def test_a_template_that_cannot_bridge_still_renders(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    path = folder / "chat_template.jinja"
    # Each answer says how many messages there are, so nothing can be appended to one.
    path.write_text(
        path.read_text().replace("{{- m.content | trim }}", "{{- m.content | trim ~ (messages | length) }}")
    )
    renderer = load_renderer(folder)
    assert isinstance(renderer, TemplateRenderer)
    assert not renderer.serves()
    assert renderer.bridge([], renderer.encode("a<|im_end|>"), [user(), assistant("a")], [user()], []) is None
    assert renderer.render([user(), assistant("a"), user()], [])
