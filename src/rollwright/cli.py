"""The command line. The only place that reads the environment, handles signals, installs logging and prints results.

Results go to stdout, progress and logs to stderr. Exit codes: 0 all graded, 1 usage or configuration, 2 some rollouts
ungraded (or a check that failed), 130 interrupted. A verb imports what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import anyio
from cyclopts import App, CycloptsError, Parameter

from rollwright import __version__
from rollwright.concurrency import plain_errors
from rollwright.errors import ConfigError, RollwrightError, UsageError

if TYPE_CHECKING:
    from rollwright.run import Places, Prepared
    from rollwright.store import RunDir, RunWriter

T = TypeVar("T")

OK, USAGE, UNGRADED, INTERRUPTED = 0, 1, 2, 130

_SHOW_CURSOR = b"\x1b[?25h"
"""The live table hides it."""

app = App(name="rollwright", version=__version__, help="Turns coding tasks into RL training data a trainer can trust.")
sandbox_app = App(name="sandbox", help="Look at sandboxes and remove what a killed run left.")
harness_app = App(name="harness", help="Coding-agent CLIs and their bundles.")
app.command(sandbox_app)
app.command(harness_app)

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print the result as JSON.")]


@app.command
def run(
    job: Path,
    /,
    *overrides: str,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-j"])] = None,
    attempts: Annotated[int | None, Parameter(name=["--attempts", "-k"])] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    limit: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Run every task of a run file: `rollwright run examples/quickstart/run.toml run.attempts=2`.

    Parameters
    ----------
    job
        The run file.
    overrides
        Settings as dotted names, e.g. `sampling.temperature=0.7`.
    concurrency
        Rollouts at a time (run.concurrency).
    attempts
        Rollouts per task (run.attempts).
    output
        Folder that run folders are made in (run.output).
    limit
        Only the first so many tasks (run.limit).
    dry_run
        Check everything that can be checked without starting, print the resolved plan, and stop.
    """
    from rollwright.config import RunConfig
    from rollwright.run import prepare
    from rollwright.store import RunWriter

    flags = {"run.concurrency": concurrency, "run.attempts": attempts, "run.limit": limit}
    settings = [*overrides, *(f"{name}={value}" for name, value in flags.items() if value is not None)]
    if output is not None:
        settings.append(f"run.output={output.absolute()}")
    config = RunConfig.load(job, settings)
    prepared = prepare(config, _places())
    if dry_run:
        return _print_plan(prepared, as_json=json)
    path = config.run.output / (config.run.name or _default_name(job))

    def create() -> RunWriter:
        writer = RunWriter.create(path, run_file=job.read_bytes(), resolved=prepared.resolved())
        _point_latest(path)
        return writer

    return _execute(prepared, path, create, as_json=json)


@app.command
def resume(
    folder: Path,
    /,
    *,
    ungraded: Annotated[bool, Parameter(negative=())] = False,
    concurrency: Annotated[int | None, Parameter(name=["--concurrency", "-j"])] = None,
    json: Json = False,
) -> int:
    """Finish what a run still owes: `rollwright resume runs/latest`. What was stored is not run again.

    Parameters
    ----------
    folder
        The run folder.
    ungraded
        Run the rollouts again that ended without a verdict.
    concurrency
        Rollouts at a time, if not as before.
    """
    from rollwright.config import RunConfig
    from rollwright.run import prepare, tasks_digest
    from rollwright.store import RunDir, RunWriter

    resolved = RunDir(folder).resolved()
    data = resolved["config"]
    if concurrency is not None:
        data["run"]["concurrency"] = concurrency
    config = RunConfig.resolve(data, base=Path(data.pop("base")), where=str(folder / "resolved.json"))
    prepared = prepare(config, _places())
    for what, then, now in (
        ("the data set", resolved["tasks"]["digest"], tasks_digest(prepared.tasks)),
        ("the tokenizer or chat template", resolved["renderer"]["fingerprint"], prepared.renderer.fingerprint),
    ):
        if then != now:
            raise ConfigError(f"{what} has changed since {folder} was started; start a new run")
    folder = folder.resolve()

    def reopen() -> RunWriter:
        writer = RunWriter.reopen(folder)
        if ungraded:
            writer.drop({record.rollout for record in writer.run.records() if not record.graded})
        return writer

    return _execute(prepared, folder, reopen, as_json=json)


