"""What users of the field's other systems reported of their gateways, and the tests that show it cannot happen here.

Issue numbers are those of the named repositories.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.pointers import ROOT, dangling

WIRES = "tests/contract/test_wires.py::"
REQUESTS = "tests/unit/gateway/test_requests.py::"
RESTART = "tests/unit/gateway/test_restart.py::"
TURNS = "tests/unit/gateway/test_turns.py::"
TRAFFIC = "tests/unit/gateway/test_traffic.py::"
PAUSE = "tests/unit/gateway/test_pause.py::"
HISTORIES = "tests/unit/gateway/test_histories.py::test_what_was_sampled_and_used_is_trained_once"
DIALECTS = "tests/unit/dialects/test_dialects.py::"
ANTHROPIC = "tests/unit/dialects/test_anthropic.py::"
CHAT = "tests/unit/dialects/test_openai_chat.py::"
RESPONSES = "tests/unit/dialects/test_openai_responses.py::"
PARSE = "tests/unit/tokens/test_parse.py::"
TREE = "tests/unit/tokens/test_tree.py::"
SAMPLES = "tests/unit/tokens/test_samples.py::"
RENDER = "tests/unit/tokens/test_render_template.py::"
TRUTH = "tests/unit/tokens/test_token_truth.py::"
VERIFY = "tests/unit/tokens/test_verify.py::"
SGLANG = "tests/unit/engines/test_sglang.py::"
PEERS = "tests/contract/test_peer_requirements.py::"
GOLDEN = "tests/contract/test_golden.py::"
FIDELITY = "tests/e2e/test_fidelity.py::"
REAL = "tests/engines/test_real_servers.py::"

STREAMS = DIALECTS + "test_a_stream_adds_up_to_the_body_of_the_unstreamed_reply"
ONE_BRANCH = WIRES + "test_a_conversation_is_one_branch_of_exactly_what_was_sampled"


@dataclass(frozen=True)
class Report:
    issues: str
    text: str
    shown_by: tuple[str, ...]


def _(issues: str, text: str, *shown_by: str) -> Report:
    return Report(issues, text, shown_by)


REPORTS = [
    # ------------------------------------------------------------------ histories
    _(
        "miles#1826",
        "the first turn sent again poisons the session: every later call is 400",
        WIRES + "test_an_equal_request_after_a_delivered_reply_is_another_sample",
        TREE + "test_the_same_prompt_again_is_a_sibling_with_the_same_ids",
        HISTORIES,
    ),
    _(
        "miles#955 miles#1714 miles#889",
        "a reply that the client never saw makes its next request unanswerable",
        REQUESTS + "test_a_reply_that_was_not_read_to_its_end_is_replayed_and_is_one_turn",
        REQUESTS + "test_a_reply_nobody_read_stays_undelivered",
    ),
    _(
        "miles#3311",
        "a retry with other arguments destroys history that was committed",
        TREE + "test_a_changed_meaning_is_a_fork_with_a_drift",
        TREE + "test_a_rewritten_turn_forks_where_it_stands_and_keeps_the_turns_before_it",
    ),
    _(
        "miles#2262 miles#2358",
        "arguments come back in another spelling",
        TREE + "test_an_echo_that_keeps_the_meaning_is_our_turn",
        HISTORIES,
    ),
    _(
        "miles#2080 NeMo-RL#3063 NeMo-RL#1812 rllm#272",
        "a history that is no line is thrown away, or the rollout dies of an assertion",
        TRUTH + "test_whatever_the_history_does_tokens_stay_true",
        HISTORIES,
    ),
    _(
        "NeMo-RL#3910",
        "compacted histories are not trained, and nobody is told why",
        TRUTH + "test_three_sub_agents_in_parallel_and_a_compaction_lose_nothing",
        FIDELITY + "test_a_compaction_starts_a_branch_and_trains_nothing_twice",
    ),
    _(
        "prime-rl#2634 prime-rl#1383",
        "the first match is taken for the longest one",
        TREE + "test_the_deepest_match_wins_over_the_first",
    ),
    _(
        "ProRL-Agent-Server#37",
        "siblings with one prompt are merged into one another",
        TREE + "test_ids_tell_apart_siblings_that_said_the_same",
        TREE + "test_ids_far_back_tell_apart_branches_that_said_the_same",
    ),
    _(
        "rllm#772 rllm#774",
        "sub-agents throw the one accumulator of a session from line to line",
        HISTORIES,
        FIDELITY + "test_a_sub_agent_is_a_branch_of_its_own",
    ),
    _(
        "trl#5224 SkyRL#1542",
        "decoded and encoded again is not what was sampled",
        TREE + "test_odd_tokens_of_the_policy_stay_as_they_were_sampled",
        ONE_BRANCH,
    ),
    _(
        "rllm#767 prime-rl#1674 trl#6250",
        "what a turn costs grows with the history",
        TREE + "test_only_deltas_are_stored",
        TREE + "test_two_hundred_turns_cost_milliseconds_each",
        RENDER + "test_a_bridge_only_needs_the_end_of_the_prompt",
    ),
    _(
        "uni-agent#101",
        "the suffix disagrees with the real template at separators",
        RENDER + "test_a_bridge_after_a_canonical_answer_is_the_full_render",
        RENDER + "test_with_the_real_qwen3_both_renderers_agree",
    ),
    # ------------------------------------------------------------------ retries, aborts, restarts
    _(
        "verifiers#2368",
        "an SDK's retry commits a turn twice",
        REQUESTS + "test_a_retry_that_says_so_is_replayed_even_after_delivery",
        WIRES + "test_equal_requests_at_once_are_one_turn",
        WIRES + "test_a_client_that_leaves_and_asks_again_gets_the_turn_it_left",
    ),
    _(
        "miles#3337 uni-agent",
        "an abort is answered as a whole reply and committed",
        TURNS + "test_an_abort_is_one_slow_turn_with_a_version_for_every_token",
        SGLANG + "test_an_abort_at_the_server_comes_back_as_what_was_sampled",
    ),
    _(
        "miles#2589 slime#2272 slime#2260",
        "a weight update kills what runs, or its continuation is given the whole budget again",
        PAUSE + "test_a_running_call_is_cut_and_goes_on_with_the_new_weights",
        TURNS + "test_aborts_that_use_up_the_budget_end_the_turn_as_length",
    ),
    _(
        "verifiers#2164",
        "an engine's error reaches the client as one that nobody repeats",
        WIRES + "test_an_engine_that_fails_closes_the_stream_and_the_retry_gets_the_turn",
        WIRES + "test_an_engine_that_fails_an_unstreamed_request_is_a_server_error_that_sdks_retry",
    ),
    _(
        "miles#888 miles#3178",
        "a restart makes every agent crash on 404",
        RESTART + "test_a_client_outlives_kill_9_and_no_turn_is_lost_or_doubled",
        RESTART + "test_a_conversation_goes_on_where_the_dead_gateway_left_it",
    ),
    # ------------------------------------------------------------------ logprobs
    _(
        "uni-agent#92 verl#6299 agentcore-rl-toolkit",
        "logprobs are invented where there are none, or belong to other tokens",
        TURNS + "test_an_engine_that_breaks_its_contract_makes_no_turn",
        SGLANG + "test_a_reply_that_breaks_the_contract_is_an_error_never_a_turn",
        VERIFY + "test_a_lie_is_seen",
    ),
    _(
        "miles#2263",
        "Claude Code sets the temperature",
        WIRES + "test_the_trainers_sampling_is_used_and_the_clients_is_recorded",
    ),
    _(
        "vime#64 vime#69 prime-rl#697",
        "logprobs of another distribution than was sampled from",
        SGLANG + "test_behaviour_logprobs_are_asked_for_by_name",
        "tests/unit/test_rescore.py::test_numbers_that_mean_something_else_are_not_compared",
        REAL + "test_vllms_processed_logprobs_are_those_of_the_behaviour",
    ),
    # ------------------------------------------------------------------ samples
    _(
        "slime#2300 slime#2301 slime#2302",
        "a rollout with many rows skews its group",
        PEERS + "test_both_rows_of_a_fork_have_the_reward_and_share_its_weight",
    ),
    _(
        "slime#2005 Gym",
        "the call for a title is trained, or is taken for the main line because it came first",
        TRAFFIC + "test_each_class_is_trained_or_not_as_the_session_says",
        GOLDEN + "test_each_request_is_of_its_class_and_all_are_of_one_program",
    ),
    # ------------------------------------------------------------------ parsers
    _(
        "slime#2283",
        "of parallel calls only the first is sent, and all are trained",
        CHAT + "test_every_parallel_call_is_sent",
        PARSE + "test_parallel_calls_are_all_kept_in_order_with_the_text_around_them",
    ),
    _(
        "verifiers#1463",
        "calls that were read well are dropped for their status",
        PARSE + "test_an_unknown_tool_stays_a_call",
        PARSE + "test_a_good_call_after_a_broken_one_is_still_a_call",
    ),
    _(
        "verifiers#2027",
        "a call inside a thought that was not closed",
        PARSE + "test_a_call_ends_a_block_that_was_left_open",
        PARSE + "test_calls_drafted_inside_a_closed_block_are_thoughts",
    ),
    _(
        "vllm#47761",
        "arguments cut by the token limit come back and are refused",
        TURNS + "test_a_truncated_call_is_not_sent_and_a_whole_one_is",
        CHAT + "test_arguments_that_are_no_object_are_sent_as_they_were_sampled",
    ),
    # ------------------------------------------------------------------ wires
    _(
        "claude-code#68900 vllm#36829 sglang#21064",
        "a billing header in the system prompt differs from request to request",
        ANTHROPIC + "test_the_billing_header_is_no_part_of_the_prompt",
    ),
    _(
        "sglang#36877",
        "cache marks move through the history",
        ANTHROPIC + "test_a_moving_cache_mark_and_text_as_a_block_change_nothing",
        GOLDEN + "test_the_history_of_the_main_line_only_grows",
    ),
    _(
        "miles#3299",
        "empty text blocks, fields nobody knows",
        ANTHROPIC + "test_empty_text_blocks_leave_nothing",
        DIALECTS + "test_unknown_fields_are_tolerated_and_settings_are_recorded_as_sent",
    ),
    _(
        "claude-code#77698 ollama#17774 litellm#40969",
        "system messages in mid-list",
        DIALECTS + "test_system_text_in_mid_list_becomes_a_user_message_of_its_own",
    ),
    _(
        "Gym#1389 codex#31083 codex#41340 vllm#42407 vllm#56285",
        "Codex needs each item's events, and one id in the stream and in the final object",
        STREAMS,
        FIDELITY + "test_every_token_of_seven_turns_is_trained_on_one_branch",
    ),
    _(
        "vllm#42475 vllm#49493 codex#26234",
        "namespaced and custom tools are refused, or their calls come back without the namespace",
        RESPONSES + "test_a_call_gets_its_namespace_back_and_comes_back_flat",
        RESPONSES + "test_a_freeform_call_carries_text_and_the_turn_is_known_again_by_it",
    ),
    _(
        "opencode#46903 claude-code#35327",
        "a slow reply is cut and asked for again",
        WIRES + "test_a_slow_generation_is_kept_alive_by_events_and_shows_nothing_early",
    ),
    _(
        "tale#3398",
        "a full context is a reply without words instead of an error that the CLI understands",
        WIRES + "test_an_overlong_prompt_is_told_in_the_wires_own_words",
        WIRES + "test_count_tokens_is_the_number_the_engine_would_be_given",
    ),
    _(
        "codex#41662 vekil#6",
        "bodies packed with zstd",
        REQUESTS + "test_a_zstd_body_is_understood_where_its_package_is_there",
    ),
    _(
        "Gym#2570 slime#1469 sglang#34513",
        "a session's calls go to any replica",
        SGLANG + "test_it_sends_ids_the_request_id_and_the_routing_key",
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.issues)
def test_each_report_is_answered_by_tests_that_exist(report: Report) -> None:
    assert report.shown_by
    assert dangling(report.shown_by) == []


def test_what_is_measured_and_not_asserted_is_there_to_be_run() -> None:
    assert (ROOT / "benchmarks" / "gateway.py").is_file()
    assert "test-engines:" in (ROOT / "Makefile").read_text()
