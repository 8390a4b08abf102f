"""Whole runs through the command line: real pi, real sandboxes, real tests, a scripted policy."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from rollwright.export import samples_of
from rollwright.store import RunDir
from support.commandline import QUICKSTART, Rollwright, graded

pytestmark = [pytest.mark.pi, pytest.mark.timeout(180)]

SCRIPTED = "engine.kind=scripted"
Until = Callable[[Callable[[], bool], str], None]


def test_a_scripted_policy_solves_its_task_and_leaves_training_samples(rollwright: Rollwright) -> None:
    run = rollwright.run(SCRIPTED, "run.limit=2", "run.attempts=2")
    records = graded(run)
    assert {name: record.status for name, record in records.items()} == {
        "cart.1": "resolved",
        "cart.2": "resolved",
        "boltons-bytes2human.1": "empty_patch",
        "boltons-bytes2human.2": "empty_patch",
    }
    solved = records["cart.1"]
    assert (solved.reward, solved.turns, solved.branches, solved.stop_reason) == (1.0, 4, 1, "completed")
    assert solved.trained_tokens == solved.sampled_tokens > 0
    assert ">= FREE_SHIPPING_FROM" in run.rollout("cart.1").patch.read_text()
    assert "FREE_SHIPPING" not in run.rollout("boltons-bytes2human.1").patch.read_text()

    samples = list(samples_of(run))
    assert len(samples) == 4
    assert sum(sum(sample.loss_mask) for sample in samples) == sum(r.sampled_tokens for r in records.values())

    checked = orjson.loads(rollwright("verify", run.path, "--json").stdout)
    assert checked["violations"] == []
    assert checked["trained_tokens"] == checked["sampled_tokens"]
    assert rollwright.boxes() == []


def test_a_changed_sample_is_found_by_verify(rollwright: Rollwright) -> None:
    run = rollwright.run(SCRIPTED, "run.limit=1", "run.attempts=1")
    path = run.rollout("cart.1").samples
    line = orjson.loads(path.read_bytes())
    line["logprobs"][0] -= 0.25
    path.write_bytes(orjson.dumps(line) + b"\n")
    done = rollwright("verify", run.path, code=2)
    assert "logprob_differs" in done.stdout


def test_samples_export_to_jsonl_and_parquet(rollwright: Rollwright, tmp_path: Path) -> None:
    run = rollwright.run(SCRIPTED, "run.limit=1", "run.attempts=1")
    sample = next(samples_of(run))
    rollwright("export", run.path, "-o", tmp_path / "all.jsonl")
    row = orjson.loads((tmp_path / "all.jsonl").read_bytes())
    assert (row["tokens"], row["loss_mask"], row["logprobs"]) == tuple(
        values.tolist() for values in (sample.tokens, sample.loss_mask, sample.logprobs)
    )
    rollwright("export", run.path, "--format", "parquet", "-o", tmp_path / "all.parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert (table[0]["tokens"], table[0]["reward"]) == (sample.tokens.tolist(), 1.0)
    assert "format is one of" in rollwright("export", run.path, "--format", "csv", code=1).stderr


def test_a_killed_run_is_finished_by_resume_and_repeats_nothing(rollwright: Rollwright, until: Until) -> None:
    job = ("run", rollwright.job, f"run.output={rollwright.home}", "run.name=killed", SCRIPTED, "run.limit=3")
    process = rollwright.start(*job, "run.attempts=4", "run.concurrency=2", "engine.scripted.seconds_per_turn=0.2")
    run = RunDir(rollwright.home / "killed")
    until(lambda: run.index.exists() and len(run.records()) >= 3, "the third stored rollout")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stored = run.index.read_bytes()
    before = stored[: stored.rfind(b"\n") + 1]
    assert 3 <= before.count(b"\n") < 12
    until(lambda: all(not box["alive"] for box in rollwright.boxes()), "the death of the boxes")
    rollwright("sandbox", "reap")
    assert rollwright.boxes() == []

    rollwright("resume", run.path)
    assert run.index.read_bytes().startswith(before)
    names = [record.rollout for record in run.records()]
    assert len(names) == len(set(names)) == 12
    assert all(record.graded for record in run.records())
    assert sorted(path.name for path in run.rollouts.iterdir()) == sorted(names)
    assert rollwright("verify", run.path).stdout.startswith("0 violations in 12")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_nothing_behind_and_resume_finishes(rollwright: Rollwright, until: Until, times: int) -> None:
    job = ("run", rollwright.job, f"run.output={rollwright.home}", "run.name=stopped", SCRIPTED, "run.limit=2")
    process = rollwright.start(*job, "run.attempts=4", "run.concurrency=2", "engine.scripted.seconds_per_turn=0.3")
    run = RunDir(rollwright.home / "stopped")
    until(lambda: run.index.exists() and len(run.records()) >= 1, "the first stored rollout")
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    until(lambda: all(not box["alive"] for box in rollwright.boxes()), "the death of the boxes")
    if times == 1:
        assert rollwright.boxes() == []
        assert "Traceback" not in said
    rollwright("resume", run.path)
    assert len({record.rollout for record in run.records()}) == 8


def test_two_ctrl_c_give_the_terminal_its_cursor_back(rollwright: Rollwright) -> None:
    settings = (f"run.output={rollwright.home}", SCRIPTED, "run.limit=1", "engine.scripted.seconds_per_turn=30")
    ours, theirs = os.openpty()
    argv = rollwright.argv("run", rollwright.job, *settings)
    process = subprocess.Popen(argv, env=rollwright.env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    for sign in (b"agent_running", b"interrupted"):
        while sign not in shown:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    while chunk := _rest(ours):
        shown += chunk
    os.close(ours)
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0


def _rest(terminal: int) -> bytes:
    """What a terminal whose other end is closed still holds."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_ctrl_c_before_the_first_rollout_leaves_no_run_and_names_none(rollwright: Rollwright) -> None:
    process = rollwright.start("run", rollwright.job, f"run.output={rollwright.home}", "run.name=early", SCRIPTED)
    assert process.stderr is not None
    while "preparing" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    if not (rollwright.home / "early").exists():
        assert (printed, said.splitlines()[-1]) == ("", "nothing was started")
    assert rollwright.boxes() == []


