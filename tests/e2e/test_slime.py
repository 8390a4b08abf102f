"""slime's calls, as slime makes them: train path and eval path, a cut, a cancelled call, and a shutdown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from rollwright.engines import Engine, EngineCapabilities, Generation
from rollwright.engines.scripted import ScriptedEngine
from rollwright.errors import TaskError
from rollwright.graders.swebench_package import problem
from rollwright.integrations.slime import generate, post_process_rewards, shutdown
from rollwright.integrations.slime.samples import KEY
from rollwright.store import RunDir
from rollwright.testing.loopback_sglang import LoopbackSglang, loopback_sglang
from rollwright.tokens.render import load_renderer
from rollwright.types import Sampling
from support.commandline import QUICKSTART, Rollwright
from support.slime import Sample, arguments

pytestmark = pytest.mark.anyio

TASKS = [json.loads(line) for line in (QUICKSTART / "tasks.jsonl").read_text().splitlines()]
PARAMETERS = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 256, "skip_special_tokens": False}
TEST = """import pytest
from cart import Cart
def order(cents):
    cart = Cart()
    cart.add("article", cents, 1)
    return cart
def test_fifty():
    assert order(5000).shipping() == 0
def test_less():
    assert order(4999).shipping() == 490
"""
TEST_PATCH = (
    "diff --git a/tests/test_shipping.py b/tests/test_shipping.py\nnew file mode 100644\n--- /dev/null\n"
    f"+++ b/tests/test_shipping.py\n@@ -0,0 +1,{TEST.count(chr(10))} @@\n"
    + "".join(f"+{line}\n" for line in TEST.splitlines())
)
EVAL_SCRIPT = f"""#!/bin/bash
set -uxo pipefail
cd /workspace/cart
git apply -v - <<'EOF_114329324912'
{TEST_PATCH}
EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA tests/test_shipping.py
: '>>>>> End Test Output'
"""


def swebench_row() -> dict[str, Any]:
    """The quickstart's first task as a row of SWE-bench 5."""
    given = TASKS[0]["metadata"]
    metadata = {
        "instance_id": "quickstart__cart-1",
        "repo": "quickstart/cart",
        "version": "1",
        "base_commit": "HEAD",
        "image": given["image"],
        "workdir": given["workdir"],
        "problem_statement": given["problem_statement"],
        "patch": "",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps(["tests/test_shipping.py::test_fifty"]),
        "PASS_TO_PASS": json.dumps(["tests/test_shipping.py::test_less"]),
        "eval_script": EVAL_SCRIPT,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return {"prompt": given["problem_statement"], "label": "", "metadata": metadata}


def sample_of(row: Mapping[str, Any], *, index: int, group: int = 0) -> Sample:
    return Sample(
        index=index, group_index=group, prompt=row["prompt"], label=row["label"], metadata=dict(row["metadata"])
    )


class Slime:
    """A slime process: its arguments, and the SGLang server behind them."""

    def __init__(self, server: LoopbackSglang, home: Path) -> None:
        self.server = server
        self.home = home
        self.more: dict[str, Any] = {}
        self.run_table: dict[str, Any] = {"retries": 0}

    @property
    def args(self) -> Any:
        own = {
            "sandbox": {"namespaces": {"images": str(self.images)}, "disk_mb": 512},
            "run": self.run_table,
            "telemetry": {"kinds": ["rollwright.testing.recorder:Recorder"]},
        }
        return arguments(QUICKSTART / "policy", self.server.url, rollwright=own, **self.more)

    @property
    def images(self) -> Path:
        return QUICKSTART.parents[1] / ".cache" / "quickstart" / "images"

    def run(self) -> RunDir:
        (folder,) = self.home.joinpath("runs").iterdir()
        return RunDir(folder)


@pytest.fixture
async def slime(rollwright: Rollwright, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Slime]:
    for name, value in {
        "XDG_STATE_HOME": str(rollwright.home / "state"),
        "ROLLWRIGHT_OUTPUT": str(rollwright.home / "runs"),
        "SLIME_AGENT_SANDBOX_BACKEND": "namespaces",
        "SWE_AGENT": "pi",
        "SWE_EVAL_PROTOCOL": "swebench",
    }.items():
        monkeypatch.setenv(name, value)
    async with serving() as server:
        yield Slime(server, rollwright.home)
        await anyio.to_thread.run_sync(shutdown)
    assert rollwright.boxes() == []


@asynccontextmanager
async def serving() -> AsyncIterator[LoopbackSglang]:
    renderer = load_renderer(QUICKSTART / "policy", kind="auto", tool_parser="qwen3_coder", reasoning_parser=None)
    scripted = ScriptedEngine(renderer=renderer, script=QUICKSTART / "replies.toml")
    async with scripted as engine, loopback_sglang(engine, renderer) as server:
        yield server


async def test_training_makes_samples_and_advantages(slime: Slime) -> None:
    """One group: two that solve the task, and two whose first turn a dead engine spoils."""
    made: dict[int, list[Sample]] = {}

    async def one(index: int, row: Mapping[str, Any]) -> None:
        made[index] = await generate(slime.args, sample_of(row, index=index), PARAMETERS)

    async with anyio.create_task_group() as group:
        for index in range(2):
            group.start_soon(one, index, TASKS[0])
    await one(2, TASKS[1])
    slime.server.faults.extend(["error_500"] * 40)
    await one(3, TASKS[0])
    samples = [sample for index in sorted(made) for sample in made[index]]
    for sample in samples:
        sample.check()
    statuses = [sample.status for sample in samples]
    assert statuses == [Sample.Status.COMPLETED] * 3 + [Sample.Status.ABORTED]
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0, 0.0]
    assert "sglang /generate answered 500" in samples[3].metadata["abort_reason"]
    assert samples[0].metadata[KEY]["status"] == "resolved"
    assert all(sample.weight_versions for sample in samples[:3])
    assert sum(samples[0].loss_mask or []) > 50
    _, advantages = post_process_rewards(slime.args, samples)
    assert advantages[0] == advantages[1] > 0 > advantages[2]
    assert advantages[3] == 0.0
    asked = [each.body["sampling_params"] for each in slime.server.received[1:]]  # the first is the check of step 0
    assert {(each["temperature"], each["max_new_tokens"]) for each in asked} == {(0.7, 256)}, "slime's, not the CLI's"
    records = slime.run().records()
    assert {record.rollout for record in records} == {"cart.1", "cart.2", "cart.3", f"{slug_of(TASKS[1])}.1"}
    await anyio.to_thread.run_sync(shutdown)
    heard = (slime.run().logs / "telemetry.jsonl").read_bytes().splitlines()
    assert len(heard) == 1 + len(records) + 1, "who listens hears the beginning, each rollout and the end"


