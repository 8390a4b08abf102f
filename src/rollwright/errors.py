"""The one tree of everything that can go wrong, and what may be done about it.

    RollwrightError
    ├── UsageError                  the person who started us can fix it
    │   ├── ConfigError             a setting; names the field
    │   ├── TaskError               a row of the data set; names the row and the field
    │   ├── PluginError             an unknown or doubled implementation name
    │   ├── Unsupported             the chosen backend cannot do what was asked
    │   ├── PathNotFound            a file that was to be read is not there
    │   └── MalformedRequest        a client's request does not follow its wire; names the field
    ├── InfraError                  we failed, not the policy; never a reward
    │   ├── SandboxError
    │   │   ├── Transient           worth another try (RateLimited, Unreachable)
    │   │   ├── AmbiguousOutcome    the request may or may not have been carried out
    │   │   ├── SandboxGone         the box died
    │   │   ├── JobLost             the box lives, the job's record does not
    │   │   ├── ProvisionFailed     the box never came up
    │   │   └── SandboxBroken       the box answers, but nonsense
    │   ├── EngineError             EngineUnreachable, EngineRejected, EngineProtocolError
    │   ├── HarnessError            AgentInstallFailed, AgentSilent, RequestRefused
    │   ├── GraderError             WorkspaceFailed, CaptureFailed, ApplyFailed, GradingFailed, ImageQuarantined
    │   ├── TokensBroken            samples that do not say what was sampled
    │   ├── RolloutOverdue          a rollout or its boot outlived its deadline
    │   ├── RolloutCut              a rollout was ended from outside
    │   └── StoreError              the run folder could not be written or read
    ├── RolloutTooOld               a rollout's weights were too old when the trainer wanted it
    │   └── RolloutSuperseded       so its group was rolled out again
    ├── LimitError                  a size or count limit of ours was reached (output, file, disk)
    └── PromptTooLong               the policy's context is full; a normal end, told to the CLI in its own words

To add one: subclass the nearest branch, keep the keyword-only extras picklable (Ray carries exceptions between
processes), and set `retryable` only if doing the very same thing again may help.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Fault = Literal["user", "infra", "policy", "trainer", "bug"]
"""Whose doing it is. Only `policy` may ever show in a reward."""


class RollwrightError(Exception):
    """Base of all our errors. `str()` is one sentence that says what to do."""

    fault: ClassVar[Fault] = "bug"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        """Small JSON-able facts for the record: the operation, the box, the field."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details))


def _rebuild(cls: type[RollwrightError], message: str, details: dict[str, Any]) -> RollwrightError:
    return cls(message, **details)


class UsageError(RollwrightError):
    """What was asked for cannot be done as asked."""

    fault = "user"


class ConfigError(UsageError):
    """A setting is wrong. The message names the field."""


class TaskError(UsageError):
    """A row of the data set is unusable. The message names the row and the field."""


class PluginError(UsageError):
    """No such implementation, or two of one name."""


class Unsupported(UsageError):
    """The backend's capabilities do not include this."""


class PathNotFound(UsageError):
    """A file or folder that was to be read does not exist."""


class MalformedRequest(UsageError):
    """A request to the gateway does not follow its wire API. `details["field"]`: the field, dotted."""


class InfraError(RollwrightError):
    """The machine, not the model, failed. The rollout has no reward and is out of group statistics."""

    fault = "infra"
    retryable = True


class SandboxError(InfraError):
    """Base of what a sandbox backend may raise."""


class Transient(SandboxError):
    """The same call may work in a moment. `details["retry_after"]` (seconds) when the backend named one."""


class RateLimited(Transient):
    """The backend asked us to slow down."""


class Unreachable(Transient):
    """No answer from the backend or the box."""


class AmbiguousOutcome(SandboxError):
    """The request left, the answer did not come: it may have been carried out."""


class SandboxGone(SandboxError):
    """The box is dead. `details["reason"]`: killed | expired | oom | evicted | unknown."""


class JobLost(SandboxError):
    """The box lives, but the job's supervisor died without an exit record."""


class ProvisionFailed(SandboxError):
    """The box could not be made (image, boot, quota)."""


class SandboxBroken(SandboxError):
    """The box answered something that its contract does not allow."""


class EngineError(InfraError):
    """Base of what an engine may raise."""


class EngineUnreachable(EngineError):
    """No connection, or it broke before the reply was complete."""


class EngineRejected(EngineError):
    """The engine answered with an error status."""


class EngineProtocolError(EngineError):
    """The reply is not what the contract promises (missing logprobs, lengths that differ)."""

    retryable = False


class HarnessError(InfraError):
    """Base of what a harness may raise."""


class AgentInstallFailed(HarnessError):
    """The CLI could not be brought into the sandbox, or does not start there."""


class AgentSilent(HarnessError):
    """The CLI ended without one completed turn, so there is nothing of the policy's to judge."""


class RequestRefused(HarnessError):
    """The CLI gave up on a request that our dialect or the policy's template could not take."""

    retryable = False
    fault = "bug"


class GraderError(InfraError):
    """Base of what a grader may raise."""


class WorkspaceFailed(GraderError):
    """The working folder could not be made ready: it is missing, or the row's `pre_commands` failed."""


class CaptureFailed(GraderError):
    """The patch could not be taken out of the agent's sandbox."""


class ApplyFailed(GraderError):
    """The captured patch does not apply to an equal base: our bug, not the policy's."""

    retryable = False
    fault = "bug"


class GradingFailed(GraderError):
    """The grading sandbox did not give evidence that could be judged."""


class ImageQuarantined(GraderError):
    """A control during the run found that an image no longer tells gold from nothing. `details`: image, task,
    problems."""

    retryable = False


class TokensBroken(InfraError):
    """A rollout's samples do not say what was sampled: our bug, and nothing to train on."""

    retryable = False
    fault = "bug"


class RolloutOverdue(InfraError):
    """A rollout, or its boot, outlived its deadline."""


class RolloutCut(InfraError):
    """A rollout was ended from outside: the rest of its group had waited long enough, or nobody wants it any more."""

    retryable = False


class StoreError(InfraError):
    """The run folder could not be written or read back."""

    retryable = False


class RolloutTooOld(RollwrightError):
    """A graded rollout is out of the loss and of its group's statistics: weights that sampled some of it were too old
    when the trainer wanted it. `details`: `max_lag`, and `roll`, how often its group had been rolled out."""

    fault = "trainer"


class RolloutSuperseded(RolloutTooOld):
    """Its group was rolled out again: it is no part of it any more, others are in its place."""


class LimitError(RollwrightError):
    """A limit of ours was reached: output, file size, disk."""

    fault = "policy"


class PromptTooLong(RollwrightError):
    """The prompt does not fit the policy's context. `details`: tokens, maximum."""

    fault = "policy"
