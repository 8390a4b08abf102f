"""Every way in which real clients give a history back: what was sampled is trained, and nothing that nobody used."""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rollwright.engines import Generation
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.gateway.log import read_turn_log
from rollwright.testing.loopback_gateway import LoopbackGateway, loopback_gateway
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.testing.watched import WatchedEngine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import verify
from rollwright.types import HistoryPolicy, Sample, Sampling

pytestmark = pytest.mark.anyio

STEPS = 8
Json = dict[str, Any]
PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "quiet": {"type": "boolean"},
        "paths": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path_factory.mktemp("thinking"), thinking=True))


# --------------------------------------------------------------------------- the policy


def turn(number: int, *, blank: str = "", extra: str = "", body: str = "") -> str:
    call = (
        f"<tool_call>\n<function=bash>\n{body}<parameter=command>\nls {number}\n</parameter>\n{extra}"
        "</function>\n</tool_call>"
    )
    return f"I think of {number}. {blank}\n</think>\n\nStep {number}. {blank}\n\n{call}"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


CANONICAL = [turn(n) for n in range(STEPS)]
BOOLEANS = [turn(n, extra=parameter("quiet", "true")) for n in range(STEPS)]
LISTS = [turn(n, extra=parameter("paths", '["a.py",  "b.py" ]')) for n in range(STEPS)]
BLANKS = [turn(n, blank="\n\n") for n in range(STEPS)]
ORDER = [turn(n, body=parameter("quiet", "false")) for n in range(STEPS)]
NATURAL = [kind[n] for n, kind in enumerate([BOOLEANS, LISTS, BLANKS, ORDER] * 2)]
TEXTS = ["Just text.\n</think>\n\nHm." if n % 5 == 4 else turn(n) for n in range(STEPS)]


class Policy(ScriptedEngine):
    """Says `sayings` in order; in calls of `split` one token is two that spell the same."""

    def __init__(self, renderer: TemplateRenderer, sayings: Sequence[str], split: frozenset[int]) -> None:
        super().__init__(renderer=renderer, script=Script(script=(Rule(replies=tuple(sayings)),)))
        self._split = split
        self._tokenizer = renderer
        self._number = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **kw: Any) -> Generation:
        said = await super().generate(ids, sampling, **kw)
        self._number += 1
        if self._number not in self._split:
            return said
        at = next(n for n, token in enumerate(said.ids) if len(self._tokenizer.decode([token]).strip()) > 2)
        text = self._tokenizer.decode([said.ids[at]])
        pieces = [*self._tokenizer.encode(text[:2]), *self._tokenizer.encode(text[2:])]
        assert self._tokenizer.encode(text) != pieces
        spelled = [*said.ids[:at], *pieces, *said.ids[at + 1 :]]
        spans = (replace(said.versions[0], end=len(spelled)),)
        return replace(said, ids=spelled, logprobs=[-0.1] * len(spelled), versions=spans)


# --------------------------------------------------------------------------- the client


