"""Each thing a person can get wrong: one clear line that names the field or the fix, exit 1, and nothing started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollwright.testing.tiny import tiny_tokenizer
from support.commandline import QUICKSTART, Rollwright

Row = dict[str, Any]


@pytest.fixture
def rollwright(tmp_path: Path) -> Rollwright:
    return Rollwright(home=tmp_path)


@pytest.fixture
def row() -> Row:
    return orjson.loads((QUICKSTART / "tasks.jsonl").read_bytes().splitlines()[0])


@pytest.fixture
def refused(rollwright: Rollwright, row: Row) -> Callable[..., str]:
    """Run a small job that is right but for `settings` and `rows`; what it says on its way out."""
    home = rollwright.home
    policy = home / "policy"
    policy.mkdir()
    tiny_tokenizer(policy)
    (home / "script.toml").write_text("[[script]]\nreplies = ['Done.']\n")
    (home / "job.toml").write_text(
        '[tasks]\npath = "tasks.jsonl"\n[policy]\npath = "policy"\n[engine]\nkind = "scripted"\n'
        '[engine.scripted]\nscript = "script.toml"\n'
    )

    def run(*settings: str, rows: list[Row] | bytes | None = None) -> str:
        data = rows if isinstance(rows, bytes) else b"\n".join(orjson.dumps(each) for each in rows or [{**row}])
        (home / "tasks.jsonl").write_bytes(data)
        done = rollwright("run", home / "job.toml", *settings, code=1)
        assert "Traceback" not in done.stderr, done.stderr
        assert not (home / "runs").exists()
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("rollwright: ")
        return last

    return run


def changed(row: Row, **metadata: Any) -> Row:
    return {**row, "metadata": {**row["metadata"], "image": "host", **metadata}}


def test_a_row_that_is_not_json_is_named_by_its_line(refused: Callable[..., str], row: Row) -> None:
    said = refused(rows=orjson.dumps(row) + b"\n{broken\n")
    assert "tasks.jsonl line 2 is not JSON" in said


@pytest.mark.parametrize("field", ["image", "workdir"])
def test_a_row_without_a_field_names_row_and_field(refused: Callable[..., str], row: Row, field: str) -> None:
    del row["metadata"][field]
    row["metadata"]["remote_env_info"].pop(field, None)
    said = refused(rows=[row])
    assert "line 1" in said
    assert field in said


def test_an_unknown_protocol_is_named_with_the_known_ones(refused: Callable[..., str], row: Row) -> None:
    said = refused(rows=[changed(row, protocol="scalesw")])
    assert "metadata.protocol 'scalesw'" in said
    assert "scaleswe" in said


def test_the_same_row_twice_is_named(refused: Callable[..., str], row: Row) -> None:
    assert "line 2: the same task as tasks.jsonl line 1 (cart)" in refused(rows=[row, row])


def test_an_empty_data_set_is_named(refused: Callable[..., str]) -> None:
    assert "holds no rows" in refused(rows=b"\n")


def test_a_missing_data_set_is_named(refused: Callable[..., str]) -> None:
    said = refused("tasks.path=nowhere.jsonl")
    assert "nowhere.jsonl cannot be read" in said


def test_a_missing_image_is_named(refused: Callable[..., str], row: Row, tmp_path: Path) -> None:
    said = refused(f"sandbox.namespaces.images={tmp_path}", rows=[changed(row, image="quickstart/none")])
    assert "quickstart/none" in said
    assert str(tmp_path) in said


def test_an_unknown_implementation_names_the_nearest(refused: Callable[..., str]) -> None:
    assert "Did you mean 'scripted'" in refused("engine.kind=scriptd")


def test_an_unknown_option_names_the_nearest(refused: Callable[..., str]) -> None:
    said = refused("engine.scripted.seconds_per_trun=1")
    assert "[engine.scripted] has no option 'seconds_per_trun'. Did you mean 'seconds_per_turn'" in said


def test_a_deadline_that_running_out_the_clock_would_reach_is_named(
    refused: Callable[..., str],
) -> None:
    said = refused("run.rollout_seconds=2000", "harness.seconds=1000", "grading.scaleswe.seconds=500")
    assert "run.rollout_seconds: 2000 s are too few" in said


def test_an_engine_that_is_down_is_named(refused: Callable[..., str], row: Row) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    said = refused("engine.kind=sglang", f"engine.sglang.url={url}", rows=[changed(row)])
    assert "EngineUnreachable" in said
    assert url in said


def test_a_policy_that_is_not_the_engines_is_named(refused: Callable[..., str], row: Row, tmp_path: Path) -> None:
    from rollwright.testing.tiny_llama import write_random_llama

    write_random_llama(tmp_path / "model", vocab_size=64)
    said = refused("engine.kind=local", f"engine.local.model={tmp_path / 'model'}", rows=[changed(row)])
    assert "64" in said
    assert "not of one policy" in said


def test_a_folder_without_a_tokenizer_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "tokenizer.json" in refused(f"policy.path={tmp_path / 'empty'}")


@pytest.mark.parametrize(
    ("when", "says"), [("tools", "cannot offer tools"), ("messages[-1].role == 'tool'", "cannot say what a tool gave")]
)
def test_a_template_that_no_agent_could_work_with_is_named(
    refused: Callable[..., str], rollwright: Rollwright, when: str, says: str
) -> None:
    template = rollwright.home / "policy" / "chat_template.jinja"
    template.write_text(f"{{%- if {when} %}}{{{{ raise_exception('not me') }}}}{{% endif -%}}" + template.read_text())
    said = refused()
    assert "policy.path" in said
    assert says in said


def test_a_missing_npm_says_what_to_install(
    refused: Callable[..., str], rollwright: Rollwright, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = refused("harness.npm=npm-is-not-here", rows=[changed(row)])
    assert "npm-is-not-here" in said


def test_no_user_namespaces_says_what_to_enable(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("taking user namespaces away needs root")
    code = (
        "import anyio, pathlib; from rollwright.sandboxes.namespaces import NamespacesProvider\n"
        f"anyio.run(NamespacesProvider(state_dir=pathlib.Path({str(tmp_path / 's')!r})).probe)"
    )
    # In a user namespace whose limit of further ones is 0, as the root of nothing.
    shell = 'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "max_user_namespaces" not in done.stderr and "Permission" in done.stderr and "echo" in done.stderr:
        pytest.skip("this kernel does not let a namespace lower its own limit")
    assert "Unsupported" in done.stderr, done.stderr
    assert "sysctl -w user.max_user_namespaces" in done.stderr


def test_a_port_in_use_is_named(rollwright: Rollwright, tmp_path: Path) -> None:
    (tmp_path / "script.toml").write_text("[[script]]\nreplies = ['Done.']\n")
    (tmp_path / "policy").mkdir()
    tiny_tokenizer(tmp_path / "policy")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ["gateway", f"script={tmp_path / 'script.toml'}", "--engine", "scripted"]
        done = rollwright(*argv, "--tokenizer", tmp_path / "policy", "--port", port, code=1)
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_command_line_is_exit_1(rollwright: Rollwright) -> None:
    assert rollwright("run", code=1).returncode == 1
    assert rollwright("nonsense", code=1).returncode == 1
    assert "is not a run folder" in rollwright("verify", rollwright.home, code=1).stderr
    assert "no run file" in rollwright("run", rollwright.home / "x.toml", code=1).stderr
