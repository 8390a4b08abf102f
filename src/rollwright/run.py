"""Many rollouts: what is owed, checks before step 0, the workers, and what is stored."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import platform
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from rollwright import __version__, plugins
from rollwright.config import RunConfig
from rollwright.engines import Engine
from rollwright.errors import ConfigError, TaskError, UsageError
from rollwright.gateway.server import Gateway
from rollwright.graders import Grader
from rollwright.graders.grading import GradingLimits
from rollwright.harnesses import Harness
from rollwright.harnesses.bundle import ensure_bundle
from rollwright.lockfile import check_lock
from rollwright.messages import Message, ToolCall, ToolSpec
from rollwright.rollout import Finished, RolloutPlan, Toolbox, run_rollout
from rollwright.sandboxes import Provider
from rollwright.store import RolloutRecord, RunWriter
from rollwright.tasks import TaskSet, load_tasks
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.types import Stage

log = logging.getLogger(__name__)
current_rollout: ContextVar[str] = ContextVar("rollout", default="-")
"""For log records: which rollout is talking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Host folders a run may use, chosen by the edge that starts it."""

    cache: Path
    """Bundles. Shared by all runs, safe to delete."""
    state: Path
    """The sandbox registry. Shared by all runs of this user."""


class Observer(Protocol):
    """Hears what happens. Called on the event loop; must return at once."""

    def preparing(self, what: str) -> None:
        """A slow step before the first rollout."""
        ...

    def started(self, plan: RolloutPlan) -> None: ...

    def entered(self, plan: RolloutPlan, stage: Stage) -> None: ...

    def stored(self, plan: RolloutPlan, record: RolloutRecord) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that was checked and can start: nothing in it is open yet."""

    config: RunConfig
    tasks: TaskSet
    graders: Mapping[str, Grader]
    renderer: Renderer
    engine: Engine
    harness: Harness
    provider: Provider

    def plans(self, run: str) -> list[RolloutPlan]:
        """Every attempt of the run, groups together."""
        return [
            RolloutPlan(run=run, task_name=name, task=task, attempt=attempt)
            for name, task in list(self.tasks.tasks.items())[: self.config.run.limit]
            for attempt in range(1, self.config.run.attempts + 1)
        ]

    def resolved(self) -> dict[str, Any]:
        """What goes into resolved.json: settings, versions, digests."""
        return {
            "config": self.config.dump(),
            "versions": {
                "rollwright": __version__,
                "python": platform.python_version(),
                "kernel": platform.release(),
                **{f"grader:{name}": grader.version for name, grader in sorted(self.graders.items())},
                **{f"artifact:{a.package}": a.version for a in self.harness.artifacts},
                **{name: importlib.metadata.version(name) for name in ("tokenizers", "renderers", "numpy")},
            },
            "renderer": {"name": self.renderer.name, "fingerprint": self.renderer.fingerprint},
            "tasks": {"count": len(self.tasks.tasks), "digest": tasks_digest(self.tasks)},
        }


def tasks_digest(tasks: TaskSet) -> str:
    """Changes when a row that a run was made of changes."""
    parts = "\n".join(f"{name} {task.id}" for name, task in tasks.tasks.items())
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def prepare(config: RunConfig, places: Places) -> Prepared:
    """Make every object of the run and check all that can be checked without starting anything.

    Raises `UsageError` (settings, rows, unknown names) with the field or the fix.
    """
    graders = load_graders(config)
    tasks = load_tasks(config.tasks.path, graders, default_protocol=config.tasks.protocol)
    if config.tasks.require_lock:
        check_lock(
            config.tasks.path,
            dict(list(tasks.tasks.items())[: config.run.limit]),
            {name: grader.version for name, grader in graders.items()},
        )
    for name, task in tasks.tasks.items():
        for problem in graders[task.grader.protocol].check(task):
            raise TaskError(f"{config.tasks.path.name}: task {name}: {problem}", task=name)
    for protocol in sorted({task.grader.protocol for task in tasks.tasks.values()}):
        for problem in graders[protocol].preflight():
            raise ConfigError(f"grader {protocol}: {problem}")
    _time_for_all(config, tasks, graders)
    harness: Harness = plugins.make(
        "harnesses",
        config.harness.kind,
        config.harness.chosen,
        table=f"harness.{config.harness.kind}",
        base=config.base,
    )
    renderer = load_renderer(
        config.policy.path,
        kind=config.policy.renderer,
        tool_parser=config.policy.tool_parser,
        reasoning_parser=config.policy.reasoning_parser,
    )
    _can_offer_tools(renderer)
    engine: Engine = plugins.make(
        "engines",
        config.engine.kind,
        config.engine.chosen,
        table=f"engine.{config.engine.kind}",
        base=config.base,
        renderer=renderer,
    )
    return Prepared(
        config=config,
        tasks=tasks,
        graders=graders,
        renderer=renderer,
        engine=engine,
        harness=harness,
        provider=make_provider(config, places),
    )


