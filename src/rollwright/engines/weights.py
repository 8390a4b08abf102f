"""Which weights a model folder holds: a digest that any training step changes and that takes milliseconds."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from rollwright.errors import ConfigError

__all__ = ["weights_digest"]

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "config.json")
_WHOLE = 64 << 20
"""Bytes; of larger files the header and samples are read."""
_HEADER = 1 << 20
_SAMPLES, _SAMPLE = 256, 4096


def weights_digest(folder: Path) -> str:
    """32 hex digits over names, sizes and contents. A change of a few numbers in a large file may go unseen; one of
    all of them, as a step of training makes it, does not. Raises `ConfigError` for files that cannot be read."""
    digest = blake2b(digest_size=16)
    try:
        for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_WHOLE if size <= _WHOLE else _HEADER))
                for number in range(0 if size <= _WHOLE else _SAMPLES):
                    file.seek(_HEADER + (size - _HEADER - _SAMPLE) * number // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise ConfigError(
            f"engine.local.model: {folder} cannot be read: {error.strerror}", field="engine.local.model"
        ) from error
    return digest.hexdigest()
