"""What the orchestrator costs: many rollouts at once through the real scheduler, gateway and store, with sandboxes and
an engine that cost nothing; and the same process's share of real rollouts.

    python benchmarks/scale.py simulate --rollouts 10000 --turns 10
    python benchmarks/scale.py real --attempts 4          # the quickstart, scripted engine, real sandboxes
    python benchmarks/scale.py ray --nodes 1 2            # rollouts per second by Ray nodes on this machine

The first two give CPU seconds of this process, which hold on a busy machine too, and its peak resident size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import orjson

from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.gateway.gate import PauseMode
from rollwright.gateway.limits import SessionLimits
from rollwright.gateway.server import Gateway
from rollwright.rollout import RolloutPlan, proved
from rollwright.run import Attempt, Observer, Room, Silent, execute
from rollwright.store import RunDir, RunWriter
from rollwright.testing.scripted_executor import plain_task, scripted_attempt
from rollwright.tokens.render import load_renderer
from rollwright.tokens.samples import build_samples
from rollwright.types import Sampling

ROOT = Path(__file__).parents[1]
POLICY = ROOT / "examples" / "quickstart" / "policy"
CALL = """I look further.
<tool_call>
<function=bash>
<parameter=command>
ls -la src
</parameter>
</function>
</tool_call>"""
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulate = commands.add_parser("simulate")
    simulate.add_argument("--rollouts", type=int, default=10_000)
    simulate.add_argument("--at-once", type=int, help="default: all")
    simulate.add_argument("--turns", type=int, default=10)
    simulate.add_argument("--prompt-words", type=int, default=1000)
    simulate.add_argument("--tool-words", type=int, default=100, help="of each tool result")
    real = commands.add_parser("real")
    real.add_argument("--attempts", type=int, default=4)
    ray = commands.add_parser("ray")
    ray.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    ray.add_argument("--attempts", type=int, default=8)
    ray.add_argument("--concurrency", type=int, default=2, help="rollouts at a time on each node")
    ray.add_argument("--seconds", type=int, default=30, help="that the agent's command takes in its box")
    options = parser.parse_args()
    match options.command:
        case "simulate":
            anyio.run(_simulate, options, backend_options={"use_uvloop": True})
        case "real":
            _real(options)
        case _:
            _ray(options)


# --------------------------------------------------------------------------- simulated rollouts


class Simulated:
    """An executor whose rollouts are conversations with the real gateway: no sandbox, no agent's process, no tests."""

    def __init__(self, gateway: Gateway, writer: RunWriter, options: argparse.Namespace) -> None:
        self.room = Room(options.at_once or options.rollouts)
        self.versions: Sequence[str] = ()
        self.open = 0
        self.most = 0
        self.all_open = anyio.Event()
        self._gateway = gateway
        self._writer = writer
        self._options = options
        self._storing = anyio.Lock()
        self._prompt = " ".join(f"word{n % 97}" for n in range(options.prompt_words))
        self._result = " ".join(f"out{n % 89}" for n in range(options.tool_words))

    async def run(self, plan: RolloutPlan, observer: Observer, *, cut: anyio.Event | None = None) -> Attempt:
        folder = self._writer.begin(plan.name)
        session = self._gateway.open(plan.name, log=folder.turns, limits=SessionLimits())
        self.open += 1
        self.most = max(self.most, self.open)
        if self.open == self.room.places:
            self.all_open.set()
        await self.all_open.wait()
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._prompt}]
        for _ in range(self._options.turns):
            reply = await _post(self._gateway.app, session.secret, {"messages": messages, "tools": [TOOL]})
            said = reply["choices"][0]["message"]
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": self._result} for call in said["tool_calls"]
            ]
        trajectory = await session.close()
        self.open -= 1
        samples = build_samples(
            trajectory,
            task_id=plan.task.id,
            group_id=plan.group,
            rollout_id=plan.name,
            reward=1.0,
            trainable=True,
            counts_in_baseline=True,
        )
        report = proved(trajectory, samples)
        assert report.trained == report.sampled
        record = scripted_attempt(plan, reward=1.0).record
        async with self._storing:
            await anyio.to_thread.run_sync(self._writer.store, record, folder, samples)
        return Attempt(plan=plan, record=record, samples=samples)

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self, version: str | None) -> None: ...


