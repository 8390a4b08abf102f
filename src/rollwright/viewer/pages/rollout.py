"""One rollout: its time line, patch, tests, conversation and logs; also while it is still running."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from rollwright.errors import RollwrightError
from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.store import RolloutDir, RolloutRecord
from rollwright.types import Stage
from rollwright.viewer.branches import time_line
from rollwright.viewer.conversation import best_leaf, conversation
from rollwright.viewer.diff import read_diff
from rollwright.viewer.index import RolloutRow
from rollwright.viewer.library import ShownRun
from rollwright.viewer.pages.site import NotFound, Site
from rollwright.viewer.text import excerpt_of, read_capped

__all__ = ["BUNDLED", "Opened", "files_of", "number", "open_rollout", "rollout_page"]

_PATCH_BYTES = 1 << 20
_JSON_BYTES = 32 << 20
_TESTS = 400
_FILES = (
    "patch.diff",
    "patch.json",
    "verdict.json",
    "grade.json",
    "agent.log",
    "grade.log",
    "turns.log",
    "samples.jsonl",
)
BUNDLED = tuple(file for file in _FILES if file not in ("turns.log", "samples.jsonl"))
"""Those that go along where pages are files: what the others hold is on the pages, and they are large."""
_BAD = ("failed", "error", "missing", "skipped", "xfailed", "passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A rollout's row and folder."""

    run: ShownRun
    name: str
    row: RolloutRow | None
    """None: it is still running."""
    folder: RolloutDir

    def turn_log(self) -> tuple[LoggedTrajectory | None, str]:
        """What its turn log says, or why that cannot be read."""
        if not self.folder.turns.exists():
            return None, ""
        try:
            return read_turn_log(self.folder.turns), ""
        except RollwrightError as error:
            return None, error.message


def open_rollout(site: Site, run: str, name: str) -> Opened:
    """Raises `NotFound`."""
    shown = site.run(run)
    row = shown.index.row(name)
    folder = shown.run.rollout(name)
    if row is None:
        folder = RolloutDir(shown.run.work / name)
        if not folder.path.is_dir():
            raise NotFound(f"run {run} has no rollout {name}")
    return Opened(run=shown, name=name, row=row, folder=folder)


def files_of(site: Site, run: str, name: str, file: str) -> Path:
    """A file of a rollout. Raises `NotFound`."""
    opened = open_rollout(site, run, name)
    path = opened.folder.path / file
    if (file not in _FILES and file not in _earlier(opened.folder)) or not path.is_file():
        raise NotFound(f"rollout {name} has no {file}")
    return path


def number(text: str, limit: int) -> int:
    """A turn's index from a URL. Raises `NotFound`."""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < limit):
        raise NotFound(f"there is no turn {text}")
    return int(text)


def rollout_page(site: Site, run: str, name: str, *, leaf: str | None) -> str:
    opened = open_rollout(site, run, name)
    folder, row = opened.folder, opened.row
    logged, log_problem = opened.turn_log()
    trajectory = None if logged is None else logged.trajectory
    chosen = None
    if trajectory is not None:
        chosen = best_leaf(trajectory) if leaf is None else number(leaf, len(trajectory.turns))
    elif leaf is not None:
        raise NotFound(f"rollout {name} has no turns")
    verdict, failure = _verdict(folder)
    grade, patch_record = _json(folder.grade_record), _json(folder.patch_record)
    before, after = (None, None) if row is None else opened.run.index.neighbours(row)
    here = ("runs", run, "rollouts", name) + (() if leaf is None else ("branch", leaf))
    steps = [] if trajectory is None or chosen is None else conversation(trajectory, chosen)
    files = BUNDLED if site.files else (*_FILES, *_earlier(folder))
    return site.render(
        "rollout.html",
        here,
        run=opened.run,
        running=opened.run.running,
        name=name,
        row=row,
        record=_record(opened),
        verdict=verdict,
        failure=failure,
        tests=_tests(verdict),
        grade=grade,
        patch=_patch(folder),
        signals=_integrity(folder, verdict, grade, patch_record),
        line=_time_line(opened, logged),
        steps=steps,
        leaf=chosen,
        leaves=[] if trajectory is None else [(index, trajectory.turns[index]) for index in trajectory.leaves()],
        tools=[] if logged is None else [tool for tools in logged.tools.values() for tool in tools],
        log_problem=log_problem,
        agent_log=_log(folder.agent_log),
        grade_log=_log(folder.grade_log),
        present=[file for file in files if (folder.path / file).is_file()],
        before=before,
        after=after,
    )


