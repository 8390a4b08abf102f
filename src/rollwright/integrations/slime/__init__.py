"""slime: a drop-in for `examples/coding_agent_rl`.

--custom-generate-function-path          rollwright.integrations.slime.generate
--custom-reward-post-process-path        rollwright.integrations.slime.post_process_rewards
--custom-rollout-log-function-path       rollwright.integrations.slime.log_rollout
--custom-eval-rollout-log-function-path  rollwright.integrations.slime.log_eval_rollout
--dynamic-sampling-filter-path           rollwright.integrations.slime.keep_informative (if wanted)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import orjson

from rollwright.integrations.places import user_places
from rollwright.integrations.slime.logs import log_eval_rollout, log_rollout
from rollwright.integrations.slime.rewards import keep_informative, post_process_rewards
from rollwright.integrations.slime.service import Service
from rollwright.integrations.slime.settings import run_config

__all__ = ["generate", "keep_informative", "log_eval_rollout", "log_rollout", "post_process_rewards", "shutdown"]

_lock = threading.Lock()
_services: dict[bytes, Service] = {}
"""By settings. Empty until the first call: slime hands its functions no object that could hold what they share."""
_known: dict[int, tuple[Any, Service]] = {}
"""By the identity of slime's arguments: a run file that is edited while slime runs changes nothing any more."""


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """Roll out one sample of slime's: a real coding agent in a sandbox, graded in a second one.

    Settings come from `args`, the environment (`names.NAMES`) and `ROLLWRIGHT_RUN_FILE`; all of it is read at the first
    call, which opens gateway, sandboxes and engine and checks every row of the prompt data. Returns a list with a
    sample for each branch of the rollout. `evaluation` chooses `SWE_EVAL_PROTOCOL` over `SWE_TRAIN_PROTOCOL`, and one
    sample for a rollout, not in a list: some slimes print the prompt of the first before they look what it is.

    A failure of ours is an ABORTED sample with `metadata["abort_reason"]`, removed from the loss. Raises `UsageError`
    when this machine, the settings or the data cannot do it.
    """
    samples = await _service(args).generate(sample, sampling_params, evaluation=evaluation)
    return samples[0] if evaluation else samples


def shutdown() -> None:
    """End every rollout and close what `generate` has opened; returns when nothing runs any more.

    The interpreter's exit does it too.
    """
    with _lock:
        services = list(_services.values())
        _services.clear()
        _known.clear()
    for service in services:
        service.stop()


def _service(args: Any) -> Service:
    with _lock:
        if id(args) not in _known:
            config = run_config(args, os.environ)
            key = orjson.dumps(config.dump())
            if key not in _services:
                _services[key] = Service(args, config, dict(os.environ), user_places())
                _services[key].start()
            _known[id(args)] = args, _services[key]
        return _known[id(args)][1]
