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
from contextlib import ExitStack, contextmanager, suppress
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
    parser.add_argument("--engine-url", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace, command: str) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    if command == "shards":
        _compare_shards(options)
        return
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        if command == "loop" and len(cores) > 1:
            os.sched_setaffinity(0, cores[1:])  # of the clients and the engine, too
            stack.callback(os.sched_setaffinity, 0, cores)
        engine_port, port, rival, rival_admin = (_free_port() for _ in range(4))
        engine_url = f"http://127.0.0.1:{engine_port}"
        client = [options.client_python]
        engine = [*client, str(options.bench / "fake_sglang.py"), "--port", str(engine_port)]
        stack.enter_context(_process(options, "engine", [*engine, "--tokenizer", str(options.tokenizer)], engine_port))
        ours = [sys.executable, __file__, "--tokenizer", str(options.tokenizer), "--serve", str(port)]
        ours += ["--engine-url", engine_url, "--work", str(options.work), *(["--profile"] if options.profile else [])]
        pid = stack.enter_context(_process(options, "ours", ours, port))
        targets = [
            "--target",
            f"name=ours,url=http://127.0.0.1:{port},wire={options.wire},pid={pid},engine={engine_url}",
        ]
        if options.verifiers and command != "loop":
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
        if command == "loop":
            _put_first(pid, cores[0])
            _loop(options, targets, port, cores[0])
            return
        limits = ["--repeat", str(options.repeat), "--conc", options.conc, "--sessions", str(options.sessions)]
        _bench(options, [command, *targets, *limits, "--wait-quiet", str(options.wait_quiet)])


