"""What the token page says of each token is what `verify` says of them all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.gateway.log import read_turn_log
from rollwright.store import RunDir, RunWriter
from rollwright.testing.run_folder import conversations, write_rollout
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.tokens.tokenizer import fingerprint
from rollwright.tokens.tree import DriftCause
from rollwright.tokens.verify import verify
from rollwright.viewer.branches import tree
from rollwright.viewer.tokenview import CONTINUED, EXPLAINED, Fates, Gap, Pieces, Span, branches, partings, token_turns

FIRST_PROMPT = 396
"""Tokens of the first request: a little more cuts inside the first reply."""
each_shape = pytest.mark.parametrize("shape", sorted(conversations()))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return tiny_tokenizer(tmp_path / "policy")


@pytest.fixture
def run(tmp_path: Path, policy: Path, shape: str) -> RunDir:
    writer = RunWriter.create(tmp_path / "run", run_file=b"", resolved={})
    renderer = load_renderer(policy)
    write_rollout(writer, renderer, "whole.1", conversations()[shape])
    write_rollout(writer, renderer, "cut.1", conversations()[shape], max_sample_tokens=600)
    write_rollout(writer, renderer, "short.1", conversations()[shape], max_sample_tokens=FIRST_PROMPT + 10)
    writer.close()
    return writer.run


@pytest.mark.parametrize("name", ["whole.1", "cut.1", "short.1"])
@each_shape
def test_each_token_is_trained_or_left_out_for_the_reason_that_verify_finds(run: RunDir, name: str) -> None:
    trajectory = read_turn_log(run.rollout(name).turns).trajectory
    samples = run.samples(name)
    fates = Fates(trajectory, samples, graded=True)
    report = verify(trajectory, samples, None)
    assert report.violations == ()
    told = Counter(reason for turn in trajectory.turns for reason in fates.of(turn))
    assert told.pop("") == report.trained
    assert told == dict(report.excluded)
    if name != "whole.1":
        assert sum(sample.truncated for sample in samples)
        found = partings(read_turn_log(run.rollout(name).turns), samples, Pieces(None))
        assert [parting.place for parting in found if parting.what == "truncated"]


@each_shape
def test_every_branch_is_shown_whole(run: RunDir, policy: Path) -> None:
    trajectory = read_turn_log(run.rollout("whole.1").turns).trajectory
    fates = Fates(trajectory, run.samples("whole.1"), graded=True)
    pieces = Pieces.load(policy, fingerprint(policy))
    assert pieces.problem == ""
    for branch in branches(trajectory, fates):
        ids: list[int] = []
        place = 0
        gap = False
        for turn in token_turns(trajectory, trajectory.path(branch.leaf), fates, pieces):
            assert turn.start == place
            for part in (*turn.prompt, *turn.sampled):
                if isinstance(part, Gap):
                    gap = True
                    ids += trajectory.ids(branch.leaf)[place : place + part.count]
                    place += part.count
                else:
                    assert part.start == place
                    ids += [token.id for token in part.tokens]
                    place += len(part.tokens)
        assert ids == trajectory.ids(branch.leaf)
        assert place == branch.tokens
        assert not gap or branch.role != "side"
    picture = tree(trajectory, fates, current=None, href=lambda leaf: f"#{leaf}")
    assert picture.count("<a ") == len(trajectory.leaves())


@each_shape
def test_an_unjudged_rollout_trains_nothing(run: RunDir) -> None:
    trajectory = read_turn_log(run.rollout("whole.1").turns).trajectory
    fates = Fates(trajectory, [], graded=False)
    assert {reason for turn in trajectory.turns for reason in fates.of(turn)} == {"ungraded"}


@each_shape
def test_a_drift_shows_what_both_have_and_where_they_part(run: RunDir, policy: Path, shape: str) -> None:
    logged = read_turn_log(run.rollout("whole.1").turns)
    pieces = Pieces.load(policy, None)
    found = [parting for parting in partings(logged, run.samples("whole.1"), pieces) if parting.what != "truncated"]
    assert [parting.what for parting in found] == [turn.drift.cause for turn in logged.trajectory.turns if turn.drift]
    assert ("assistant_rewritten" in [parting.what for parting in found]) == (shape == "drift")
    for parting in found:
        assert parting.left != parting.right
        assert parting.explained
        renderer = load_renderer(policy)
        stored = renderer.decode(logged.trajectory.ids(0))
        assert parting.before + parting.left in stored
        assert parting.before + parting.right not in stored


@each_shape
def test_another_tokenizers_text_is_not_shown(run: RunDir, policy: Path, tmp_path: Path) -> None:
    other = Pieces.load(policy, "0" * 32)
    missing = Pieces.load(tmp_path / "none", None)
    for pieces in (other, missing):
        assert pieces.problem
        assert pieces.of([17, 18]) == ["17 ", "18 "]
        assert pieces.text([1, 2]) == "1 2"


@each_shape
def test_surprise_has_a_colour_and_no_logprob_has_none(run: RunDir, shape: str) -> None:
    trajectory = read_turn_log(run.rollout("whole.1").turns).trajectory
    fates = Fates(trajectory, run.samples("whole.1"), graded=True)
    heats: set[int | None] = set()
    for leaf in trajectory.leaves():
        for turn in token_turns(trajectory, trajectory.path(leaf), fates, Pieces(None)):
            spans = [part for part in turn.sampled if isinstance(part, Span)]
            heats |= {token.heat for span in spans for token in span.tokens}
            versions = {span.version for span in spans}
            assert versions <= ({"1", "2"} if shape == "updated" else {"1"})
    assert {0, 1} <= heats
    assert (None in heats) == (shape == "updated")


def test_every_cause_of_drift_is_explained() -> None:
    assert set(EXPLAINED) == set(get_args(DriftCause))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Pieces]:
    folder = tiny_tokenizer(tmp_path_factory.mktemp("tiny"))
    return load_renderer(folder), Pieces.load(folder, None)


@given(text=st.text(st.sampled_from("ab —é🙂\t中\n")))
def test_a_character_of_several_tokens_is_shown_once(tiny: tuple[Renderer, Pieces], text: str) -> None:
    renderer, pieces = tiny
    ids = renderer.encode(text)
    shown = pieces.of(ids)
    assert len(shown) == len(ids)
    assert "".join(shown).replace(CONTINUED, "") == text.replace("\n", "↵\n").replace("\t", "→\t")


@given(ids=st.lists(st.integers(0, 599), max_size=40))
def test_any_ids_have_a_text_each(tiny: tuple[Renderer, Pieces], ids: list[int]) -> None:
    assert len(tiny[1].of(ids)) == len(ids)
