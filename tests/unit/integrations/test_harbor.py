"""Harbor: every trained token is in exactly one completion, after its full prompt."""

from __future__ import annotations

from rollwright.integrations.harbor import rollout_details
from rollwright.integrations.record import StoredRollout


def test_the_main_agent_comes_first(calc: list[StoredRollout]) -> None:
    segments = [detail["extra"]["segment"][0] for detail in rollout_details(calc[1])]
    roles = [calc[1].samples[segment].role for segment in segments]
    assert sorted(segments) == [0, 1, 2]
    assert roles == ["main", "main", "subagent"]


def test_turns_have_their_prompt_ids_logprobs_and_versions(calc: list[StoredRollout]) -> None:
    (sample,) = calc[0].samples
    (detail,) = rollout_details(calc[0])
    assert set(detail) == {"prompt_token_ids", "completion_token_ids", "logprobs", "extra"}
    turns = zip(detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"], strict=True)
    for (prompt, completion, logprobs), (start, end) in zip(turns, sample.trained_spans(), strict=True):
        assert prompt + completion == sample.tokens[:end].tolist()
        assert len(completion) == end - start
        assert logprobs == sample.logprobs[start:end].tolist()
    lengths = [len(completion) for completion in detail["completion_token_ids"]]
    assert detail["extra"]["weight_versions"] == [[["7", 0, lengths[0]]], [["8", 0, lengths[1]]]]
    assert {len(values) for values in detail["extra"].values()} == {2}


def test_lost_and_silent_rollouts_have_no_details(calc: list[StoredRollout]) -> None:
    assert rollout_details(calc[2]) == rollout_details(calc[4]) == []
