from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError, UsageError
from rollwright.messages import Message, ToolSpec
from rollwright.tokens.render import load_renderer
from rollwright.tokens.render_renderers import RenderersRenderer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.template import as_messages, as_tool
from rollwright.tokens.tokenizer import fingerprint
from support.conversation import TOOLS, assistant, call_text, system, tool, user

CALLED = assistant("I look.", ("bash", {"command": "ls -la", "timeout": 3, "quiet": True}, "call_0"), reasoning="Hm.")
CONVERSATIONS: list[list[Message]] = [
    [user("hi")],
    [system(), user("Grüße, 世界 👋\r\n\ttab")],
    [system("  "), user("one"), assistant("two"), user("three")],
    [system(), user(), CALLED, tool("a.py", "call_0"), tool("b", "x"), user("go on"), assistant("Done."), user("ok")],
]


@pytest.fixture(scope="session")
def oracle(plain_folder: Path, thinking_folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {
        "plain": AutoTokenizer.from_pretrained(plain_folder),
        "thinking": AutoTokenizer.from_pretrained(thinking_folder),
    }


@pytest.mark.parametrize("name", ["plain", "thinking"])
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_a_full_render_is_what_transformers_renders(
    name: str,
    tools: tuple[ToolSpec, ...],
    messages: list[Message],
    oracle: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    renderer: TemplateRenderer = request.getfixturevalue(name)
    expected = oracle[name].apply_chat_template(
        as_messages(messages), tools=[as_tool(t) for t in tools] or None, add_generation_prompt=True, return_dict=False
    )
    assert renderer.render(messages, tools) == expected


def test_a_template_may_use_what_transformers_gives_it(plain_folder: Path, tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{%- if m.role == 'skip' %}{%- continue %}{%- endif %}"
        "{% generation %}{{ m.role }}:{{ m.content }}{% endgeneration %}<|im_end|>{{ '\\n' }}{%- endfor %}"
        "{{- strftime_now('%Y') | length }}{{ eos_token }}{{ {'a': 'ü<'} | tojson(indent=1) }}"
        "{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"
    )
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    (folder / "chat_template.jinja").write_text(source)
    from transformers import AutoTokenizer

    messages = [user("x"), assistant("y"), user("z")]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        as_messages(messages), add_generation_prompt=True, return_dict=False
    )
    assert TemplateRenderer(folder).render(messages, []) == expected


TAILS = [
    [user("next")],
    [tool("a.py", "call_0")],
    [tool("a.py", "call_0"), tool("b.py")],
    [tool("a.py", "call_0"), user("<system-reminder>be brief</system-reminder>")],
    [user("one"), user("two")],
]


@pytest.mark.parametrize("tail", TAILS, ids=range(len(TAILS)))
def test_a_bridge_after_a_canonical_answer_is_the_full_render(plain: TemplateRenderer, tail: list[Message]) -> None:
    history = [system(), user()]
    prompt = plain.render(history, TOOLS)
    sampled = plain.encode("I look.\n" + call_text("ls") + "<|im_end|>")
    answer = assistant("I look.", ("bash", {"command": "ls"}, "call_0"))
    new = plain.bridge(prompt, sampled, [*history, answer], tail, TOOLS)
    assert new is not None
    assert prompt + sampled + new == plain.render([*history, answer, *tail], TOOLS)


def test_a_bridge_only_needs_the_end_of_the_prompt(plain: TemplateRenderer) -> None:
    prompt = plain.render([system("long " * 500), user()], TOOLS)
    sampled = plain.encode("ok<|im_end|>")
    history = [system(), user(), assistant("ok")]
    assert plain.bridge(prompt, sampled, history, [user()], TOOLS) == plain.bridge(
        [], sampled, history, [user()], TOOLS
    )


def test_a_missing_end_of_turn_is_among_the_new_ids(plain: TemplateRenderer) -> None:
    whole = plain.encode("one two<|im_end|>")
    history = [user(), assistant("one two")]
    with_end = plain.bridge([], whole, history, [user("more")], [])
    without = plain.bridge([], whole[:-1], history, [user("more")], [])
    assert with_end is not None
    assert without == [whole[-1], *with_end]


def test_a_thought_that_ran_out_of_tokens_is_closed(thinking: TemplateRenderer) -> None:
    cut = thinking.encode("I think that")
    new = thinking.bridge([], cut, [user(), assistant("", reasoning="I think that")], [user("more")], [])
    assert new is not None
    assert thinking.decode(new) == (
        "\n</think>\n\n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_a_bridge_keeps_thoughts_that_a_full_render_drops(thinking: TemplateRenderer) -> None:
    prompt = thinking.render([user()], [])
    sampled = thinking.encode("deep\n</think>\n\nAnswer.<|im_end|>")
    history = [user(), assistant("Answer.", reasoning="deep")]
    new = thinking.bridge(prompt, sampled, history, [user("next")], [])
    assert new is not None
    assert "deep" in thinking.decode(prompt + sampled + new)
    assert "deep" not in thinking.decode(thinking.render([*history, user("next")], []))


def test_a_tail_the_template_refuses_is_not_bridged(plain: TemplateRenderer) -> None:
    assert plain.bridge([], plain.encode("a<|im_end|>"), [user(), assistant("a")], [system("mid")], []) is None
    with pytest.raises(UsageError, match="must come first"):
        plain.render([user(), system("mid")], [])


def test_a_tail_or_tool_that_imitates_the_stand_in_is_refused_or_right(plain: TemplateRenderer) -> None:
    from rollwright.tokens import render_template

    mark = render_template._MARK
    sampled = plain.encode("a<|im_end|>")
    history = [user(), assistant("a")]
    new = plain.bridge([], sampled, history, [user(mark)], [])
    assert new is not None
    assert plain.decode(new) == f"\n<|im_start|>user\n{mark}<|im_end|>\n<|im_start|>assistant\n"
    assert plain.bridge([], sampled, history, [user()], [ToolSpec(name="t", description=mark)]) is None


OPENER_ENDS_TURN = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{ '<tool_response>' }}{%- else %}{{ '<|im_' + "
    "('start' if m.role == 'user' else 'end') + '|>' }}{%- endif %}{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_end|>' }}{%- endif %}"
)


def test_where_the_next_opener_ends_a_turn_it_is_not_said_twice(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    (folder / "chat_template.jinja").write_text(OPENER_ENDS_TURN)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = TemplateRenderer(folder)
    opener, result = renderer.encode("<|im_start|>")[0], renderer.encode("<tool_response>")[0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [opener, result]}))
    renderer = TemplateRenderer(folder)
    assert renderer.stop_ids >= {opener, result}
    history = [user(), assistant("a")]
    said = renderer.encode("a")
    stopped = renderer.bridge([], [*said, opener], history, [user("b")], [])
    cut = renderer.bridge([], said, history, [user("b")], [])
    assert stopped == renderer.encode("b<|im_end|>")
    assert cut == [opener, *stopped]
    # The policy ended its turn for a tool, and a person speaks: these ids cannot be continued.
    assert renderer.bridge([], [*said, result], history, [user("b")], []) is None


CALLS = {
    "hermes": r"""{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- (function.arguments | tojson) + '}\n</tool_call>' }}""",
    None: r"""{{- '<tool_call>' + function.name + '\n<arg_key>x</arg_key>\n' }}
{{- '<arg_value>y</arg_value>\n</tool_call>' }}""",
}


@pytest.mark.parametrize("parser", CALLS)
def test_the_tool_parser_is_the_one_that_reads_what_the_template_writes(
    parser: str | None, plain_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    path = folder / "chat_template.jinja"
    source = path.read_text()
    start, end = source.index("{%- macro call("), source.index("{%- set start")
    macro = "{%- macro call(function) -%}" + CALLS[parser] + "{%- endmacro -%}\n"
    path.write_text(source[:start] + macro + source[end:])
    renderer = TemplateRenderer(folder)
    assert renderer.serves() == (parser is not None)
    if parser is None:
        with pytest.raises(UsageError, match="no tool parser fits"):
            renderer.render([user()], TOOLS)
    else:
        text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
        assert [call.name for call in renderer.parse(renderer.encode(text), TOOLS).tool_calls] == ["bash"]


def test_a_template_for_conversations_with_tools_only_is_served(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    path = folder / "chat_template.jinja"
    path.write_text("{%- for t in tools %}{%- endfor %}" + path.read_text())
    renderer = load_renderer(folder, kind="template")
    assert isinstance(renderer, TemplateRenderer)
    assert renderer.serves()
    with pytest.raises(UsageError, match="not iterable"):
        renderer.render([user()], [])


def test_tools_without_a_parser_are_refused(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    (folder / "chat_template.jinja").write_text(OPENER_ENDS_TURN)
    with pytest.raises(UsageError, match="tool_parser"):
        TemplateRenderer(folder).render([user()], TOOLS)


def test_a_broken_folder_is_one_clear_error(plain_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_renderer(tmp_path)
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_renderer(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load_renderer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_renderer(folder)


def test_a_wrong_setting_is_named(plain_folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown tool_parser 'x'"):
        load_renderer(plain_folder, tool_parser="x")
    with pytest.raises(ConfigError, match="unknown reasoning_parser 'x'"):
        load_renderer(plain_folder, reasoning_parser="x")
    with pytest.raises(ConfigError, match="leave tool_parser"):
        load_renderer(plain_folder, kind="renderers", tool_parser="hermes")
    with pytest.raises(ConfigError, match="no family"):
        load_renderer(plain_folder, kind="renderers")


def test_a_template_inside_the_configuration_is_found(plain_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "own")
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for found in (source, [{"name": "default", "template": "x"}, {"name": "tool_use", "template": source}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": found}))
        assert fingerprint(folder) == fingerprint(plain_folder)


def test_the_fingerprint_changes_with_the_template(plain: TemplateRenderer, thinking: TemplateRenderer) -> None:
    assert plain.fingerprint != thinking.fingerprint


def test_one_renderer_serves_many_threads(plain: TemplateRenderer) -> None:
    text = "def f(x):\n    return x\n" * 50
    expected = plain.render([user(text)], TOOLS)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            if plain.render([user(text)], TOOLS) != expected or plain.decode(expected) == "":
                wrong.append("differs")
            if plain.bridge([], expected[-1:], [user(), assistant()], [user(text)], TOOLS) is None:
                wrong.append("refused")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_loading_a_template_brings_no_heavy_library_with_it(plain_folder: Path) -> None:
    script = (
        "import sys, pathlib; from rollwright.tokens.render import load_renderer; "
        "load_renderer(pathlib.Path(sys.argv[1])); "
        "print(*{'transformers', 'renderers', 'openai', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(plain_folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_auto_is_the_template_where_it_bridges(plain_folder: Path) -> None:
    assert isinstance(load_renderer(plain_folder), TemplateRenderer)


@pytest.mark.network
def test_with_the_real_qwen3_both_renderers_agree(qwen3_folder: Path) -> None:
    by_template = TemplateRenderer(qwen3_folder)
    by_family = load_renderer(qwen3_folder, kind="renderers")
    assert isinstance(by_family, RenderersRenderer)
    assert by_family.name == "renderers:qwen3"
    assert by_family.fingerprint == by_template.fingerprint
    for messages in CONVERSATIONS:
        assert by_family.render(messages, TOOLS) == by_template.render(messages, TOOLS)
    sampled = by_template.encode(
        'ok\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    )
    prompt = by_template.render([user()], TOOLS)
    history = [user(), assistant("ok", ("bash", {"command": "ls"}, "call_0"))]
    assert by_family.parse(sampled, TOOLS) == by_template.parse(sampled, TOOLS)
    for tail in TAILS:
        new = by_template.bridge(prompt, sampled, history, tail, TOOLS)
        assert new is not None
        assert by_family.bridge(prompt, sampled, history, tail, TOOLS) == new
