"""The command line in a shell: completion, colour, results and progress kept apart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from support.terminal import terminal

ROLLWRIGHT = [sys.executable, "-m", "rollwright.cli"]


def test_verbs_and_options_complete_in_bash(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    script = tmp_path / "completion.sh"
    env = os.environ | {"HOME": str(tmp_path)}
    argv = [*ROLLWRIGHT, "--install-completion", "--shell", "bash", "--output", str(script)]
    subprocess.run(argv, env=env, check=True, capture_output=True)
    assert str(script) in (tmp_path / ".bashrc").read_text()

    def completed(*words: str) -> set[str]:
        code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rollwright; echo "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "-c", code, "bash", str(script), "rollwright", *words], capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    assert completed("re") == {"resume", "regrade"}
    assert "--dry-run" in completed("run", "--d")
    assert completed("sandbox", "") >= {"ls", "reap"}


@pytest.mark.parametrize("asked", [{}, {"NO_COLOR": "1"}])
def test_colour_is_for_terminals_and_no_color_is_honoured(asked: dict[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    with terminal([*ROLLWRIGHT, "--help"], env=env | asked, lines=80) as seen:
        assert seen.ended() == 0
        colours = {cell.fg for line in seen.screen.buffer.values() for cell in line.values()}
        assert any("doctor" in line for line in seen.lines)
    assert (colours == {"default"}) == bool(asked)


@pytest.mark.parametrize("verb", [["list"], ["harness", "list"], ["sandbox", "ls"], ["sandbox", "reap"]])
def test_json_is_one_value_on_stdout_and_nothing_else(verb: list[str], tmp_path: Path) -> None:
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run([*ROLLWRIGHT, *verb, "--json"], env=env, capture_output=True, check=True)
    assert isinstance(orjson.loads(done.stdout), dict | list)
    assert done.stderr == b""