@dataclass
class Client:
    """A CLI on the Messages or the Chat wire, with hooks where CLIs differ."""

    http: httpx2.AsyncClient
    wire: str = "anthropic"
    system: str = "You are a coding agent."
    messages: list[Json] = field(default_factory=list[Json])
    view: Callable[[list[Json]], list[Json]] = lambda messages: messages
    """What is sent instead of the history."""
    echo: Callable[[Json], Json] = lambda message: message
    """What becomes of an answer in the history."""

    def user(self, *texts: str) -> Json:
        return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}

    def request(self) -> tuple[str, Json]:
        sent = self.view(copy.deepcopy(self.messages))
        if self.wire == "anthropic":
            tools: Any = [{"name": "bash", "description": "Run.", "input_schema": PARAMETERS}]
            return "/v1/messages", {"max_tokens": 99, "system": self.system, "tools": tools, "messages": sent}
        tools = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": PARAMETERS}}]
        return "/v1/chat/completions", {"messages": [{"role": "system", "content": self.system}, *sent], "tools": tools}

    async def post(self) -> Json:
        path, body = self.request()
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        data = response.json()
        if self.wire == "anthropic":
            return {"role": "assistant", "content": data["content"]}
        return data["choices"][0]["message"]

    def results(self, answer: Json) -> list[Json]:
        if self.wire == "anthropic":
            ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
            blocks = [
                {"type": "tool_result", "tool_use_id": name, "content": f"result {len(self.messages)}"} for name in ids
            ]
            return [{"role": "user", "content": blocks}] if blocks else [self.user("Go on.")]
        ids = [call["id"] for call in answer.get("tool_calls") or []]
        content = f"result {len(self.messages)}"
        return [{"role": "tool", "tool_call_id": name, "content": content} for name in ids] or [self.user("Go on.")]

    def absorb(self, answer: Json) -> None:
        self.messages += [self.echo(copy.deepcopy(answer)), *self.results(answer)]

    async def step(self) -> None:
        self.absorb(await self.post())

    async def steps(self, count: int = STEPS) -> None:
        if not self.messages:
            self.messages = [self.user("<system-reminder>\nnotes 1\n</system-reminder>", "Fix the bug.")]
        for _ in range(count):
            await self.step()


def strip(value: Any, kinds: frozenset[str] = frozenset({"text", "thinking", "tool_use", "tool_result"})) -> Any:
    """Trailing whitespace of strings taken away, in blocks of these kinds."""
    if isinstance(value, str):
        return value.rstrip()
    if isinstance(value, list):
        return [strip(item, kinds) for item in value]
    if isinstance(value, dict):
        if value.get("type", next(iter(kinds))) not in kinds and "content" not in value:
            return value
        return {key: item if key == "signature" else strip(item, kinds) for key, item in value.items()}
    return value


def without_thinking(message: Json) -> Json:
    if message["role"] != "assistant":
        return message
    return message | {"content": [block for block in message["content"] if block["type"] != "thinking"]}


def reordered(message: Json) -> Json:
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = dict(reversed(block["input"].items()))
    return message


def respaced(message: Json) -> Json:
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return message


REMINDER = {"type": "text", "text": "<system-reminder>\nKeep going.\n</system-reminder>"}


def reminder_on_newest(messages: list[Json]) -> list[Json]:
    messages[-1]["content"].append(REMINDER)
    return messages


def reminder_in_result(messages: list[Json]) -> list[Json]:
    for block in messages[-1]["content"]:
        if block["type"] == "tool_result":
            block["content"] += "\n<system-reminder>Keep going.</system-reminder>"
    return messages


# --------------------------------------------------------------------------- what clients do

Play = Callable[[Client, LoopbackGateway], Awaitable[None]]


def plainly(**hooks: Any) -> Play:
    async def play(client: Client, loop: LoopbackGateway) -> None:
        for name, hook in hooks.items():
            setattr(client, name, hook)
        await client.steps()

    return play


