"""`rollwright doctor` as a command: what it prints, how it ends, and machines that lack something."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from support.commandline import Rollwright
from support.sample import sample


@pytest.fixture(scope="module")
def rollwright(tmp_path_factory: pytest.TempPathFactory) -> Rollwright:
    return sample(tmp_path_factory.mktemp("doctor"))


def looked(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {found["check"]: found for found in orjson.loads(done.stdout)}


def test_a_typo_in_the_run_file_is_found_and_the_machine_is_still_looked_at(rollwright: Rollwright) -> None:
    done = rollwright("doctor", rollwright.job, "run.atempts=3", code=1)
    assert "fail     run file" in done.stdout
    assert "did you mean 'attempts'?" in done.stdout
    assert "ok       namespaces" in done.stdout
    assert "1 fail" in done.stdout.splitlines()[-1]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("concurrency", "state"), [(2, "ok"), (8, "warn"), (30, "fail")])
def test_few_open_files_are_found_before_a_run_would_fail_of_them(
    rollwright: Rollwright, concurrency: int, state: str
) -> None:
    call = rollwright.argv("doctor", rollwright.job, f"run.concurrency={concurrency}", "--json")
    argv = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *call]
    done = subprocess.run(argv, capture_output=True, text=True, env=rollwright.env, check=False)
    assert done.returncode == (1 if state == "fail" else 0), done.stderr
    seen = looked(done)
    assert seen["limits"]["state"] == state
    assert {name for name, found in seen.items() if found["state"] == "fail"} == (
        {"limits"} if state == "fail" else set()
    )
    if state != "ok":
        assert "200 open files are allowed" in seen["limits"]["seen"]
        assert seen["limits"]["fix"].startswith("ulimit -n ")


def test_a_path_without_npm_and_git_is_found(rollwright: Rollwright, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "env"):
        (tools / name).symlink_to(shutil.which(name) or name)
    env = rollwright.env | {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = rollwright.argv("doctor", rollwright.job, "--json")
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    seen = looked(done)
    assert done.returncode == 1
    assert {name for name, found in seen.items() if found["state"] == "fail"} == {"git", "harness"}
    assert "there is no npm in PATH" in seen["harness"]["seen"]
    assert not (tmp_path / "cache").exists()


def test_a_machine_without_user_namespaces_is_told_what_to_enable(rollwright: Rollwright) -> None:
    if os.geteuid() != 0:
        pytest.skip("taking user namespaces away needs root")
    # In a user namespace whose limit of further ones is 0, as the root of nothing.
    shell = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh"]
    argv += rollwright.argv("doctor", rollwright.job, "--json")
    done = subprocess.run(argv, capture_output=True, text=True, env=rollwright.env, check=False)
    seen = looked(done)
    assert done.returncode == 1
    assert seen["namespaces"]["state"] == "fail"
    assert "sysctl -w user.max_user_namespaces" in seen["namespaces"]["fix"]
    assert seen["gateway"] == {"check": "gateway", "state": "skipped", "seen": "needs a sandbox", "fix": ""}
    assert seen["engine"]["state"] == "ok"


def test_a_home_that_may_not_be_written_is_one_line_for_a_run_and_found_by_doctor(
    rollwright: Rollwright, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("being another user needs root")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    # Root of the machine to its files, but in a user namespace another one, without any power over nobody's home.
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}

    def call(verb: str) -> subprocess.CompletedProcess[str]:
        argv = ["unshare", "--user", "--map-user=1000", "--map-group=1000", *rollwright.argv(verb, rollwright.job)]
        return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)

    ran = call("run")
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert f"rollwright: {home}/.local" in ran.stderr
    assert "XDG_STATE_HOME" in ran.stderr
    looked_at = call("doctor").stdout
    assert f"fail     state           {home} may not be written" in looked_at
    assert f"fail     cache           {home} may not be written" in looked_at
