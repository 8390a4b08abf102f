"""What boxes and durable jobs cost, next to the bare thing, in one run; and what they survive.

    python benchmarks/jobs.py [--rounds 20]
    python benchmarks/jobs.py --faults [--jobs 1000]

Times are milliseconds. Read the ratios and the minima, the machine may be busy; `nice -n -20` in front helps.
`--faults`: jobs with known codes and bytes, through the real E2B SDK and our server, while every TCP connection is
broken after 1.5 s, by a reset or an orderly close, and every 0.35 s a request goes wrong.
"""

from __future__ import annotations

import argparse
import random
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import e2b

from rollwright.e2b_server import FAULTS, E2BServer, Faults
from rollwright.sandboxes import JobSpec, Sandbox, SandboxSpec
from rollwright.sandboxes.e2b import E2BProvider
from rollwright.sandboxes.jobs import Jobs
from rollwright.sandboxes.namespaces import NamespacesProvider
from rollwright.testing.chaos_proxy import chaos_proxy
from rollwright.testing.known_jobs import KnownJob, known_job, run_all, traces

BOXES = 200
FILE_MB = 100
KEY = "bench"
SPEC = SandboxSpec(image="host", network="gateway_only")
CLOSED = SandboxSpec(image="host", network="none")


@dataclass(frozen=True)
class Times:
    """Of one thing, in milliseconds."""

    least: float
    median: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--jobs", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.faults:
            ok = anyio.run(survive, Path(folder), options.jobs)
            sys.exit(0 if ok else 1)
        anyio.run(measure, Path(folder), options.rounds)


async def timed(name: str, rounds: int, once: Callable[[], Awaitable[object]], base: Times | None = None) -> Times:
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        await once()
        times.append((time.perf_counter() - started) * 1000)
    found = Times(min(times), statistics.median(times))
    row(name, found, base)
    return found


def row(name: str, found: Times, base: Times | None) -> None:
    more = "" if base is None else f"{found.median / base.median:8.1f} x   {found.median - base.median:+9.1f}"
    print(f"{name:44} {found.least:9.1f} {found.median:9.1f} {more}", flush=True)


async def measure(folder: Path, rounds: int) -> None:
    print(f"{'':44} {'least':>9} {'median':>9} {'ratio':>10}   {'more':>9}")
    async with NamespacesProvider(state_dir=folder / "state") as provider:
        await provider.probe()
        await compare_commands(provider, rounds)
        await compare_files(provider, folder)
        await many_boxes(provider)
    async with served(folder / "server") as url, client(url, folder / "client") as remote:
        await compare_through_e2b(remote, url, rounds)


def true_job() -> JobSpec:
    return JobSpec(id=secrets.token_hex(16), argv=("true",), user="agent")


async def five_second_poll(box: Sandbox) -> None:
    """How it is done elsewhere: the command leaves a mark, and the mark is looked for."""
    await box.exec(["sh", "-c", "true; touch /tmp/done"])
    await anyio.sleep(5)
    await box.get("/tmp/done")


async def compare_commands(provider: NamespacesProvider, rounds: int) -> None:
    async def host() -> None:
        await anyio.run_process(["true"])

    boxes: list[Sandbox] = []

    async def create() -> None:
        boxes.append(await provider.create(SPEC, key=secrets.token_hex(8)))

    async def destroy() -> None:
        await boxes.pop().close()

    base = await timed("subprocess on the host", rounds, host)
    await timed("namespaces: create", rounds, create, base)
    await timed("namespaces: destroy", rounds, destroy, base)
    box = await provider.create(SPEC, key="bench")
    plain = Jobs(box, folder="/var/lib/rollwright")
    command = await timed("namespaces: exec true", rounds, lambda: box.exec(["true"]), base)
    await timed("namespaces: durable true", rounds, lambda: box.run(true_job()), command)
    await timed("namespaces: durable true over plain exec", rounds, lambda: plain.run(true_job()), command)
    await timed("namespaces: mark polled every 5 s", 1, lambda: five_second_poll(box), command)
    await box.close()


async def compare_files(provider: NamespacesProvider, folder: Path) -> None:
    data = secrets.token_bytes(FILE_MB << 20)
    source = folder / "file"
    source.write_bytes(data)
    box = await provider.create(CLOSED, key="files")

    async def copy() -> None:
        await anyio.run_process(["cp", "--reflink=never", str(source), str(folder / "copy")])

    base = await timed(f"cp {FILE_MB} MB", 5, copy)
    await timed(f"namespaces: put {FILE_MB} MB", 5, lambda: box.put("/tmp/file", data), base)
    await timed(f"namespaces: get {FILE_MB} MB", 5, lambda: box.get("/tmp/file"), base)
    await box.close()
    source.unlink()


def available_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 1024