def _earlier(folder: RolloutDir) -> list[str]:
    """Verdicts and test runs that a regrade has replaced."""
    found = [*folder.path.glob("verdict.*.json"), *folder.path.glob("grade.*.json"), *folder.path.glob("grade.*.log")]
    return sorted(path.name for path in found)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_capped(path, _JSON_BYTES)
        value: Any = None if found is None else orjson.loads(found[0])
    except (OSError, ValueError):
        return {}
    return _object(value)


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _verdict(folder: RolloutDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verdict, the failure; one of them is empty, both while the rollout is running."""
    data = _json(folder.verdict)
    graded, ungraded = data.get("graded"), data.get("ungraded")
    return _object(graded), _object(ungraded)


def _record(opened: Opened) -> RolloutRecord | None:
    if opened.row is None:
        return None
    name = orjson.dumps(opened.name)
    try:
        with opened.run.run.index.open("rb") as file:
            for line in file:
                if name in line:
                    data: Any = orjson.loads(line)
                    if data.get("rollout") == opened.name:
                        return RolloutRecord.from_line(data)
    except (OSError, ValueError, RollwrightError):
        pass
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tests:
    rows: list[dict[str, Any]]
    counts: list[tuple[str, int]]
    total: int
    required: int
    required_passed: int


def _tests(verdict: Mapping[str, Any]) -> _Tests | None:
    listed = verdict.get("tests")
    if not isinstance(listed, list) or not listed:
        return None
    rows = [cast("dict[str, Any]", test) for test in cast("list[Any]", listed) if isinstance(test, dict)]
    rows = [{"id": "", "status": "", "expected": True, "seconds": None, "message": "", **test} for test in rows]
    required = [test for test in rows if test["expected"]]
    rows.sort(key=lambda test: (_BAD.index(test["status"]) if test["status"] in _BAD else 0, not test["expected"]))
    return _Tests(
        rows=rows[:_TESTS],
        counts=Counter(str(test["status"]) for test in rows).most_common(),
        total=len(rows),
        required=len(required),
        required_passed=sum(test["status"] == "passed" for test in required),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patch:
    files: list[Any]
    left_out: int
    total: int
    cut: bool
    added: int
    removed: int


def _patch(folder: RolloutDir) -> _Patch | None:
    try:
        found = read_capped(folder.patch, _PATCH_BYTES)
    except OSError:
        return None
    if found is None:
        return None
    data, total = found
    files, left_out = read_diff(data)
    return _Patch(
        files=files,
        left_out=left_out,
        total=total,
        cut=total > len(data),
        added=sum(file.added for file in files),
        removed=sum(file.removed for file in files),
    )


def _log(path: Path) -> Any:
    try:
        return excerpt_of(path)
    except OSError:
        return None


def _integrity(
    folder: RolloutDir, verdict: Mapping[str, Any], grade: Mapping[str, Any], patch: Mapping[str, Any]
) -> list[tuple[str, str, bool]]:
    """What speaks for or against trusting the verdict: name, text, whether it is a warning."""
    rows: list[tuple[str, str, bool]] = []
    for signal in verdict.get("signals") or ():
        rows.append(("signal", str(signal), True))
    for path in verdict.get("dropped_paths") or ():
        rows.append(("put back before the tests", str(path), True))
    for flaky in grade.get("flaky") or ():
        rows.append(("flaky", str(flaky), True))
    if refusal := patch.get("refusal"):
        rows.append(("patch refused", str(refusal), True))
    if left_out := patch.get("left_out"):
        rows.append(("left out of the patch", f"{left_out} paths", True))
    if verdict.get("trainable") is False:
        rows.append(("not trainable", "the protocol's evidence is too weak to train on", True))
    for what, path, digest in (
        ("patch.diff", folder.patch, patch.get("sha256")),
        ("grade.log", folder.grade_log, verdict.get("log_sha256")),
    ):
        if isinstance(digest, str) and digest and path.is_file():
            same = hashlib.sha256(path.read_bytes()).hexdigest() == digest
            rows.append(
                (
                    what,
                    "has the recorded SHA-256" if same else "is not the recorded file: its SHA-256 differs",
                    not same,
                )
            )
    return rows


def _time_line(opened: Opened, logged: LoggedTrajectory | None) -> Any:
    record = _record(opened)
    if record is None:
        return None
    stages = [(stage.value, record.seconds[stage]) for stage in Stage if stage in record.seconds]
    turns: list[tuple[int, float, float]] = []
    if logged is not None:
        for turn in logged.trajectory.turns:
            intents: list[int] = turn.meta.get("intents") or []
            end: Any = turn.meta.get("at")
            begin = logged.intents.get(intents[0]) if intents else None
            if begin is not None and isinstance(end, int | float) and end >= begin.at:
                turns.append((turn.index, begin.at, float(end)))
    failed = "" if record.failure is None else str(record.failure.stage)
    return time_line(stages, turns, failed=failed) if stages else None
