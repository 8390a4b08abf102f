"""Implementations are found by name, and their options are checked by their constructors' annotations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollwright import plugins
from rollwright.errors import ConfigError, PluginError


class Example:
    def __init__(
        self,
        *,
        renderer: str,
        folder: Path,
        other: Path | str | None = None,
        named: Mapping[str, Path] | None = None,
        count: int = 1,
    ) -> None:
        self.renderer, self.folder, self.other, self.named, self.count = renderer, folder, other, named, count


HERE = f"{__name__}:Example"


def make(options: dict[str, object], **given: object) -> Example:
    return plugins.make("engines", HERE, options, table="engine.example", base=Path("/base"), **given)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_options_are_converted_and_paths_are_taken_from_the_run_file() -> None:
    named = {"a/b:1": "z", "c": "/z"}
    made = make({"folder": "x", "other": "y", "count": "3", "named": named}, renderer="r", unused="u")
    assert made.named == {"a/b:1": Path("/base/z"), "c": Path("/z")}
    assert (made.folder, made.other, made.count, made.renderer) == (Path("/base/x"), Path("/base/y"), 3, "r")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"folder": "x", "cuont": 1}, r"\[engine\.example\] has no option 'cuont'\. Did you mean 'count'"),
        ({"folder": "x", "count": "many"}, r"\[engine\.example\] count: .*integer"),
        ({}, r"\[engine\.example\] needs the option 'folder'"),
        ({"folder": "x", "renderer": "mine"}, r"has no option 'renderer'"),
    ],
)
def test_a_wrong_option_names_table_and_option(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(options, renderer="r")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"'scaleswee'.*there are: .*scaleswe.*Did you mean 'scaleswe'"):
        plugins.find("graders", "scaleswee")


def test_a_path_that_cannot_be_imported_says_why() -> None:
    with pytest.raises(PluginError, match="no_such_module"):
        plugins.find("graders", "no_such_module:Grader")


def test_every_registered_name_can_be_imported() -> None:
    for kind in plugins.KINDS:
        for name in plugins.names(kind):
            assert isinstance(plugins.find(kind, name), type)


def test_a_name_of_two_packages_is_an_error_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwright.graders]\nscaleswe = rival:Grader\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"rival \(rival:Grader\) and rollwright"):
        plugins.find("graders", "scaleswe")