async def many_boxes(provider: NamespacesProvider) -> None:
    spec = SandboxSpec(image="host", network="gateway_only", disk_mb=64)
    before = available_mb()
    started = time.perf_counter()
    boxes: list[Sandbox] = []

    async def create(n: int) -> None:
        box = await provider.create(spec, key=f"many-{n}")
        await box.start(JobSpec(id=secrets.token_hex(16), argv=("sleep", "600"), user="agent"))
        boxes.append(box)

    async with anyio.create_task_group() as tasks:
        for n in range(BOXES):
            tasks.start_soon(create, n)
    seconds = time.perf_counter() - started
    used = (before - available_mb()) / BOXES
    print(f"namespaces: {BOXES} boxes at once, each with a running job: {seconds:.1f} s, {used:.1f} MB each")
    async with anyio.create_task_group() as tasks:
        for box in boxes:
            tasks.start_soon(box.close)


# --------------------------------------------------------------------------- through the real E2B SDK and our server


_SERVE = """
import sys, anyio
from pathlib import Path
from rollwright.e2b_server import serve
anyio.run(lambda: serve(host="127.0.0.1", port=0, api_key=sys.argv[2], state_dir=Path(sys.argv[1]), images=None,
                        image_metadata_key=None, ready=lambda url: print(url, flush=True)))
"""


@asynccontextmanager
async def served(state: Path) -> AsyncGenerator[str]:
    """Our server as a process; its address."""
    async with await anyio.open_process([sys.executable, "-c", _SERVE, str(state), KEY], stderr=None) as process:
        assert process.stdout is not None
        yield (await process.stdout.receive()).decode().strip()
        process.terminate()


@asynccontextmanager
async def client(url: str, state: Path) -> AsyncGenerator[E2BProvider]:
    async with E2BProvider(
        state_dir=state, api_key=KEY, api_url=url, sandbox_url=url, patience_seconds=120
    ) as provider:
        yield provider


async def compare_through_e2b(provider: E2BProvider, url: str, rounds: int) -> None:
    boxes: list[Sandbox] = []

    async def create() -> None:
        boxes.append(await provider.create(CLOSED, key=secrets.token_hex(8)))

    async def destroy() -> None:
        await boxes.pop().close()

    await timed("E2B SDK and our server: create", rounds, create)
    await timed("E2B SDK and our server: destroy", rounds, destroy)
    box = await provider.create(CLOSED, key="bench")
    bare = await e2b.E2B(api_key=KEY, api_url=url, sandbox_url=url).AsyncSandbox.connect(box.id)
    base = await timed("E2B SDK and our server: bare run true", rounds, lambda: bare.commands.run("true", user="root"))
    await timed("E2B SDK and our server: exec true", rounds, lambda: box.exec(["true"]), base)
    await timed("E2B SDK and our server: durable true", rounds, lambda: box.run(true_job()), base)
    await timed("E2B SDK and our server: mark polled every 5 s", 1, lambda: five_second_poll(box), base)
    await box.close()


# --------------------------------------------------------------------------- while everything goes wrong


async def survive(folder: Path, count: int) -> bool:
    """Whether each job ran once with its own result and nothing was left."""
    faults = Faults(seed=1)
    ok = True
    async with NamespacesProvider(state_dir=folder / "server") as backend:
        async with E2BServer(provider=backend, api_key=KEY, faults=faults) as server:
            sock = socket.create_server(("127.0.0.1", 0), backlog=512)
            port = sock.getsockname()[1]
            async with server.listening(sock), chaos_proxy(port, seconds=1.5, cuts=("rst", "fin"), seed=1) as proxy:
                async with client(proxy.url, folder / "client") as provider:
                    faults.every(0.35, [kind for kind in FAULTS if kind != "truncate"])
                    dice = random.Random(1)
                    boxes = [await provider.create(CLOSED, key=f"box{n}") for n in range(8)]
                    jobs: list[KnownJob] = [known_job(boxes[n % len(boxes)], dice) for n in range(count)]
                    started = time.perf_counter()
                    wrong = await run_all(jobs, at_once=16)
                    seconds = time.perf_counter() - started
                    faults.stop()
                    proxy.seconds = 0
                    twice = await traces(jobs)
                    faults.every(0.35, [kind for kind in FAULTS if kind != "truncate"])
                    proxy.seconds = 1.5
                left = server.boxes.all()
            print(f"{count} jobs in {len(boxes)} boxes, 16 at a time, in {seconds:.0f} s")
            print(f"injected: {dict(proxy.counts)} connections of {proxy.connections}; requests: {dict(faults.counts)}")
            print(f"borne with: {sum(provider.tally().failures.values())} failures")
            for (operation, kind), times in sorted(provider.tally().failures.items()):
                print(f"  {operation}: {kind} {times}")
            print(f"lost or wrong: {len(wrong)}; not run once, or alive: {len(twice)}; boxes left: {len(left)}")
            print(f"errors that the adapter does not know: {provider.tally().unclassified or 'none'}")
            for line in (*wrong, *twice)[:20]:
                print(f"  {line}")
            ok = not (wrong or twice or left)
        ok = ok and await backend.list() == []
    return ok


if __name__ == "__main__":
    main()
