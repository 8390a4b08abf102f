"""A branch as tokens, the tree it is in, and where histories parted."""

from __future__ import annotations

from rollwright.errors import RollwrightError
from rollwright.tokens.tree import Trajectory
from rollwright.types import Sample
from rollwright.viewer.branches import tree
from rollwright.viewer.conversation import best_leaf
from rollwright.viewer.links import Links
from rollwright.viewer.pages.rollout import Opened, number, open_rollout
from rollwright.viewer.pages.site import NotFound, Site
from rollwright.viewer.tokenview import Fates, branches, partings, token_turns

__all__ = ["token_pages", "tokens_page"]

_PAGE_TOKENS = 8000
"""Shown tokens after which another page begins."""
_SHOWN_PROMPT = 800
"""As many tokens of one turn's prompt are shown at most."""


def token_pages(trajectory: Trajectory, leaf: int) -> list[list[int]]:
    """The turns of a branch, page by page."""
    pages: list[list[int]] = [[]]
    room = _PAGE_TOKENS
    for index in trajectory.path(leaf):
        turn = trajectory.turns[index]
        cost = min(len(turn.delta), _SHOWN_PROMPT) + len(turn.sampled)
        if cost > room and pages[-1]:
            pages.append([])
            room = _PAGE_TOKENS
        pages[-1].append(index)
        room -= cost
    return pages


def tokens_page(site: Site, run: str, name: str, *, leaf: str | None, page: str) -> str:
    opened = open_rollout(site, run, name)
    logged, problem = opened.turn_log()
    here = ("runs", run, "rollouts", name, "tokens")
    if logged is None or not logged.trajectory.turns:
        return site.render(
            "tokens_none.html",
            here,
            run=opened.run,
            running=opened.run.running,
            name=name,
            row=opened.row,
            problem=problem,
        )
    trajectory = logged.trajectory
    chosen = best_leaf(trajectory) if leaf is None else number(leaf, len(trajectory.turns))
    assert chosen is not None
    pages = token_pages(trajectory, chosen)
    at = number(page, len(pages) + 1)
    if at == 0:
        raise NotFound("pages are counted from 1")
    if leaf is not None:
        here = (*here, leaf) + ((page,) if page != "1" else ())
    samples, sample_problem = _samples(opened)
    fates = Fates(trajectory, samples, graded=opened.row is not None and opened.row.error is None)
    pieces = site.pieces(opened.run)
    link = Links(here, files=site.files)
    turns = token_turns(trajectory, pages[at - 1], fates, pieces)
    apart = partings(logged, samples, pieces)
    versions = sorted({span.version for turn in trajectory.turns for span in turn.versions})
    return site.render(
        "tokens.html",
        here,
        run=opened.run,
        running=opened.run.running,
        name=name,
        row=opened.row,
        header=logged.header,
        leaf=chosen,
        page=at,
        pages=len(pages),
        turns=turns,
        branches=branches(trajectory, fates),
        partings=apart,
        parted={parting.turn: parting for parting in apart if parting.what != "truncated"},
        cuts={parting.turn: parting for parting in apart if parting.what == "truncated"},
        picture=tree(
            trajectory,
            fates,
            current=chosen,
            href=lambda index: link("runs", run, "rollouts", name, "tokens", str(index)),
        ),
        versions={version: place % 6 for place, version in enumerate(versions)},
        reasons=sorted({reason for turn in turns for reason in fates.of(turn.turn) if reason}),
        trained_in={turn.turn.index: fates.trained_in(turn.turn) for turn in turns},
        samples=samples,
        problem=sample_problem or pieces.problem,
        trainable=any(sample.trainable for sample in samples),
    )


def _samples(opened: Opened) -> tuple[list[Sample], str]:
    if opened.row is None or not opened.folder.samples.exists():
        return [], ""
    try:
        return opened.run.run.samples(opened.name), ""
    except (RollwrightError, TypeError, LookupError, ValueError) as error:
        return [], f"samples.jsonl cannot be read: {error}"