def slug_of(row: Mapping[str, Any]) -> str:
    return str(row["metadata"]["remote_env_info"]["instance_id"])


@pytest.mark.skipif(problem() is not None, reason="the swebench package is not installed")
async def test_evaluation_grades_by_its_own_protocol(slime: Slime) -> None:
    sample = await generate(slime.args, sample_of(swebench_row(), index=0), PARAMETERS, evaluation=True)
    sample.check()
    assert (sample.reward, sample.status) == (1.0, Sample.Status.COMPLETED), sample.metadata
    verdict = json.loads(slime.run().rollout("eval-quickstart__cart-1.1").verdict.read_bytes())
    assert verdict["graded"]["grader"] == "swebench"


async def test_a_row_that_cannot_be_graded_ends_the_job_before_any_rollout(slime: Slime, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps(swebench_row()) + "\n")
    slime.more = {"prompt_data": str(data)}
    with pytest.raises(TaskError, match=r"train\.jsonl line 1.*swebench"):
        await generate(slime.args, sample_of(TASKS[0], index=0), PARAMETERS)
    assert slime.server.received == []


async def test_a_cancelled_call_leaves_no_sandbox(slime: Slime, rollwright: Rollwright) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(generate, slime.args, sample_of(TASKS[0], index=0), PARAMETERS)
        with anyio.fail_after(60):
            while not rollwright.boxes():  # noqa: ASYNC110 - another thread makes them
                await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    assert rollwright.boxes() == []