def _time_for_all(config: RunConfig, tasks: TaskSet, graders: Mapping[str, Grader]) -> None:
    """A rollout's deadline is a failure of ours: an agent or tests that use up their own time must not reach it."""
    runs = GradingLimits().attempts
    for name, task in list(tasks.tasks.items())[: config.run.limit]:
        tests = graders[task.grader.protocol].plan(task, nonce="0" * 32).seconds
        if config.harness.seconds + runs * tests >= config.run.rollout_seconds:
            raise ConfigError(
                f"run.rollout_seconds: {config.run.rollout_seconds:g} s are too few for the agent's "
                f"{config.harness.seconds:g} s and {runs} runs of the tests of {name}, {tests:g} s each",
                field="run.rollout_seconds",
            )


def _can_offer_tools(renderer: Renderer) -> None:
    """A template that cannot offer tools, or say what a tool gave, would fail at each first turn."""
    tool = ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}})
    call = ToolCall(name="bash", arguments={"command": "ls"}, id="call_0")
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hello."),
        Message(role="assistant", content="I look.", tool_calls=(call,)),
        Message(role="tool", content="a.py", tool_call_id=call.id, tool_name="bash"),
    ]
    for length, what in ((2, "offer tools"), (4, "say what a tool gave")):
        try:
            renderer.render(messages[:length], [tool])
        except UsageError as error:
            raise ConfigError(f"policy.path: the chat template cannot {what}: {error}", field="policy.path") from error


def load_graders(config: RunConfig) -> dict[str, Grader]:
    """All registered graders with their options; cheap, they import their packages only when used."""
    return {
        name: plugins.make(
            "graders", name, config.grading.options.get(name, {}), table=f"grading.{name}", base=config.base
        )
        for name in plugins.names("graders")
    }


def make_provider(config: RunConfig, places: Places) -> Provider:
    return plugins.make(
        "sandboxes",
        config.sandbox.kind,
        config.sandbox.chosen,
        table=f"sandbox.{config.sandbox.kind}",
        base=config.base,
        state_dir=places.state / "boxes",
    )


@asynccontextmanager
async def opened(prepared: Prepared, places: Places, observer: Observer) -> AsyncGenerator[Toolbox]:
    """Open what a run needs and check it for real: sandboxes work here, images exist, the engine keeps its promises."""
    config = prepared.config
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, prepared.provider)
        capabilities = await prepared.provider.probe()
        if "gateway_only" not in capabilities.networks:
            raise ConfigError(f"sandbox {capabilities.name} cannot give a box the gateway as its only network")
        for setting, kept in (("memory_mb", capabilities.memory_limit), ("pids", capabilities.pids_limit)):
            if getattr(config.sandbox, setting) is not None and not kept:
                log.warning("sandbox.%s is not kept: the %s backend cannot limit it here", setting, capabilities.name)
        for image in sorted({plan.task.agent.image for plan in prepared.plans("")}):
            await prepared.provider.check_image(image)
        for box in await prepared.provider.reap():
            log.info("removed sandbox %s, which a killed run had left", box)
        observer.preparing(f"harness {prepared.harness.name}")
        bundle = await ensure_bundle(prepared.harness, cache_dir=places.cache, npm=config.harness.npm)
        observer.preparing(f"engine {config.engine.kind}")
        engine = await stack.enter_async_context(prepared.engine)
        await engine.check()
        _same_tokens(prepared.renderer, engine)
        gateway = await stack.enter_async_context(
            Gateway(
                engine=engine,
                renderer=prepared.renderer,
                sampling=config.sampling.sampling(None),
                model=config.policy.model,
                keepalive_seconds=config.gateway.keepalive_seconds,
            )
        )
        yield Toolbox(
            config=config,
            provider=prepared.provider,
            capabilities=capabilities,
            gateway=gateway,
            max_context=engine.capabilities.max_context,
            harness=prepared.harness,
            bundle=bundle,
            graders=prepared.graders,
        )


