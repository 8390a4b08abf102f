"""Every page as a function of a path and a query. Knows nothing of HTTP, so that files can be made of it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollwright.viewer.library import Library
from rollwright.viewer.links import is_segment
from rollwright.viewer.pages.compare import compare_page
from rollwright.viewer.pages.rollout import files_of, rollout_page
from rollwright.viewer.pages.rollouts import rollouts_page
from rollwright.viewer.pages.run import run_page
from rollwright.viewer.pages.runs import runs_page
from rollwright.viewer.pages.site import NotFound, Site
from rollwright.viewer.pages.tasks import tasks_page
from rollwright.viewer.pages.tokens import tokens_page

__all__ = ["NotFound", "Pages"]


@dataclass(frozen=True, slots=True)
class Pages:
    """All pages of a library. Thread-safe; a page may take as long as reading its files does."""

    site: Site

    @classmethod
    def of(cls, library: Library, *, files: bool = False, tokenizer: Path | None = None) -> Pages:
        """`files`: pages that need no server. `tokenizer`: a folder in the place of the runs' own."""
        return cls(Site(library, files=files, tokenizer=tokenizer))

    def html(self, parts: tuple[str, ...], query: Mapping[str, str]) -> str:
        """The page at a path. Raises `NotFound`."""
        if not all(map(is_segment, parts)):
            raise NotFound("no such page")
        site = self.site
        match parts:
            case ():
                return runs_page(site)
            case ("runs", run):
                return run_page(site, run)
            case ("runs", run, "rollouts"):
                return rollouts_page(site, run, query)
            case ("runs", run, "tasks"):
                return tasks_page(site, run, query)
            case ("runs", run, "rollouts", name):
                return rollout_page(site, run, name, leaf=None)
            case ("runs", run, "rollouts", name, "branch", leaf):
                return rollout_page(site, run, name, leaf=leaf)
            case ("runs", run, "rollouts", name, "tokens"):
                return tokens_page(site, run, name, leaf=None, page="1")
            case ("runs", run, "rollouts", name, "tokens", leaf):
                return tokens_page(site, run, name, leaf=leaf, page="1")
            case ("runs", run, "rollouts", name, "tokens", leaf, page):
                return tokens_page(site, run, name, leaf=leaf, page=page)
            case ("compare", left, right):
                return compare_page(site, left, right, query)
            case _:
                raise NotFound("no such page")

    def file(self, parts: tuple[str, ...]) -> Path:
        """A rollout's file, as it is. Raises `NotFound`."""
        match parts:
            case ("runs", run, "rollouts", name, "files", file) if all(map(is_segment, parts)):
                return files_of(self.site, run, name, file)
            case _:
                raise NotFound("no such file")

    def error(self, parts: tuple[str, ...], message: str) -> str:
        """What is shown where there is no page."""
        return self.site.render("error.html", parts, title="Nothing to show", message=message)

    def state(self, parts: tuple[str, ...]) -> str:
        """Changes whenever the page at this path may look different."""
        return self.site.state(parts)
