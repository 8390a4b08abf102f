"""The launch script: what it refuses, what it prints, what it starts, and that it stops exactly that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.commandline import ROOT

SCRIPT = ROOT / "launch" / "slime_swe.sh"
RAY = """#!/bin/sh
# Writes down what it was called with. `start` lives until it is told to end.
echo "$*" >>"$STUB/calls"
case $1 in
start)
  case $2 in --head) name=head ;; *) name=worker ;; esac
  echo $$ >"$STUB/$name.$$"
  trap 'rm -f "$STUB/$name.$$"; exit 0' TERM
  while :; do sleep 0.05; done ;;
job)
  if [ "$2" = submit ]; then
    cp "$8" "$STUB/environment.json"
    stat -c %a "$8" >"$STUB/mode"
    while [ -e "$STUB/hold" ]; do sleep 0.05; done
    exit "${JOB_EXIT:-0}"
  fi
  rm -f "$STUB/hold" ;;
esac
"""
RAY_MODULE = """
import glob, os
def init(**_): pass
def nodes(): return [{"Alive": True} for name in glob.glob(os.environ["STUB"] + "/*.[0-9]*")]
"""
SSH = """#!/bin/sh
# The last argument is the command; this machine is all hosts.
echo "$*" >>"$STUB/ssh"
for last; do :; done
exec sh -c "$last"
"""


@dataclass
class Launch:
    """A machine with slime on it."""

    home: Path
    env: dict[str, str]

    def __call__(self, *args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", SCRIPT, *args], env=self.env | env, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == code, done.stderr + done.stdout
        return done

    def alive(self) -> list[Path]:
        """What the stub of Ray has running."""
        return sorted(self.home.glob("stub/*.[0-9]*"))

    def calls(self) -> list[str]:
        path = self.home / "stub" / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    binaries, stub, slime, model = (tmp_path / name for name in ("bin", "stub", "slime", "model"))
    for folder in (binaries, stub, slime / "scripts", model, tmp_path / "modules"):
        folder.mkdir(parents=True)
    for name, text in (("ray", RAY), ("ssh", SSH)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    (tmp_path / "modules" / "ray.py").write_text(RAY_MODULE)
    (slime / "train.py").touch()
    (slime / "model.sh").write_text("MODEL_ARGS=(--num-layers 40 --rotary-base '1 0')\n")
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "hosts").write_text("# rack 1\n127.0.0.1 slots=8\nnode-b\nnode-c\n\n")
    env = {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "STUB": str(stub),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path / "modules"),
        "SLIME_DIR": str(slime),
        "MODEL_ARGS_FILE": str(slime / "model.sh"),
        "HF_CHECKPOINT": str(model),
        "REF_MODEL_PATH": str(model),
        "PROMPT_DATA": str(tmp_path / "rows.jsonl"),
        "HOSTFILE": str(tmp_path / "hosts"),
        "RUN_ROOT": str(tmp_path / "run"),
        "E2B_API_KEY": "e2b_secret",
        "ADAPTER_PUBLIC_HOST": "10.0.0.1",
        "RAY_PORT": "26379",
        "START_SECONDS": "20",
    }
    yield Launch(home=tmp_path, env=env)
    for left in tmp_path.glob("stub/*.[0-9]*"):
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_it_is_clean() -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([checker, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"HF_CHECKPOINT": ""}, "HF_CHECKPOINT is not set"),
        ({"HF_CHECKPOINT": "/no/model"}, "HF_CHECKPOINT: there is no /no/model"),
        ({"HF_CHECKPOINT": "/tmp"}, "/tmp has no tokenizer.json"),
        ({"PROMPT_DATA": "/no/rows"}, "PROMPT_DATA: there is no /no/rows"),
        ({"E2B_API_KEY": ""}, "E2B_API_KEY is not set"),
        ({"SLIME_AGENT_CC_TARBALL": "/no/cc.tgz"}, "SLIME_AGENT_CC_TARBALL: there is no file /no/cc.tgz"),
        ({"SLIME_AGENT_NODE_TARBALL": "/no/node.tar.xz"}, "SLIME_AGENT_NODE_TARBALL: there is no file"),
        ({"SLIME_DIR": "/no/slime"}, "SLIME_DIR: there is no /no/slime/train.py"),
        ({"HOSTFILE": "/no/hosts"}, "HOSTFILE: there is no /no/hosts, and 3 nodes are wanted"),
        ({"NODES": "4"}, "has 3 hosts, and 4 nodes are wanted"),
        ({"NODES": "none"}, "must be a positive number, not 'none'"),
        ({"ADAPTER_PUBLIC_HOST": "127.0.0.1"}, "ADAPTER_PUBLIC_HOST is 127.0.0.1, which no sandbox reaches"),
        ({"MASTER_ADDR": "10.9.9.9"}, "the first host of"),
        ({"MASTER_ADDR": "192.0.2.1", "HOSTFILE": "/no/hosts", "NODES": "1"}, "192.0.2.1, which is not this machine"),
    ],
)
def test_what_is_missing_is_said_in_one_line_before_anything_starts(
    launch: Launch, changed: dict[str, str], says: str
) -> None:
    done = launch(code=1, **({"NODES": "3"} | changed))
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert launch.calls() == []
    assert not (launch.home / "run").exists()


def test_a_host_that_is_no_host_is_refused(launch: Launch) -> None:
    (launch.home / "hosts").write_text("127.0.0.1\n-oProxyCommand=touch\n")
    assert "is not a host name" in launch("--nodes", "2", code=1).stderr


@pytest.mark.parametrize("first", ["192.0.2.1", "node-b.invalid"])
def test_a_hostfile_of_which_another_machine_is_the_head_is_refused_naming_both(launch: Launch, first: str) -> None:
    (launch.home / "hosts").write_text(f"{first}\n127.0.0.1\n")
    done = launch("--nodes", "2", code=1)
    assert f"the first host of {launch.home}/hosts is {first}, and this machine is {os.uname().nodename}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert launch.calls() == []


def test_this_machine_is_known_by_its_name_too(launch: Launch) -> None:
    (launch.home / "hosts").write_text("localhost\n")
    assert "--node-ip-address localhost" in launch("--nodes", "1", "--dry-run").stdout


def test_without_a_hostfile_the_head_is_where_the_environment_says(launch: Launch) -> None:
    shown = launch("--nodes", "1", "--dry-run", HOSTFILE="/no/hosts", MASTER_ADDR="127.0.0.1").stdout
    assert "# head: 127.0.0.1" in shown


@pytest.mark.parametrize(
    ("ssh", "says"),
    [
        ("exit 255", "host node-b: no password-less ssh"),
        ('PATH=/nowhere; exec /bin/sh -c "$last"', "host node-b: there is no ray"),
        ('PYTHONPATH="$STUB/../without" exec sh -c "$last"', "has no rollwright"),
    ],
)
def test_a_worker_that_cannot_work_is_refused_before_anything_starts(launch: Launch, ssh: str, says: str) -> None:
    (launch.home / "bin" / "ssh").write_text(f"#!/bin/sh\nfor last; do :; done\n{ssh}\n")
    (launch.home / "without").mkdir()
    (launch.home / "without" / "rollwright.py").write_text("raise ImportError\n")
    done = launch("--nodes", "2", code=1)
    assert says in done.stderr
    assert launch.calls() == []


def test_the_dry_run_prints_everything_but_the_key_and_starts_nothing(launch: Launch) -> None:
    more = {
        "SWE_TRAIN_PROTOCOL": "swebench",
        "SLIME_AGENT_CC_EXTRA_ENVS": '{"TOKEN": "other_secret"}',
        "https_proxy": "http://me:proxy_secret@proxy:3128",
        "WANDB_API_KEY": "wandb_secret",
    }
    shown = launch("--nodes", "3", "--dry-run", "--", "--lr", "2e-6", **more).stdout
    for part in (
        "ray start --head --block --node-ip-address 127.0.0.1 --port 26379",
        "# worker: node-b",
        "# worker: node-c",
        "--actor-num-nodes 3",
        "--rotary-base 1\\ 0",
        "--custom-generate-function-path rollwright.integrations.slime.generate",
        "--custom-reward-post-process-path rollwright.integrations.slime.post_process_rewards",
        "--custom-rollout-log-function-path rollwright.integrations.slime.log_rollout",
        "--custom-eval-rollout-log-function-path rollwright.integrations.slime.log_eval_rollout",
        '"SWE_TRAIN_PROTOCOL": "swebench"',
        '"E2B_API_KEY": "(set)"',
        '"WANDB_API_KEY": "(set)"',
        "--lr 2e-6",
    ):
        assert part in shown, part
    assert "_secret" not in shown
    assert launch.calls() == []
    assert not (launch.home / "run").exists()


def test_sandboxes_elsewhere_are_told_the_node_that_the_rollout_manager_is_on(launch: Launch) -> None:
    """It need not be the head."""
    del launch.env["ADAPTER_PUBLIC_HOST"]
    assert '"ADAPTER_PUBLIC_HOST": "node"' in launch("--nodes", "1", "--dry-run").stdout


def test_a_proxy_is_not_for_the_hosts_of_the_cluster(launch: Launch) -> None:
    shown = launch("--nodes", "2", "--dry-run", no_proxy="intranet").stdout
    assert '"no_proxy": "intranet,127.0.0.1,localhost,127.0.0.1,node-b"' in shown


def test_eight_nodes_are_the_default(launch: Launch) -> None:
    (launch.home / "hosts").write_text("127.0.0.1\n" + "".join(f"node-{n}\n" for n in range(9)))
    assert "--actor-num-nodes 8" in launch("--dry-run").stdout


def test_a_job_on_three_nodes_leaves_nothing_behind(launch: Launch) -> None:
    done = launch("--nodes", "3")
    calls = launch.calls()
    assert sum(call.startswith("start --head") for call in calls) == 1
    assert sum(call.startswith("start --block --address 127.0.0.1:26379") for call in calls) == 2
    (submit,) = [call for call in calls if call.startswith("job submit")]
    assert "e2b_secret" not in submit, "everybody on the machine can read the arguments of a process"
    environment = json.loads((launch.home / "stub" / "environment.json").read_text())["env_vars"]
    assert environment["E2B_API_KEY"] == "e2b_secret"
    assert environment["ROLLWRIGHT_OUTPUT"] == str(launch.home / "run")
    assert (launch.home / "stub" / "mode").read_text().strip() == "600"
    assert launch.alive() == []
    assert "job rollwright-" in done.stdout
    assert not any(call.startswith("stop") for call in calls), "`ray stop` would end other people's Ray"


def test_the_jobs_failure_is_the_scripts(launch: Launch) -> None:
    launch("--nodes", "1", code=7, JOB_EXIT="7")
    assert launch.alive() == []


def test_ctrl_c_ends_the_job_and_the_nodes(launch: Launch) -> None:
    (launch.home / "stub" / "hold").touch()
    process = subprocess.Popen(["bash", SCRIPT, "--nodes", "3"], env=launch.env, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 40
    while not any(call.startswith("job submit") for call in launch.calls()):
        assert time.monotonic() < deadline
        signal.sigtimedwait([], 0.02)
    assert len(launch.alive()) == 3
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)
    assert process.returncode == 143
    assert launch.alive() == []
    assert any(call.startswith("job stop") for call in launch.calls())


NOBODY_THERE = """
import os, time
def init(**_):
    open(os.environ["STUB"] + "/looked", "w").close()
    time.sleep(600)