async def _close(provider: Provider) -> None:
    with anyio.CancelScope(shield=True):
        await provider.close()


def _same_tokens(renderer: Renderer, engine: Engine) -> None:
    """A policy folder that is not the engine's would train on nonsense."""
    has = engine.capabilities
    if has.fingerprint is not None and has.fingerprint != renderer.fingerprint:
        raise ConfigError(
            f"engine {has.name} uses another tokenizer or chat template ({has.fingerprint}) than policy.path "
            f"({renderer.fingerprint})",
            field="policy.path",
        )
    if has.vocab_size is not None and has.vocab_size < renderer.vocab_size:
        raise ConfigError(
            f"policy.path has a vocabulary of {renderer.vocab_size} tokens, engine {has.name} only {has.vocab_size}",
            field="policy.path",
        )


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    interrupted: bool = False

    @property
    def ungraded(self) -> int:
        return sum(not record.graded for record in self.records)

    @property
    def statuses(self) -> Counter[str]:
        return Counter(str(record.status) for record in self.records)


async def execute(tools: Toolbox, plans: Sequence[RolloutPlan], writer: RunWriter, observer: Observer) -> Summary:
    """Run `plans`, `run.concurrency` at a time, and store each as it ends.

    Cancelling it cleans up what is in flight (boxes closed, nothing stored of it). A bug in a rollout stops the run.
    """
    summary = Summary()
    owed = iter(plans)
    storing = anyio.Lock()  # one writer; storing must not block the event loop
    async with anyio.create_task_group() as group:
        for _ in range(min(tools.config.run.concurrency, len(plans))):
            group.start_soon(_worker, owed, tools, writer, storing, observer, summary)
    return summary


async def _worker(
    owed: Iterator[RolloutPlan],
    tools: Toolbox,
    writer: RunWriter,
    storing: anyio.Lock,
    observer: Observer,
    summary: Summary,
) -> None:
    for plan in owed:
        token = current_rollout.set(plan.name)
        observer.started(plan)
        finished = await _with_retries(plan, tools, writer, observer)
        with anyio.CancelScope(shield=True):  # a finished rollout is not lost to a Ctrl-C that comes now
            async with storing:
                await anyio.to_thread.run_sync(writer.store, finished.record, finished.folder, finished.samples)
        summary.records.append(finished.record)
        observer.entered(plan, Stage.STORED)
        observer.stored(plan, finished.record)
        current_rollout.reset(token)


async def _with_retries(plan: RolloutPlan, tools: Toolbox, writer: RunWriter, observer: Observer) -> Finished:
    """Begin again, in new sandboxes and a new session, while the failure is ours and may pass."""
    last = 1 + tools.config.run.retries
    for attempt in range(1, last + 1):
        finished = await run_rollout(
            plan, tools, writer.begin(plan.name), entered=lambda stage: observer.entered(plan, stage), tries=attempt
        )
        failure = finished.record.failure
        if failure is None or not failure.retryable or attempt == last:
            return finished
        log.warning("try %d of %d failed: %s: %s", attempt, last, failure.error, failure.message)
    raise AssertionError("unreachable")


__all__ = [
    "Observer",
    "Places",
    "Prepared",
    "Summary",
    "current_rollout",
    "execute",
    "load_graders",
    "make_provider",
    "opened",
    "prepare",
    "tasks_digest",
]
