"""What a person sees of a run: on a terminal that is resized, in a pipe, with a reader that goes away."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import orjson
import pytest

from support.commandline import Rollwright
from support.sample import sample
from support.terminal import terminal

pytestmark = [pytest.mark.pi]

SLOW = ("run.attempts=8", "run.concurrency=4", "engine.scripted.seconds_per_turn=30")


@pytest.fixture(scope="module")
def rollwright(tmp_path_factory: pytest.TempPathFactory) -> Rollwright:
    return sample(tmp_path_factory.mktemp("terminal"))


def seconds(lines: list[str]) -> int:
    """By the table's title; -1 unless one table is there, and all of it."""
    titles = [line for line in lines if "0/8 stored" in line]
    heads = [line for line in lines if line.startswith("rollout")]
    rows = [line for line in lines if line.startswith("greet.") and "agent_running" in line]
    others = [line for line in lines if line and line not in (*titles, *heads, *rows)]
    found = re.search(r"running · (\d+) s$", titles[0]) if titles else None
    if (len(titles), len(heads), len(rows), others) != (1, 1, 4, []) or found is None:
        return -1
    return int(found[1])


def test_the_live_table_survives_resizing(rollwright: Rollwright) -> None:
    argv = rollwright.argv("run", rollwright.job, "run.name=resized", *SLOW)
    with terminal(argv, env=rollwright.env, columns=100, lines=30) as seen:
        seen.until(lambda lines: seconds(lines) >= 0, "the table")
        for columns, lines in ((50, 20), (140, 14), (44, 40), (100, 12)):
            before = seconds(seen.lines)
            seen.resize(columns, lines)
            seen.until(lambda lines: seconds(lines) > before, f"a newer table, alone, at {columns} x {lines}")  # noqa: B023
        seen.resize(24, 4)
        seen.until(lambda lines: any("0/8 stored" in line for line in lines), "a table on a tiny screen")
        seen.process.send_signal(signal.SIGINT)
        assert seen.ended() == 130
        assert not seen.screen.cursor.hidden


def test_a_dumb_terminal_gets_plain_lines(rollwright: Rollwright) -> None:
    argv = rollwright.argv("run", rollwright.job, "run.name=dumb", "run.attempts=1")
    with terminal(argv, env=rollwright.env | {"TERM": "dumb"}, columns=200) as seen:
        assert seen.ended() == 0
        assert any(line.startswith("[1/1] greet.1  resolved") for line in seen.lines)
        assert any(line.startswith("next: rollwright ") for line in seen.lines)


def test_a_pipe_gets_results_on_stdout_and_plain_progress_on_stderr(rollwright: Rollwright) -> None:
    done = rollwright("run", rollwright.job, "run.name=piped", "run.attempts=1", "--json")
    assert orjson.loads(done.stdout)["stored"] == 1
    assert "[1/1] greet.1  resolved" in done.stderr
    assert "\x1b" not in done.stderr


def test_a_reader_of_the_progress_that_goes_away_stops_no_run(rollwright: Rollwright, tmp_path: Path) -> None:
    argv = rollwright.argv("run", rollwright.job, "run.name=unwatched", "run.attempts=2")
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(argv, env=rollwright.env, stdout=out, stderr=subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=60) == 0
    assert b"2 of 2 rollouts: 2 resolved" in (tmp_path / "out").read_bytes()


def test_a_reader_of_the_results_that_goes_away_ends_it_quietly(rollwright: Rollwright) -> None:
    process = subprocess.Popen(
        rollwright.argv("list", "--json"), env=rollwright.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, b"")
