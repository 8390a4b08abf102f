"""The policy's tokenizer: a `tokenizer.json` and the settings beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from tokenizers import Tokenizer as _Tokenizer

from rollwright.errors import ConfigError
from rollwright.tokens.blocks import BlockCache
from rollwright.tokens.marks import Marks, control_tokens

__all__ = ["SpecialText", "TextTokenizer", "fingerprint"]

SpecialText: TypeAlias = Literal["plain", "special"]
"""What text of a message that spells a control token becomes: plain text, so that no message can imitate the template;
or that token, as `transformers` has it."""

_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer:
    """Text ↔ ids, special tokens recognised, nothing added. Thread-safe: nothing here changes the tokenizer.

    (The "already borrowed" trouble of shared fast tokenizers comes from switching truncation or padding per call.)
    """

    def __init__(self, folder: Path, *, special_text: SpecialText = "plain") -> None:
        from rollwright.tokens.template import template_source

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json", path=str(folder))
        try:
            self._tokenizer = _Tokenizer.from_file(str(path))
        # The library raises a bare Exception for any broken file.
        except Exception as error:
            raise ConfigError(f"{path} is not a tokenizer: {error}", path=str(path)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: index for index, token in added.items()}
        """Text → id of the tokens that are recognised whole."""
        self._blocks = BlockCache(self.encode, added.values())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.special: dict[str, str] = {
            name: text for name in _TOKEN_NAMES if (text := _token_text(self.config.get(name))) is not None
        }
        """`eos_token` and the like → text, as templates know them."""
        self.fingerprint = fingerprint(folder, special_text=special_text)
        control = control_tokens(added.values(), template_source(folder))
        self._marks = Marks(path, control) if control and special_text == "plain" else None

    def encode(self, text: str) -> list[int]:
        # `encode` would hold the interpreter for as long as it takes, 50 ms for a first prompt; this does not.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def mark(self, value: Any) -> Any:
        """A message or tool in the form templates read, so that `encode_marked` knows its texts from the template's."""
        return value if self._marks is None else self._marks.put(value)

    def encode_marked(self, text: str, *, begins: bool = False) -> list[int]:
        """`encode` of what a template made of marked messages: special tokens are the template's alone.

        `begins`: with it a conversation begins, and many begin alike.
        """
        if self._marks is None or not self._marks.are_in(text):
            return self._blocks.encode(text) if begins else self.encode(text)
        return self._marks.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens shown; ids outside the vocabulary are left out."""
        size = self.vocab_size
        known = list(ids)
        if known and not 0 <= min(known) <= max(known) < size:
            known = [index for index in known if 0 <= index < size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def id_of(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def end_ids(self) -> set[int]:
        """Ids the model's own files say end a reply: `eos_token` and `generation_config.json`."""
        found: set[int] = set()
        eos = self.special.get("eos_token")
        if eos is not None and (index := self.id_of(eos)) is not None:
            found.add(index)
        listed: Any = read_json(self.folder / "generation_config.json").get("eos_token_id")
        for value in cast("list[Any]", listed) if isinstance(listed, list) else [listed]:
            if isinstance(value, int):
                found.add(value)
        return found


def fingerprint(folder: Path, *, special_text: SpecialText = "plain") -> str:
    """Digest of the folder's tokenizer and chat template, and of how they are used (32 hex digits); what a `Renderer`
    calls its fingerprint."""
    from rollwright.tokens.template import template_source

    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "tokenizer.json").read_bytes())
    digest.update(b"\0")
    digest.update((template_source(folder) or "").encode())
    digest.update(b"\0" + special_text.encode())
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file. Raises `ConfigError` when it is something else."""
    if not path.is_file():
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", path=str(path))
    return cast("dict[str, Any]", value)


def _token_text(value: Any) -> str | None:
    """A token as the configuration has it: text, or an object with `content`."""
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("content")
    return value if isinstance(value, str) else None
