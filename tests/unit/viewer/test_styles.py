"""Light and dark can be read, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rollwright.viewer

HERE = Path(rollwright.viewer.__file__).parent
CSS = (HERE / "static" / "viewer.css").read_text()


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): ([^;]+);", block))


BLOCKS = [variables(block) for block in re.findall(r":root[^{]*\{([^}]*)\}", CSS)]
LIGHT, DARK, CHOSEN_DARK = BLOCKS
PAIRS = [
    *((ink, paper) for ink in ("ink", "soft", "faint", "accent-ink", "alarm") for paper in ("paper", "panel", "sunk")),
    ("accent-ink", "accent-soft"),
    ("alarm", "alarm-soft"),
    ("amber", "amber-soft"),
    ("plus", "panel"),
    ("minus", "panel"),
    *(("ink", f"h{level}") for level in range(1, 6)),
    *(("ink", f"w{place}") for place in range(6)),
]


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("ink", "paper"), PAIRS)
def test_text_stands_out_from_what_it_is_on(theme: dict[str, str], ink: str, paper: str) -> None:
    bright, dim = sorted((luminance(theme[ink]), luminance(theme[paper])), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= 4.5


def test_a_chosen_dark_is_the_systems_dark() -> None:
    assert DARK == CHOSEN_DARK
    assert set(LIGHT) == set(DARK)


@pytest.mark.parametrize(
    "path", sorted([*HERE.glob("templates/*"), *HERE.glob("static/*")]), ids=lambda path: path.name
)
def test_nothing_comes_from_elsewhere_and_no_page_has_code_in_it(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(", text)
    if path.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<script(?![^>]* src=)|\|\s*safe", text)
    if path.suffix == ".js":
        assert not re.search(r"\beval\b|new Function|\.innerHTML\s*=(?!=)|insertAdjacentHTML|document\.write", text)
