"""The words of the project as frozen values: tasks and their two views, verdicts, outcomes, samples.

Nothing here does I/O. A type used by one port alone lives in that port's `__init__`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeAlias

SCHEMA = 1
"""Carried by every stored file."""


# --------------------------------------------------------------------------- tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """All of a task that may reach the agent's sandbox, its prompt or its environment."""

    id: str
    """Opaque: a digest of the row, never the source's own id (some contain the gold commit)."""
    image: str
    workdir: str
    """Absolute path of the repository inside the image."""
    prompt: str
    """What the CLI is told."""
    pre_commands: tuple[str, ...] = ()
    """Shell lines the row wants run as root in the workdir before anything else, in both sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderView:
    """The hidden part of a task. Never enters the agent's sandbox."""

    source_id: str
    """The row's own id, for people."""
    protocol: str
    """Name of the grader that understands `payload`."""
    payload: Mapping[str, Any]
    """The protocol's validated data: scripts, test ids, patches."""
    gold_patch: bytes | None = None
    """The reference solution, for `validate`."""
    base_patch: bytes = b""
    """Makes the task's base from the image's files (it plants the bug): applied and committed in both sandboxes before
    the agent sees them."""
    hidden_paths: tuple[str, ...] = ()
    """Absolute paths of the image that the agent must not see: gone from its sandbox; in the grading box put back only
    after the patch. Those inside the workdir belong into the plan's `protected` too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `agent` and `grader` are kept apart so that hidden data has no way into the agent's box."""

    agent: AgentView
    grader: GraderView

    @property
    def id(self) -> str:
        return self.agent.id


# --------------------------------------------------------------------------- sampling


LogprobKind = Literal["raw", "temperature", "behaviour"]
"""raw: log_softmax(logits). temperature: log_softmax(logits / T), full vocabulary.
behaviour: of the distribution sampled from, after temperature and top-k/top-p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy is sampled. The trainer's to set; a CLI's wishes are recorded and ignored."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    max_new_tokens: int = 1024
    """Per turn; the gateway lowers it to what the context leaves."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of one generation came from weights `version`."""

    version: str
    start: int
    end: int


FinishReason = Literal["stop", "length"]


# --------------------------------------------------------------------------- verdicts and outcomes


class VerdictStatus(StrEnum):
    """What the grader concluded about the policy's work."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    PATCH_REJECTED = "patch_rejected"
    """The patch does what no patch may (leaves the repository, writes into .git)."""
    TAMPERED = "tampered"
    """Evidence that the tests' report is not the tests' doing."""
    TEST_TIMEOUT = "test_timeout"


TestStatus = Literal["passed", "failed", "error", "skipped", "xfailed", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """One test, as the structured report has it."""

    __test__ = False  # pytest collects classes called Test*

    id: str
    status: TestStatus
    expected: bool = True
    """Whether resolving the task requires it to pass."""
    seconds: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grader's judgement with its evidence. Pure function of the raw run, so it can be made again from the log."""

    status: VerdictStatus
    reward: float
    grader: str
    grader_version: str
    tests: tuple[TestOutcome, ...] = ()
    exit_code: int | None = None
    signals: tuple[str, ...] = ()
    """Integrity observations, e.g. `exit_code_disagrees_with_report`."""
    dropped_paths: tuple[str, ...] = ()
    """Paths of the patch that were put back to the base before the tests ran."""
    log_sha256: str = ""
    trainable: bool = True
    """False when the protocol's evidence is too weak to train on."""


