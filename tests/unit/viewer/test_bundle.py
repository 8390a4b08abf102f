"""The pages as files: all of them, and nothing that needs a server."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from rollwright.errors import ConfigError
from rollwright.store import RunDir
from rollwright.testing.run_folder import build_run
from rollwright.viewer.bundle import write_bundle
from rollwright.viewer.library import Library
from support.hostile import hostile_run


def links(page: Path) -> list[Path]:
    """Files that a page's links and sources name."""
    found = re.findall(r'(?:href|src)="([^"]+)"', page.read_text())
    paths = [urlsplit(unescape(link)).path for link in found]
    return [page.parent / unquote(path) for path in paths if path]


def test_every_page_is_there_and_every_link_leads_to_a_file(tmp_path: Path, cache: Path) -> None:
    build_run(tmp_path / "one", tasks=3, attempts=3, seed=3)
    build_run(tmp_path / "two", tasks=3, attempts=3, seed=4, policy=tmp_path / "policy")
    library = Library([tmp_path / "one", tmp_path / "two"], cache)
    told: list[tuple[int, int]] = []
    count = write_bundle(library, tmp_path / "site", progress=lambda done, total: told.append((done, total)))
    library.close()
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) == count
    assert told[-1] == (18, 18)
    for page in pages:
        text = page.read_text()
        assert "Content-Security-Policy" in text
        assert "http://" not in text
        assert "EventSource" not in text
        for target in links(page):
            assert target.exists(), f"{page} links to {target}"
    names = {page.parent.relative_to(tmp_path / "site").as_posix() for page in pages}
    assert {".", "runs/one", "runs/two/rollouts", "runs/two/tasks", "compare/one/two", "compare/two/one"} <= names
    for run in ("one", "two"):
        for record in RunDir(tmp_path / run).records():
            assert f"runs/{run}/rollouts/{record.rollout}/tokens" in names
    assert not list((tmp_path / "site").rglob("turns.log"))


def test_names_with_signs_of_urls_and_html_lead_to_their_files(tmp_path: Path, cache: Path) -> None:
    run = hostile_run(tmp_path / "a #b?c%20 <i>")
    library = Library([run.path], cache)
    write_bundle(library, tmp_path / "site", progress=lambda done, total: None)
    library.close()
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        assert all(target.exists() for target in links(page)), page


def test_a_folder_with_content_is_left_alone(built: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        write_bundle(Library([built.path], None), tmp_path, progress=lambda done, total: None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder"):
        Library([tmp_path], None).check()
