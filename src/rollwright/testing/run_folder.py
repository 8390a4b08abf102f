"""Run folders without a run: any size, every kind of outcome and branch, true to the last token (`rollwright verify`
finds nothing). For tests and demonstrations of whatever reads run folders."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random

import orjson

from rollwright.gateway.log import Intent, TurnLog
from rollwright.messages import Message, ToolSpec
from rollwright.store import RolloutDir, RolloutRecord, RunDir, RunWriter
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens import Renderer
from rollwright.tokens.render import load_renderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.tree import Trajectory
from rollwright.tokens.verify import prompt_digest, verify
from rollwright.types import (
    SCHEMA,
    BranchRole,
    Failure,
    FinishReason,
    Sample,
    Stage,
    TestOutcome,
    TestStatus,
    Verdict,
    VerdictStatus,
    VersionSpan,
)

__all__ = ["Talk", "build_run", "conversations", "write_rollout"]

_BASH = ToolSpec(
    name="bash",
    description="Run a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
_AGENT = ToolSpec(
    name="agent",
    description="Let another agent look into something.",
    parameters={"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
)
_TOOLS = (_BASH, _AGENT)
_BEGAN = 1_790_000_000.0
_WORDS = ("cache", "pager", "parser", "router", "signals", "forms", "widgets", "paths", "query", "session", "codec")
_FAILURES: tuple[tuple[str, Stage, str, bool, str, str], ...] = (
    (
        "SandboxGone",
        Stage.AGENT_DONE,
        "infra",
        True,
        "the box is gone",
        "box 7f3a: oom_kill 1\nmemory.max 2147483648\n",
    ),
    ("EngineUnreachable", Stage.AGENT_DONE, "infra", True, "no connection to the engine", "connect ECONNREFUSED\n"),
    (
        "GradingFailed",
        Stage.GRADED,
        "infra",
        True,
        "the grading box gave no evidence",
        "pytest: error: no tests ran\nexit 5\n",
    ),
    ("ProvisionFailed", Stage.BOOTED, "infra", True, "the box never came up", "image acme/web: no space left\n"),
    ("RequestRefused", Stage.AGENT_DONE, "bug", False, "the CLI gave up on a refused request (api_error)", ""),
)
_PATCH = b"""\
diff --git a/pager.py b/pager.py
index 8c2f1d0..41f7a9e 100644
--- a/pager.py
+++ b/pager.py
@@ -18,9 +18,11 @@ class Pager:
         self.entries = entries
         self.per_page = per_page

     def count(self):
