"""The story of one attempt at one task, from boot to samples.

`run_rollout` is meant to be read from top to bottom. Whatever goes wrong in it by our doing becomes `Ungraded` in one
place; only a grader's verdict becomes a reward.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.engines import Engine
from rollwright.errors import (
    AgentInstallFailed,
    AgentSilent,
    CaptureFailed,
    LimitError,
    RequestRefused,
    RolloutCut,
    RolloutOverdue,
    RollwrightError,
    TokensBroken,
    Unsupported,
    UsageError,
)
from rollwright.gateway.server import Gateway
from rollwright.gateway.session import Session, SessionLimits
from rollwright.graders import Grader
from rollwright.graders.diff import Refusal
from rollwright.graders.grading import GradingLimits, grade
from rollwright.graders.patch import Baseline, CaptureLimits, Patch, capture, take_baseline
from rollwright.graders.workspace import make_base, prepare, scrub_history
from rollwright.groups import DEFAULT_QUORUM
from rollwright.harnesses import AgentReport, Endpoint, Harness
from rollwright.harnesses.bundle import Bundle
from rollwright.line import Line, used_up
from rollwright.sandboxes import Attaches, Capabilities, Job, JobResult, JobSpec, Mount, Provider, Sandbox, SandboxSpec
from rollwright.sandboxes.jobs import job_id
from rollwright.store import RolloutDir, RolloutRecord, group_id
from rollwright.tokens.samples import build_samples, within_lag
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import VerifyReport, verify
from rollwright.types import SCHEMA, Failure, Graded, Outcome, Sample, Sampling, Stage, Task, Ungraded, Verdict

AGENT_HOME = "/home/agent"
_EVIDENCE_BYTES = 2000
_REFUSALS = tuple(cls.__name__ for cls in (UsageError, *UsageError.__subclasses__()))
"""What a session counts requests under that were understood wrongly or not at all."""
_ROOM_KIB = 16 << 10
"""Free space below which a capture that failed has failed for want of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """What all rollouts of a run share. Opened by `run`, handed down."""

    config: RunConfig
    provider: Provider
    capabilities: Capabilities
    engine: Engine
    gateway: Gateway
    gateway_url: str | None = None
    """Where boxes on other machines reach the gateway; None: each box has a socket of its own for it."""
    max_context: int
    harness: Harness
    bundle: Bundle
    graders: Mapping[str, Grader]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """One owed attempt."""

    run: str
    """The run folder's name: keys of boxes and jobs start with it."""
    task_name: str
    task: Task
    attempt: int
    epoch: int = 1
    """The pass over the tasks it belongs to."""
    sampling: Sampling | None = None
    """How its policy is sampled, if not as the run file says."""
    quorum: int = DEFAULT_QUORUM
    """How many rollouts of its group must count for the group to be trained."""
    lease: int = 0
    """How often it was given to a machine before that was lost: boxes of there must not be taken for its own."""

    @property
    def name(self) -> str:
        """Folder and rollout id: `<task>.<attempt>`."""
        return f"{self.task_name}.{self.attempt}"

    @property
    def group(self) -> str:
        return group_id(self.task_name, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An attempt whose agent runs in its box, as another process can go on with it."""

    tries: int
    lease: int
    baseline: Baseline
    box: str
    """The key under which its box is attached to."""
    gateway_url: str | None = None
    """The address that the agent was given for the gateway; None: its box has a socket of its own."""

    def to_json(self) -> dict[str, object]:
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Held:
        """Raises `UsageError` for anything else than `to_json` made."""
        try:
            return Held(
                tries=int(data["tries"]),
                lease=int(data["lease"]),
                baseline=Baseline(**data["baseline"]),
                box=str(data["box"]),
                gateway_url=data.get("gateway_url"),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"what was left of it cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One attempt's end, ready to be stored."""

    record: RolloutRecord
    folder: RolloutDir
    samples: list[Sample]


@dataclass(slots=True)
class _Attempt:
    """What is known so far. Filled along the way, so that a failure can be recorded with what came before it."""

    plan: RolloutPlan
    entered: Callable[[Stage], None]
    reached: Stage = Stage.ADMITTED
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    trajectory: Trajectory | None = None
    report: AgentReport | None = None
    patch: Patch | None = None
    prompt_tokens: int = 0
    _since: float = field(default_factory=time.monotonic)

    def reach(self, stage: Stage) -> None:
        now = time.monotonic()
        self.seconds[stage.value] = round(now - self._since, 4)
        self._since = now
        self.reached = stage
        self.entered(stage)

    @property
    def next_stage(self) -> Stage:
        stages = list(Stage)
        return stages[min(stages.index(self.reached) + 1, len(stages) - 1)]


async def run_rollout(
    plan: RolloutPlan,
    tools: Toolbox,
    folder: RolloutDir,
    *,
    entered: Callable[[Stage], None],
    tries: int = 1,
    cut: anyio.Event | None = None,
    held: Held | None = None,
) -> Finished:
    """One attempt end to end. Our own failures are in the record (`status = "ungraded"`), not raised.

    Anything that is no `RollwrightError` is a bug and does escape. `entered` hears each stage as it is reached. `cut`
    ends it when set: ungraded, too. `held`: it was begun by another process, and is gone on with.
    """
    attempt = _Attempt(plan, entered)
    samples: list[Sample] = []
    checked: VerifyReport | None = None
    outcome: Outcome
    try:
        with plain_errors(), _deadline(tools.config.run.rollout_seconds):
            async with _until(cut):
                verdict = await _attempt(attempt, tools, folder, tries, held)
        outcome = Graded(verdict=verdict)
        assert attempt.trajectory is not None
        samples, checked = _seal(attempt.trajectory, verdict, plan, tools)
        attempt.reach(Stage.SEALED)
    except RollwrightError as error:  # the one place where a failure of ours becomes an outcome
        outcome = Ungraded(failure=failure_of(error, attempt.next_stage))
        if attempt.trajectory is not None:
            checked = verify(attempt.trajectory, [], None)
    folder.write_json(folder.verdict, _outcome_json(outcome))
    return Finished(record=_record(attempt, outcome, checked, tries), folder=folder, samples=samples)


def not_started(plan: RolloutPlan, folder: RolloutDir, error: RollwrightError) -> Finished:
    """The end of an attempt that may not be begun."""
    outcome = Ungraded(failure=failure_of(error, Stage.ADMITTED))
    folder.write_json(folder.verdict, _outcome_json(outcome))
    record = _record(_Attempt(plan, lambda _: None), outcome, None, 1)
    return Finished(record=record, folder=folder, samples=[])


async def _attempt(attempt: _Attempt, tools: Toolbox, folder: RolloutDir, tries: int, held: Held | None) -> Verdict:
    plan, task, config = attempt.plan, attempt.plan.task, tools.config
    key = f"{plan.run}/{plan.name}/{tries}" + (f"/{plan.lease}" if plan.lease else "")
    async with _box(tools, plan, key=f"{key}/agent", left=None if held is None else held.box) as (box, name):
        attempt.reach(Stage.BOOTED)

        if held is None:
            baseline = await _make_ready(box, tools, task)
            session = _open_session(tools, plan, folder)
        else:
            baseline = held.baseline
            if held.gateway_url != tools.gateway_url:
                raise UsageError(f"its agent knows the gateway at {held.gateway_url}, and it is at {tools.gateway_url}")
            session = tools.gateway.reopen(folder.turns)
        attempt.reach(Stage.PREPARED)

        try:
            spec = await _job_of(box, session, tools, plan, job=job_id(key, "agent"), files=held is None)
            left = Held(tries=tries, lease=plan.lease, baseline=baseline, box=name, gateway_url=tools.gateway_url)
            folder.write_json(folder.held, left.to_json())
            async with _served(box, session, tools) as line:
                running = await box.start(spec)
                attempt.reach(Stage.AGENT_RUNNING)
                result = await _until_limit(session, running)
        finally:
            with anyio.CancelScope(shield=True):
                attempt.trajectory = await session.close()
        attempt.prompt_tokens = session.prompt_tokens
        folder.write(folder.agent_log, result.stdout.data() + b"\n[stderr]\n" + result.stderr.data())
        attempt.report = _how_it_ended(tools.harness, session, result)
        _must_have_been_served(tools, attempt.report, result, away=held is not None)
        assert attempt.trajectory is not None
        if line is not None:
            turns = attempt.trajectory.turns
            line.must_have_held(attempt.report, delivered=not turns or turns[-1].delivered)
        await _must_have_worked(box, tools, session, attempt.report, result)
        attempt.reach(Stage.AGENT_DONE)

        attempt.patch = await _capture(box, baseline, config)
        folder.write(folder.patch, attempt.patch.data)
        folder.write_json(folder.patch_record, {"schema": SCHEMA, **attempt.patch.record()})
        attempt.reach(Stage.CAPTURED)

    grading = await grade(
        provider=tools.provider,
        spec=_spec(tools, plan, gateway=False),
        key=f"{key}/grade",
        task=task,
        patch=attempt.patch,
        grader=tools.graders[task.grader.protocol],
        limits=GradingLimits(boot_seconds=config.grading.boot_seconds, step_seconds=config.grading.step_seconds),
    )
    folder.write_json(folder.grade_record, {"schema": SCHEMA, **grading.record()})
    if grading.raw is not None:
        folder.write(folder.grade_log, grading.raw.log)
    attempt.reach(Stage.GRADED)
    return grading.verdict


async def _make_ready(box: Sandbox, tools: Toolbox, task: Task) -> Baseline:
    """The repository as the agent finds it, and what its work will be compared with."""
    seconds = tools.config.grading.step_seconds
    await prepare(box, task.agent, seconds=seconds)
    await make_base(box, task, for_agent=True, seconds=seconds)
    await scrub_history(box, task.agent.workdir, seconds=seconds)
    baseline = await take_baseline(box, task.agent.workdir, seconds=seconds)
    await _install(box, tools)
    return baseline


def _open_session(tools: Toolbox, plan: RolloutPlan, folder: RolloutDir) -> Session:
    config = tools.config
    return tools.gateway.open(
        plan.name,
        log=folder.turns,
        limits=SessionLimits(
            turns=config.gateway.max_turns,
            sampled_tokens=config.gateway.max_sampled_tokens,
            seconds=config.harness.seconds,
        ),
        sampling=plan.sampling,
        seed=_seed(config, plan),
        history=config.gateway.history,
        trained=frozenset(config.gateway.trained),
        one_program=True,
    )


async def _capture(box: Sandbox, baseline: Baseline, config: RunConfig) -> Patch:
    """The patch. One that is too large, or that the agent left no room to take, is the agent's doing and becomes a
    refused patch, never a cut one: filling the box must not be a way out of a bad reward."""
    limits = CaptureLimits(patch_bytes=config.grading.max_patch_bytes)
    try:
        return await capture(box, baseline, limits=limits, seconds=config.grading.step_seconds)
    except LimitError:
        pass
    except CaptureFailed:
        if not await _is_full(box, baseline.shadow):
            raise
    return replace(Patch.nothing(baseline.base_tree), refusal=Refusal(reason="too_large", path="."))


async def _is_full(box: Sandbox, path: str) -> bool:
    """Whether the file system of `path` has too little room for a capture. Raises what `Sandbox.exec` raises."""
    free = await box.exec(("df", "-Pk", path))
    fields = free.stdout.decode(errors="replace").split()[-3:]
    return free.exit_code == 0 and len(fields) == 3 and fields[0].isdigit() and int(fields[0]) < _ROOM_KIB


@asynccontextmanager
async def _box(tools: Toolbox, plan: RolloutPlan, *, key: str, left: str | None) -> AsyncGenerator[tuple[Sandbox, str]]:
    """The agent's box: a new one under `key`, or the one that an earlier process left. And what to attach to later."""
    if left is not None:
        assert isinstance(tools.provider, Attaches), "the capability says so"
        box, name = await tools.provider.attach(left), left
    else:
        box = await tools.provider.create(_spec(tools, plan, gateway=True), key=key)
        name = tools.provider.known_as(key) if isinstance(tools.provider, Attaches) else key
    try:
        yield box, name
    finally:
        with anyio.CancelScope(shield=True):
            await box.close()


def _spec(tools: Toolbox, plan: RolloutPlan, *, gateway: bool) -> SandboxSpec:
    spec = box_spec(tools.config, tools.capabilities, image=plan.task.agent.image, labels={"rollout": plan.name})
    if not gateway:
        return spec
    mount = (Mount(source=tools.bundle.path, target=_bundle_target(tools)),)
    return replace(
        spec,
        network="gateway_only",
        gateway_port=tools.config.gateway.port,
        gateway_url=tools.gateway_url,
        mounts=mount if tools.capabilities.mounts else (),
        survives=True,
    )


def box_spec(config: RunConfig, capabilities: Capabilities, *, image: str, labels: Mapping[str, str]) -> SandboxSpec:
    """A box without network. Limits that the backend cannot keep here are left out: they guard the machine, not the
    result."""
    return SandboxSpec(
        image=image,
        memory_mb=config.sandbox.memory_mb if capabilities.memory_limit else None,
        pids=config.sandbox.pids if capabilities.pids_limit else None,
        cpus=config.sandbox.cpus if capabilities.cpu_limit else None,
        disk_mb=config.sandbox.disk_mb,
        lifetime_seconds=config.run.rollout_seconds,
        boot_seconds=config.sandbox.boot_seconds,
        labels=labels,
        survives=False,
    )


def _bundle_target(tools: Toolbox) -> str:
    return f"/opt/rollwright/{tools.harness.name}"


async def _install(box: Sandbox, tools: Toolbox) -> None:
    """Bring the CLI in where the backend could not simply show it."""
    if not tools.capabilities.mounts:
        await box.put_tree(tools.bundle.path, _bundle_target(tools))


async def _job_of(
    box: Sandbox, session: Session, tools: Toolbox, plan: RolloutPlan, *, job: str, files: bool
) -> JobSpec:
    """The CLI as a job; with `files`, what it needs to start is written."""
    config, task = tools.config, plan.task
    sampling = plan.sampling or config.sampling.sampling(None)
    launch = tools.harness.launch(
        bundle=_bundle_target(tools),
        home=AGENT_HOME,
        workdir=task.agent.workdir,
        prompt=task.agent.prompt,
        endpoint=Endpoint(
            base_url=tools.gateway_url or f"http://127.0.0.1:{config.gateway.port}",
            api_key=session.secret,
            model=config.policy.model,
            context_window=tools.max_context,
            max_output_tokens=sampling.max_new_tokens,
        ),
    )
    for path, data in launch.files.items() if files else ():
        await box.put(path, data, user="agent", mode=0o600)
    return JobSpec(
        id=job,
        argv=launch.argv,
        env=launch.env,
        cwd=task.agent.workdir,
        user="agent",
        stdin=launch.stdin,
        # The session keeps the agent's time, without a trainer's pauses; this is for when we are dead.
        seconds=2 * config.harness.seconds,
    )


@asynccontextmanager
async def _served(box: Sandbox, session: Session, tools: Toolbox) -> AsyncGenerator[Line | None]:
    """The box reaches the gateway: by the socket in it, or at the public address, which is served for all boxes."""
    if tools.gateway_url is not None:
        line = Line(box, tools.gateway_url, session.secret)
        await line.begin()
        yield line
        await line.end()
        return
    socket = box.gateway_socket
    if socket is None:
        raise Unsupported(f"sandbox {tools.capabilities.name} has no listening socket for the gateway in its boxes")
    async with tools.gateway.listening(socket, session):
        yield None


async def _until_limit(session: Session, job: Job) -> JobResult:
    """The job's end, brought about at once when the session has reached a limit."""

    async def stop() -> None:
        await session.limit_reached.wait()
        await job.cancel()

    result: JobResult | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        result = await job.wait()
        group.cancel_scope.cancel()
    assert result is not None
    return result


def _how_it_ended(harness: Harness, session: Session, result: JobResult) -> AgentReport:
    """Our own limits first, then the job's end, then what the CLI says of itself."""
    if session.limit_reason is not None:
        return AgentReport(ok=False, reason=f"limit: {session.limit_reason}")
    if result.state == "timeout":
        return AgentReport(ok=False, reason="timeout")
    if result.state != "exited":
        return AgentReport(ok=False, reason=result.state)
    return harness.report(result)


def _must_have_been_served(tools: Toolbox, report: AgentReport, result: JobResult, *, away: bool) -> None:
    """Raise when the CLI may have ended as it did because nobody answered it between two of our processes."""
    if away and may_be_our_absence(report):
        said = (result.stderr.data() or result.stdout.data())[-_EVIDENCE_BYTES:].decode("utf-8", errors="replace")
        raise AgentSilent(f"{tools.harness.name} ended while its gateway was away ({report.reason})", said=said)


def may_be_our_absence(report: AgentReport) -> bool:
    """Whether an end can come of a gateway that was away: the CLI gave up, or its time ran on while nobody answered."""
    return not report.ok and not used_up(report)


async def _must_have_worked(
    box: Sandbox, tools: Toolbox, session: Session, report: AgentReport, result: JobResult
) -> None:
    """Raise when what the agent left is our doing and must not be judged."""
    if session.last_error is not None:  # no turn has followed it, so the CLI went on or gave up without an answer
        raise session.last_error
    said = (result.stderr.data() or result.stdout.data())[-_EVIDENCE_BYTES:].decode("utf-8", errors="replace")
    if report.reason.startswith("api_error") and any(session.errors[name] for name in _REFUSALS):
        raise RequestRefused(f"{tools.harness.name} gave up on a refused request ({report.reason})", said=said)
    if session.turns > 0:
        return
    argv = tools.harness.version_argv(_bundle_target(tools))
    version = await box.exec(argv, user="agent")
    if version.exit_code != 0:
        raise AgentInstallFailed(f"{tools.harness.name} does not start in image: exit {version.exit_code}", said=said)
    raise AgentSilent(f"{tools.harness.name} ended ({report.reason}) without one completed turn", said=said)


def _seal(
    trajectory: Trajectory, verdict: Verdict, plan: RolloutPlan, tools: Toolbox
) -> tuple[list[Sample], VerifyReport]:
    lag = tools.config.samples.max_version_lag
    samples = build_samples(
        trajectory,
        task_id=plan.task.id,
        group_id=plan.group,
        rollout_id=plan.name,
        reward=verdict.reward,
        trainable=verdict.trainable,
        counts_in_baseline=True,
        max_sample_tokens=tools.config.samples.max_tokens,
        accepted_versions=None if lag is None else within_lag(tools.gateway.versions, lag),
    )
    return samples, proved(trajectory, samples)


def proved(trajectory: Trajectory, samples: Sequence[Sample]) -> VerifyReport:
    """What the samples train. Raises `TokensBroken` when they do not hold: no trainer may find them."""
    report = verify(trajectory, samples, None)
    if report.violations:
        first = str(report.violations[0])
        raise TokensBroken(f"{len(report.violations)} violations, the first: {first}", said=first)
    return report


def failure_of(error: RollwrightError, stage: Stage) -> Failure:
    """What is stored of an error that kept a rollout from `stage`."""
    said = error.details.get("said", "")
    return Failure(
        stage=stage,
        error=type(error).__name__,
        message=error.message,
        fault=error.fault,
        retryable=error.retryable,
        details={key: value for key, value in error.details.items() if key != "said"},
        evidence=str(said),
    )


def _record(attempt: _Attempt, outcome: Outcome, checked: VerifyReport | None, tries: int) -> RolloutRecord:
    plan, trajectory = attempt.plan, attempt.trajectory
    graded = isinstance(outcome, Graded)
    return RolloutRecord(
        rollout=plan.name,
        task=plan.task_name,
        task_id=plan.task.id,
        attempt=plan.attempt,
        epoch=plan.epoch,
        source_id=plan.task.grader.source_id,
        status=outcome.verdict.status if graded else "ungraded",
        reward=outcome.reward if graded else None,
        trainable=graded and outcome.verdict.trainable,
        counts_in_baseline=graded,
        failure=None if graded else outcome.failure,
        stop_reason=attempt.report.reason if attempt.report else "",
        tries=tries,
        seconds=attempt.seconds,
        turns=len(trajectory.turns) if trajectory else 0,
        traffic=dict(Counter(str(turn.meta["class"]) for turn in trajectory.turns)) if trajectory else {},
        branches=len(trajectory.leaves()) if trajectory else 0,
        drift=dict(Counter(turn.drift.cause for turn in trajectory.turns if turn.drift)) if trajectory else {},
        prompt_tokens=attempt.prompt_tokens,
        sampled_tokens=checked.sampled if checked else 0,
        trained_tokens=checked.trained if checked else 0,
        excluded_tokens=checked.excluded if checked and graded else {},
        violations=len(checked.violations) if checked and graded else 0,
        patch_bytes=len(attempt.patch.data) if attempt.patch else 0,
        versions=tuple(sorted({span.version for turn in trajectory.turns for span in turn.versions}))
        if trajectory
        else (),
        quorum=plan.quorum,
    )


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    match outcome:
        case Graded(verdict=verdict):
            return {"schema": SCHEMA, "graded": asdict(verdict)}
        case Ungraded(failure=failure):
            return {"schema": SCHEMA, "ungraded": asdict(failure)}


def _seed(config: RunConfig, plan: RolloutPlan) -> int | None:
    """Each rollout's own sampling seed, from the run's."""
    if config.run.seed is None:
        return None
    digest = hashlib.blake2b(f"{config.run.seed}/{plan.name}".encode(), digest_size=6)
    return int.from_bytes(digest.digest(), "big")


@asynccontextmanager
async def _until(cut: anyio.Event | None) -> AsyncGenerator[None]:
    """Cancel the body when `cut` is set. Raises `RolloutCut` then."""
    if cut is None:
        yield
        return

    async def watch() -> None:
        await cut.wait()
        group.cancel_scope.cancel()

    ended = False
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        yield
        ended = True
        group.cancel_scope.cancel()
    if not ended:
        raise RolloutCut("ended before its time")


@contextmanager
def _deadline(seconds: float) -> Generator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise RolloutOverdue(f"not done within {seconds:g} s")
