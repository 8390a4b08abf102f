"""Long prompts encoded by block: the system prompt and tools with which all conversations of a run begin, once."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tokenizers import AddedToken

__all__ = ["BlockCache"]

_BLOCK = 4096
"""Characters; shorter texts are not worth remembering."""
_REMEMBERED = 4 << 20
"""Characters of all blocks together."""


class BlockCache:
    """`encode` of a text is that of its parts wherever an added token begins: a tokenizer takes those out first.
    Thread-safe."""

    def __init__(self, encode: Callable[[str], list[int]], added: Iterable[AddedToken]) -> None:
        self._encode = encode
        tokens = sorted(added, key=lambda token: len(token.content), reverse=True)
        # Where a token is taken out depends on what stands around it, a text is one block.
        fixed = not any(token.lstrip or token.single_word or token.normalized for token in tokens)
        self._tokens = re.compile("|".join(re.escape(token.content) for token in tokens)) if fixed and tokens else None
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        """The least recently used first."""
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        if len(text) < _BLOCK:
            return self._encode(text)
        ids: list[int] = []
        for block in self._blocks(text):
            ids += self._encode(block) if len(block) < _BLOCK else self._remembered(block)
        return ids

    def _blocks(self, text: str) -> list[str]:
        """Cut before an added token once a block is long enough, and before the next one, so that what differs between
        two conversations is in a block of its own."""
        if self._tokens is None:
            return [text]
        cuts = [0]
        for found in self._tokens.finditer(text):
            if found.start() - cuts[-1] >= _BLOCK:
                cuts.append(found.start())
        return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _remembered(self, block: str) -> array[int]:
        with self._lock:
            ids = self._known.get(block)
            if ids is not None:
                self._known.move_to_end(block)
                return ids
        ids = array("i", self._encode(block))
        with self._lock:
            if block not in self._known:
                self._known[block] = ids
                self._size += len(block)
            while self._size > _REMEMBERED:
                self._size -= len(self._known.popitem(last=False)[0])
        return ids