-        filler = self.per_page + 1
-        return (len(self.entries) + filler) // self.per_page
+        # A full last page is the last one.
+        filler = self.per_page - 1
+        return max(0, (len(self.entries) + filler) // self.per_page)

     def page(self, number):
         start = (number - 1) * self.per_page
         return self.entries[start : start + self.per_page]
"""
_GRADE_LOG = b"""\
\x1b[1m============================= test session starts ==============================\x1b[0m
collected 6 items

tests/test_pager.py \x1b[32m.\x1b[0m\x1b[32m.\x1b[0m\x1b[32m.\x1b[0m\x1b[31mF\x1b[0m\x1b[32m.\x1b[0m\x1b[32m.\x1b[0m

\x1b[31m=================================== FAILURES ===================================\x1b[0m
"""


class Talk:
    """A client and a policy that talk, with a turn log. The policy says what it is told to say."""

    def __init__(self, renderer: Renderer, log: Path, *, rollout: str, seed: int = 0) -> None:
        self.renderer = renderer
        self.trajectory = Trajectory(rollout)
        header = {"rollout_id": rollout, "model": "tiny", "renderer": renderer.name, "history": "exact"}
        self.log = TurnLog(log, header)
        self._random = Random(seed)
        self._clock = _BEGAN
        self._intents = 0
        self._calls = 0

    def turn(
        self,
        messages: Sequence[Message],
        says: str,
        *,
        role: BranchRole = "main",
        finish: FinishReason = "stop",
        versions: Sequence[str] = ("1",),
        trained: bool = True,
        delivered: bool = True,
        broken_logprob: bool = False,
    ) -> Message:
        """One request and its reply, as the client gets it. `versions`: weights that sampled it, in equal parts."""
        plan = self.trajectory.plan(messages, _TOOLS, self.renderer)
        ids = self.renderer.encode(says) + ([min(self.renderer.stop_ids)] if finish == "stop" else [])
        begin = self._clock + self._random.uniform(0.2, 1.5)
        self._clock = begin + len(ids) * 0.02
        intent = Intent(
            number=self._intents,
            parent=plan.parent,
            prompt_tokens=len(plan.prompt),
            prompt_digest=prompt_digest(plan.prompt),
            at=begin,
        )
        self.log.intent(intent)
        self._intents += 1
        parsed = self.renderer.parse(ids, _TOOLS)
        calls = tuple(replace(call, id=self._call_id()) for call in parsed.tool_calls)
        reply = Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)
        reply = replace(reply, carriers=tuple(call.id for call in calls))
        logprobs = [self._logprob() for _ in ids]
        if broken_logprob:
            logprobs[len(ids) // 2] = math.nan
        turn = self.trajectory.commit(
            plan,
            sampled=ids,
            logprobs=logprobs,
            finish=finish,
            versions=_spans(versions, len(ids)),
            reply=reply,
            role=role,
            trained=trained,
            ill_formed=parsed.ill_formed,
            meta={
                "agent": "helper" if role == "subagent" else "",
                "class": role,
                "intents": [intent.number],
                "seconds": {"plan": 0.002, "engine": round(self._clock - begin, 4)},
                "at": self._clock,
            },
        )
        self.log.turn(turn, _TOOLS)
        self.log.delivery(turn.index, delivered=delivered)
        if not delivered:
            self.trajectory.mark_undelivered(turn.index)
        return reply

    def seal(self) -> Trajectory:
        self.log.seal([turn.index for turn in self.trajectory.turns if not turn.delivered])
        return self.trajectory

    def _call_id(self) -> str:
        self._calls += 1
        return f"call_{self._calls}"

    def _logprob(self) -> float:
        return -round(self._random.expovariate(1.0) ** 3 * 0.12 + 1e-6, 6)


def conversations() -> Mapping[str, Callable[[Talk], None]]:
    """Every shape a trajectory can take, by name."""
    return {
        "plain": _plain,
        "subagent": _subagent,
        "compaction": _compaction,
        "drift": _drift,
        "retried": _retried,
        "updated": _updated,
        "broken": _broken,
    }


def _call(command: str) -> str:
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def _begin() -> list[Message]:
    return [
        Message(role="system", content="You are a coding agent. You work in /repo, a folder of Python code."),
        Message(
            role="user",
            content="With 10 entries and 5 to a page, the list view links to a third page that has nothing on it. "
            "The same happens whenever the last page is full. Fix it and run the tests.",
        ),
    ]


def _result(text: str, reply: Message) -> Message:
    return Message(role="tool", content=text, tool_call_id=reply.tool_calls[0].id)


def _work(talk: Talk, messages: list[Message], *, versions: Sequence[str] = ("1",)) -> None:
    """Look, change, test."""
    for says, shown in (
        (
            "I look at the pager first.\n" + _call("sed -n 15,30p pager.py"),
            "class Pager:\n    def count(self):\n        filler = self.per_page + 1\n"
            "        return (len(self.entries) + filler) // self.per_page\n",
        ),
        (
            "The filler is one page too many.\n"
            + _call("sed -i 's/self.per_page + 1/self.per_page - 1/' pager.py && git diff --stat"),
            " pager.py | 2 +-\n 1 file changed, 1 insertion(+), 1 deletion(-)\n",
        ),
        (
            _call("python -m pytest -q tests"),
            "......            [100%]\n6 passed in 0.21s\n",
        ),
    ):
        reply = talk.turn(messages, says, versions=versions)
        messages += [reply, _result(shown, reply)]


def _plain(talk: Talk) -> None:
    messages = _begin()
    _work(talk, messages)
    talk.turn(messages, "The list view has no empty last page any more. All tests pass.")


def _subagent(talk: Talk) -> None:
    title = [
        Message(role="system", content="Write a title for this session."),
        Message(role="user", content="Empty last page in the list view."),
    ]
    talk.turn(title, "Fix the pager's empty last page", role="side", trained=False)
    messages = _begin()
    asked = "Which tests cover the pager?"
    reply = talk.turn(
        messages,
        "Let somebody look for the tests.\n<tool_call>\n<function=agent>\n<parameter=prompt>\n"
        f"{asked}\n</parameter>\n</function>\n</tool_call>",
    )
    sub = [
        Message(role="system", content="You are a search sub-agent. Answer in one line."),
        Message(role="user", content=asked),
    ]
    found = talk.turn(sub, _call("grep -rln Pager tests"), role="subagent")
    sub += [found, _result("tests/test_pager.py\ntests/test_views.py\n", found)]
    told = talk.turn(sub, "tests/test_pager.py and tests/test_views.py.", role="subagent")
    messages += [reply, _result(told.content, reply)]
    _work(talk, messages)
    talk.turn(messages, "Done: the pager counts its pages right. The tests of the pager and of the views pass.")


def _compaction(talk: Talk) -> None:
    messages = _begin()
    reply = talk.turn(messages, "I read the code.\n" + _call("cat pager.py views.py"))
    messages += [reply, _result("".join(f"    line_{n} = {n} * per_page\n" for n in range(160)), reply)]
    summary = Message(role="user", content="CONTEXT CHECKPOINT COMPACTION: sum up what was done so far.")
    said = talk.turn(
        [*messages, summary], "The pager's filler in count() is wrong; nothing is changed yet.", role="compaction"
    )
    messages = [*_begin(), Message(role="user", content=f"What was done so far: {said.content}")]
    _work(talk, messages)
    talk.turn(messages, "The pager is fixed.")


def _drift(talk: Talk) -> None:
    messages = _begin()
    reply = talk.turn(messages, "I  look at the pager first.  \n\n" + _call("cat pager.py"))
    # A client that tidies up what the policy said.
    messages += [replace(reply, content="I look at the pager first."), _result("filler = self.per_page + 1\n", reply)]
    _work(talk, messages)
    talk.turn(messages, "Fixed.")


def _retried(talk: Talk) -> None:
    messages = _begin()
    talk.turn(messages, "I look at the views.\n" + _call("cat views.py"), delivered=False)
    talk.turn(messages, "I look around.\n" + _call("ls -la"))
    _work(talk, messages)
    talk.turn(messages, "The list view is fixed.")


def _updated(talk: Talk) -> None:
    messages = _begin()
    _work(talk, messages, versions=("1", "2"))
    talk.turn(messages, "All tests pass now. The last page is never empty.", versions=("2",), broken_logprob=True)


def _broken(talk: Talk) -> None:
    messages = _begin()
    _work(talk, messages)
    talk.turn(messages, "<tool_call>\n<function=bash>\n<parameter=command>\ngit diff", finish="length")


def _spans(versions: Sequence[str], count: int) -> list[VersionSpan]:
    versions = versions[:count]
    edges = [round(count * place / len(versions)) for place in range(len(versions) + 1)] if versions else []
    return [VersionSpan(version, edges[n], edges[n + 1]) for n, version in enumerate(versions)]


def write_rollout(
    writer: RunWriter,
    renderer: Renderer,
    name: str,
    talk: Callable[[Talk], None],
    *,
    outcome: str = "resolved",
    patch: bytes = _PATCH,
    max_sample_tokens: int | None = None,
    seed: int = 0,
) -> RolloutRecord:
    """Store one rollout whose policy talked as `talk` says. `outcome`: a verdict's status, or `ungraded`."""
    task, _, attempt = name.rpartition(".")
    folder = writer.begin(name)
    session = Talk(renderer, folder.turns, rollout=name, seed=seed)
    talk(session)
    trajectory = session.seal()
    graded = outcome != "ungraded"
    reward = float(outcome == "resolved")
    samples: list[Sample] = []
    if graded:
        samples = build_samples(
            trajectory,
            task_id=hashlib.blake2b(task.encode(), digest_size=8).hexdigest(),
            group_id=task,
            rollout_id=name,
            reward=reward,
            trainable=True,
            counts_in_baseline=True,
            max_sample_tokens=max_sample_tokens,
        )
    report = verify(trajectory, samples, None)
    patch = b"" if outcome == "empty_patch" else patch
    failure = None if graded else _failure(0)
    _write_files(folder, trajectory, patch, outcome, failure)
    record = RolloutRecord(
        rollout=name,
        task=task,
        task_id=hashlib.blake2b(task.encode(), digest_size=8).hexdigest(),
        attempt=int(attempt),
        status=outcome,
        reward=reward if graded else None,
        trainable=graded,
        counts_in_baseline=graded,
        failure=failure,
        stop_reason="completed",
        seconds=_times(Random(seed), Stage.STORED if failure is None else failure.stage),
        turns=len(trajectory.turns),
        traffic=dict(Counter(str(turn.meta["class"]) for turn in trajectory.turns)),
        branches=len(trajectory.leaves()),
        drift=dict(Counter(str(turn.drift.cause) for turn in trajectory.turns if turn.drift is not None)),
        prompt_tokens=sum(len(turn.delta) for turn in trajectory.turns),
        sampled_tokens=report.sampled,
        trained_tokens=report.trained,
        excluded_tokens=report.excluded if graded else {},
        patch_bytes=len(patch),
        versions=tuple(sorted({span.version for turn in trajectory.turns for span in turn.versions})),
    )
    writer.store(record, folder, samples)
    return record


def _write_files(
    folder: RolloutDir, trajectory: Trajectory, patch: bytes, outcome: str, failure: Failure | None
) -> None:
    log = _GRADE_LOG + (b"6 passed in 0.21s\n" if outcome == "resolved" else b"1 failed, 5 passed in 0.24s\n")
    events = [{"type": "turn", "index": turn.index, "text": turn.reply.content} for turn in trajectory.turns]
    folder.write(folder.agent_log, b"".join(orjson.dumps(event) + b"\n" for event in events))
    if failure is not None:
        folder.write_json(folder.verdict, {"schema": SCHEMA, "ungraded": asdict(failure)})
        return
    folder.write(folder.patch, patch)
    digest = hashlib.sha256(patch).hexdigest()
    folder.write_json(folder.patch_record, {"schema": SCHEMA, "sha256": digest, "refusal": None, "left_out": 0})
    judged = patch and outcome != "patch_rejected"
    verdict = Verdict(
        status=VerdictStatus(outcome),
        reward=float(outcome == "resolved"),
        grader="scaleswe",
        grader_version="1",
        tests=_tests(outcome) if judged else (),
        exit_code=int(outcome != "resolved") if judged else None,
        signals=("exit_code_disagrees_with_report",) if outcome == "tampered" else (),
        log_sha256=hashlib.sha256(log).hexdigest() if judged else "",
    )
    folder.write_json(folder.verdict, {"schema": SCHEMA, "graded": asdict(verdict)})
    if judged:
        folder.write(folder.grade_log, log)
        folder.write_json(folder.grade_record, {"schema": SCHEMA, "state": "exited", "attempts": 1, "flaky": []})


def _tests(outcome: str) -> tuple[TestOutcome, ...]:
    names = ("a_full_last_page_is_the_last", "an_empty_list_has_no_page", "one_entry_is_one_page", "pages_are_slices")
    failed = 0 if outcome == "resolved" else 1
    rows: list[TestOutcome] = []
    for place, name in enumerate(names):
        status: TestStatus = "failed" if place < failed else "passed"
        message = "AssertionError: assert 3 == 2\n +  where 3 = count()" if status == "failed" else ""
        rows.append(
            TestOutcome(id=f"tests/test_pager.py::test_{name}", status=status, seconds=0.004 * place, message=message)
        )
    return tuple(rows)


def _failure(place: int) -> Failure:
    error, stage, fault, retryable, message, evidence = _FAILURES[place % len(_FAILURES)]
    return Failure(
        stage=stage,
        error=error,
        message=message,
        fault=fault,
        retryable=retryable,
        details={"operation": "exec"},
        evidence=evidence,
    )


def _times(random: Random, until: Stage) -> dict[str, float]:
    """Seconds of the stages before `until`."""
    middles = (
        (Stage.BOOTED, 1.4),
        (Stage.PREPARED, 2.1),
        (Stage.AGENT_RUNNING, 0.6),
        (Stage.AGENT_DONE, 210.0),
        (Stage.CAPTURED, 0.8),
        (Stage.GRADED, 38.0),
        (Stage.SEALED, 0.02),
    )
    stages = list(Stage)
    return {
        stage.value: round(middle * random.lognormvariate(0, 0.45), 4)
        for stage, middle in middles
        if stages.index(stage) < stages.index(until)
    }


@dataclass(frozen=True, slots=True)
class _Model:
    """One rollout that was really made, to be copied under other names."""

    record: RolloutRecord
    files: Mapping[str, bytes]


@dataclass(slots=True)
class _Models:
    """Made where they are first wanted: by shape and outcome."""

    renderer: Renderer
    scratch: Path
    made: dict[tuple[str, str], _Model] = field(default_factory=dict[tuple[str, str], _Model])

    def get(self, shape: str, outcome: str) -> _Model:
        key = (shape, outcome)
        if key not in self.made:
            run = self.scratch / f"{shape}-{outcome}"
            writer = RunWriter.create(run, run_file=b"", resolved={})
            try:
                record = write_rollout(
                    writer, self.renderer, "@TASK@.1", conversations()[shape], outcome=outcome, seed=len(self.made)
                )
            finally:
                writer.close()
            folder = RunDir(run).rollout(record.rollout).path
            self.made[key] = _Model(record, {path.name: path.read_bytes() for path in folder.iterdir()})
        return self.made[key]


def build_run(
    path: Path,
    *,
    tasks: int = 12,
    attempts: int = 4,
    folders: int | None = None,
    seed: int = 0,
    skill: float = 0.0,
    policy: Path | None = None,
) -> RunDir:
    """A finished run folder; the same for the same arguments.

    `folders`: how many rollouts have their files (None: all); the others have only their line. `skill`: shifts how
    often tasks are solved. `policy`: a tokenizer folder; None makes a tiny one beside the run folder.
    """
    random = Random(seed)
    policy = tiny_tokenizer(path.parent / "policy") if policy is None else policy
    renderer = load_renderer(policy)
    run = RunDir(path)
    run.rollouts.mkdir(parents=True)
    run.run_file.write_text("# made by rollwright.testing.run_folder\n")
    run.resolved_file.write_bytes(orjson.dumps(_resolved(path, policy, renderer, tasks, attempts, skill)))
    with tempfile.TemporaryDirectory() as scratch:
        models = _Models(renderer, Path(scratch))
        with run.index.open("wb") as index:
            for place, (record, shape) in enumerate(_rollouts(tasks, attempts, random, skill)):
                model = models.get(shape, record.status)
                record = replace(model.record, **{name: getattr(record, name) for name in _OWN})
                index.write(record.to_line())
                if folders is None or place < folders:
                    _copy(model, run.rollout(record.rollout).path, record)
    return run


_OWN = ("rollout", "task", "task_id", "attempt", "failure", "stop_reason", "tries", "seconds")
"""What a copied rollout has of its own."""


def _rollouts(tasks: int, attempts: int, random: Random, skill: float) -> Iterator[tuple[RolloutRecord, str]]:
    shapes = list(conversations())
    for number in range(tasks):
        task = f"{_WORDS[number % len(_WORDS)]}-{1000 + number * 7}"
        chance = min(max(random.betavariate(0.7, 0.9) + skill, 0.0), 1.0)
        for attempt in range(1, attempts + 1):
            solved = random.random() < chance
            luck = random.random()
            outcome = "resolved" if solved else "unresolved" if luck < 0.8 else "empty_patch"
            failure = _failure(random.randrange(len(_FAILURES))) if random.random() < 0.03 else None
            record = RolloutRecord(
                rollout=f"{task}.{attempt}",
                task=task,
                task_id=hashlib.blake2b(task.encode(), digest_size=8).hexdigest(),
                attempt=attempt,
                status="ungraded" if failure else outcome,
                reward=None if failure else float(solved),
                trainable=failure is None,
                counts_in_baseline=failure is None,
                failure=failure,
                stop_reason="completed" if luck < 0.9 else "timeout",
                tries=2 if failure or luck > 0.97 else 1,
                seconds=_times(random, failure.stage if failure else Stage.STORED),
            )
            yield record, shapes[random.choices(range(len(shapes)), (60, 12, 8, 6, 6, 5, 3))[0]]


def _copy(model: _Model, folder: Path, record: RolloutRecord) -> None:
    folder.mkdir()
    for name, data in model.files.items():
        data = data.replace(b"@TASK@.1", record.rollout.encode()).replace(b"@TASK@", record.task.encode())
        if name == "samples.jsonl":
            data = data.replace(model.record.task_id.encode(), record.task_id.encode())
        if name == "verdict.json" and record.failure is not None:
            data = orjson.dumps({"schema": SCHEMA, "ungraded": asdict(record.failure)})
        (folder / name).write_bytes(data)


def _resolved(
    path: Path, policy: Path, renderer: Renderer, tasks: int, attempts: int, skill: float
) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "config": {
            "run": {"name": path.name, "attempts": attempts, "limit": None},
            "policy": {"path": str(policy), "model": "tiny"},
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "engine": {"kind": "scripted", "options": {"skill": skill}},
            "harness": {"kind": "pi"},
            "sandbox": {"kind": "namespaces"},
        },
        "versions": {"rollwright": "0"},
        "renderer": {"name": renderer.name, "fingerprint": renderer.fingerprint},
        "tasks": {"count": tasks, "digest": "0" * 32},
    }