async def first_reminder_changes_once(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(4)
    client.messages[0] = client.user("<system-reminder>\nnotes 2\n</system-reminder>", "Fix the bug.")
    await client.steps(4)


async def reminders_that_stay(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(1)
    for number in range(1, STEPS):
        if number % 3 == 0:
            client.messages[-1]["content"].append(REMINDER)
        await client.step()


async def old_results_are_cleared(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(5)

    def view(messages: list[Json]) -> list[Json]:
        for message in messages[1:5]:
            for block in message["content"]:
                if block["type"] == "tool_result":
                    block["content"] = "[old result cleared]"
        return messages

    client.view = view
    await client.steps(3)


async def compaction(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(4)
    client.messages.append(client.user("Summarise the conversation."))
    summary = await client.post()
    text = next(block["text"] for block in summary["content"] if block["type"] == "text")
    client.messages = [client.user(f"This is a summary: {text}")]
    await client.steps(3)


async def thrown_away(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(2)
    for _ in range(2):
        await client.post()
        await client.steps(2)


async def hangs_up(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(2)
    path, body = client.request()
    before = len(loop.engine.calls)
    loop.engine.hold()
    async with client.http.stream("POST", path, json=body | {"stream": True}):
        await loop.engine.called(before + 1)
    await loop.engine.settled()
    loop.engine.release()
    await client.steps(2)


async def sent_twice_at_once(client: Client, loop: LoopbackGateway) -> None:
    await client.steps(2)
    for _ in range(2):
        before = len(loop.engine.calls)
        loop.engine.hold()
        answers: list[Json] = []

        async def one(into: list[Json]) -> None:
            into.append(await client.post())

        async with anyio.create_task_group() as group:
            group.start_soon(one, answers)
            await loop.engine.called(before + 1)
            path, body = client.request()
            async with client.http.stream("POST", path, json=body | {"stream": True}) as other:
                # Its headers are here, so it has joined.
                loop.engine.release()
                await other.aread()
        client.absorb(answers[0])
        await client.steps(1)


def sub_agents(*, parallel: bool) -> Play:
    async def play(client: Client, loop: LoopbackGateway) -> None:
        await client.steps(2)
        agents = [Client(client.http, system=f"You are sub-agent {n}.") for n in range(3)]
        async with anyio.create_task_group() as group:
            for agent in agents:
                if parallel:
                    group.start_soon(agent.steps, 2)
                else:
                    await agent.steps(2)
        await client.steps(2)

    return play


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    play: Play = field(default_factory=plainly)
    says: Sequence[str] = tuple(CANONICAL)
    wire: str = "anthropic"
    split: frozenset[int] = frozenset()
    max_new_tokens: int = 1024
    rows: int = 1
    """Samples with the history as the client has it."""
    rows_appended: int | None = None
    """Samples with `append_only`, where that differs."""
    superseded: bool = False
    """Whether answers were thrown away."""


SCENARIOS = [
    Scenario(name="faithful, canonical outputs"),
    Scenario(name="faithful, natural outputs", says=NATURAL),
    Scenario(name="lower-case booleans", says=BOOLEANS),
    Scenario(name="JSON list spacing", says=LISTS),
    Scenario(name="extra blank lines", says=BLANKS),
    Scenario(name="keys in any order", says=ORDER),
    Scenario(name="non-canonical tokens in two calls", split=frozenset({2, 5})),
    Scenario(name="every 5th answer text only", says=TEXTS),
    Scenario(name="trailing whitespace of all strings stripped", says=BLANKS, play=plainly(echo=strip)),
    Scenario(
        name="trailing whitespace of text stripped",
        says=BLANKS,
        play=plainly(echo=lambda message: strip(message, frozenset({"text"}))),
    ),
    Scenario(
        name="trailing whitespace of thinking stripped",
        says=BLANKS,
        play=plainly(echo=lambda message: strip(message, frozenset({"thinking"}))),
    ),
    Scenario(name="arguments re-ordered", says=BOOLEANS, play=plainly(echo=reordered)),
    Scenario(name="arguments re-spaced", says=BOOLEANS, wire="openai", play=plainly(echo=respaced)),
    Scenario(name="thinking dropped", play=plainly(echo=without_thinking)),
    Scenario(
        name="thinking dropped but for the newest",
        play=plainly(view=lambda messages: [*map(without_thinking, messages[:-2]), *messages[-2:]]),
    ),
    Scenario(name="first reminder changes once", play=first_reminder_changes_once, rows=2, rows_appended=1),
    Scenario(name="reminder on the newest only", play=plainly(view=reminder_on_newest), rows=STEPS, rows_appended=1),
    Scenario(
        name="reminder in the newest result", play=plainly(view=reminder_in_result), rows=STEPS - 1, rows_appended=1
    ),
    Scenario(name="reminders that stay", play=reminders_that_stay),
    Scenario(name="old results cleared", play=old_results_are_cleared, rows=2, rows_appended=1),
    Scenario(name="compaction half way", play=compaction, rows=2),
    Scenario(name="answer thrown away, asked again", play=thrown_away, superseded=True),
    Scenario(name="hangs up, asks again", play=hangs_up),
    Scenario(name="same request twice at once", play=sent_twice_at_once),
    Scenario(name="three sub-agents in turn", play=sub_agents(parallel=False), rows=4),
    Scenario(name="three sub-agents in parallel", play=sub_agents(parallel=True), rows=4),
    Scenario(name="an answer cut in a call", says=[*CANONICAL[:2], turn(2) * 4, *CANONICAL[3:]], max_new_tokens=90),
]


def test_the_table_has_every_measured_scenario() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == 27


@pytest.mark.parametrize("history", ["exact", "append_only"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_what_was_sampled_and_used_is_trained_once(
    thinking: TemplateRenderer, tmp_path: Path, scenario: Scenario, history: HistoryPolicy
) -> None:
    log = tmp_path / "turns.log"
    engine = WatchedEngine(Policy(thinking, scenario.says, scenario.split))
    sampling = Sampling(max_new_tokens=scenario.max_new_tokens)
    async with loopback_gateway(thinking, engine, log=log, sampling=sampling, history=history) as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as http:
            await scenario.play(Client(http, scenario.wire), loop)
        await loop.session.close()

    logged = read_turn_log(log)
    samples = samples_of(log)
    sent = {turn.index: logged.intents[turn.meta["intents"][0]].prompt_digest for turn in logged.trajectory.turns}
    report = verify(logged.trajectory, samples, sent)
    assert report.violations == ()
    assert set(report.excluded) == ({"superseded"} if scenario.superseded else set())
    assert report.trained == report.sampled - sum(report.excluded.values())
    # Each reply that the engine finished is one turn, token for token.
    done = [call.generation.ids for call in engine.calls if call.generation is not None]
    assert sorted(done) == sorted(list(turn.sampled) for turn in logged.trajectory.turns)
    rows = scenario.rows
    if history == "append_only" and scenario.rows_appended is not None:
        rows = scenario.rows_appended
    assert len(samples) == rows
    assert {sample.history for sample in samples} == {history}


def samples_of(log: Path) -> list[Sample]:
    return build_samples(
        read_turn_log(log).trajectory,
        task_id="t",
        group_id="g",
        rollout_id="r",
        reward=1.0,
        trainable=True,
        counts_in_baseline=True,
    )


async def test_a_history_that_no_longer_fits_is_taken_as_the_client_has_made_it(thinking: TemplateRenderer) -> None:
    script = Script(script=(Rule(replies=tuple(CANONICAL)),), max_context=700)
    engine = WatchedEngine(ScriptedEngine(renderer=thinking, script=script))
    async with loopback_gateway(thinking, engine, history="append_only") as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as http:
            client = Client(http)
            client.messages = [client.user("x" * 250)]
            await client.step()
            client.messages[0] = client.user("short")
            await client.step()
            client.messages[-1]["content"].append({"type": "text", "text": "y" * 300})
            await client.step()
        turns = (await loop.session.close()).turns
    assert [turn.parent for turn in turns] == [None, 0, None]
    assert [turn.drift.cause if turn.drift else None for turn in turns] == [None, "history_kept", "history_edited"]
    drift = turns[1].drift
    assert drift is not None
    assert (drift.stored_text, drift.new_text) == ("x" * 60, "short")


async def test_an_agent_with_another_system_prompt_never_continues_a_kept_history(thinking: TemplateRenderer) -> None:
    engine = WatchedEngine(Policy(thinking, CANONICAL, frozenset()))
    async with loopback_gateway(thinking, engine, history="append_only") as loop:
        headers = {"x-api-key": loop.session.secret}
        async with httpx2.AsyncClient(base_url=loop.url, headers=headers, timeout=30) as http:
            client = Client(http)
            await client.steps(2)
            client.system = "You extract memories."
            await client.step()
        turns = (await loop.session.close()).turns
    assert [turn.parent for turn in turns] == [None, 0, None]
