"""Harbor: a rollout as `rollout_details` of its `AgentContext`. `rollwright export --format atif` writes trajectories.

One detail per sample, the main agent's first. Every trained run of tokens is a turn, with the full prompt before it, so
that each trained token is in exactly one completion. A rollout that is not trained has no details.
"""

from __future__ import annotations

from typing import Any

from rollwright.integrations.record import Rollout, trained

__all__ = ["rollout_details"]


def rollout_details(rollout: Rollout) -> list[dict[str, Any]]:
    """`harbor.models.agent.rollout_detail.RolloutDetail`s. `extra` has of each turn its weight
    versions, its temperature and what its logprobs are of."""
    samples = sorted(trained(rollout), key=lambda sample: sample.role != "main")
    details: list[dict[str, Any]] = []
    for sample in samples:
        tokens, logprobs = sample.tokens.tolist(), sample.logprobs
        spans = sample.trained_spans()
        details.append(
            {
                "prompt_token_ids": [tokens[:start] for start, _ in spans],
                "completion_token_ids": [tokens[start:end] for start, end in spans],
                "logprobs": [logprobs[start:end].tolist() for start, end in spans],
                "extra": {
                    "weight_versions": [
                        [
                            [span.version, max(span.start, start) - start, min(span.end, end) - start]
                            for span in sample.versions
                            if span.start < end and span.end > start
                        ]
                        for start, end in spans
                    ],
                    "temperature": [sample.temperature for _ in spans],
                    "logprob_kind": [sample.logprob_kind for _ in spans],
                    "segment": [sample.segment_index for _ in spans],
                },
            }
        )
    return details
