"""The same pages as files: a folder that any web server, or a browser alone, can show."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rollwright.errors import ConfigError, StoreError
from rollwright.viewer.library import Library, ShownRun
from rollwright.viewer.links import is_segment
from rollwright.viewer.pages import NotFound, Pages
from rollwright.viewer.pages.rollout import BUNDLED, open_rollout
from rollwright.viewer.pages.site import STATIC, STATIC_FILES
from rollwright.viewer.pages.tokens import token_pages

__all__ = ["write_bundle"]


def write_bundle(
    library: Library, target: Path, *, tokenizer: Path | None = None, progress: Callable[[int, int], None]
) -> int:
    """Write every page of every run into the new folder `target`; how many. `progress`: rollouts done, rollouts in all.

    Raises `ConfigError` when the folder has content, `StoreError` when it cannot be written.
    """
    pages = Pages.of(library, files=True, tokenizer=tokenizer)
    try:
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} is not empty; choose a new folder for --bundle")
        (target / "static").mkdir(parents=True)
        for name in STATIC_FILES:
            shutil.copyfile(STATIC / name, target / "static" / name)
        return _write(pages, library, target, progress)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from error


def _write(pages: Pages, library: Library, target: Path, progress: Callable[[int, int], None]) -> int:
    count = done = 0
    runs = library.runs()
    for shown in runs:
        shown.index.sync()
        while shown.index.read_facts(400):
            pass
    total = sum(shown.index.count() for shown in runs)
    for parts in _overviews(pages, runs):
        count += _page(pages, target, parts)
    for shown in runs:
        for row in shown.index.rows():
            progress(done, total)
            done += 1
            if is_segment(row.rollout):
                for parts in _of_rollout(pages, shown, row.rollout):
                    count += _page(pages, target, parts)
                _files(pages, target, shown, row.rollout)
    progress(done, total)
    return count


def _overviews(pages: Pages, runs: list[ShownRun]) -> Iterator[tuple[str, ...]]:
    yield ()
    for shown in runs:
        yield ("runs", shown.name)
        yield ("runs", shown.name, "rollouts")
        yield ("runs", shown.name, "tasks")
        for other in pages.site.comparable(shown.name):
            yield ("compare", other, shown.name)


def _of_rollout(pages: Pages, shown: ShownRun, name: str) -> Iterator[tuple[str, ...]]:
    here = ("runs", shown.name, "rollouts", name)
    yield here
    logged, _ = open_rollout(pages.site, shown.name, name).turn_log()
    if logged is None or not logged.trajectory.turns:
        return
    yield (*here, "tokens")
    for leaf in logged.trajectory.leaves():
        yield (*here, "branch", str(leaf))
        for page in range(1, len(token_pages(logged.trajectory, leaf)) + 1):
            yield (*here, "tokens", str(leaf), *([str(page)] if page > 1 else []))


def _page(pages: Pages, target: Path, parts: tuple[str, ...]) -> int:
    folder = target.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(pages.html(parts, {}), encoding="utf-8")
    return 1


def _files(pages: Pages, target: Path, shown: ShownRun, name: str) -> None:
    here = ("runs", shown.name, "rollouts", name, "files")
    for file in BUNDLED:
        try:
            source = pages.file((*here, file))
        except NotFound:
            continue
        folder = target.joinpath(*here)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / file)
