"""Per-token weight versions as spans."""

from __future__ import annotations

from collections.abc import Sequence

from rollwright.types import VersionSpan

__all__ = ["version_spans"]


def version_spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions; they cover `[0, len(versions))` without gaps."""
    spans: list[VersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(VersionSpan(version, index, index + 1))
    return tuple(spans)
