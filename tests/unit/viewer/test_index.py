"""The index says what the folder says, follows it, and can be thrown away."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.quorum import group_table
from rollwright.store import RolloutRecord, RunDir
from rollwright.testing.run_folder import build_run
from rollwright.viewer.index import SORTS, Filter, RolloutRow, RunIndex

Opened = Callable[[RunDir], RunIndex]


@pytest.fixture
def opened(cache: Path) -> Iterator[Opened]:
    made: list[RunIndex] = []

    def open_index(run: RunDir) -> RunIndex:
        made.append(RunIndex(run, cache=cache))
        made[-1].sync()
        return made[-1]

    yield open_index
    for index in made:
        index.close()


def read(index: RunIndex) -> list[RolloutRow]:
    index.sync()
    return index.rows()


def names(index: RunIndex) -> list[str]:
    return [row.rollout for row in read(index)]


def test_it_counts_what_the_records_say(built: RunDir, opened: Opened) -> None:
    index, records = opened(built), built.records()
    while index.read_facts(10):
        pass
    assert names(index) == [record.rollout for record in records]
    assert sum(index.statuses().values()) == len(records)
    assert index.statuses()["resolved"] == sum(record.status == "resolved" for record in records)
    sums = index.sums()
    assert sums["sampled_tokens"] == sum(record.sampled_tokens for record in records)
    assert sums["known"] == len(records)
    assert sums["drift"] > 0
    assert index.counted("excluded")["undelivered"] == sum(r.excluded_tokens.get("undelivered", 0) for r in records)
    failures = index.failures()
    assert sum(row[3] for row in failures) == sum(record.failure is not None for record in records) > 0
    for group in index.groups():
        rewards = [r.reward for r in records if r.group == group.name and r.reward is not None]
        assert (group.judged, group.counted, group.resolved) == (len(rewards), len(rewards), sum(rewards))
        assert group.zero_variance == (len(set(rewards)) == 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    sort=st.sampled_from(sorted(SORTS)),
    down=st.booleans(),
    status=st.sampled_from(["", "resolved", "ungraded"]),
    text=st.sampled_from(["", "pager", "1", "CACHE .1", "the box is gone", "%", "'"]),
    drift=st.booleans(),
)
def test_filters_and_sorts_are_those_of_python(
    built: RunDir, opened: Opened, sort: str, down: bool, status: str, text: str, drift: bool
) -> None:
    index = opened(built)
    while index.read_facts(100):
        pass
    which = Filter(status=status, text=text, drift=drift)
    rows = index.rows(which, sort=sort, down=down)
    wanted = [
        row
        for row in index.rows()
        if (not status or row.status == status)
        and all(word in row.rollout.lower() or word in (row.message or "").lower() for word in text.lower().split())
        and (not drift or row.drift)
    ]
    assert {row.rollout for row in rows} == {row.rollout for row in wanted}
    assert index.count(which) == len(wanted)
    column = {"stored": "seq", "sampled": "sampled_tokens", "trained": "trained_tokens", "patch": "patch_bytes"}
    values = [getattr(row, column.get(sort, sort)) for row in rows]
    if sort == "rollout":
        values = [(row.task, row.attempt) for row in rows]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=down)
    assert values[len(known) :] == [None] * (len(values) - len(known)), "what has no value comes last"
    assert index.rows(which, sort=sort, down=down, limit=3, offset=2) == rows[2:5]


def test_it_follows_a_growing_file_and_waits_for_the_end_of_a_line(tmp_path: Path, opened: Opened) -> None:
    run = build_run(tmp_path / "run", tasks=3, attempts=2, folders=0)
    whole = run.index.read_bytes()
    lines = whole.splitlines(keepends=True)
    run.index.write_bytes(b"")
    index = opened(run)
    assert names(index) == []
    with run.index.open("ab") as file:
        file.write(lines[0] + lines[1][:50])
        file.flush()
        assert len(names(index)) == 1
        before = index.sync()
        assert index.sync() == before, "nothing new, nothing changes"
        file.write(lines[1][50:] + lines[2])
        file.flush()
    assert len(names(index)) == 3
    assert index.sync() > before
    again = opened(run)
    assert names(again) == names(index)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path, opened: Opened) -> None:
    run = build_run(tmp_path / "run", tasks=2, attempts=2, folders=0)
    index = opened(run)
    lines = run.index.read_bytes().splitlines(keepends=True)
    other = tmp_path / "other"
    other.write_bytes(b"".join(lines[1:]))
    other.rename(run.index)
    assert len(names(index)) == 3
    # In place, and longer than before: only the bytes tell.
    changed = b"".join(lines[1:]).replace(b'"status":"', b'"status":"a') + lines[0]
    run.index.write_bytes(changed)
    assert [(row.rollout, row.status) for row in read(index)] == [(r.rollout, r.status) for r in run.records()]
    run.index.unlink()
    assert names(index) == []


@pytest.mark.parametrize(("quorums", "needed"), [((1, 1, 1), 2), ((2, 3, 2), 3), ((), 5)])
def test_the_quorum_of_a_group_is_that_of_every_other_reader(
    tmp_path: Path, opened: Opened, quorums: tuple[int, ...], needed: int
) -> None:
    """Without one in the lines it is that of the settings."""
    run = build_run(tmp_path / "run", tasks=3, attempts=3, folders=0)
    resolved = run.resolved()
    resolved["config"] |= {"run": {"attempts": 5}, "grading": {"group_quorum": 5}}
    run.resolved_file.write_bytes(orjson.dumps(resolved))
    lines = [orjson.loads(line) for line in run.index.read_bytes().splitlines()]
    for line in lines:
        line.pop("quorum", None)
        if quorums:
            line["quorum"] = quorums[line["attempt"] - 1]
    run.index.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    groups = opened(run).groups()
    assert {group.quorum for group in groups} == {needed}
    assert [(g.name, g.counted < g.quorum) for g in groups] == [(r.group, not r.trainable) for r in group_table(run)]


def test_a_line_that_is_no_rollout_is_counted_and_left_out(tmp_path: Path, opened: Opened) -> None:
    run = build_run(tmp_path / "run", tasks=1, attempts=2, folders=0)
    line = orjson.loads(run.index.read_bytes().splitlines()[0])
    with run.index.open("ab") as file:
        file.write(b"nonsense\n[]\n" + orjson.dumps({**line, "turns": "many"}) + b"\n")
        file.write(orjson.dumps({**line, "rollout": "b.1", "turns": 2**63}) + b"\n")
    index = opened(run)
    assert (index.count(), index.bad_lines) == (2, 4)


@pytest.mark.parametrize("damage", ["garbage", "cut", "schema", "table"])
def test_a_damaged_index_is_made_again(built: RunDir, cache: Path, opened: Opened, damage: str) -> None:
    first = opened(built)
    wanted = names(first)
    first.close()
    (file,) = cache.glob("*.sqlite")
    if damage == "garbage":
        file.write_bytes(b"no database at all" * 100)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        base = sqlite3.connect(file)
        base.execute("PRAGMA user_version = 77" if damage == "schema" else "DROP TABLE rollouts")
        base.commit()
        base.close()
    assert names(opened(built)) == wanted


def test_without_a_place_for_it_the_index_is_in_memory(built: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    index = RunIndex(built, cache=tmp_path / "file" / "cache")
    assert len(names(index)) == len(built.records())
    index.close()


def test_two_viewers_of_one_run_share_an_index(tmp_path: Path, opened: Opened) -> None:
    run = build_run(tmp_path / "run", tasks=2, attempts=2, folders=0)
    one, two = opened(run), opened(run)
    with run.index.open("ab") as file:
        record = run.records()[0]
        values = {name: getattr(record, name) for name in RolloutRecord.__dataclass_fields__}
        file.write(RolloutRecord(**values | {"rollout": "new.1", "task": "new"}).to_line())
    assert names(one) == names(two)
    assert len(names(one)) == 5


def test_the_run_folder_is_not_touched(built: RunDir, opened: Opened) -> None:
    def seen() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in built.path.rglob("*")}

    before = seen()
    index = opened(built)
    while index.read_facts(100):
        pass
    assert seen() == before
