"""A tokenizer small enough to be made in a test, in the shape of the Qwen3-Coder family's."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["tiny_tokenizer"]

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Repeated, so that the words of this format become tokens and a re-tokenisation can differ from what was sampled.
_CORPUS = (
    "system\nYou are a coding agent. You have these functions:",
    "user\nFix the bug in the file and run the tests. The tests must pass.",
    "assistant\nI will look at the file first. The fix is done, all tests pass now.",
    "\n<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>\n",
    "\n<function=edit>\n<parameter=path>\nsrc/module.py\n</parameter>\n<parameter=old>\nreturn a - b\n</parameter>\n",
    '{"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}',
    '{"name": "bash", "arguments": {"command": "cat file.py", "timeout": 10, "quiet": true}}',
    "def add(a, b):\n    return a - b\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
    "\n\n\n\n  \n    \n        \n",
)

_TOOLS = r"""{%- macro offer(tools) -%}
{{- "# Tools\n\nYou have these functions:\n\n<tools>" }}
{%- for tool in tools %}{{- "\n" + (tool | tojson) }}{%- endfor %}
{{- "\n</tools>\n\nCall one like this:\n\n" }}
{{- "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>" }}
{%- endmacro -%}
{%- macro call(function) -%}
{{- "<tool_call>\n<function=" + function.name + ">\n" }}
{%- for key, value in function.arguments | items %}
{{- "<parameter=" + key + ">\n" }}
{%- if value is string %}{{- value }}{%- else %}{{- value | tojson }}{%- endif %}
{{- "\n</parameter>\n" }}
{%- endfor %}
{{- "</function>\n</tool_call>" }}
{%- endmacro -%}
{%- set start = messages[0].content if messages[0].role == "system" else "" %}
{%- if start or tools %}
{{- "<|im_start|>system\n" + start }}
{%- if tools %}{{- ("\n\n" if start else "") + offer(tools) }}{%- endif %}
{{- "<|im_end|>\n" }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == "user" %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == "system" %}
{%- if not loop.first %}{{- raise_exception("the system message must come first") }}{%- endif %}
{%- elif m.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}{{- "<|im_start|>user\n" }}{%- endif %}
{{- "<tool_response>\n" + m.content + "\n</tool_response>\n" }}
{%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\n" }}{%- endif %}
{%- elif m.role == "assistant" %}
{{- "<|im_start|>assistant\n" }}
"""

_TURN = r"""{{- m.content | trim }}
{%- for tool_call in m.tool_calls or [] %}
{{- ("\n" if m.content | trim or not loop.first else "") + call(tool_call.function) }}
{%- endfor %}
{{- "<|im_end|>\n" }}
{%- else %}
{{- "<|im_start|>user\n" + m.content + "<|im_end|>\n" }}
{%- endif %}
{%- endfor %}
"""

_PLAIN = (
    _TOOLS
    + _TURN
    + r"""{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}
"""
)

# Like the family's thinking models: `<think>` is opened in the prompt, thoughts before the last user message go.
_THINKING = (
    _TOOLS
    + r"""{%- if loop.index0 > last.user and (loop.last or m.reasoning_content) %}
{{- "<think>\n" + (m.reasoning_content or "") | trim + "\n</think>\n\n" }}
{%- endif %}
"""
    + _TURN
    + r"""{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n<think>\n" }}{%- endif %}
"""
)


def tiny_tokenizer(folder: Path, *, thinking: bool = False) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` into `folder`; the same each time.

    A byte-level BPE of some 600 tokens with Qwen's special tokens, and a template with tools and `qwen3_coder` calls.
    With `thinking` its generation prompt opens `<think>` and old thoughts are left out of full renders.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in _CORPUS for _ in range(8)], trainer)
    added = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL]
    added += [AddedToken(text, special=False, normalized=False) for text in _MARKUP]
    tokenizer.add_tokens(added)  # pyright: ignore[reportUnknownMemberType] - a bare `list` in the library's stub

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(_THINKING if thinking else _PLAIN)
    return folder
