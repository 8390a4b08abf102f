"""Nothing hidden reaches the agent's box: rollouts of every protocol, with a spy for an agent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from contract.calc_task import WORKDIR, images
from contract.pro_task import DOCKERFILE, PARSER, RUN_SCRIPT
from contract.test_other_protocols import harbor_folder
from rollwright.config import RunConfig
from rollwright.graders import Grader
from rollwright.graders.harbor import Harbor
from rollwright.graders.swe_gym import SweGym
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_pro import SwebenchPro
from rollwright.graders.swerebench_v2 import SweRebenchV2
from rollwright.graders.swesmith import SweSmith
from rollwright.run import LocalExecutor, Places, Silent, opened, prepare
from rollwright.store import RunWriter
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.types import Task
from support.spy import spy_tarball

pytestmark = pytest.mark.anyio

SECRET = "f0rb1dden"
"""In every hidden field, in the name of the image, and in what people call the task."""
STATEMENT = "add subtracts"
PATCH = f"""diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b  # {SECRET}
"""
BUG = PATCH.replace(f"a + b  # {SECRET}", "a * b")
TEST_PATCH = f"--- /dev/null\n+++ b/tests/test_{SECRET}.py\n@@ -0,0 +1 @@\n+def test_{SECRET}(): pass\n"
TEST = f"tests/test_{SECRET}.py::test_{SECRET}"
SCRIPT = f"cd {WORKDIR}\n: '>>>>> Start Test Output'\npytest -rA tests/test_{SECRET}.py\n: '>>>>> End Test Output'\n"


def rows(base: str, solution: str, harbor: Path) -> dict[str, dict[str, Any]]:
    """A row of each protocol. Its names are those of the protocol's own data sets."""
    common = {
        "instance_id": f"{SECRET}__calc-1",
        "problem_statement": STATEMENT,
        "workdir": WORKDIR,
        "patch": PATCH,
        "test_patch": TEST_PATCH,
        "hints_text": SECRET,
        "FAIL_TO_PASS": [TEST],
        "PASS_TO_PASS": [TEST],
    }
    classic = common | {"repo": "calc/calc", "version": "1", "base_commit": base, "image": f"{SECRET}-calc"}
    return {
        "scaleswe": common | {"image": f"{SECRET}-calc", "f2p_script": f"def test_{SECRET}(): pass\n"},
        "command": common | {"image": f"{SECRET}-calc", "command": f"echo {SECRET}", "report": "junit"},
        "harbor": {"task_dir": str(harbor)},
        "swebench": classic | {"eval_script": SCRIPT, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"},
        "swe_gym": classic | {"repo": "dask/dask", "eval_script": SCRIPT},
        "swesmith": common | {"repo": "swesmith/x__calc.01234567", "patch": BUG, "image_name": f"x/{SECRET}-smith"},
        "swerebench_v2": classic
        | {"install_config": {"log_parser": "parse_log_pytest", "test_cmd": [f"pytest {SECRET}"]}},
        "r2e_gym": common | {"docker_image": f"{SECRET}-r2e", "expected_output_json": {f"test_{SECRET}": "PASSED"}},
        "swebench_pro": common
        | {
            "instance_id": f"instance_calc__calc-{solution}-{SECRET}",
            "base_commit": base,
            "image": f"{SECRET}-calc",
            "before_repo_set_cmd": f"git reset --hard {base}\ngit checkout {solution} -- tests/test_calc.py",
            "selected_test_files_to_run": [TEST],
        },
    }


def hide_in_names(folder: Path) -> tuple[str, str]:
    """Images whose names, and whose layers' paths, hold the secret. Returns the base commit and the solution's."""
    images(folder)
    layer = folder / "calc-layer" / WORKDIR[1:]
    commits = subprocess.run(
        ["git", "rev-parse", "HEAD", "v1"], cwd=layer, check=True, capture_output=True, text=True
    ).stdout.split()
    spec = json.loads((folder / "calc" / "image.json").read_text()) | {"layers": ["layer"]}
    for name in ("calc", "smith", "r2e"):
        image = folder / (f"{SECRET}-{name}" if name != "smith" else f"x/{SECRET}-smith")
        shutil.copytree(folder / "calc-layer", image / "layer", symlinks=True)
        (image / "image.json").write_text(json.dumps(spec))
    smith = folder / f"x/{SECRET}-smith" / "layer" / WORKDIR[1:]
    (smith / "tests" / f"test_{SECRET}.py").write_text(f"def test_{SECRET}(): pass\n")
    subprocess.run(["sh", "-c", f"git add -A && git commit -q -m {SECRET}"], cwd=smith, check=True)
    hidden = folder / f"{SECRET}-r2e" / "layer"
    (hidden / "r2e_tests").mkdir()
    (hidden / "r2e_tests" / f"test_{SECRET}.py").write_text(SECRET)
    (hidden / WORKDIR[1:] / "run_tests.sh").write_text(SECRET)
    return commits[0], commits[1]


def assets(folder: Path, instance_id: str) -> Path:
    scripts = folder / "run_scripts" / instance_id
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN_SCRIPT + f"# {SECRET}\n")
    (scripts / "parser.py").write_text(PARSER + f"# {SECRET}\n")
    dockerfile = folder / "dockerfiles" / "instance_dockerfile" / instance_id / "Dockerfile"
    dockerfile.parent.mkdir(parents=True)
    dockerfile.write_text(DOCKERFILE + f"ENV X {SECRET}\n")
    return folder


