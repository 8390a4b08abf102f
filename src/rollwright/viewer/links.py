"""URLs relative to the page they stand on: a token in the path and a folder on a disk then make no difference."""

from __future__ import annotations

from urllib.parse import quote, urlencode

__all__ = ["Links", "is_segment"]


def is_segment(name: str) -> bool:
    """Whether a name can be one part of a URL's path and of a folder's."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


class Links:
    """Links of one page."""

    def __init__(self, here: tuple[str, ...], *, files: bool) -> None:
        """`here`: the page's folder below the root. `files`: pages are `index.html` files, without a server."""
        self._up = "../" * len(here)
        self._here = here
        self._files = files

    def __call__(self, *parts: str, anchor: str = "", **query: str | int) -> str:
        """To a page."""
        path = self._path(parts)
        path += "/" if path and not path.endswith("/") else ""
        if self._files:
            path += "index.html"
        return (path or "./") + self._query(query) + (f"#{quote(anchor)}" if anchor else "")

    def file(self, *parts: str) -> str:
        """To a file."""
        return self._path(parts)

    def _path(self, parts: tuple[str, ...]) -> str:
        return self._up + "/".join(quote(part, safe="") for part in parts)

    def _query(self, query: dict[str, str | int]) -> str:
        told = {key: value for key, value in query.items() if value not in ("", 0)}
        return f"?{urlencode(told)}" if told else ""
