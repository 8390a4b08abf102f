"""Our samples as slime's, made from the one that slime gave: its class, its indices, its metadata. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.errors import RollwrightError
from rollwright.integrations.arrays import response_lists
from rollwright.integrations.record import Rollout, comparable, longest, stand_in, trained, trained_versions
from rollwright.store import RolloutRecord
from rollwright.types import Sample

__all__ = ["KEY", "Filler", "failure_of", "is_graded", "note_of", "rollout_of"]

KEY = "rollwright"
"""Where a slime sample's metadata has what slime has no field for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filler:
    """Fills slime samples."""

    decode: Callable[[Sequence[int]], str]
    """Ids → the text that slime logs."""
    reward_key: str | None = None
    """slime's `--reward-key`."""
    eval_reward_key: str | None = None
    """slime's `--eval-reward-key`."""
    run: str = ""
    """The run folder."""
    quorum: int = 2
    """How many rollouts of a group must count."""

    def samples(self, base: Any, rollout: Rollout, *, evaluation: bool) -> list[Any]:
        """One slime `Sample` for each of the rollout's that is trained, all with one `rollout_id`; for an evaluation
        one in all, so that a rollout counts once.

        `base` is not changed. An ungraded rollout, or one with nothing to train, is a row that slime removes from the
        loss (`remove_sample`). Ungraded, its status is ABORTED, and its reward (slime needs a number) is 0.0 and kept
        out of the baseline by `post_process_rewards`. Raises `UsageError` for logprobs that slime would take for others
        (see `record.comparable`).
        """
        kept = trained(rollout) if evaluation else comparable(rollout)
        if evaluation and kept:
            kept = [longest([sample for sample in kept if sample.role == "main"] or kept)]
        rows = kept or [stand_in(rollout, filler=0)]
        return [
            self._filled(base, row, rollout.record, index, len(rows), evaluation=evaluation)
            for index, row in enumerate(rows)
        ]

    def aborted(self, base: Any, error: RollwrightError, *, evaluation: bool) -> list[Any]:
        """For a rollout that could not even begin."""
        made = _copied(base)
        made.tokens, made.response, made.response_length = [0, 0], "", 1
        made.loss_mask, made.rollout_log_probs = [0], [0.0]
        made.reward = self._reward(0.0, evaluation=evaluation)
        made.status = base.Status.ABORTED
        made.remove_sample = True
        made.weight_versions = []
        reason = f"{type(error).__name__}: {error.message}"
        note = {
            "failure": type(error).__name__,
            "abort_reason": reason,
            "counts_in_baseline": False,
            "trainable": False,
        }
        made.metadata = {**_own_metadata(base), "abort_reason": reason, KEY: note}
        return [made]

    def _filled(self, base: Any, row: Sample, record: RolloutRecord, index: int, of: int, *, evaluation: bool) -> Any:
        made = _copied(base)
        whole = response_lists(row)
        made.tokens = whole.prompt + whole.response
        made.response_length = len(whole.response)
        made.response = self.decode(whole.response)
        # slime's masks and logprobs are those of the response alone
        made.loss_mask, made.rollout_log_probs = whole.mask, whole.logprobs
        made.weight_versions = trained_versions(row) or list(record.versions)
        made.reward = self._reward(0.0 if record.reward is None else record.reward, evaluation=evaluation)
        made.remove_sample = not row.trainable
        status: Any = base.Status
        failure = record.failure
        made.status = status.ABORTED if failure else status.TRUNCATED if row.truncated else status.COMPLETED
        note: dict[str, Any] = {
            "run": self.run,
            "quorum": self.quorum,
            "rollout": record.rollout,
            "group": record.group,
            "status": str(record.status),
            "stop_reason": record.stop_reason,
            "role": row.role,
            "segment_index": index,
            "n_segments": of,
            "weight": row.weight,
            "trainable": row.trainable,
            "counts_in_baseline": record.counts_in_baseline,
            "versions": [[span.version, span.start, span.end] for span in row.versions],
            "logprob_kind": row.logprob_kind,
            "excluded": dict(row.excluded),
        }
        metadata: dict[str, Any] = {**_own_metadata(base), KEY: note}
        if failure is not None:
            note["failure"] = failure.error
            note["abort_reason"] = metadata["abort_reason"] = f"{failure.stage}: {failure.error}: {failure.message}"
        made.metadata = metadata
        return made

    def _reward(self, value: float, *, evaluation: bool) -> Any:
        """slime asks an evaluation's sample for `--eval-reward-key`, and in some of its charts for `--reward-key`."""
        asked = (self.reward_key, self.eval_reward_key if evaluation else None)
        keys = [key for key in asked if key]
        return dict.fromkeys(keys, value) if keys else value


def note_of(sample: Any) -> Mapping[str, Any]:
    """What a slime sample says of its rollout that slime has no field for; empty when it is not of ours."""
    metadata: Mapping[str, Any] = sample.metadata or {}
    return metadata.get(KEY, {})


def rollout_of(sample: Any) -> str:
    """What the samples of one rollout have in common."""
    own = note_of(sample).get("rollout", getattr(sample, "rollout_id", None))
    return f"{sample.index}" if own is None else f"{sample.index}/{own}"


def is_graded(sample: Any) -> bool:
    """Whether its reward is somebody's verdict."""
    return sample.status is not sample.Status.ABORTED and sample.reward is not None


def failure_of(sample: Any) -> str:
    """The error by which a sample was not graded; slime's status where it was never ours."""
    return str(note_of(sample).get("failure", sample.status.value))


def _copied(base: Any) -> Any:
    """A sample of slime's that is ours to fill. slime wants each of a list's to have a `rollout_id`."""
    made = copy.copy(base)
    if hasattr(base, "rollout_id") and base.rollout_id is None:
        made.rollout_id = base.index
    return made


def _own_metadata(base: Any) -> dict[str, Any]:
    """What slime's row says. A sample that was aborted comes again with why, which says nothing of its next end."""
    metadata: Mapping[str, Any] = base.metadata or {}
    return {key: value for key, value in metadata.items() if key not in ("abort_reason", KEY)}
