"""What grading costs beside the box's boot and the tests: `python benchmarks/grading.py [rounds]`.

Wall times are milliseconds, of boxes; the smallest is what an idle machine takes (`nice -n -20` helps). Host times are
CPU time. Limits: overhead 300 ms, `check` 10 ms a row, a 10 MB log 1 s.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from rollwright.graders import Grader, RawRun
from rollwright.graders.command import Command
from rollwright.graders.grading import Grading, grade
from rollwright.graders.patch import Patch, capture, take_baseline
from rollwright.graders.scaleswe import ScaleSwe
from rollwright.graders.swe_gym import SweGym
from rollwright.graders.swebench import SweBench
from rollwright.graders.swebench_log import END, START
from rollwright.graders.swebench_package import problem
from rollwright.graders.swebench_pro import SwebenchPro
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.sandboxes import SandboxSpec
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.types import Task

WORKDIR = "/workspace/calc"
REPOSITORY = (
    "git init -q . && git config user.name t && git config user.email t@localhost && mkdir tests src &&"
    "for n in $(seq 200); do echo \"x = $n\" >src/m$n.py; done; echo 'def add(a, b): return a - b' >calc.py;"
    "git add -A && git commit -q -m base"
)
TAP = "1..1\nok 1 - add\n"
MEGABYTES = 10
NONCE = "0" * 32


class Counted:
    """A box that counts what is asked of it."""

    def __init__(self, box: Any, calls: Counter[str]) -> None:
        self._box = box
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in ("exec", "put", "get", "run"):
            self._calls[name] += 1
        return getattr(self._box, name)


class Counting(NamespacesProvider):
    calls: Counter[str]

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        return Counted(await super().create(spec, key=key), self.calls)


async def boxes(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder) / "images" / "calc" / "layer" / WORKDIR[1:]
        layer.mkdir(parents=True)
        await anyio.run_process(["sh", "-c", REPOSITORY], cwd=layer)
        image = {"schema": 1, "base": "host", "layers": ["layer"]}
        (Path(folder) / "images" / "calc" / "image.json").write_text(json.dumps(image))
        meta = {
            "image": "calc",
            "workdir": WORKDIR,
            "problem_statement": "p",
            "command": ["printf", "%s", TAP],
            "report": {"format": "tap", "path": "-"},
            "files": {"tests/test_hidden.py": "x"},
        }
        task = Command().parse({"metadata": meta}, where="row")
        async with Counting(state_dir=Path(folder) / "state", images=Path(folder) / "images") as provider:
            provider.calls = Counter()
            patch, before = await agents_part(provider, task)
            provider.calls.clear()
            done: list[tuple[float, Grading]] = []
            for number in range(rounds):
                began = time.perf_counter()
                grading = await grade(
                    provider=provider,
                    spec=SandboxSpec(image="calc"),
                    task=task,
                    patch=patch,
                    grader=Command(),
                    key=f"grade{number}",
                )
                done.append((time.perf_counter() - began, grading))
        for name, seconds in before.items():
            print(f"agent's box: {name:26} {seconds * 1000:8.1f} ms, once")
        for step in done[0][1].seconds:
            show(step, [grading.seconds[step] for _, grading in done])
        tests = [grading.raw.seconds if grading.raw else 0.0 for _, grading in done]
        rest = [total - g.seconds["boot"] - run for (total, g), run in zip(done, tests, strict=True)]
        show("all but boot and tests", rest)
        print("requests to the box:", {name: count / rounds for name, count in provider.calls.items()})


async def agents_part(provider: NamespacesProvider, task: Task) -> tuple[Patch, dict[str, float]]:
    box = await provider.create(SandboxSpec(image="calc"), key="agent")
    seconds: dict[str, float] = {}

    async def timed(name: str, call: Any) -> Any:
        began = time.perf_counter()
        found = await call
        seconds[name] = time.perf_counter() - began
        return found

    await timed("prepare", prepare(box, task.agent))
    await timed("scrub", scrub_history(box, WORKDIR))
    baseline = await timed("baseline", take_baseline(box, WORKDIR))
    await box.exec(("sh", "-c", "echo 'def add(a, b): return a + b' >calc.py"), user="agent", cwd=WORKDIR)
    return await timed("capture", capture(box, baseline)), seconds


def show(name: str, seconds: list[float]) -> None:
    print(f"{name:39} min {min(seconds) * 1000:8.1f}   median {statistics.median(seconds) * 1000:8.1f} ms")


def cpu(name: str, times: int, call: Callable[[], object]) -> None:
    used: list[float] = []
    for _ in range(times):
        began = time.process_time()
        call()
        used.append(time.process_time() - began)
    print(f"{name:39} min {min(used) * 1000:8.2f}   median {statistics.median(used) * 1000:8.2f} ms CPU")


def host() -> None:
    tests = [f"tests/test_{n % 50}.py::test_case_{n}" for n in range(1000)]
    common = {
        "instance_id": "dask__dask-1",
        "image": "i",
        "workdir": "/w",
        "problem_statement": "p" * 2000,
        "FAIL_TO_PASS": tests[:10],
        "PASS_TO_PASS": tests[10:],
    }
    test_patch = "--- a/tests/test_0.py\n+++ b/tests/test_0.py\n@@ -1 +1 @@\n-a\n+b\n"
    classic = common | {"repo": "x/y", "version": "1", "base_commit": "0" * 40, "test_patch": test_patch}
    script = f"cd /w\n: '{START}'\npytest -rA tests/test_0.py\n: '{END}'\n"
    scripted = {"eval_script": script, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    rows: list[tuple[Grader, dict[str, Any]]] = [
        (ScaleSwe(), common | {"f2p_script": "\n".join(f"def test_{n}(): pass" for n in range(2000))}),
        (Command(), common | {"command": "true", "report": "junit"}),
        (SweGym(), classic | {"repo": "dask/dask", "eval_script": script}),
    ]
    if problem() is None:
        rows.append((SweBench(), classic | scripted))
    for grader, row in rows:
        task = grader.parse(row, where="row")
        cpu(f"parse and check: {grader.name}", 30, lambda g=grader, r=row: g.check(g.parse(r, where="row")))
        make = scripted_run if grader.name in ("swebench", "swe_gym") else junit_run
        raw = make(MEGABYTES << 20)
        cpu(f"judge {MEGABYTES} MB: {grader.name}", 3, lambda g=grader, t=task, r=raw: g.judge(t, r))
    pro = SwebenchPro(assets=None)
    row = classic | {
        "before_repo_set_cmd": f"git reset --hard {'0' * 40}\ngit checkout {'1' * 40} -- tests",
        "selected_test_files_to_run": ["tests"],
    }
    task = pro.parse(row, where="row")
    found = {"tests": [{"name": f"tests/a_rather_long_name_of_a_test_{n}", "status": "PASSED"} for n in range(130_000)]}
    raw = run(b"", {"/output.json": json.dumps(found).encode()})
    cpu(f"judge {MEGABYTES} MB: swebench_pro", 3, lambda: pro.judge(task, raw))


def run(log: bytes, reports: dict[str, bytes | None]) -> RawRun:
    return RawRun(state="exited", exit_code=1, log=log, reports=reports, seconds=1.0, nonce=NONCE)


def junit_run(size: int) -> RawRun:
    case = "<testcase classname='tests.test_%d' name='test_case_with_a_name_%d' time='0.01'></testcase>\n"
    cases = "".join(case % (n % 50, n) for n in range(size // len(case)))
    log = f"rollwright {NONCE} pytest 9\n".encode()
    return run(log, {"/report.xml": f"<testsuites><testsuite>{cases}</testsuite></testsuites>".encode()})


def scripted_run(size: int) -> RawRun:
    said = "some output of a chatty test, as there is in every larger project\n" * 9
    body = "".join(f"{said}PASSED tests/test_1.py::test_case_{n}\n" for n in range(size // (len(said) + 36)))
    marks = f"+ : 'rollwright {NONCE} script'\n+ : 'rollwright {NONCE} begin'\n+ : '{START}'\n"
    end = f"+ : '{END}'\n>>>>> Test Exit Code: 1\n+ : 'rollwright {NONCE} end 1'\n"
    return run((marks + body + end).encode(), {})


if __name__ == "__main__":
    anyio.run(boxes, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
    host()
