"""What all pages share: the runs, the templates, and how values are written."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rollwright import __version__
from rollwright.viewer.library import Library, ShownRun
from rollwright.viewer.links import Links, is_segment
from rollwright.viewer.plots import duration
from rollwright.viewer.stats import Estimate
from rollwright.viewer.svg import short
from rollwright.viewer.text import clean
from rollwright.viewer.tokenview import Pieces

__all__ = ["FILES_POLICY", "STATIC", "STATIC_FILES", "NotFound", "Site"]

_HERE = Path(__file__).parent.parent
STATIC = _HERE / "static"
STATIC_FILES = ("icon.svg", "theme.js", "viewer.css", "viewer.js")
FILES_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data: blob:; "
    "base-uri 'none'; form-action 'self' file:"
)
"""Content-Security-Policy of pages that are files; a server sends a stricter one as a header."""
_MOST_COMPARED = 10
_REMEMBERED = 256
_SHOWN_TEXT = 1 << 20

T = TypeVar("T")


class NotFound(LookupError):
    """There is no such page. `str()` says why, in a sentence."""


class Site:
    """Renders pages of a library."""

    def __init__(self, library: Library, *, files: bool, tokenizer: Path | None = None) -> None:
        self.library = library
        self.files = files
        self._tokenizer = tokenizer
        self._pieces: dict[tuple[str, str | None], Pieces] = {}
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._env = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_final,
        )
        filters = cast("dict[str, Callable[..., object]]", self._env.filters)  # pyright: ignore[reportUnknownMemberType]
        filters |= {
            "short": short,
            "duration": duration,
            "percent": _percent,
            "size": _size,
            "count": _count,
            "interval": _interval,
            "words": _words,
        }

    def render(self, template: str, here: tuple[str, ...], /, **values: Any) -> str:
        return self._env.get_template(template).render(
            link=Links(here, files=self.files),
            files=self.files,
            files_policy=FILES_POLICY,
            state="" if self.files else self.state(here),
            version=__version__,
            several=1 < len(self.library.runs()) <= (_MOST_COMPARED if self.files else 10**6),
            **values,
        )

    def run(self, name: str) -> ShownRun:
        """A run of the library, its index up to date. Raises `NotFound`."""
        shown = self.library.run(name)
        if shown is None:
            raise NotFound(f"there is no run {name} here")
        shown.index.sync()
        return shown

    def comparable(self, name: str) -> list[str]:
        """The runs that a run is offered to be compared with; as files there would be a page for each pair."""
        others = [shown.name for shown in self.library.runs() if shown.name != name]
        return [] if self.files and len(others) >= _MOST_COMPARED else others

    def state(self, parts: tuple[str, ...]) -> str:
        """Changes whenever the page at this path may look different."""
        if parts[:1] == ("runs",) and len(parts) > 1 and is_segment(parts[1]):
            shown = self.library.run(parts[1])
            return "" if shown is None else shown.state()
        if parts[:1] == ("compare",):
            both = [self.library.run(name) for name in parts[1:3] if is_segment(name)]
            return " ".join(str(shown.index.sync()) for shown in both if shown is not None)
        return " ".join(f"{shown.index.sync()}{shown.running:d}" for shown in self.library.runs())

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for this key before; the key holds everything it depends on."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            self._made[key] = made
            while len(self._made) > _REMEMBERED:
                self._made.popitem(last=False)
        return made

    def pieces(self, shown: ShownRun) -> Pieces:
        """The run's tokenizer; loaded once."""
        folder = self._tokenizer or shown.setting("policy.path")
        wanted = shown.setting("renderer.fingerprint", top=True)
        if not isinstance(folder, str | Path):
            return Pieces(None, "resolved.json does not say where the tokenizer is; give its folder with --tokenizer")
        key = (str(folder), wanted if isinstance(wanted, str) else None)
        with self._lock:
            if key not in self._pieces:
                self._pieces[key] = Pieces.load(Path(folder), key[1])
            return self._pieces[key]


def _final(value: Any) -> Any:
    """The last thing before a value is escaped: no string reaches a page uncleaned, whoever wrote it."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return clean(value if len(value) <= _SHOWN_TEXT else f"{value[:_SHOWN_TEXT]} …")
    return "–" if value is None else value


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if value in (0, 1) else f"{value:.1%}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _size(value: float) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _interval(estimate: Estimate | None, form: str = "number") -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    if form == "percent":
        return f"{_percent(estimate.low)} – {_percent(estimate.high)}"
    return f"{estimate.low:.3f} – {estimate.high:.3f}"


def _words(name: object) -> str:
    return str(name).replace("_", " ")
