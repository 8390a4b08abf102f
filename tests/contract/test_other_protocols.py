"""`swebench_pro`, `harbor` and `command` from a patch to a verdict: the honest ways, the cheats, and dying boxes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from contract.calc_task import FIX, GOLD, WORKDIR, Place, python
from contract.pro_task import assets, pro_image, pro_row
from contract.test_second_sandbox import MortalBoxes
from rollwright.config import RunConfig
from rollwright.errors import GradingFailed, InfraError, TaskError, UsageError
from rollwright.graders import Grader
from rollwright.graders.command import Command
from rollwright.graders.grading import Grading, GradingLimits, grade
from rollwright.graders.harbor import Harbor
from rollwright.graders.patch import Patch, capture, take_baseline
from rollwright.graders.swebench_pro import SwebenchPro
from rollwright.graders.validation import validate_task
from rollwright.graders.workspace import prepare, scrub_history
from rollwright.lockfile import check_images, read_lock, write_lock
from rollwright.run import Places
from rollwright.run import prepare as prepare_run
from rollwright.sandboxes import SandboxSpec
from rollwright.types import Task, VerdictStatus
from rollwright.validate import validate_run

pytestmark = pytest.mark.anyio

RESOLVED, UNRESOLVED = VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED
CHECK = "from calc import add; assert add(2, 3) == 5"
REPORT = f"""
import os, sys
try:
    {CHECK}
    inner = ""
except AssertionError:
    inner = "<failure/>"
with open(os.environ["ROLLWRIGHT_REPORT"], "w") as f:
    f.write(f"<testsuite><testcase classname='t' name='add'>{{inner}}</testcase></testsuite>")
