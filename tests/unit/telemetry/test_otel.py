"""Spans as the real OpenTelemetry SDK makes them, in memory and over OTLP to a collector on this machine."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollwright.store import RunDir
from rollwright.telemetry.otel import OpenTelemetry
from rollwright.testing.loopback_http import serving
from rollwright.testing.run_folder import build_run
from unit.telemetry.test_listeners import tell

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
otlp = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return build_run(tmp_path_factory.mktemp("otel") / "run", tasks=10, attempts=4)


async def spans_of(run: RunDir) -> list[Any]:
    exporter = memory.InMemorySpanExporter()
    await tell(run, OpenTelemetry(run=run, exporter=exporter))
    return list(exporter.get_finished_spans())


async def test_each_rollout_is_a_trace_with_its_stages_and_turns_inside(run: RunDir) -> None:
    spans = await spans_of(run)
    roots = {span.attributes["rollwright.rollout"]: span for span in spans if span.name == "rollout"}
    records = {record.rollout: record for record in run.records()}
    assert set(roots) == set(records)
    for name, root in roots.items():
        record = records[name]
        mine = [span for span in spans if span.context.trace_id == root.context.trace_id and span is not root]
        stages = [span for span in mine if span.name.startswith("reach ")]
        turns = [span for span in mine if span.name == "turn"]
        assert [span.name for span in stages] == [
            f"reach {stage}" for stage in record.seconds if stage != "admitted"
        ] + ["reach stored"]
        assert len(turns) == record.turns
        assert sum(span.attributes["rollwright.sampled_tokens"] for span in turns) == record.sampled_tokens
        agent = [span.context.span_id for span in stages if span.name == "reach agent_done"] or [root.context.span_id]
        assert {span.parent.span_id for span in turns} <= set(agent)
        assert all(root.start_time <= span.start_time <= span.end_time <= root.end_time for span in stages)
        assert root.attributes.get("rollwright.reward") == record.reward
        assert root.status.is_ok != (record.failure is not None)


async def test_spans_hold_nothing_of_what_was_said(run: RunDir) -> None:
    said = [turn for span in await spans_of(run) for turn in span.attributes.values() if isinstance(turn, str)]
    assert max(map(len, said)) < 200


async def test_a_collector_gets_them_over_otlp_before_the_run_is_over(run: RunDir) -> None:
    got: list[Any] = []

    async def collect(request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        got.append(otlp.ExportTraceServiceRequest.FromString(body))
        return Response(otlp.ExportTraceServiceResponse().SerializeToString(), media_type="application/x-protobuf")

    async with serving(Starlette(routes=[Route("/v1/traces", collect, methods=["POST"])])) as url:
        records = await tell(run, OpenTelemetry(run=run, endpoint=f"{url}/v1/traces"))
    spans = [span for each in got for part in each.resource_spans for scope in part.scope_spans for span in scope.spans]
    assert sum(span.name == "rollout" for span in spans) == len(records)
    assert sum(span.name == "turn" for span in spans) == sum(record.turns for record in records)
    named = {item.key: item.value.string_value for item in got[0].resource_spans[0].resource.attributes}
    assert (named["service.name"], named["rollwright.run"]) == ("rollwright", "run")
