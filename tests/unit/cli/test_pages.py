"""docs/cli says of every verb what its `--help` says."""

from __future__ import annotations

import re

import pytest

from support.cli_pages import PAGES, page_of, renewed, told, verbs

HOW = "run `python tests/support/cli_pages.py` (with tests on PYTHONPATH)"


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_every_verb_has_a_page_with_its_arguments_options_and_defaults(verb: str) -> None:
    page = page_of(verb)
    assert page.exists(), f"write {page.name}, with the lines `<!-- help: {verb} -->` and `<!-- end of help -->`"
    text = page.read_text()
    assert verb in told(text), f"{page.name} has no block for {verb}"
    assert renewed(text) == text, HOW


def test_the_pages_tell_of_no_verb_that_is_not_there() -> None:
    for page in PAGES.glob("*.md"):
        assert told(page.read_text()) <= set(verbs()), page.name


def test_every_page_is_listed_and_begins_with_its_verb() -> None:
    listed = set(re.findall(r"\]\(([a-z0-9-]+)\.md\)", (PAGES / "README.md").read_text()))
    assert listed == {page.stem for page in PAGES.glob("*.md")} - {"README"}
    for name in listed:
        assert (PAGES / f"{name}.md").read_text().startswith(f"# rollwright {name}\n")


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_every_verb_has_help_with_examples_that_call_it(verb: str) -> None:
    about = verbs()[verb]
    assert about.help_epilogue is not None
    examples = [line.strip() for line in about.help_epilogue.splitlines()[2:]]
    assert examples
    assert all(f"rollwright {verb}" in line for line in examples)
    assert all(argument.parameter.help for argument in about.assemble_argument_collection(parse_docstring=True))