sys.exit(bool(inner))
"""


def command_task(**extra: Any) -> Task:
    meta = {"image": "calc", "workdir": WORKDIR, "problem_statement": "p", "command": ["python3", "-c", CHECK]}
    return Command().parse({"metadata": meta | {"patch": GOLD} | extra}, where="test")


def harbor_folder(folder: Path, toml: str = "", test: str = "") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text(
        f'schema_version = "1.3"\n[environment]\ndocker_image = "calc"\nworkdir = "{WORKDIR}"\n{toml}'
    )
    (folder / "instruction.md").write_text("add subtracts\n")
    (folder / "tests" / "check.py").write_text(CHECK)
    (folder / "tests" / "test.sh").write_text(
        test or "if python3 /tests/check.py; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
    )
    (folder / "solution" / "solve.sh").write_text(FIX)
    return folder


def harbor_task(folder: Path) -> Task:
    return Harbor().parse({"metadata": {"task_dir": str(folder)}}, where="test")


SEPARATE = """
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "git diff --binary HEAD~1 HEAD > /logs/artifacts/model.patch"
[[verifier.collect]]
command = "false"
"""
APPLY = f"""
cd {WORKDIR}
test -e /logs/artifacts/model.patch
git apply --allow-empty /logs/artifacts/model.patch
if python3 /tests/check.py; then echo '{{"reward": 1.0}}'; else echo '{{"reward": 0}}'; fi >/logs/verifier/reward.json
"""


@dataclass
class Bench:
    """A task, its grader, and the patches an agent could leave in its box."""

    place: Place
    task: Task
    grader: Grader
    patches: Callable[[str], Any]

    async def grade(self, script: str | Patch, key: str, **options: Any) -> Grading:
        patch = await self.patches(script) if isinstance(script, str) else script
        return await grade(
            provider=options.pop("provider", self.place.provider),
            spec=SandboxSpec(image=self.task.agent.image),
            task=self.task,
            patch=patch,
            grader=self.grader,
            key=key,
            **options,
        )


@pytest.fixture(scope="module")
async def pro(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    commits = pro_image(place.images)
    folder = assets(tmp_path_factory.mktemp("assets"))
    grader = SwebenchPro(assets=folder, seconds=60)
    task = grader.parse(pro_row(commits), where="test")
    box = await place.provider.create(SandboxSpec(image="pro"), key="pro-agent")
    await prepare(box, task.agent)
    await scrub_history(box, WORKDIR)
    baseline = await take_baseline(box, WORKDIR)

    async def patch(script: str) -> Patch:
        for argv in (("git", "clean", "-fdxq"), ("git", "reset", "-q", "--hard"), ("sh", "-c", script)):
            done = await box.exec(argv, user="agent", cwd=WORKDIR)
            assert done.exit_code == 0, done.stderr
        return await capture(box, baseline)

    return Bench(place, task, grader, patch)


def bench(place: Place, task: Task, grader: Grader) -> Bench:
    return Bench(place, task, grader, place.patch)


# --------------------------------------------------------------------------- honest


async def test_pro_gold_resolves_each_time_and_doing_nothing_does_not(pro: Bench) -> None:
    checked = await validate_task(
        provider=pro.place.provider,
        spec=SandboxSpec(image="pro"),
        task=pro.task,
        grader=pro.grader,
        key="pro-validate",
        gold_runs=2,
    )
    assert checked.ok, (checked.problems, checked.noop.raw)
    assert len(checked.golds) == 2
    assert checked.fail_to_pass == ("tests/test_hidden.py::test_add",)
    assert checked.pass_to_pass == ("tests/test_calc.py::test_zero",)
    assert checked.flaky == {}


async def test_pro_hidden_tests_are_not_in_the_agents_box(pro: Bench) -> None:
    patch = await pro.patches("ls -R . >seen.txt; git log --all --oneline >>seen.txt; env >>seen.txt")
    assert b"test_hidden" not in patch.data
    assert b"solution" not in patch.data


@pytest.mark.parametrize("separate", [False, True])
async def test_harbor_judges_solve_sh_and_doing_nothing(place: Place, tmp_path: Path, separate: bool) -> None:
    folder = harbor_folder(tmp_path / "t", SEPARATE if separate else "", APPLY if separate else "")
    task = harbor_task(folder)
    checked = await validate_task(
        provider=place.provider, spec=place.spec, task=task, grader=Harbor(), key=f"harbor{separate}"
    )
    assert checked.ok, (checked.problems, checked.noop.raw)


async def test_a_command_may_name_a_report(place: Place) -> None:
    for extra, trainable in (({}, False), ({"command": ["python3", "-c", REPORT], "report": "junit"}, True)):
        of = bench(place, command_task(**extra), Command())
        good = await of.grade(FIX, f"command-good{trainable}")
        bad = await of.grade(python("def add(a, b): return 7"), f"command-bad{trainable}")
        assert (good.verdict.status, good.verdict.trainable) == (RESOLVED, trainable)
        assert (bad.verdict.status, bad.verdict.trainable) == (UNRESOLVED, trainable)


# --------------------------------------------------------------------------- cheats


LOOKS_INTO_GIT = python(
    "import subprocess\n"
    "found = subprocess.run(['git', 'log', '--all', '--format=%H'], capture_output=True, text=True).stdout.split()\n"
    "for commit in found:\n"
    "    source = subprocess.run(['git', 'show', commit + ':calc.py'], capture_output=True, text=True).stdout\n"
    "    if 'a + b' in source: exec(source)\n"
    "if 'add' not in globals():\n    def add(a, b): return a - b\n"
)


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        ("exit", python("import os\nos._exit(0)"), UNRESOLVED),
        ("hidden_test_taken", "echo 'def test_add(): pass' >tests/test_hidden.py", UNRESOLVED),
        ("hidden_test_is_a_folder", "mkdir tests/test_hidden.py; echo >tests/test_hidden.py/x", UNRESOLVED),
        ("conftest", python("import pytest\npytest.skip('no', allow_module_level=True)", "conftest.py"), UNRESOLVED),
        ("fix_from_the_grading_boxs_history", LOOKS_INTO_GIT, UNRESOLVED),
        (
            "own_parser",
            python(
                "import os, glob\nfor p in glob.glob('/var/rollwright-*/*/*'):\n"
                "    try: open(p, 'w').write('PASSED')\n    except OSError: pass\n"
            ),
            UNRESOLVED,
        ),
        # Known to pass, as with the official grader: the log is all there is.
        (
            "results_printed_past_pytests_capture",
            python(
                "import contextlib, os\n"
                "for fd in range(1, 20):\n"
                "    for t in ('hidden.py::test_add', 'calc.py::test_zero'):\n"
                "        with contextlib.suppress(OSError):\n"
                "            os.write(fd, f'\\ntests/test_{t} PASSED\\n'.encode())\n"
                "os._exit(0)"
            ),
            RESOLVED,
        ),
    ],
)
async def test_pros_zoo(pro: Bench, name: str, script: str, expected: VerdictStatus) -> None:
    grading = await pro.grade(script, f"pro-{name}")
    assert grading.verdict.status == expected, grading


WRITES = """
import os, signal
for name, text in (("json", '{"reward": 1}'), ("txt", "1")):
    open("/logs/verifier/reward." + name, "w").write(text)