async def test_what_slime_has_no_use_for_any_more_is_cut(slime: Slime, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime tells by the flag of its own rollout state that it has enough."""

    class State:
        aborted = False

    state = State()
    module = ModuleType("slime.rollout.sglang_rollout")
    module.GenerateState = lambda args: state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made: list[Sample] = []

    async def one() -> None:
        made.extend(await generate(slime.args, sample_of(TASKS[0], index=0), PARAMETERS))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        state.aborted = True
    (sample,) = made
    assert sample.status is Sample.Status.ABORTED
    assert "RolloutCut" in sample.metadata["abort_reason"]


async def test_a_rollout_that_outlives_the_guard_is_aborted(slime: Slime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWE_ROLLOUT_GUARD_SEC", "0.05")
    (sample,) = await generate(slime.args, sample_of(TASKS[0], index=0), PARAMETERS)
    assert sample.status is Sample.Status.ABORTED
    assert sample.remove_sample


TRAINER = """
import asyncio, json, sys, threading
from pathlib import Path
from rollwright.integrations.slime import generate
from support.slime import Sample, arguments

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()  # as slime has it
policy, url, own, row = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
args = arguments(Path(policy), url, rollwright=own)
asyncio.run_coroutine_threadsafe(generate(args, Sample(index=0, group_index=0, **row), {}), loop)
sys.stdin.read()  # until the trainer is told to end
"""


async def test_a_trainer_that_exits_leaves_nothing(slime: Slime, rollwright: Rollwright, tmp_path: Path) -> None:
    own = json.dumps(slime.args.rollwright)
    argv = [sys.executable, "-c", TRAINER, str(QUICKSTART / "policy"), slime.server.url, own, json.dumps(TASKS[0])]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    async with await anyio.open_process(argv, env=env, stderr=None, stdout=None) as process:
        with anyio.fail_after(60):
            while not rollwright.boxes():  # noqa: ASYNC110 - another process makes them
                await anyio.sleep(0.05)
            assert process.stdin is not None
            await process.stdin.aclose()
            assert await process.wait() == 0
    assert rollwright.boxes() == []


ON_RAY = """
import asyncio, json, sys, threading
from pathlib import Path
import ray

@ray.remote
class RolloutManager:  # slime's name of it; its loop is on a thread, too
    def generate(self, policy, url, own, row):
        from rollwright.integrations.slime import generate, shutdown
        from support.slime import Sample, arguments

        async def group():
            args = arguments(Path(policy), url, rollwright=own)
            return await asyncio.gather(
                *(generate(args, Sample(index=index, group_index=0, **row), {}) for index in range(2))
            )

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        made = asyncio.run_coroutine_threadsafe(group(), loop).result()
        shutdown()
        return [sample.reward for samples in made for sample in samples]

policy, url, own, row, address = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
manager = RolloutManager.options(num_cpus=1, num_gpus=0).remote()
print(json.dumps(ray.get(manager.generate.remote(policy, url, json.loads(own), json.loads(row)))))
"""


class Meeting:
    """An engine that answers no rollout before two have asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: set[str] = set()
        self._met = anyio.Event()

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, stop_ids: frozenset[int], request_id: str, session_key: str
    ) -> Generation:
        if not session_key.startswith("rollwright-check"):
            self._asked.add(session_key)
            if len(self._asked) == 2:
                self._met.set()
            await self._met.wait()
        return await self._engine.generate(
            ids, sampling, stop_ids=stop_ids, request_id=request_id, session_key=session_key
        )

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)


@pytest.mark.timeout(300)
async def test_inside_a_ray_job_rollouts_are_on_all_of_its_nodes(
    slime: Slime, rollwright: Rollwright, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As slime does it: the caller is an actor of the cluster, whose address nobody has to say. With one place a node,
    two rollouts can only meet when they are on two of them."""
    pytest.importorskip("ray", reason="needs the ray extra")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    slime.run_table |= {"executor": "ray", "concurrency": 1}
    slime.server.engine = Meeting(slime.server.engine)
    own = json.dumps(slime.args.rollwright)
    argv = [sys.executable, "-c", ON_RAY, str(QUICKSTART / "policy"), slime.server.url, own, json.dumps(TASKS[0])]
    small = {"num_gpus": 0, "num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"include_dashboard": False, **small})
    try:
        cluster.add_node(**small)
        done = await anyio.run_process([*argv, str(cluster.address)], stderr=None)
    finally:
        cluster.shutdown()
    assert json.loads(done.stdout.splitlines()[-1]) == [1.0] * 2
    assert {record.rollout for record in slime.run().records()} == {"cart.1", "cart.2"}
    assert rollwright.boxes() == []


async def test_settings_are_read_once(slime: Slime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever edits the run file for the next job does not end this one."""
    file = tmp_path / "own.toml"
    file.write_text("[run]\nconcurrency = 2\n")
    monkeypatch.setenv("ROLLWRIGHT_RUN_FILE", str(file))
    monkeypatch.setenv("SWE_ROLLOUT_GUARD_SEC", "0.05")
    args = slime.args
    for text in ("", "[run]\nconcurrency = 3\n", "half a li"):
        if text:
            file.write_text(text)
        (sample,) = await generate(args, sample_of(TASKS[0], index=0), PARAMETERS)
        assert sample.status is Sample.Status.ABORTED
    assert slime.run().resolved()["config"]["run"]["concurrency"] == 2


async def test_a_rollout_waits_for_a_place_of_the_run_files(slime: Slime) -> None:
    slime.run_table["concurrency"] = 1
    async with anyio.create_task_group() as group:
        for index in range(2):
            group.start_soon(generate, slime.args, sample_of(TASKS[0], index=index), PARAMETERS)
    asked = [each.body["rid"].rpartition("-")[0] for each in slime.server.received[1:]]
    assert len(set(asked)) == 2
    assert len(list(groupby(asked))) == 2, "one began when the other had ended"