async def test_nothing_hidden_reaches_the_agents_box(tmp_path: Path) -> None:
    base, solution = hide_in_names(tmp_path / "images")
    harbor = harbor_folder(tmp_path / f"{SECRET}-task")
    (harbor / "task.toml").write_text((harbor / "task.toml").read_text().replace('"calc"', f'"{SECRET}-calc"'))
    for file in ("tests/test.sh", "solution/solve.sh"):
        (harbor / file).write_text((harbor / file).read_text() + f"# {SECRET}\n")
    made = rows(base, solution, harbor)
    for number, (protocol, row) in enumerate(made.items()):
        row["protocol"] = protocol
        if "instance_id" in row and protocol != "swebench_pro":
            row["instance_id"] += str(number)
    lines = [json.dumps({"metadata": row}) for row in made.values()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    kind = "support.spy:Spy"
    config = RunConfig.resolve(
        {
            "run": {"retries": 0},
            "tasks": {"path": "rows.jsonl"},
            "policy": {"path": str(tiny_tokenizer(tmp_path / "policy"))},
            "engine": {"kind": "scripted", "scripted": {"script": "replies.toml"}},
            "harness": {"kind": kind, kind: {"tarball": str(spy_tarball(tmp_path))}},
            "sandbox": {"namespaces": {"images": str(tmp_path / "images")}},
            "grading": {
                "swebench_pro": {"assets": str(assets(tmp_path / "assets", made["swebench_pro"]["instance_id"]))}
            },
        },
        base=tmp_path,
        where="run.toml",
    )
    (tmp_path / "replies.toml").write_text('[[script]]\nreplies = ["Done."]\n')
    places = Places(cache=tmp_path / "cache", state=tmp_path / "state")
    prepared = prepare(config, places)
    assert {task.grader.protocol for task in prepared.tasks.tasks.values()} == set(made)
    async with opened(prepared.parts, places, Silent(), images=prepared.images) as tools:
        writer = RunWriter.create(tmp_path / f"run-{SECRET}", run_file=b"", resolved=prepared.resolved())
        executor = LocalExecutor(tools, writer)
        for plan in prepared.plans(f"run-{SECRET}"):
            attempt = await executor.run(plan, Silent())
            assert attempt.record.failure is not None
            assert attempt.record.failure.error == "AgentSilent", attempt.record.failure
            seen = writer.run.rollout(plan.name).agent_log.read_bytes().decode(errors="replace")
            assert "all seen" in seen
            assert "bytes dropped" not in seen
            assert STATEMENT in seen or protocol_of(plan.task) == "harbor"
            for secret in (SECRET, solution, plan.task.grader.source_id):
                assert secret not in seen, (protocol_of(plan.task), context(seen, secret))
        writer.close()


def protocol_of(task: Task) -> str:
    return task.grader.protocol


def context(seen: str, secret: str) -> str:
    at = seen.index(secret)
    return seen[max(0, at - 300) : at + 100]


ROWS = Path(__file__).parents[3] / "shared" / "data" / "rows"


def real_rows() -> list[tuple[Grader, dict[str, Any]]]:
    """Rows as the data sets have them, with the grader of each."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (ROWS / name).read_text().splitlines()]

    def loaded(name: str) -> Any:
        return json.loads((ROWS / name).read_text())

    found: list[tuple[Grader, dict[str, Any]]] = [(SweBench(), row) for row in lines("swebench/verified_5rows.jsonl")]
    found += [(SweGym(), row) for row in lines("swegym/swerl_gen_5rows.jsonl")]
    found += [(SweSmith(), loaded("swesmith/pandas_pr_53652.json"))]
    found += [(SweRebenchV2(), row) for row in loaded("swerebench_v2/sample.json")]
    found += [(SwebenchPro(), loaded("swebench_pro/flipt_15b76cad_row.json"))]
    found += [
        (Harbor(), {"metadata": {"task_dir": str(path.parent)}}) for path in (ROWS / "harbor").glob("*/task.toml")
    ]
    return found


def hidden_in(task: Task) -> set[str]:
    """Strings that give the answer or the tests away: long lines of patches and scripts, names of tests, commits."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        match value:
            case str():
                found.update(line.strip() for line in value.splitlines())
                found.update(re.findall("[0-9a-f]{40}", value))
            case bytes():
                walk(value.decode("utf-8", "replace"))
            case dict():
                walk(list(value.values()))
            case list() | tuple():
                for item in value:
                    walk(item)
            case _:
                pass

    walk([task.grader.payload, task.grader.gold_patch, task.grader.base_patch])
    return {text for text in found if len(text) > 24} | {task.grader.source_id}


@pytest.mark.skipif(not ROWS.is_dir(), reason="the example rows are not part of the repository")
def test_of_real_rows_the_agent_gets_the_statement_the_image_and_the_base() -> None:
    rows = real_rows()
    assert len({grader.name for grader, _ in rows}) == 6
    for grader, row in rows:
        task = grader.parse(row, where="row")
        statement = row.get("problem_statement") or ""
        assert grader.name in ("harbor", "swebench_pro") or task.agent.prompt.strip() == statement.strip()
        # What reaches the box: the name of the image does not (the test above), the statement is the data set's.
        rest = json.dumps([task.agent.id, task.agent.workdir, task.agent.pre_commands])
        base = str(task.grader.payload.get("base_commit") or row.get("base_commit"))
        for secret in hidden_in(task) - {base, task.agent.workdir}:
            assert secret not in rest.replace(base, ""), (grader.name, secret)
