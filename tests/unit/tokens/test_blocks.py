"""A prompt encoded block by block has the ids it has as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.blocks import BlockCache

WORDS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "\n", "  ", "return a - b", "é", "e\u0301"]
long_text = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"))


def cache_of(tokenizer: Tokenizer, *more: AddedToken) -> tuple[BlockCache, list[str]]:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return tokenizer.encode(text, add_special_tokens=False).ids

    return BlockCache(encode, [*tokenizer.get_added_tokens_decoder().values(), *more]), asked


@given(parts=st.lists(long_text, min_size=1, max_size=4))
def test_the_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    cache, _ = cache_of(tokenizer)
    text = ("Fix the bug in the file. " * 200).join(parts)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert cache.encode(text) == whole
    assert cache.encode(text) == whole, "also when its blocks are known"


def test_what_two_conversations_begin_with_is_encoded_once(tokenizer: Tokenizer) -> None:
    cache, asked = cache_of(tokenizer)
    system = "<|im_start|>system\n" + "You are a coding agent. " * 400 + "<|im_end|>\n"
    for task in ("one", "two", "three"):
        cache.encode(system + f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n")
    assert sum(len(text) > 4096 for text in asked) == 1
    assert sum(map(len, asked)) < 1.1 * len(system)


def test_a_tokenizer_whose_tokens_look_around_is_asked_for_the_whole(tokenizer: Tokenizer) -> None:
    cache, asked = cache_of(tokenizer, AddedToken("<mask>", lstrip=True))
    text = ("word " * 2000 + "<|im_end|>\n") * 2
    assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert asked == [text]


def test_memory_does_not_grow_with_the_number_of_prompts(tokenizer: Tokenizer) -> None:
    asked: list[str] = []
    cache = BlockCache(lambda text: asked.append(text) or [len(asked)], [])
    first = "x" * 100_000
    assert cache.encode(first) == [1]
    for number in range(50):
        cache.encode(f"{number} " + "y" * 100_000)
    assert cache.encode(first) == [52], "the oldest is gone"


def test_the_caller_may_change_what_it_gets(tokenizer: Tokenizer) -> None:
    cache, _ = cache_of(tokenizer)
    text = "word " * 2000
    first = cache.encode(text)
    first.append(-1)
    assert cache.encode(text) == first[:-1]