def test_an_engine_that_fails_for_good_is_never_a_reward(rollwright: Rollwright, tmp_path: Path) -> None:
    script = tmp_path / "broken.toml"
    faults = "".join(f"[[fault]]\ncall = {call}\nkind = 'unreachable'\n" for call in range(1, 60))
    script.write_text(f"[[script]]\nreplies = ['Done.']\n{faults}")
    run = rollwright.run(
        SCRIPTED, f"engine.scripted.script={script}", "run.limit=1", "run.attempts=1", "run.retries=0", code=2
    )
    (record,) = run.records()
    assert (record.status, record.reward, record.trainable, record.counts_in_baseline) == (
        "ungraded",
        None,
        False,
        False,
    )
    assert record.failure is not None
    assert (record.failure.error, record.failure.fault) == ("EngineUnreachable", "infra")
    assert list(samples_of(run)) == []
    assert "ungraded" in orjson.loads(run.rollout(record.rollout).verdict.read_bytes())
    assert rollwright.boxes() == []


def test_a_conversation_the_template_refuses_is_never_a_reward(rollwright: Rollwright, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(QUICKSTART / "policy", policy)
    template = policy / "chat_template.jinja"
    when = "messages[-1].role == 'tool' and messages[-1].content != 'a.py'"  # what the check before step 0 says
    template.write_text(f"{{%- if {when} %}}{{{{ raise_exception('not me') }}}}{{% endif -%}}" + template.read_text())
    run = rollwright.run(SCRIPTED, f"policy.path={policy}", "run.limit=1", "run.attempts=1", code=2)
    (record,) = run.records()
    assert (record.status, record.reward, record.turns) == ("ungraded", None, 1)
    assert record.failure is not None
    assert (record.failure.error, record.failure.fault, record.tries) == ("RequestRefused", "bug", 1)
    assert list(samples_of(run)) == []


def test_a_passing_engine_failure_is_retried_and_costs_nothing(rollwright: Rollwright, tmp_path: Path) -> None:
    script = tmp_path / "shaky.toml"
    solved = (rollwright.job.parent / "replies.toml").read_text()
    script.write_text(f"{solved}\n[[fault]]\ncall = 3\nkind = 'unreachable'\n")
    run = rollwright.run(SCRIPTED, f"engine.scripted.script={script}", "run.limit=1", "run.attempts=1")
    (record,) = run.records()
    assert (record.status, record.tries, record.branches) == ("resolved", 1, 1)
    assert record.trained_tokens == record.sampled_tokens


@pytest.mark.parametrize("left_kib", [0, 40])
def test_a_policy_that_fills_its_box_is_judged_and_not_excused(
    rollwright: Rollwright, tmp_path: Path, left_kib: int
) -> None:
    script = tmp_path / "hog.toml"
    fill = "head -c 30000 /dev/urandom >work.bin; cd; dd if=/dev/zero of=hog bs=1M"
    script.write_text(f"""
[[script]]
replies = ['''<tool_call>
<function=bash>
<parameter=command>
{fill}; truncate -s -{left_kib}K hog
</parameter>
</function>
</tool_call>''', "Done."]
""")
    run = rollwright.run(SCRIPTED, f"engine.scripted.script={script}", "run.limit=1", "run.attempts=1")
    (record,) = run.records()
    assert (record.status, record.reward, record.tries) == ("patch_rejected", 0.0, 1)


def test_a_sandbox_that_dies_under_the_agent_is_begun_again(rollwright: Rollwright, until: Until) -> None:
    job = ("run", rollwright.job, f"run.output={rollwright.home}", "run.name=dying", SCRIPTED, "run.limit=1")
    process = rollwright.start(*job, "run.attempts=1", "engine.scripted.seconds_per_turn=1.5")
    boxes = rollwright.home / "state" / "rollwright" / "boxes" / "boxes"
    turns = rollwright.home / "dying" / "work" / "cart.1" / "turns.log"
    until(lambda: turns.exists() and b'"kind":"turn"' in turns.read_bytes(), "the first turn")
    (record,) = (orjson.loads(path.read_bytes()) for path in boxes.glob("*.json"))
    os.kill(record["init"]["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    (stored,) = RunDir(rollwright.home / "dying").records()
    assert (stored.status, stored.tries) == ("resolved", 2)
    assert stored.trained_tokens == stored.sampled_tokens
    assert rollwright.boxes() == []


def test_the_gateways_port_is_the_sandboxs_own(rollwright: Rollwright) -> None:
    with socket.create_server(("127.0.0.1", 18001)):
        run = rollwright.run(SCRIPTED, "run.limit=1", "run.attempts=2", "run.concurrency=2")
    assert [record.status for record in run.records()] == ["resolved", "resolved"]


def test_a_dry_run_prints_the_plan_and_starts_nothing(rollwright: Rollwright) -> None:
    done = rollwright("run", rollwright.job, "--dry-run", f"run.output={rollwright.home / 'none'}", "--limit", "2")
    assert "8 rollouts: 2 tasks × 4 attempts" in done.stdout
    assert "cart: scaleswe, image quickstart/cart" in done.stdout
    assert not (rollwright.home / "none").exists()
    plan = orjson.loads(rollwright("run", rollwright.job, "--dry-run", "--json", "--limit", "1").stdout)
    assert plan["rollouts"] == [f"cart.{attempt}" for attempt in (1, 2, 3, 4)]


def test_validate_proves_the_tasks(rollwright: Rollwright) -> None:
    rows = orjson.loads(rollwright("validate", rollwright.job, "run.limit=3", "--json").stdout)
    assert [(row["gold"], row["noop"], row["usable"]) for row in rows] == [("resolved", "unresolved", True)] * 3