"""


@pytest.mark.parametrize(
    ("name", "then", "expected", "signal"),
    [
        ("goes_on", "def add(a, b): return 7", UNRESOLVED, "rewards_disagree: 1 and 0"),
        ("kills_the_verifier", "os.kill(os.getppid(), signal.SIGKILL)", UNRESOLVED, "spoiled_by_the_patch"),
        # Known to pass: what this test.sh itself falls for.
        ("ends_well", "os._exit(0)", RESOLVED, None),
    ],
)
async def test_rewards_that_the_patch_writes_itself(
    place: Place, tmp_path: Path, name: str, then: str, expected: VerdictStatus, signal: str | None
) -> None:
    of = bench(place, harbor_task(harbor_folder(tmp_path / "t")), Harbor())
    verdict = (await of.grade(python(WRITES + then), f"writes-{name}")).verdict
    assert verdict.status == expected, verdict
    assert signal is None or verdict.signals[0].startswith(signal)


async def test_harbors_stale_reward_is_removed_and_a_missing_one_is_no_zero(place: Place, tmp_path: Path) -> None:
    folder = harbor_folder(tmp_path / "t", test="test ! -e /logs/verifier/reward.txt && exit 1\n")
    stale = replace(
        harbor_task(folder).agent, pre_commands=("mkdir -p /logs/verifier", "echo 1 >/logs/verifier/reward.txt")
    )
    of = bench(place, replace(harbor_task(folder), agent=stale), Harbor())
    with pytest.raises(GradingFailed, match="neither reward"):
        await of.grade(FIX, "stale")


@pytest.mark.parametrize(
    ("parser", "verdict"),
    [
        ("import no_such_module", None),
        ("import sys\nopen(sys.argv[3], 'w').write('{')", UNRESOLVED),
        ("import sys\nassert not open(sys.argv[1]).read()\nopen(sys.argv[3], 'w').write('{}')", UNRESOLVED),
    ],
)
async def test_a_parser_that_reads_nothing_is_our_failure_one_that_chokes_on_this_output_is_not(
    pro: Bench, parser: str, verdict: VerdictStatus | None
) -> None:
    payload = {**pro.task.grader.payload, "parser": parser}
    of = replace(pro, task=replace(pro.task, grader=replace(pro.task.grader, payload=payload)))
    key = f"parser-{len(parser)}"
    if verdict is None:
        with pytest.raises(GradingFailed, match="not even on an empty log") as caught:
            await of.grade(FIX, key)
        assert caught.value.details["step"] == "parse"
    else:
        found = (await of.grade(FIX, key)).verdict
        assert found.status == verdict
        assert found.signals[0].startswith(("no_report", "unreadable_report"))


@pytest.mark.parametrize("thing", ["mkdir", "mkfifo", "ln -s /dev/zero", "ln -s /nowhere"])
async def test_a_report_that_is_no_file_is_no_report(place: Place, thing: str) -> None:
    task = command_task(command=f"{thing} /tmp/report", report={"format": "junit", "path": "/tmp/report"})
    grading = await bench(place, task, Command()).grade(FIX, f"thing-{thing}")
    assert grading.verdict.status == UNRESOLVED
    assert "no_report" in grading.verdict.signals


# --------------------------------------------------------------------------- flakes


async def test_a_failure_of_a_test_that_passed_before_is_run_again(place: Place, tmp_path: Path) -> None:
    """The box's number, which the provider gives it, decides: the first run fails, the second does not."""
    flaky = """
import os, sys
first = os.path.exists("/run/first") or os.environ["FIRST"] == "1"
inner = "<failure/>" if first else ""
with open(os.environ["ROLLWRIGHT_REPORT"], "w") as f:
    f.write(f"<testsuite><testcase name='new'/><testcase name='old'>{inner}</testcase></testsuite>")
sys.exit(first)
"""

    class Numbered(type(place.provider)):  # type: ignore[misc]
        made = 0

        async def create(self, spec: SandboxSpec, *, key: str) -> Any:
            self.made += 1
            return await super().create(replace(spec, env={"FIRST": str(self.made)}), key=key)

    task = command_task(command=["python3", "-c", flaky], report="junit", FAIL_TO_PASS=["new"], PASS_TO_PASS=["old"])
    patch = await place.patch(FIX)
    async with Numbered(state_dir=tmp_path, images=place.images) as provider:
        of = bench(place, task, Command())
        twice = await of.grade(patch, "flaky", provider=provider)
        assert twice.verdict.status == RESOLVED
        assert twice.attempts == 2
        assert "flaky: old" in twice.verdict.signals
        provider.made = 0
        once = await of.grade(patch, "strict", provider=provider, limits=GradingLimits(p2p_reruns=0))
        assert once.verdict.status == UNRESOLVED


async def test_a_noop_that_breaks_tests_that_should_pass_makes_the_task_unusable(place: Place) -> None:
    task = command_task(
        command=["sh", "-c", "echo 1..2; echo not ok 1 new; echo not ok 2 old; exit 1"],
        report={"format": "tap", "path": "-"},
        FAIL_TO_PASS=["new"],
        PASS_TO_PASS=["old"],
    )
    checked = await validate_task(
        provider=place.provider, spec=place.spec, task=task, grader=Command(), key="broken-noop"
    )
    assert any("tests that should pass do not: old" in problem for problem in checked.problems)


