"""Task folders, and what a reward file is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError, GradingFailed, TaskError
from rollwright.graders import RawRun
from rollwright.graders.grading import judge_run
from rollwright.graders.harbor import Harbor, read_reward
from rollwright.types import Task, Verdict, VerdictStatus

NONCE = "5f" * 16


def folder(path: Path, toml: str = '[environment]\ndocker_image = "img"\n') -> Path:
    (path / "tests" / "sub").mkdir(parents=True)
    (path / "solution").mkdir()
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text("Do it.\n")
    (path / "tests" / "test.sh").write_text("echo 1 >/logs/verifier/reward.txt\n")
    (path / "tests" / "sub" / "data").write_bytes(b"\xff")
    (path / "solution" / "solve.sh").write_text("touch the-fix\n")
    return path


def parse(path: Path, **options: Any) -> Task:
    return Harbor(**options).parse({"metadata": {"task_dir": str(path)}}, where="t")


def test_a_folder_becomes_a_task_whose_halves_keep_apart(tmp_path: Path) -> None:
    task = parse(folder(tmp_path / "t"))
    assert task.agent.prompt == "Do it.\n"
    assert (task.agent.image, task.agent.workdir) == ("img", "/app")
    plan = Harbor().plan(task, nonce=NONCE)
    assert plan.files["/tests/sub/data"] == b"\xff"
    assert not any("solution" in path for path in plan.files)
    assert "the-fix" not in repr(task.agent)


def test_the_id_changes_with_any_file(tmp_path: Path) -> None:
    path = folder(tmp_path / "t")
    before = parse(path).id
    (path / "tests" / "sub" / "data").write_bytes(b"\xfe")
    assert parse(path).id != before


def test_image_and_workdir_may_come_from_options_and_dockerfile(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine", "")
    with pytest.raises(TaskError, match="build environment"):
        parse(path)
    (path / "environment").mkdir()
    (path / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /a\nWORKDIR /srv/b/\n")
    task = parse(path, image="local/{name}")
    assert (task.agent.image, task.agent.workdir) == ("local/mine", "/srv/b")


def checked(tmp_path: Path, toml: str, **options: Any) -> list[str]:
    task = parse(folder(tmp_path / "t", '[environment]\ndocker_image = "img"\n' + toml), **options)
    return Harbor(**options).check(task)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("gpus = 1", "GPUs"),
        ("mcp_servers = [{name = 'x'}]", "MCP"),
        ("env = {A = '1'}", "environment.env"),
        ("os = 'windows'", "not for Linux"),
        ("[[steps]]\nname = 'a'", "several steps"),
        ("[verifier]\nenvironment_mode = 'other'", "neither shared nor separate"),
        ("[verifier]\nnetwork_mode = 'public'", "public network"),
        ("[verifier]\nnetwork_mode = 'allowlist'", "allowlist"),
        ("[verifier.env]\nKEY = '${KEY}'", "variable of the host"),
        ("[verifier]\ntimeout_sec = -1", "timeout_sec"),
        ("[verifier]\nenvironment_mode = 'separate'\n[[verifier.collect]]\nx = 1", "command"),
    ],
)
def test_what_cannot_be_done_is_said_before_step_0(tmp_path: Path, toml: str, words: str) -> None:
    assert any(words in problem for problem in checked(tmp_path, toml))


def test_a_plain_task_and_an_allowed_network_are_fine(tmp_path: Path) -> None:
    assert checked(tmp_path, "") == []
    assert checked(tmp_path / "2", "[verifier]\nnetwork_mode = 'public'", network=True) == []


def test_a_missing_test_sh_is_a_problem(tmp_path: Path) -> None:
    path = folder(tmp_path / "t")
    (path / "tests" / "test.sh").unlink()
    assert Harbor().check(parse(path)) == ["tests/test.sh is missing"]


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    path = folder(tmp_path / "t")
    (path / missing).unlink()
    with pytest.raises(TaskError, match=missing):
        parse(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "t")
    (path / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="leads out"):
        parse(path)


def test_a_separate_verifier_gets_only_artifacts(tmp_path: Path) -> None:
    toml = (
        'artifacts = ["/out/a", {source = "/out/b"}]\n[environment]\ndocker_image = "img"\n[verifier]\n'
        'environment_mode = "separate"\nuser = "root"\ntimeout_sec = 7\n'
        '[verifier.environment]\ndocker_image = "judge"\n'
        '[[verifier.collect]]\ncommand = "make"\n'
    )
    plan = Harbor().plan(parse(folder(tmp_path / "t", toml)), nonce=NONCE)
    assert plan.collect is not None
    assert plan.collect.artifacts == ("/logs/artifacts", "/out/a", "/out/b")
    assert plan.collect.image == "judge"
    assert [script.required for script in plan.collect.commands] == [True, False]
    assert (plan.user, plan.seconds) == ("root", 7)


REAL = Path(__file__).parents[4] / "shared" / "data" / "rows" / "harbor" / "deepswe_abs-module-cache-flags"


@pytest.mark.skipif(not REAL.is_dir(), reason="the example rows are not part of the repository")
def test_the_real_task_is_understood() -> None:
    task = parse(REAL)
    plan = Harbor().plan(task, nonce=NONCE)
    assert task.agent.workdir == "/app"
    assert plan.seconds == 1800
    assert plan.collect is not None
    assert "/logs/artifacts/model.patch" in plan.collect.artifacts
    assert Harbor().check(task) == ["tests/test.sh is missing"]  # our copy is abridged
    assert task.grader.gold_patch == (REAL / "solution" / "solution.patch").read_bytes()


# --------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("as_json", "as_text", "reward"),
    [
        (b'{"reward": 1}', None, 1.0),
        (b'{"reward": 0.25, "style": 0.9}', b"1", 0.25),
        (b'{"score": 0.5}', None, 0.5),
        (None, b" 1.0\n", 1.0),
        (None, b"0", 0.0),
    ],
)
def test_a_reward_is_read(as_json: bytes | None, as_text: bytes | None, reward: float) -> None:
    assert read_reward(as_json, as_text) == reward


@pytest.mark.parametrize(
    ("as_json", "as_text"),
    [
        (None, None),
        (None, b"\n"),
        (None, b"nan"),
        (None, b"inf"),
        (None, b"-1"),
        (None, b"1.5"),
        (None, b"pass"),
        (b"", b"1"),
        (b"{}", None),
        (b"[1]", None),
        (b'{"reward": NaN}', None),
        (b'{"reward": true}', None),
        (b'{"reward": "1"}', None),
        (b'{"a": 1, "b": 1}', None),
        (b"[" * 100_000, None),
    ],
)
def test_anything_else_is_an_error_and_never_a_zero(as_json: bytes | None, as_text: bytes | None) -> None:
    with pytest.raises(ValueError):
        read_reward(as_json, as_text)


@given(st.binary(max_size=40) | st.none(), st.binary(max_size=20) | st.none())
def test_whatever_is_written_it_is_a_reward_or_an_error(as_json: bytes | None, as_text: bytes | None) -> None:
    try:
        reward = read_reward(as_json, as_text)
    except ValueError:
        return
    assert 0.0 <= reward <= 1.0


def verdict(
    tmp_path: Path,
    text: bytes | None,
    state: Any = "exited",
    *,
    as_json: bytes | None = None,
    exit_code: int | None = 0,
) -> Verdict:
    reports = {"/logs/verifier/reward.json": as_json, "/logs/verifier/reward.txt": text}
    raw = RawRun(state=state, exit_code=exit_code, log=b"boom", reports=reports, seconds=1, nonce=NONCE)
    return judge_run(Harbor(), parse(folder(tmp_path / "t")), raw)


def test_only_a_full_reward_is_resolved(tmp_path: Path) -> None:
    full, part = verdict(tmp_path / "1", b"1"), verdict(tmp_path / "2", b"0.5")
    assert (full.status, full.reward) == (VerdictStatus.RESOLVED, 1.0)
    assert (part.status, part.reward) == (VerdictStatus.UNRESOLVED, 0.5)


def test_of_two_rewards_the_lower_one_counts(tmp_path: Path) -> None:
    """One may be the patch's: test.sh writes the other, wherever the patch has put its own."""
    same = verdict(tmp_path / "1", b"1", as_json=b'{"reward": 1.0}')
    assert (same.reward, same.signals) == (1.0, ())
    for number, (as_json, text) in enumerate(((b'{"reward": 1}', b"0"), (b'{"reward": 0}', b"1"))):
        odd = verdict(tmp_path / f"2{number}", text, as_json=as_json)
        assert (odd.status, odd.reward) == (VerdictStatus.UNRESOLVED, 0.0)
        assert odd.signals[0].startswith("rewards_disagree")
    with pytest.raises(GradingFailed):
        verdict(tmp_path / "3", b"half", as_json=b'{"reward": 1}')


def test_the_reward_of_a_verifier_that_was_killed_is_nobodys(tmp_path: Path) -> None:
    with pytest.raises(GradingFailed, match="killed"):
        verdict(tmp_path / "1", b"1", exit_code=None)


def test_no_reward_is_our_failure_unless_time_ran_out(tmp_path: Path) -> None:
    with pytest.raises(GradingFailed, match="neither reward"):
        verdict(tmp_path / "1", None)
    assert verdict(tmp_path / "2", None, "timeout").status == VerdictStatus.TEST_TIMEOUT


@pytest.mark.parametrize("options", [{"user": "me"}, {"workdir": "app"}])
def test_a_bad_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"grading.harbor.{next(iter(options))}"):
        Harbor(**options)