def _bench(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    subprocess.run([options.client_python, str(options.bench / "bench_gateway.py"), *arguments], check=True)


def _compare_shards(options: argparse.Namespace) -> None:
    """Turns a second of one process and of several, in turn: a policy that answers at once, a connection a session.

    Where others use the cores too, the second number is the one to read: turns a CPU second of the busiest process,
    which is what bounds the rate when there are cores enough.
    """
    import anyio

    async def both() -> None:
        rates: dict[int, list[tuple[float, float]]] = {1: [], options.shards: []}
        for _ in range(options.repeat):
            for count, into in rates.items():
                into.append(await _rate(options, count))
                print(f"{count} processes: {into[-1][0]:.0f} turns/s, {into[-1][1]:.0f} a CPU second", flush=True)
        for index, what in enumerate(("turns/s", "turns a CPU second of the busiest")):
            ratios = [many[index] / one[index] for one, many in zip(*rates.values(), strict=True)]
            print(f"ratio of {what}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")

    anyio.run(both, backend_options={"use_uvloop": True})


async def _rate(options: argparse.Namespace, count: int, *, sessions: int = 64, turns: int = 8) -> tuple[float, float]:
    import anyio

    from rollwright.gateway.shards import serve_shards
    from rollwright.testing.loopback_gateway import load_scripted
    from rollwright.types import Sampling

    urls: list[str] = []
    ready = anyio.Event()

    def on_ready(url: str, sessions: int) -> None:
        urls.append(url)
        ready.set()

    async with anyio.create_task_group() as group:
        serve = partial(
            serve_shards,
            count=count,
            load=partial(load_scripted, options.tokenizer, "I look at the next file. " * 20),
            sampling=Sampling(max_new_tokens=4096),
            model="policy",
            port=0,
            bench_admin=True,
            on_ready=on_ready,
        )
        group.start_soon(serve)
        await ready.wait()
        port = int(urls[0].rpartition(":")[2])
        await _drive(port, "warm", sessions, 2)
        since, before = time.perf_counter(), _cpu_of_children()
        await _drive(port, "bench", sessions, turns)
        seconds, after = time.perf_counter() - since, _cpu_of_children()
        group.cancel_scope.cancel()
    busiest = max(after[pid] - before[pid] for pid in before)
    return sessions * turns / seconds, sessions * turns / busiest


def _cpu_of_children() -> dict[int, float]:
    """Seconds, of each child of this process: here its shards."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ticks = os.sysconf("SC_CLK_TCK")
    spent: dict[int, float] = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent[int(pid)] = (int(fields[11]) + int(fields[12])) / ticks
    return spent


async def _drive(port: int, name: str, sessions: int, turns: int) -> None:
    """Sessions side by side; each says its whole history, some 12 to 20 thousand tokens, on a connection of its own."""
    import anyio
    import orjson

    system = {"role": "system", "content": "You are a coding agent. Use the tools that you have. " * 1000}

    async def call(stream: anyio.abc.SocketStream, path: str, key: str, value: object) -> bytes:
        body = orjson.dumps(value)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += await stream.receive()
        head, _, rest = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < length:
            rest += await stream.receive()
        return rest

    async def session(number: int) -> None:
        key = f"{name}-{number}"
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await call(stream, "/_bench/open", "", {"sid": key})
        messages: list[dict[str, str]] = [system, {"role": "user", "content": f"Fix bug {number}."}]
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            for turn in range(turns):
                reply = orjson.loads(await call(stream, "/v1/chat/completions", key, {"messages": messages}))
                said = reply["choices"][0]["message"]["content"]
                output = f"file {number} {turn}\n" + "    return left - right  # line\n" * 80
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": output}]

    async with anyio.create_task_group() as group:
        for number in range(sessions):
            group.start_soon(session, number)


def _loop(options: argparse.Namespace, targets: Sequence[str], port: int, core: int) -> None:
    """Requests that need nothing but the event loop, while 16 sessions run.

    The gateway has a core of its own, and the probe comes before the clients that it shares the others with: what is
    measured is how long the loop keeps it waiting. A bare loop is asked beside it: how long the machine does.
    """
    clients = [options.client_python, str(options.bench / "bench_gateway.py"), "throughput", *targets, "--conc", "16"]
    load = subprocess.Popen([*clients, "--repeat", str(options.repeat)])
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        print("the probe waits for its turn like everyone: to come first needs root")
    with _bare_loop(core) as bare:
        times = {"gateway": list[float](), "bare loop": list[float]()}
        while load.poll() is None:
            # The gateway hangs up on who shows no key for half a minute.
            with socket.create_connection(("127.0.0.1", port)) as ours, socket.create_connection(bare) as beside:
                opened = time.perf_counter()
                while load.poll() is None and time.perf_counter() - opened < 10:
                    for name, probe in (("gateway", ours), ("bare loop", beside)):
                        times[name].append(_answered(probe))
                    time.sleep(0.005)  # noqa: TID251 - the probe's own pace
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    for name, seconds in times.items():
        seconds.sort()
        shown = ", ".join(f"p{part} {1e3 * seconds[int(len(seconds) * part / 100)]:.1f}" for part in (50, 95, 99))
        over = sum(1 for each in seconds if each > 0.005)
        print(f"{name}: {len(seconds)} probes, ms: {shown}, max {1e3 * seconds[-1]:.1f}; {over} over 5 ms")
    held = options.work / "held.txt"
    if held.exists():
        print(held.read_text())


def _answered(probe: socket.socket) -> float:
    """Seconds until the answer to a request that needs nothing but the event loop."""
    since = time.perf_counter()
    probe.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    while b"no such route" not in received:
        part = probe.recv(65536)
        if not part:
            sys.exit("the probe's connection was closed")
        received += part
    return time.perf_counter() - since


@contextmanager
def _bare_loop(core: int) -> Generator[tuple[str, int]]:
    """A process that has nothing to do but to answer, as favoured as the gateway and on the same core: what it is late
    is this machine's doing."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while True:
            client, _ = listener.accept()
            while client.recv(65536):
                client.sendall(b"no such route")
    try:
        _put_first(pid, core)
        yield listener.getsockname()
    finally:
        listener.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _put_first(pid: int, core: int) -> None:
    """A core for all threads of a process and those that they start, where they come before others."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), -20)


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

    from rollwright.engines.sglang import SglangEngine
    from rollwright.gateway.standalone import serve_gateway
    from rollwright.tokens.render import load_renderer
    from rollwright.types import Sampling

    renderer = load_renderer(options.tokenizer)
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
        engine = SglangEngine(
            renderer=renderer, url=options.engine_url, max_context=CONTEXT, version="0", logprob_kind="temperature"
        )
        async with engine, anyio.create_task_group() as group:
            if options.profile:
                group.start_soon(tell)
            await serve_gateway(
                engine=engine,
                renderer=renderer,
                sampling=Sampling(max_new_tokens=4096),
                model="policy",
                port=options.serve,
                folder=options.work / f"logs-{os.getpid()}",
                bench_admin=True,
            )

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