"""
"""Ray looks for its head for minutes."""


def test_a_head_that_ends_is_said_with_its_last_words(launch: Launch) -> None:
    (launch.home / "modules" / "ray.py").write_text(NOBODY_THERE)
    (launch.home / "bin" / "ray").write_text("#!/bin/sh\necho the port is taken\nexit 1\n")
    done = launch("--nodes", "1", code=1, PROBE_SECONDS="0.5")
    assert "Ray's head ended: the port is taken" in done.stderr


def test_waiting_for_nodes_can_be_interrupted(launch: Launch) -> None:
    (launch.home / "modules" / "ray.py").write_text(NOBODY_THERE)
    process = subprocess.Popen(["bash", SCRIPT, "--nodes", "1"], env=launch.env | {"PROBE_SECONDS": "600"})
    deadline = time.monotonic() + 40
    while not (launch.alive() and (launch.home / "stub" / "looked").exists()):
        assert time.monotonic() < deadline
        signal.sigtimedwait([], 0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=40) == 143
    assert launch.alive() == []


def test_a_ray_that_runs_already_is_left_alone(launch: Launch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = launch("--nodes", "1", code=1, RAY_PORT=port)
    assert "another Ray runs here" in done.stderr
    assert launch.calls() == []


def test_a_name_by_which_the_example_knows_a_setting_is_not_overridden_by_a_default(launch: Launch) -> None:
    said = launch("--dry-run", "--nodes", "1", SLIME_HEAD_HOST="203.0.113.7", SHIM_PORT="20001").stdout
    assert "20001" in said
    assert "203.0.113.7" in said
    assert "18001" not in said
