"""Drawing: a canvas of escaped SVG elements, and axes. Colours are the style sheet's, by class."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log10

from markupsafe import Markup

from rollwright.viewer.text import clean

__all__ = ["Axis", "Canvas", "nice_ticks", "short", "time_ticks"]

Value = str | float | int


class Canvas:
    """Collects elements; attribute names are Python's (`stroke_width`, `class_`)."""

    def __init__(self, width: float, height: float, *, label: str) -> None:
        self.width = width
        self.height = height
        self._label = label
        self._parts: list[str] = []

    def put(self, name: str, text: str | None = None, *, title: str | None = None, **attributes: Value) -> None:
        """One element, with text and a hover title."""
        parts = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items())
        inner = "" if title is None else f"<title>{escape(clean(title))}</title>"
        inner += "" if text is None else escape(clean(text))
        self._parts.append(f"<{name}{parts}>{inner}</{name}>" if inner else f"<{name}{parts}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str) -> None:
        self.put("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)

    def rect(
        self, x: float, y: float, width: float, height: float, class_: str, *, title: str | None = None, rx: float = 0
    ) -> None:
        self.put("rect", title=title, x=x, y=y, width=max(width, 0), height=max(height, 0), class_=class_, rx=rx)

    def text(self, x: float, y: float, text: str, class_: str = "tick", *, anchor: str = "start") -> None:
        self.put("text", text, x=x, y=y, class_=class_, text_anchor=anchor)

    def open_link(self, href: str, label: str) -> None:
        self._parts.append(f'<a href="{escape(href)}" aria-label="{escape(clean(label))}">')

    def close_link(self) -> None:
        self._parts.append("</a>")

    def done(self) -> Markup:
        """The whole picture, as wide as its place."""
        return Markup(
            f'<svg viewBox="0 0 {_value(self.width)} {_value(self.height)}" role="img" '
            f'aria-label="{escape(clean(self._label))}" class="plot">{"".join(self._parts)}</svg>'
        )


class Axis:
    """Values to places along one direction."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two values."""
    if not (isfinite(low) and isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / most
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(step * n, 10) for n in range(first, floor(high / step + 1e-9) + 1)]


def time_ticks(end: float, most: int = 6) -> list[float]:
    """Round times from 0 on, in seconds: beyond a minute in whole parts of minutes, beyond an hour of hours."""
    for step in (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800):
        if end >= 90 and end / step <= most:
            return [float(step * n) for n in range(int(end // step) + 1)]
    return nice_ticks(0, end, most)


def short(value: float) -> str:
    """A number with three digits that matter: 0.25, 12, 1.2k, 3.4M."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_value(x)},{_value(y)}" for x, y in points)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: Value) -> str:
    return escape(clean(value)) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
