"""The docs describe main: every setting is listed with its default, every link leads somewhere."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rollwright import plugins
from rollwright.cli import app
from rollwright.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))


def settings() -> dict[str, object]:
    found: dict[str, object] = {}
    for table, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for name, inner in field.annotation.model_fields.items():
                if name != "options":
                    found[f"{table}.{name}"] = inner.default
    return found


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_every_setting_is_documented_and_no_other() -> None:
    assert set(documented()) == set(settings())


@pytest.mark.parametrize("name", sorted(settings()))
def test_the_documented_default_is_the_default(name: str) -> None:
    default, text = settings()[name], documented()[name]
    if default is PydanticUndefined:
        assert text == "required"
    elif default is None:
        assert text == "none"
    else:
        value = tomllib.loads(f"value = {text.strip('`')}")["value"]
        default = list(default) if isinstance(default, tuple) else default
        assert value == (str(default) if isinstance(default, Path) else default)
        assert type(value) is (str if isinstance(default, Path) else type(default)) or float(str(default)) == value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_of_us_is_there(page: Path) -> None:
    for module, names in re.findall(r"^from (rollwright[\w.]*) import (.+)$", page.read_text(), re.MULTILINE):
        for name in names.split(", "):
            there = hasattr(importlib.import_module(module), name)
            assert there or importlib.import_module(f"{module}.{name}"), f"{page.name} imports {module}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page: Path) -> None:
    verbs = {name for name in app if not name.startswith("-")}
    said = set(re.findall(r"(?:^ *|`)rollwright ([a-z0-9][a-z0-9-]*)", page.read_text(), re.MULTILINE))
    assert said <= verbs, f"{page.name} tells of {sorted(said - verbs)}"


def test_the_readmes_picture_names_every_module_and_no_other() -> None:
    picture = (ROOT / "README.md").read_text().partition("```\nsrc/rollwright/\n")[2].partition("\nexamples/")[0]
    named = {name for line in picture.splitlines() for name in re.findall(r"[a-z0-9_]+(?:\.py|/)", line[:53])}
    there = {
        path.name if path.suffix else f"{path.name}/"
        for path in (ROOT / "src/rollwright").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert named == there


def test_the_readme_leads_to_every_page() -> None:
    readme, verbs = (ROOT / "README.md").read_text(), (ROOT / "docs/cli/README.md").read_text()
    for page in PAGES[3:]:
        known = f"({page.name})" in verbs if page.parent.name == "cli" and page.name != "README.md" else None
        assert known or f"({page.relative_to(ROOT)})" in readme, f"nothing leads to {page.relative_to(ROOT)}"


def test_list_names_every_kind_of_plugin() -> None:
    page = (ROOT / "docs/cli/list.md").read_text()
    assert [kind for kind in plugins.KINDS if kind not in page] == []


def test_agents_md_stays_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 80