class _InProcess:
    """Stands in for the TCP connection of a request that has none."""

    broken = False

    def admit(self, session: object) -> bool:
        return True

    def hang_up(self) -> None: ...


async def _post(app: Any, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """One chat completion, as the server hands it to the app: an HTTP client's own cost is not the orchestrator's."""
    parts: list[bytes] = []
    asked = [{"type": "http.request", "body": orjson.dumps({"model": "policy", **body}), "more_body": False}]
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""},
        **{"method": "POST", "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b""},
        **{"headers": headers, "state": {"only": None, "connection": _InProcess()}},
    }

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return orjson.loads(b"".join(parts))


async def _simulate(options: argparse.Namespace) -> None:
    renderer = load_renderer(POLICY, kind="auto", tool_parser="qwen3_coder", reasoning_parser=None)
    script = Script(script=(Rule(replies=(CALL,) * options.turns),), max_context=1 << 20)
    plans = [
        RolloutPlan(run="scale", task_name=f"task-{n // 8}", task=plain_task(f"task-{n // 8}"), attempt=n % 8 + 1)
        for n in range(options.rollouts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        async with (
            ScriptedEngine(renderer=renderer, script=script) as engine,
            Gateway(engine=engine, renderer=renderer, sampling=Sampling(max_new_tokens=256), model="policy") as gateway,
        ):
            path = await anyio.Path(folder).joinpath("run").absolute()
            writer = RunWriter.create(Path(path), run_file=b"", resolved={})
            executor = Simulated(gateway, writer, options)
            before, cpu, began = _memory_mb(), time.process_time(), time.monotonic()
            await execute(executor, plans, Silent())
            cpu, seconds = time.process_time() - cpu, time.monotonic() - began
            stored = len(writer.run.records())
            writer.close()
    assert stored == options.rollouts
    turns = options.rollouts * options.turns
    print(f"{options.rollouts} rollouts of {options.turns} turns, {executor.most} open at once, all stored")
    print(f"CPU {1000 * cpu / options.rollouts:.1f} ms a rollout, {1000 * cpu / turns:.2f} ms a turn")
    print(f"{options.rollouts / seconds:.1f} rollouts/s, {turns / seconds:.0f} turns/s of wall time")
    grown = _memory_mb() - before
    each = 1000 * grown / executor.most
    print(f"memory {before:.0f} MB before, {grown:.0f} MB more at its peak: {each:.0f} kB an open one")


def _memory_mb() -> float:
    """Peak resident size."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


# --------------------------------------------------------------------------- real rollouts


def _real(options: argparse.Namespace) -> None:
    """The driver's own CPU: its children (boxes, CLIs, tests) are not in it."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import atexit, json, resource, sys\n"
            "def tell():\n"
            "    own = resource.getrusage(resource.RUSAGE_SELF)\n"
            "    print(json.dumps([own.ru_utime + own.ru_stime, own.ru_maxrss / 1000]), file=sys.stderr)\n"
            "atexit.register(tell)\n"
            "from rollwright.cli import main\n"
            "sys.exit(main())\n"
        )
        costs: list[tuple[int, float, float]] = []
        for attempts in (1, 1 + options.attempts):
            settings = (
                f"run.attempts={attempts}",
                f"run.name=r{attempts}",
                f"run.output={folder}",
                "engine.kind=scripted",
            )
            script = f"engine.scripted.script={ROOT / 'examples/quickstart/replies.toml'}"
            argv = [sys.executable, "-c", code, "run", ROOT / "examples/quickstart/run.toml", *settings, script]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            cpu, peak = json.loads(done.stderr.strip().splitlines()[-1])
            costs.append((len(RunDir(Path(folder) / f"r{attempts}").records()), cpu, peak))
        (few, cpu_few, _), (many, cpu_many, peak) = costs
        each = 1000 * (cpu_many - cpu_few) / (many - few)
        print(f"{many} rollouts against {few}: {each:.1f} ms of the driver's CPU a rollout")
        print(f"peak {peak:.0f} MB")


# --------------------------------------------------------------------------- nodes

BUILD = """First the slow build.
<tool_call>
<function=bash>
<parameter=command>
sleep SECONDS
</parameter>
</function>
</tool_call>"""
FIX = """<tool_call>
<function=bash>
<parameter=command>
sed -i 's/self.subtotal() > FREE_SHIPPING_FROM/self.subtotal() >= FREE_SHIPPING_FROM/' cart.py
</parameter>
</function>
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRun:
    """What a run on so many nodes came to."""

    rollouts: int
    span: float
    """Wall seconds from the first rollout's begin to the last one's end."""
    wall: float
    """Mean seconds of a rollout, of which `working` are its agent's."""
    working: float
    cpu: float
    """CPU seconds in the span of all that was started here: driver, Ray, boxes and what runs in them."""

    @property
    def rate(self) -> float:
        return self.rollouts / self.span

    def __str__(self) -> str:
        return (
            f"{self.rollouts} rollouts in {self.span:.1f} s: {self.rate:.3f} rollouts/s\n"
            f"  a rollout: {self.wall:.1f} s, of which its agent works {self.working:.1f} s; "
            f"{self.cpu / self.rollouts:.1f} s of CPU, Ray's own included"
        )


def _ray(options: argparse.Namespace) -> None:
    """Ray nodes of this machine, each with `--concurrency` places, and rollouts that mostly wait in their boxes.

    Everything is real (Ray's cluster, boxes, pi, hidden tests) but for the policy, which is scripted: its agent runs a
    build that takes `--seconds`, fixes the bug, and is judged. So the nodes' places are what limits, not the cores they
    share here. The rate counts from the first rollout's begin to the last one's end as the run folder has them:
    starting Ray and opening nodes is not in it. Every rollout must be solved.
    """
    runs: dict[int, NodesRun] = {}
    for nodes in options.nodes:
        runs[nodes] = run = _on_nodes(nodes, options)
        print(f"{nodes} nodes, {run}", flush=True)
        if nodes != options.nodes[0]:
            print(f"  {run.rate / runs[options.nodes[0]].rate:.2f} times the rate of {options.nodes[0]}")


def _on_nodes(nodes: int, options: argparse.Namespace) -> NodesRun:
    from ray.cluster_utils import Cluster

    small = {"num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.toml"
            replies = [BUILD.replace("SECONDS", str(options.seconds)), FIX, "Orders of exactly 50.00 ship free now."]
            script.write_text(f"[[script]]\nreplies = {json.dumps(replies)}\n")
            settings = (
                *("run.executor=ray", f"ray.address={cluster.address}", f"run.concurrency={options.concurrency}"),
                *("run.limit=1", f"run.attempts={options.attempts}", "run.name=r", f"run.output={folder}"),
                *("engine.kind=scripted", f"engine.scripted.script={script}"),
            )
            argv = [sys.executable, "-m", "rollwright.cli", "run", ROOT / "examples/quickstart/run.toml", *settings]
            used = _watched(argv)
            return _measured(RunDir(Path(folder) / "r"), used)
    finally:
        cluster.shutdown()


def _watched(argv: Sequence[str | Path]) -> list[tuple[float, float]]:
    """Run a command; meanwhile, when, the CPU seconds that our descendants have used until then."""
    used = [(time.time(), _used())]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            used.append((time.time(), _used()))
    assert process.returncode == 0, "the run did not end well; try the same settings with `rollwright run`"
    return used


def _used() -> float:
    """CPU seconds of all our descendants; those that have ended are in the sum of whoever waited for them."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    total, born = 0, {pid for pid, parent in parents.items() if parent == os.getpid()}
    while born:
        total += sum(ticks[pid] for pid in born)
        born = {pid for pid, parent in parents.items() if parent in born}
    return total / os.sysconf("SC_CLK_TCK")


def _measured(run: RunDir, used: list[tuple[float, float]]) -> NodesRun:
    records = run.records()
    assert records
    assert all(record.reward == 1.0 for record in records)
    walls = [sum(record.seconds.values()) for record in records]
    ends = [run.rollout(record.rollout).path.stat().st_mtime for record in records]  # it was stored just then
    begin, end = min(end - wall for end, wall in zip(ends, walls, strict=True)), max(ends)
    inside = [cpu for at, cpu in used if begin <= at <= end]
    return NodesRun(
        rollouts=len(records),
        span=end - begin,
        wall=statistics.mean(walls),
        working=statistics.mean(record.seconds["agent_done"] for record in records),
        cpu=inside[-1] - inside[0],
    )


if __name__ == "__main__":
    main()
