"""What boxes and durable jobs cost, next to the bare thing, in one run: `python benchmarks/jobs.py [rounds]`.

Times are milliseconds; read the ratios, the machine may be busy. `chrt -f 10 python benchmarks/jobs.py` comes close
to an idle machine.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from rollwright.sandboxes import JobSpec, SandboxSpec
from rollwright.sandboxes.jobs import Jobs
from rollwright.sandboxes.namespaces import NamespacesProvider

BOXES = 200
FILE_MB = 100


async def timed(name: str, rounds: int, once: Callable[[], Awaitable[object]], base: float | None = None) -> float:
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        await once()
        times.append((time.perf_counter() - started) * 1000)
    median = statistics.median(times)
    ratio = "" if base is None else f"{median / base:8.1f} x   {median - base:+8.1f} ms"
    print(f"{name:34} min {min(times):8.1f}   median {median:8.1f}   {ratio}")
    return median


def available_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 1024


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with NamespacesProvider(state_dir=Path(folder) / "state") as provider:
            await provider.probe()
            await compare_commands(provider, rounds)
            await compare_files(provider, Path(folder))
            await many_boxes(provider)


async def compare_commands(provider: NamespacesProvider, rounds: int) -> None:
    spec = SandboxSpec(image="host", network="gateway_only")

    async def host() -> None:
        await anyio.run_process(["true"])

    async def create_and_close() -> None:
        await (await provider.create(spec, key=secrets.token_hex(8))).close()

    box = await provider.create(spec, key="bench")
    plain = Jobs(box, folder="/var/lib/rollwright")

    def job() -> JobSpec:
        return JobSpec(id=secrets.token_hex(16), argv=("true",), user="agent")

    async def five_second_poll() -> None:
        await box.exec(["sh", "-c", "true; touch /tmp/done"])
        await anyio.sleep(5)
        await box.get("/tmp/done")

    base = await timed("subprocess on the host", rounds, host)
    await timed("create and destroy a box", rounds, create_and_close, base)
    command = await timed("exec true in a box", rounds, lambda: box.exec(["true"]), base)
    await timed("durable true (cell)", rounds, lambda: box.run(job()), command)
    await timed("durable true (plain exec)", rounds, lambda: plain.run(job()), command)
    await timed("marker file polled every 5 s", 1, five_second_poll, command)
    await box.close()


async def compare_files(provider: NamespacesProvider, folder: Path) -> None:
    data = secrets.token_bytes(FILE_MB << 20)
    source = folder / "file"
    source.write_bytes(data)
    box = await provider.create(SandboxSpec(image="host"), key="files")

    async def copy() -> None:
        await anyio.run_process(["cp", "--reflink=never", str(source), str(folder / "copy")])

    base = await timed(f"cp {FILE_MB} MB", 5, copy)
    await timed(f"put {FILE_MB} MB", 5, lambda: box.put("/tmp/file", data), base)
    await timed(f"get {FILE_MB} MB", 5, lambda: box.get("/tmp/file"), base)
    await box.close()


async def many_boxes(provider: NamespacesProvider) -> None:
    spec = SandboxSpec(image="host", network="gateway_only", disk_mb=64)
    before = available_mb()
    started = time.perf_counter()

    async def create(n: int) -> None:
        box = await provider.create(spec, key=f"many-{n}")
        await box.start(JobSpec(id=secrets.token_hex(16), argv=("sleep", "600"), user="agent"))

    async with anyio.create_task_group() as tasks:
        for n in range(BOXES):
            tasks.start_soon(create, n)
    seconds = time.perf_counter() - started
    print(f"{BOXES} boxes with a running job: {seconds:.1f} s, {(before - available_mb()) / BOXES:.1f} MB each")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 20)
