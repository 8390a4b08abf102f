"""OpenTelemetry: a trace for each rollout, with a span for each stage and each turn. The one door to its packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollwright import __version__
from rollwright.errors import ConfigError
from rollwright.gateway.log import LoggedTrajectory, read_turn_log
from rollwright.rollout import RolloutPlan
from rollwright.store import RolloutRecord, RunDir
from rollwright.telemetry.background import BackgroundListener
from rollwright.types import Stage

__all__ = ["OpenTelemetry"]

_NANO = 1_000_000_000


class OpenTelemetry(BackgroundListener):
    """Sends spans to a collector over OTLP/HTTP. Without `endpoint` the SDK's own environment names it
    (`OTEL_EXPORTER_OTLP_ENDPOINT`, else http://localhost:4318).

    Spans hold times, counts and ids; of what was said, nothing.
    """

    what = "OpenTelemetry"

    def __init__(
        self, *, run: RunDir, endpoint: str | None = None, service: str = "rollwright", exporter: Any = None
    ) -> None:
        """`endpoint`: with its path, mostly `http://HOST:4318/v1/traces`. `exporter`: any `SpanExporter` of the SDK,
        in place of OTLP. Raises `ConfigError` without the extra."""
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            self._resources = importlib.import_module("opentelemetry.sdk.resources")
            self._sdk = importlib.import_module("opentelemetry.sdk.trace")
            self._export = importlib.import_module("opentelemetry.sdk.trace.export")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError as error:
            raise ConfigError(
                f"telemetry otel needs the extra: pip install 'rollwright[otel]' ({error})", field="telemetry.kinds"
            ) from error
        self._run = run
        self._named = {"service.name": service, "service.version": __version__, "rollwright.run": run.path.name}
        self._exporter: Callable[[], Any] = lambda: exporter or otlp.OTLPSpanExporter(endpoint=endpoint)
        self._provider: Any = None
        self._tracer: Any = None

    def begin(self) -> None:
        # A provider of our own: the global one belongs to the program that we may be a part of.
        resource = self._resources.Resource.create(self._named)
        self._provider = self._sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._export.BatchSpanProcessor(self._exporter()))
        self._tracer = self._provider.get_tracer("rollwright", __version__)

    def write(self, plan: RolloutPlan, record: RolloutRecord, entered: list[tuple[Stage, float]]) -> None:
        if not entered:
            return
        root = self._span("rollout", entered[0][1], None, _facts(plan, record))
        if record.failure is not None:
            said = f"{record.failure.stage}: {record.failure.error}: {record.failure.message}"
            root.set_status(self._trace.StatusCode.ERROR, said)
        inside = self._trace.set_span_in_context(root)
        agent, since = inside, entered[0][1]
        for stage, at in entered[1:]:
            span = self._span(f"reach {stage}", since, inside, {"rollwright.stage": str(stage)})
            if stage is Stage.AGENT_DONE:
                agent = self._trace.set_span_in_context(span)
            span.end(end_time=_nanoseconds(at))
            since = at
        self._turns(self._run.rollout(plan.name).turns, agent)
        root.end(end_time=_nanoseconds(since))

    def end(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()

    def _turns(self, log: Path, agent: Any) -> None:
        if not log.exists():  # it failed before the agent began
            return
        logged = read_turn_log(log)
        for turn in logged.trajectory.turns:
            done = float(turn.meta["at"])
            span = self._span("turn", done - sum(turn.meta["seconds"].values()), agent, _turn_facts(turn, logged))
            span.end(end_time=_nanoseconds(done))

    def _span(self, name: str, since: float, context: Any, facts: dict[str, Any]) -> Any:
        return self._tracer.start_span(name, context=context, start_time=_nanoseconds(since), attributes=facts)


def _facts(plan: RolloutPlan, record: RolloutRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rollwright.rollout": record.rollout,
        "rollwright.task": record.task,
        "rollwright.attempt": record.attempt,
        "rollwright.status": str(record.status),
        "rollwright.stop_reason": record.stop_reason,
        "rollwright.tries": record.tries,
        "rollwright.turns": record.turns,
        "rollwright.sampled_tokens": record.sampled_tokens,
        "rollwright.trained_tokens": record.trained_tokens,
        "rollwright.versions": list(record.versions),
    }
    return facts if record.reward is None else facts | {"rollwright.reward": record.reward}


def _turn_facts(turn: Any, logged: LoggedTrajectory) -> dict[str, Any]:
    meta = turn.meta
    return {
        "rollwright.turn": turn.index,
        "rollwright.parent_turn": -1 if turn.parent is None else turn.parent,
        "rollwright.role": turn.role,
        "rollwright.prompt_tokens": logged.intents[meta["intents"][0]].prompt_tokens,
        "rollwright.sampled_tokens": len(turn.sampled),
        "rollwright.finish": turn.finish,
        "rollwright.delivered": turn.delivered,
        "rollwright.drift": turn.drift is not None,
        "rollwright.versions": list(dict.fromkeys(span.version for span in turn.versions)),
        **{f"rollwright.{name}": meta[name] for name in ("dialect", "agent", "class", "cached_tokens") if name in meta},
        **{f"rollwright.seconds.{name}": seconds for name, seconds in meta["seconds"].items()},
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANO)