@app.command
def validate(
    job: Path,
    /,
    *overrides: str,
    gold_runs: int = 1,
    lock: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Prove each task: its gold patch resolves it and no patch does not. Exit 2 when a task is unusable.

    Parameters
    ----------
    job
        The run file that names the data set and the sandboxes.
    overrides
        Settings as dotted names.
    gold_runs
        How often each gold patch is graded; 3 shows most flakes.
    lock
        Write what was proved into the lockfile beside the data set.
    """
    from rollwright.config import RunConfig
    from rollwright.validate import validate_run

    if gold_runs < 1:
        raise ConfigError(f"--gold-runs is {gold_runs}; at least one run shows anything")
    config = RunConfig.load(job, overrides)
    rows, interrupted = _until_interrupted(
        lambda: validate_run(config, _places(), say=_say, gold_runs=gold_runs, lock=lock)
    )
    if interrupted or rows is None:
        return INTERRUPTED
    if json:
        _print_json([row.to_json() for row in rows])
    else:
        width = max(len(row.task) for row in rows)
        print(f"{'task':{width}}  gold         no patch     seconds")
        for row in rows:
            print(f"{row.task:{width}}  {row.gold:11}  {row.noop:11}  {row.seconds:7.1f}  {row.problem}")
        print(f"{sum(row.usable for row in rows)} of {len(rows)} tasks are usable")
    return OK if all(row.usable for row in rows) else UNGRADED


@app.command
def verify(folder: Path, /, *, json: Json = False) -> int:
    """Re-check a stored run's token invariants offline: `rollwright verify runs/latest`. Exit 2 on a violation.

    Parameters
    ----------
    folder
        The run folder.
    """
    from rollwright.audit import audit_run
    from rollwright.store import RunDir

    total = audit_run(RunDir(folder))
    if json:
        _print_json(
            {
                "rollouts": total.rollouts,
                "sampled_tokens": total.sampled,
                "trained_tokens": total.trained,
                "excluded": dict(total.excluded),
                "violations": total.violations,
            }
        )
        return UNGRADED if total.violations else OK
    for violation in total.violations[:50]:
        print(violation)
    print(f"{len(total.violations)} violations in {total.rollouts} graded rollouts")
    why = "; not trained: " + ", ".join(f"{n} {reason}" for reason, n in sorted(total.excluded.items()))
    print(f"{total.trained_share:.1%} of {total.sampled} sampled tokens are trained" + (why if total.excluded else ""))
    return UNGRADED if total.violations else OK


@app.command
def regrade(
    folder: Path,
    /,
    *,
    rerun: Annotated[bool, Parameter(negative=())] = False,
    write: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Judge a run's stored test runs again: `rollwright regrade runs/latest`. Exit 2 when a rollout could not be.

    Parameters
    ----------
    folder
        The run folder.
    rerun
        Run the tests again, in new sandboxes, from the stored patches.
    write
        Write changed verdicts back, into the samples too; the old verdicts are kept beside them.
    """
    from rollwright.regrade import regrade_run

    found, interrupted = _until_interrupted(
        lambda: regrade_run(folder.resolve(), _places(), rerun=rerun, write=write, say=_say)
    )
    if interrupted or found is None:
        return INTERRUPTED
    changed = sum(each.changed for each in found)
    problems = [each for each in found if each.problem]
    if json:
        _print_json([each.to_json() for each in found])
    else:
        for each in problems:
            print(f"{each.rollout}: {each.problem}")
        print(f"{len(found)} rollouts judged again: {changed} changed, {len(problems)} could not be")
    return UNGRADED if problems else OK


@app.command
def export(
    folder: Path, /, *, format: str = "jsonl", output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None
) -> int:
    """Write a run's samples as one file for a trainer: `rollwright export runs/latest --format parquet`.

    Parameters
    ----------
    folder
        The run folder.
    format
        jsonl or parquet.
    output
        The file; default: samples.FORMAT in the run folder.
    """
    from rollwright.export import export_run
    from rollwright.store import RunDir

    run_dir = RunDir(folder)
    run_dir.resolved()
    target = output or folder / f"samples.{format}"
    count = export_run(run_dir, target, format)
    print(f"{count} samples in {target}")
    return OK


@app.command
def gateway(
    *options: str,
    tokenizer: Path,
    port: int,
    engine: str = "sglang",
    engine_url: str = "",
    host: str = "127.0.0.1",
    model: str = "policy",
    renderer: Literal["auto", "renderers", "template"] = "auto",
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    folder: Path | None = None,
    bench_admin: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve the gateway alone, for any trainer: `rollwright gateway --engine-url URL --tokenizer DIR --port 18010`.

    Sessions are opened and closed under /admin by callers on this machine that send the key in ROLLWRIGHT_ADMIN_KEY.

    Parameters
    ----------
    options
        Options of the engine, e.g. `max_context=32768`.
    tokenizer
        Folder with tokenizer.json and the chat template.
    port
        Host port; 0 takes a free one.
    engine
        sglang, local, scripted, or module:Class.
    engine_url
        Where the engine answers (its option `url`).
    host
        Address to listen at.
    model
        The model name that clients see.
    renderer
        See policy.renderer in docs/configuration.md.
    tool_parser
        How sampled tool calls are read.
    reasoning_parser
        How thinking is read.
    temperature
        The trainer's.
    max_new_tokens
        Per turn.
    folder
        Where turn logs are kept; sessions a killed gateway left open there go on.
    bench_admin
        Offer the benchmark's routes under /_bench, to callers on this machine.
    """
    from rollwright import plugins
    from rollwright.config import option_of
    from rollwright.gateway.standalone import serve_gateway
    from rollwright.tokens.render import load_renderer
    from rollwright.types import Sampling

    load = load_renderer(tokenizer, kind=renderer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    given = dict(option_of(option) for option in options) | ({"url": engine_url} if engine_url else {})
    policy = plugins.make("engines", engine, given, table=f"engine.{engine}", base=Path.cwd(), renderer=load)

    async def go() -> None:
        async with policy as opened:
            await opened.check()
            await serve_gateway(
                engine=opened,
                renderer=load,
                sampling=Sampling(temperature=temperature, max_new_tokens=max_new_tokens),
                model=model,
                port=port,
                host=host,
                folder=folder,
                admin_key=os.environ.get("ROLLWRIGHT_ADMIN_KEY") or None,
                bench_admin=bench_admin,
                on_ready=lambda url, sessions: _say(f"{url}" + (f", {sessions} sessions go on" if sessions else "")),
            )

    _until_interrupted(go)
    return OK


@app.command
def e2b_server(
    *,
    port: int = 3939,
    host: str = "127.0.0.1",
    api_key: str = "",
    images: Path | None = None,
    image_metadata_key: str | None = None,
) -> int:
    """Serve E2B's API over this machine's own sandboxes, for the unchanged E2B SDK.

    Parameters
    ----------
    port
        Host port; 0 takes a free one.
    host
        Address to listen at.
    api_key
        What clients must send; default: E2B_API_KEY of the environment.
    images
        Folder of image descriptions, as for the namespaces backend.
    image_metadata_key
        Metadata key by which a client names its image, as E2B-compatible clusters do.
    """
    from rollwright.e2b_server import serve

    key = api_key or os.environ.get("E2B_API_KEY", "")
    if not key:
        raise UsageError("e2b-server needs a key: --api-key, or E2B_API_KEY in the environment")

    async def go() -> None:
        await serve(
            host=host,
            port=port,
            api_key=key,
            state_dir=_places().state / "e2b-server",
            images=images,
            image_metadata_key=image_metadata_key,
            ready=_say,
        )

    _until_interrupted(go)
    return OK


@app.command(name="list")
def list_(kind: str = "", /) -> int:
    """Show what can be chosen: sandboxes, harnesses, graders, engines."""
    from rollwright import plugins

    kinds = [kind] if kind else [k for k in plugins.KINDS if plugins.names(k)]
    for each in kinds:
        if each not in plugins.KINDS:
            raise UsageError(f"{each!r} is none of {', '.join(plugins.KINDS)}")
        print(f"{each}: {', '.join(plugins.names(each))}")
    return OK


@sandbox_app.command(name="ls")
def sandbox_ls(*, kind: str = "namespaces", json: Json = False) -> int:
    """List sandboxes of this user, also those a killed run left."""
    provider = _provider(kind)
    boxes = anyio.run(provider.list)
    if json:
        _print_json([{"id": b.id, "alive": b.alive, "owner_alive": b.owner_alive, "labels": b.labels} for b in boxes])
        return OK
    for box in boxes:
        state = "alive" if box.alive else "dead"
        owner = "" if box.owner_alive else "  owner gone"
        print(f"{box.id}  {state:5}  {box.age_seconds:7.0f} s  {box.labels.get('rollout', '')}{owner}")
    print(f"{len(boxes)} sandboxes", file=sys.stderr)
    return OK


@sandbox_app.command
def reap(*, kind: str = "namespaces", everything: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Remove sandboxes whose owner is gone or whose lease ran out.

    Parameters
    ----------
    kind
        The backend.
    everything
        Remove all of them, also those of a run that still goes on.
    """
    provider = _provider(kind)

    async def go() -> list[str]:
        return await provider.reap(everything=everything)

    reaped = anyio.run(go)
    for box in reaped:
        print(box)
    print(f"{len(reaped)} sandboxes removed", file=sys.stderr)
    return OK


@harness_app.command(name="list")
def harness_list() -> int:
    """Harnesses and the pinned versions of what they ship."""
    from rollwright import plugins

    for name in plugins.names("harnesses"):
        artifacts = plugins.find("harnesses", name).artifacts
        print(f"{name}: {', '.join(f'{a.package}@{a.version}' for a in artifacts)}")
    return OK


@harness_app.command
def bundle(name: str, /, *, npm: str = "npm") -> int:
    """Fetch a harness's bundle into the cache, so that later runs need no network.

    Parameters
    ----------
    name
        A harness, e.g. pi.
    npm
        The npm command.
    """
    from rollwright import plugins
    from rollwright.harnesses.bundle import ensure_bundle

    harness = plugins.make("harnesses", name, {}, table=f"harness.{name}", base=Path.cwd())

    async def go() -> Path:
        return (await ensure_bundle(harness, cache_dir=_places().cache, npm=npm)).path

    print(anyio.run(go))
    return OK


def main() -> None:
    """Entry point: errors of ours are one line, never a traceback."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        code: Any = app(sys.argv[1:], exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        sys.exit(USAGE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RollwrightError as error:  # before the first rollout: what fails in one is in its record
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        print(f"rollwright: {kind}{error}", file=sys.stderr)
        sys.exit(USAGE)
    sys.exit(code if isinstance(code, int) else OK)


def _execute(prepared: Prepared, path: Path, open_writer: Callable[[], RunWriter], *, as_json: bool) -> int:
    """Open everything, then the run folder, so that a run that cannot start leaves none."""
    from rich.console import Console

    from rollwright.display import Display
    from rollwright.run import execute, opened
    from rollwright.store import RunDir

    plans = prepared.plans(path.name)
    with Display(Console(stderr=True), total=len(plans)) as display:

        async def go() -> None:
            async with opened(prepared, _places(), display) as tools:
                writer = open_writer()
                try:
                    _log_into(writer.run.logs / "run.log")
                    stored = {record.rollout for record in writer.run.records()}
                    display.already(len(stored))
                    await execute(tools, [plan for plan in plans if plan.name not in stored], writer, display)
                finally:
                    writer.close()

        _, interrupted = _until_interrupted(go)
    if interrupted and not path.exists():
        _say("nothing was started")
        return INTERRUPTED
    return _report(RunDir(path), len(plans), interrupted=interrupted, as_json=as_json)


def _report(run_dir: RunDir, planned: int, *, interrupted: bool, as_json: bool) -> int:
    """The summary on stdout, and the exit code."""
    records = run_dir.records()
    graded = [record for record in records if record.reward is not None]
    sampled = sum(record.sampled_tokens for record in graded)
    trained = sum(record.trained_tokens for record in graded)
    mean = sum(record.reward or 0.0 for record in graded) / len(graded) if graded else None
    statuses = {status: sum(r.status == status for r in records) for status in sorted({str(r.status) for r in records})}
    if as_json:
        _print_json(
            {
                "run": str(run_dir.path),
                "planned": planned,
                "stored": len(records),
                "statuses": statuses,
                "mean_reward": mean,
                "sampled_tokens": sampled,
                "trained_tokens": trained,
                "interrupted": interrupted,
            }
        )
    else:
        print(f"{len(records)} of {planned} rollouts: " + ", ".join(f"{n} {s}" for s, n in statuses.items()))
        if mean is not None:
            share = trained / sampled if sampled else 1.0
            print(f"mean reward {mean:.3f}; {sampled} tokens sampled, {share:.1%} of them trained")
        failures = [record for record in records if record.failure is not None]
        for record in failures[:5]:
            assert record.failure is not None
            print(f"  {record.rollout}: {record.failure.stage}: {record.failure.error}: {record.failure.message}")
        here = _shown(run_dir.path)
        print(f"samples: {here}/rollouts/*/samples.jsonl")
        print(f"next: rollwright {'resume' if len(records) < planned else 'verify'} {here}")
    if interrupted:
        return INTERRUPTED
    return OK if len(graded) == planned else UNGRADED


def _until_interrupted(go: Callable[[], Awaitable[T]]) -> tuple[T | None, bool]:
    """Run `go`. The first Ctrl-C (or TERM) cancels it, so that everything it opened is closed; the second exits at
    once, and the sandboxes die with this process."""

    async def main() -> tuple[T | None, bool]:
        result: T | None = None
        scope = anyio.CancelScope()
        with plain_errors():
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_on_signal, scope)
                with scope:
                    result = await go()
                group.cancel_scope.cancel()
        return result, scope.cancelled_caught

    return anyio.run(main)


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if scope.cancel_called:
                if sys.stderr.isatty():
                    os.write(sys.stderr.fileno(), _SHOW_CURSOR)
                os._exit(INTERRUPTED)
            _say("interrupted: cleaning up (again to stop at once)")
            scope.cancel()


def _print_plan(prepared: Prepared, *, as_json: bool) -> int:
    plans = prepared.plans("dry-run")
    if as_json:
        _print_json({**prepared.resolved(), "rollouts": [plan.name for plan in plans]})
        return OK
    config = prepared.config
    print(f"{len(plans)} rollouts: {len(plans) // config.run.attempts} tasks × {config.run.attempts} attempts")
    for name in dict.fromkeys(plan.task_name for plan in plans):
        task = prepared.tasks.tasks[name]
        print(f"  {name}: {task.grader.protocol}, image {task.agent.image}, workdir {task.agent.workdir}")
    print(f"harness {config.harness.kind} · engine {config.engine.kind} · sandbox {config.sandbox.kind}")
    print(f"renderer {prepared.renderer.name} · fingerprint {prepared.renderer.fingerprint}")
    print("settings:")
    _print_json(config.dump())
    return OK


def _shown(path: Path) -> Path:
    """As short as it can be typed here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _places() -> Places:
    from rollwright.run import Places

    home = Path.home()
    return Places(
        cache=Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "rollwright",
        state=Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "rollwright",
    )


def _provider(kind: str) -> Any:
    from rollwright import plugins

    return plugins.make(
        "sandboxes", kind, {}, table=f"sandbox.{kind}", base=Path.cwd(), state_dir=_places().state / "boxes"
    )


def _default_name(job: Path) -> str:
    import datetime

    stem = job.parent.name if job.stem == "run" else job.stem
    return f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _point_latest(path: Path) -> None:
    """`runs/latest` leads to the newest run."""
    link = path.parent / "latest"
    if link.is_symlink() or not link.exists():
        new = link.with_name(f".latest-{os.getpid()}")
        new.symlink_to(path.name)
        new.replace(link)


def _log_into(path: Path) -> None:
    from rollwright.run import current_rollout

    def name_rollout(record: logging.LogRecord) -> bool:
        record.rollout = current_rollout.get()
        return True

    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(rollout)s %(name)s: %(message)s"))
    handler.addFilter(name_rollout)
    root = logging.getLogger("rollwright")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.propagate = False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_json(value: Any) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


if __name__ == "__main__":
    main()