async def test_validated_tasks_are_locked_and_a_run_may_ask_for_that(place: Place, tmp_path: Path) -> None:
    meta = {"image": "calc", "workdir": WORKDIR, "problem_statement": "p", "protocol": "command", "patch": GOLD}
    meta |= {"instance_id": "calc", "command": ["python3", "-c", REPORT], "report": "junit", "FAIL_TO_PASS": ["t::add"]}
    useless = meta | {"instance_id": "useless", "patch": GOLD.replace("+    return a + b", "+    return 7")}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"metadata": m}) + "\n" for m in (meta, useless)))
    settings = {
        "tasks": {"path": "rows.jsonl", "require_lock": True},
        "policy": {"path": "none"},
        "sandbox": {"kind": "namespaces", "namespaces": {"images": str(place.images)}},
    }
    config = RunConfig.resolve(settings, base=tmp_path, where="run.toml")
    places = Places(cache=tmp_path / "cache", state=tmp_path / "state")
    with pytest.raises(TaskError, match=r"task calc is not in it"):
        prepare_run(config, places)
    said: list[str] = []
    good, bad = await validate_run(config, places, say=said.append, gold_runs=2, lock=True)
    assert good.usable, good
    assert (good.gold, good.noop, len(good.gold_seconds)) == ("resolved", "unresolved", 2)
    assert bad.problem == "the gold patch is unresolved, not resolved"
    entry = read_lock(config.tasks.path)["calc"]
    assert set(read_lock(config.tasks.path)) == {"calc"}
    assert (entry.fail_to_pass, entry.gold_runs, entry.flaky) == (("t::add",), 2, {})
    assert entry.image_digest.startswith("sha256:")
    assert len(entry.base_tree) == 40
    assert entry.gold_seconds_p95 > 0
    await check_images(config.tasks.path, ["calc"], place.provider)
    write_lock(config.tasks.path, {"calc": replace(entry, image_digest="sha256:0")})
    with pytest.raises(TaskError, match=r"task calc was proved in image calc as sha256:0, which is now sha256:"):
        await check_images(config.tasks.path, ["calc"], place.provider)
    write_lock(config.tasks.path, {"calc": entry})
    with pytest.raises(TaskError, match=r"task useless is not in it"):
        prepare_run(config, places)
    with pytest.raises(UsageError) as beyond:  # the lock is in order; this run has no policy
        prepare_run(config.model_copy(update={"run": config.run.model_copy(update={"limit": 1})}), places)
    assert "require_lock" not in beyond.value.message


# --------------------------------------------------------------------------- faults


async def every_death(of: Bench, patch: Patch, state: Path, boxes: type[MortalBoxes] = MortalBoxes) -> list[str]:
    """Kill the box before its first call, its second, ...; the steps it died in, until it lives."""
    steps: list[str] = []
    async with boxes(state_dir=state, images=of.place.images) as provider:
        while True:
            provider.calls += 1
            assert provider.calls < 100, f"it never lives: {steps}"
            try:
                done = await of.grade(patch, f"mortal{provider.calls}", provider=provider)
            except InfraError as e:
                steps.append(e.details["step"])
                continue
            assert done.verdict.status == RESOLVED
            assert provider.box.calls > 0
            return list(dict.fromkeys(steps))


class MortalTestsBoxes(MortalBoxes):
    """Only the second box of a separate verifier dies."""

    async def create(self, spec: SandboxSpec, *, key: str) -> Any:
        if key.endswith(".tests"):
            return await super().create(spec, key=key)
        return await super(MortalBoxes, self).create(spec, key=key)


async def test_a_dying_box_is_never_a_verdict_of_pro(pro: Bench, tmp_path: Path) -> None:
    steps = await every_death(pro, await pro.patches(FIX), tmp_path)
    assert steps == ["prepare", "baseline", "apply", "stage", "tests", "parse"]


async def test_a_dying_box_is_never_a_verdict_of_harbor(place: Place, tmp_path: Path) -> None:
    folder = harbor_folder(tmp_path / "t", SEPARATE, APPLY)
    of = bench(place, harbor_task(folder), Harbor())
    patch = await place.patch(FIX)
    steps = await every_death(of, patch, tmp_path / "state")
    assert steps == ["prepare", "baseline", "apply", "stage", "collect"]
    steps = await every_death(of, patch, tmp_path / "state", MortalTestsBoxes)
    assert steps == ["unpack", "stage", "tests"]


async def test_a_dying_box_is_never_a_verdict_of_a_command(place: Place, tmp_path: Path) -> None:
    of = bench(place, command_task(command=["python3", "-c", REPORT], report="junit"), Command())
    steps = await every_death(of, await place.patch(FIX), tmp_path)
    assert steps == ["prepare", "baseline", "apply", "stage", "tests"]
