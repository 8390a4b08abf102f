"""What a turn costs in the gateway: growth with the history, CPU of a session, throughput, memory, sealing.

    python benchmarks/gateway.py --bench DIR --tokenizer DIR growth session throughput memory finish

Needs the folder of the load clients (`bench_gateway.py`, `fake_sglang.py`, `vf_gateway.py`) and a Python with aiohttp
and tokenizers for them (`--client-python`). With `--verifiers PYTHON`, one that has verifiers 0.4, that runs
interleaved; compare ratios of one run only. `loop` shows how long the event loop is held up while 16 sessions run:
requests that need nothing but the loop, and with `--profile` the CPU time of its longest callbacks. `shards` compares
the throughput of one process with that of `--shards` behind one address.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

COMMANDS = ("growth", "session", "throughput", "memory", "finish", "loop", "shards")
CONTEXT = 262_144


def main() -> None:
    options = _arguments()
    if options.serve is not None:
        _serve(options)
        return
    if not options.commands:
        sys.exit(f"name what to measure: {', '.join(COMMANDS)}")
    for command in options.commands:
        print(f"\n## {command}", flush=True)
        _measure(options, command)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", choices=[*COMMANDS, []], metavar="COMMAND")
    parser.add_argument("--bench", type=Path, help="folder of the load clients")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--client-python", default=sys.executable)
    parser.add_argument("--verifiers", help="a Python that has verifiers 0.4")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rollwright-bench"), help="logs and turn logs")
    parser.add_argument("--wire", default="anthropic", choices=["anthropic", "openai"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--conc", default="1,16,64")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--wait-quiet", type=int, default=30)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="time the callbacks of the event loop")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine-url", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace, command: str) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        engine_port, port, rival, rival_admin = (_free_port() for _ in range(4))
        engine_url = f"http://127.0.0.1:{engine_port}"
        client = [options.client_python]
        engine = [*client, str(options.bench / "fake_sglang.py"), "--port", str(engine_port)]
        stack.enter_context(_process(options, "engine", [*engine, "--tokenizer", str(options.tokenizer)], engine_port))
        ours = [sys.executable, __file__, "--tokenizer", str(options.tokenizer), "--serve", str(port)]
        ours += ["--engine-url", engine_url, "--work", str(options.work), "--shards", str(options.shards)]
        ours += ["--profile"] if options.profile else []
        pid = stack.enter_context(_process(options, "ours", ours, port))
        targets = [
            "--target",
            f"name=ours,url=http://127.0.0.1:{port},wire={options.wire},pid={pid},engine={engine_url}",
        ]
        if options.verifiers and command not in ("loop", "shards"):
            verifiers = [options.verifiers, str(options.bench / "vf_gateway.py"), "--port", str(rival)]
            verifiers += [
                "--admin-port",
                str(rival_admin),
                "--engine",
                engine_url,
                "--tokenizer",
                str(options.tokenizer),
            ]
            pid = stack.enter_context(_process(options, "verifiers", verifiers, rival))
            admin = f"http://127.0.0.1:{rival_admin}"
            told = (
                f"name=verifiers,url=http://127.0.0.1:{rival},wire=openai,pid={pid},engine={engine_url},admin={admin}"
            )
            targets += ["--target", told]
        if command == "shards":
            sharded = stack.enter_context(_process(options, "sharded", [*ours, "--sharded", str(rival)], rival))
            told = f"name=sharded,url=http://127.0.0.1:{rival},wire={options.wire},pid={sharded},engine={engine_url}"
            _bench(options, ["throughput", *targets, "--target", told, "--conc", options.conc])
            return
        if command == "loop":
            _loop(options, targets, port)
            return
        limits = ["--repeat", str(options.repeat), "--conc", options.conc, "--sessions", str(options.sessions)]
        _bench(options, [command, *targets, *limits, "--wait-quiet", str(options.wait_quiet)])


def _bench(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    subprocess.run([options.client_python, str(options.bench / "bench_gateway.py"), *arguments], check=True)


def _loop(options: argparse.Namespace, targets: Sequence[str], port: int) -> None:
    """Requests that need nothing but the event loop, while 16 sessions run."""
    load = subprocess.Popen(
        [options.client_python, str(options.bench / "bench_gateway.py"), "throughput", *targets, "--conc", "16"]
    )
    times: list[float] = []
    request = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as probe:
        while load.poll() is None:
            since = time.perf_counter()
            probe.sendall(request)
            while b"no such route" not in probe.recv(65536):
                pass
            times.append(time.perf_counter() - since)
            time.sleep(0.005)  # noqa: TID251 - the probe's own pace
    times.sort()
    shown = ", ".join(f"p{part} {1e3 * times[int(len(times) * part / 100)]:.1f}" for part in (50, 95, 99))
    print(f"probe of {len(times)} requests under 16 sessions, ms: {shown}, max {1e3 * times[-1]:.1f}")
    held = options.work / "held.txt"
    if held.exists():
        print(held.read_text())


@contextmanager
def _process(options: argparse.Namespace, name: str, command: Sequence[str], port: int) -> Generator[int]:
    """A server until the end of the block; it is up when it accepts connections."""
    with (options.work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start; see {log.name}")
            time.sleep(0.1)  # noqa: TID251 - no event tells that a foreign process listens
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _accepts(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _serve(options: argparse.Namespace) -> None:
    """Our side: `serve_gateway` on the fake engine, with turn logs on disk as in earnest."""
    import anyio

    from rollwright.cli.gateway import load_parts
    from rollwright.gateway.shards import serve_shards
    from rollwright.gateway.standalone import serve_gateway
    from rollwright.types import Sampling

    engine_options = {
        "url": options.engine_url,
        "max_context": CONTEXT,
        "version": "0",
        "logprob_kind": "temperature",
    }
    load = partial(load_parts, options.tokenizer, "sglang", engine_options, Path.cwd())
    settings = {
        "sampling": Sampling(max_new_tokens=4096),
        "model": "policy",
        "port": options.sharded or options.serve,
        "folder": options.work / f"logs-{os.getpid()}",
        "bench_admin": True,
    }
    held: list[float] = []

    async def tell() -> None:
        """Once a second, what the loop's callbacks have cost so far; the first seconds are start-up."""
        await anyio.sleep(2)
        held.clear()
        while True:
            await anyio.sleep(1)
            longest = sorted(held)[-5:]
            shown = ", ".join(f"{1e3 * seconds:.1f}" for seconds in longest)
            over = sum(1 for seconds in held if seconds > 0.005)
            text = f"event loop: {len(held)} callbacks, {over} over 5 ms of CPU; the longest, ms: {shown}\n"
            (options.work / "held.txt").write_text(text)

    async def serve() -> None:
        if options.sharded is not None:
            return await serve_shards(count=options.shards, load=load, **settings)
        engine, renderer = load()
        async with engine, anyio.create_task_group() as group:
            if options.profile:
                group.start_soon(tell)
            await serve_gateway(engine=engine, renderer=renderer, **settings)

    if options.profile:
        _time_callbacks(held)
    try:
        anyio.run(serve, backend_options={"use_uvloop": not options.profile})
    except KeyboardInterrupt:
        return


def _time_callbacks(into: list[float]) -> None:
    """CPU seconds of each callback of asyncio's own loop: unlike a clock, they do not count what others do."""
    import asyncio.events

    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        since = time.thread_time()
        run(handle)
        into.append(time.thread_time() - since)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