class Stage(StrEnum):
    """Where a rollout is, in order. Each has a deadline, a start time, and leaves what resume needs."""

    ADMITTED = "admitted"
    BOOTED = "booted"
    PREPARED = "prepared"
    AGENT_RUNNING = "agent_running"
    AGENT_DONE = "agent_done"
    CAPTURED = "captured"
    GRADED = "graded"
    SEALED = "sealed"
    STORED = "stored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout could not be judged."""

    stage: Stage
    """The stage it was trying to reach."""
    error: str
    """Class name in the error tree."""
    message: str
    fault: str
    retryable: bool
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evidence: str = ""
    """The last lines of whatever log shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """The patch was judged. Only this outcome has a reward."""

    verdict: Verdict

    @property
    def reward(self) -> float:
        return self.verdict.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungraded:
    """We failed. No reward, out of the loss and out of group statistics."""

    failure: Failure


Outcome: TypeAlias = Graded | Ungraded


# --------------------------------------------------------------------------- samples

BranchRole = Literal["main", "subagent", "compaction", "side"]


TrafficClass = Literal["main", "subagent", "compaction", "title", "probe", "side", "foreign"]
"""Why a CLI asks. main: the agent's own turns. subagent: an agent it started. compaction: a summary of the history.
title: naming the session. probe: is anybody there. side: anything else beside the work (memory extraction). foreign:
not this CLI at all, but something else that has its key."""


HistoryPolicy = Literal["exact", "append_only"]
"""What a prompt is when a client rewrites what others than the policy said. exact: what the client says now.
append_only: what the engine was given before, and the client's new messages after it."""


ExcludedReason = Literal[
    "undelivered",
    "superseded",
    "shared_with_earlier_branch",
    "truncated",
    "non_finite_logprob",
    "class_not_trained",
    "stale_version",
]
"""undelivered: the client never got the reply. superseded: it asked the same again and went on from another answer.
shared_with_earlier_branch: trained in another sample of the rollout.
truncated: beyond `max_sample_tokens`. non_finite_logprob: the engine gave NaN or infinity. class_not_trained: traffic
(a title, a probe) that the session does not train. stale_version: sampled by weights that are too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row made from a branch. All per-token buffers have length L = len(tokens).

    They are arrays, so that a converter can look at them without a copy; a list given for one becomes one.
    """

    task_id: str
    group_id: str
    rollout_id: str
    segment_index: int
    n_segments: int
    role: BranchRole
    tokens: array[int]
    """[L] int32: what the engine was given and what it returned, in order."""
    loss_mask: array[int]
    """[L] int8: 1 where sampled by the policy and trained here; a sampled token is so in one sample at most."""
    logprobs: array[float]
    """[L] float64: the engine's logprob where loss_mask is 1, else 0.0."""
    versions: list[VersionSpan]
    """Spans over `tokens` that cover every trained token."""
    prompt_length: int
    """Index of the first sampled token; L when there is none."""
    reward: float | None
    """None: the rollout has no valid reward."""
    weight: float
    """Share of the rollout's weight, so that fan-out cannot skew a group."""
    trainable: bool
    """May enter the loss."""
    counts_in_baseline: bool
    """May enter the group's mean and deviation."""
    truncated: bool = False
    """Cut to `max_sample_tokens`, or the last turn ran out of tokens."""
    ill_formed: bool = False
    """A turn in it could not be parsed."""
    logprob_kind: LogprobKind = "behaviour"
    temperature: float = 1.0
    excluded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sampled tokens of this branch that are not trained in it, by reason (`ExcludedReason`)."""
    turns: list[int] = field(default_factory=list[int])
    """Indices of the turns in it, from the root on."""
    history: HistoryPolicy = "exact"
    """How the prompts of this rollout were made."""
    accepted_versions: list[str] | None = None
    """The weight versions that may be trained; None: all."""

    def __post_init__(self) -> None:
        for name, code in (("tokens", "i"), ("loss_mask", "b"), ("logprobs", "d")):
            values: Any = getattr(self, name)
            if getattr(values, "typecode", None) != code:
                object.__setattr__(self, name, array(code, values))

    def trained_spans(self) -> list[tuple[int, int]]:
        """`[start, end)` of each run of trained tokens, in order."""
        mask = self.loss_mask.tobytes()
        spans: list[tuple[int, int]] = []
        start = mask.find(1)
        while start >= 0:
            end = mask.find(0, start)
            end = len(mask) if end < 0 else end
            spans.append((start, end))
            start = mask.find(1, end)
        return spans

    def to_json(self) -> dict[str, Any]:
        """Its fields, the buffers as lists."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() if isinstance(value, array) else value for name, value in values.items()}
