"""slime's side of the integration: its `Sample` (fields and checks as slime's own class has them) and its arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


@dataclass
class Sample:
    """What slime hands to a custom generate function, and takes back."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    rollout_id: int | None = None

    def get_reward_value(self, args: Namespace) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def check(self) -> None:
        """What slime relies on when it makes training data of it."""
        assert isinstance(self.tokens, list)
        assert all(type(token) is int for token in self.tokens)
        assert 0 < self.response_length < len(self.tokens)
        assert self.loss_mask is not None
        assert self.rollout_log_probs is not None
        assert len(self.loss_mask) == len(self.rollout_log_probs) == self.response_length
        assert set(self.loss_mask) <= {0, 1}
        assert self.status in (self.Status.COMPLETED, self.Status.TRUNCATED, self.Status.ABORTED)
        assert isinstance(self.response, str)


def arguments(policy: Path, url: str = "http://127.0.0.1:30000", **more: Any) -> Namespace:
    """As slime's parser leaves them."""
    host, _, port = url.removeprefix("http://").partition(":")
    given = {
        "hf_checkpoint": str(policy),
        "sglang_router_ip": host,
        "sglang_router_port": int(port),
        "sglang_tool_call_parser": "qwen3_coder",
        "sglang_reasoning_parser": None,
        "rollout_max_context_len": None,
        "rollout_max_response_len": 512,
        "prompt_data": None,
        "eval_prompt_data": None,
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "reward_key": None,
        "eval_reward_key": None,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
    }
    return Namespace(**(given | more))
