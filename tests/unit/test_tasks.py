"""Data sets: which source reads them, which protocol a row is of, which errors name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollwright.errors import ConfigError, TaskError
from rollwright.graders.command import Command
from rollwright.graders.harbor import Harbor
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.swebench_pro import SwebenchPro
from rollwright.lockfile import LockedTask, check_lock, lock_path, read_lock, write_lock
from rollwright.tasks import load_tasks

GRADERS: dict[str, Any] = {g.name: g for g in (ScaleSwe(), Command(), Harbor(), SwebenchPro())}


def row(name: str, **extra: Any) -> dict[str, Any]:
    meta = {"image": "i", "workdir": "/w", "problem_statement": "p", "instance_id": name, "command": "true"}
    return {"metadata": meta | extra}


def data_set(path: Path, *rows: object) -> Path:
    file = path / "tasks.jsonl"
    file.write_text("".join(json.dumps(r) + "\n\n" for r in rows))
    return file


def harbor(path: Path, name: str) -> Path:
    folder = path / name
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('[environment]\ndocker_image = "i"\n')
    (folder / "instruction.md").write_text("p")
    (folder / "tests" / "test.sh").write_text("true\n")
    return folder


def test_a_row_says_its_protocol_before_the_run_file_does(tmp_path: Path) -> None:
    path = data_set(tmp_path, row("a", protocol="command"), row("b", eval_cmd="true"))
    tasks = load_tasks(path, GRADERS, default_protocol="scaleswe").tasks
    assert {name: task.grader.protocol for name, task in tasks.items()} == {"a": "command", "b": "scaleswe"}
    assert load_tasks(data_set(tmp_path, row("a")), GRADERS, default_protocol="command").tasks


def test_a_row_may_say_it_in_metadata_that_is_a_string(tmp_path: Path) -> None:
    text = {"metadata": json.dumps(row("a", protocol="command")["metadata"])}
    tasks = load_tasks(data_set(tmp_path, text), GRADERS, default_protocol="scaleswe").tasks
    assert tasks["a"].grader.protocol == "command"


@pytest.mark.parametrize("default", ["scaleswe", "command"])
def test_a_row_that_looks_like_another_protocol_is_an_error_that_names_it(tmp_path: Path, default: str) -> None:
    stray = {"dockerhub_tag": "t", "before_repo_set_cmd": "x", "image": "i"}
    with pytest.raises(TaskError, match=r"tasks.jsonl line 1: .*swebench_pro"):
        load_tasks(data_set(tmp_path, stray), GRADERS, default_protocol=default)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((row("a", protocol="nope"),), "line 1: metadata.protocol 'nope'"),
        ((row("a"), row("a", x=1)), "line 3: the same task as tasks.jsonl line 1"),
        (([1],), "line 1: a row must be a JSON object"),
        ((), "holds no rows"),
    ],
)
def test_a_bad_data_set_names_the_line(tmp_path: Path, rows: tuple[object, ...], words: str) -> None:
    with pytest.raises(TaskError, match=words.replace("[", r"\[")):
        load_tasks(data_set(tmp_path, *rows), GRADERS, default_protocol="command")


def test_a_folder_of_task_folders_is_a_data_set_and_so_is_one_of_them(tmp_path: Path) -> None:
    one = harbor(tmp_path, "one")
    harbor(tmp_path, "two")
    (tmp_path / "notes").mkdir()
    tasks = load_tasks(tmp_path, GRADERS, default_protocol="scaleswe").tasks
    assert {name: task.grader.protocol for name, task in tasks.items()} == {"one": "harbor", "two": "harbor"}
    assert list(load_tasks(one, GRADERS, default_protocol="scaleswe").tasks) == ["one"]


def test_a_folder_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task folders"):
        load_tasks(tmp_path, GRADERS, default_protocol="harbor")


# --------------------------------------------------------------------------- lockfile


def locked(path: Path, **changed: Any) -> None:
    tasks = load_tasks(path, GRADERS, default_protocol="command").tasks
    entry = {"task": tasks["a"].id, "image": "i", "image_digest": "", "base_tree": "t", "grader": "command"}
    entry |= {"grader_version": Command.version, "gold_runs": 3, "gold_seconds_p95": 1.5}
    write_lock(path, {"a": LockedTask(**entry | changed)})


def check(path: Path) -> None:
    tasks = load_tasks(path, GRADERS, default_protocol="command").tasks
    check_lock(path, tasks, {name: grader.version for name, grader in GRADERS.items()})


def test_a_lockfile_lies_beside_the_data_set_and_is_read_back(tmp_path: Path) -> None:
    path = data_set(tmp_path, row("a"))
    locked(path, flaky={"t": 0.5}, fail_to_pass=("x",))
    assert lock_path(path) == tmp_path / "tasks.lock.json"
    assert lock_path(tmp_path / "folder") == tmp_path / "folder.lock.json"
    assert read_lock(path)["a"].flaky == {"t": 0.5}
    assert read_lock(path)["a"].fail_to_pass == ("x",)
    check(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"task": "other"}, "was another row"),
        ({"image": "j"}, "proved with image 'j'"),
        ({"grader_version": "0"}, "proved by grader command 0"),
    ],
)
def test_a_proof_of_something_else_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    path = data_set(tmp_path, row("a"))
    locked(path, **changed)
    with pytest.raises(TaskError, match=words):
        check(path)


def test_a_task_without_a_proof_is_refused(tmp_path: Path) -> None:
    path = data_set(tmp_path, row("a"), row("b"))
    locked(path)
    with pytest.raises(TaskError, match="task b is not in it"):
        check(path)


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 9, "tasks": {}}', '{"schema": 1, "tasks": {"a": {}}}'])
def test_a_broken_lockfile_is_no_empty_one(tmp_path: Path, text: str) -> None:
    path = data_set(tmp_path, row("a"))
    lock_path(path).write_text(text)
    with pytest.raises(ConfigError, match=r"tasks.lock.json"):
        check(path)
