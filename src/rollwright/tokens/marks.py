"""Text of messages that spells a control token: marked before a template writes it, plain text when it is encoded.

A template puts contents and control tokens into one text. Without marks the tokenizer could not tell them apart: a file
that the agent reads could end its message and begin one of another role.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson
from tokenizers import AddedToken, Tokenizer

__all__ = ["Marks", "control_tokens"]

_MARK = "\ufdd0"
"""A character that is none, by Unicode's own word; where a text has it, it becomes `_SELF`."""
_BREAK, _SELF = _MARK + "b", _MARK + "e"
_ESCAPED = r"\ufdd0"
"""How a template's `tojson` may write it."""
_MARKS = re.compile(r"(\ufdd0|\\ufdd0)([be])")
_MARKUP = re.compile(r"<[|｜].+[|｜]>|</?\w*(think|tool|function|arg)\w*>", re.DOTALL)


def control_tokens(added: Iterable[AddedToken], template: str | None) -> frozenset[str]:
    """Of the tokens that are recognised whole, those that structure a conversation: special ones, those that look like
    it, those the template writes. (Others are runs of spaces, tags of HTML and the like.)"""
    found: set[str] = set()
    for token in added:
        text: str = token.content
        written = template is not None and text in template
        if len(text.strip()) > 1 and (token.special or written or _MARKUP.fullmatch(text)):
            found.add(text)
    return frozenset(found)


class Marks:
    """Marks contents, and encodes what a template made of them. Thread-safe."""

    def __init__(self, tokenizer_file: Path, control: frozenset[str]) -> None:
        self._file = tokenizer_file
        self._control = tuple(sorted(control, key=len, reverse=True))
        exact = "|".join(map(re.escape, self._control))
        self._starts = re.compile(f"(?s:(?=(?:{exact}))(.))")
        self._exact = re.compile(exact)
        # Unguessable, because the text it must not occur in is anybody's.
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ufdd1{nonce}.{number}\ufdd1" for number, text in enumerate(self._control)}
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None

    def put(self, value: Any) -> Any:
        """A message or a tool as templates read it, each control token that its texts spell broken by a mark."""
        if isinstance(value, str):
            return self._put(value)
        if isinstance(value, Mapping):
            return {self._put(key): self.put(item) for key, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, Sequence):
            return [self.put(item) for item in cast("Sequence[Any]", value)]
        return value

    @staticmethod
    def are_in(text: str) -> bool:
        return _MARK in text or _ESCAPED in text

    def encode(self, text: str) -> list[int]:
        """Ids of a text with marks: only control tokens without a mark are these."""
        named = self._exact.sub(lambda found: self._names[found[0]], text)
        plain = _MARKS.sub(lambda found: "" if found[2] == "b" else found[1], named)
        return self._tokenizer().encode_batch_fast([plain], add_special_tokens=False)[0].ids

    def _put(self, text: str) -> str:
        if _MARK in text:
            text = text.replace(_MARK, _SELF)
        if _ESCAPED in text:
            text = text.replace(_ESCAPED, rf"\u{_BREAK}fdd0")
        if any(token in text for token in self._control):
            text = self._starts.sub(rf"\g<1>{_BREAK}", text)
        return text

    def _tokenizer(self) -> Tokenizer:
        """The same, but that its control tokens have names no text can spell. Made when the first text needs it: few
        do, and it takes as much memory as the other."""
        with self._lock:
            if self._loaded is None:
                self._loaded = _renamed(self._file, self._names)
            return self._loaded


def _renamed(file: Path, names: Mapping[str, str]) -> Tokenizer:
    data: dict[str, Any] = orjson.loads(file.read_bytes())
    added: list[dict[str, Any]] = data.get("added_tokens") or []
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    model: dict[str, Any] = data["model"]
    vocabulary: Any = model["vocab"]
    # Where a token is in the vocabulary too, its id comes from there.
    if isinstance(vocabulary, dict):
        pieces = cast("dict[str, int]", vocabulary)
        model["vocab"] = {names.get(piece, piece): index for piece, index in pieces.items()}
    else:
        scored = cast("list[list[Any]]", vocabulary)
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in scored]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    tokenizer = Tokenizer.from_str(orjson.dumps(data).decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
