"""The 65 requirements that the field's agent library tests for itself, and where they hold here.

Each names the tests that show it. `better`: what is deliberately otherwise here, and shown by the same tests.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from rollwright.gateway.limits import SessionLimits
from rollwright.testing.loopback_gateway import loopback_gateway, scripted_engine
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.tokens.samples import build_samples
from rollwright.tokens.verify import verify
from rollwright.types import Sample
from support.pointers import dangling

WIRES = "tests/contract/test_wires.py::"
REQUESTS = "tests/unit/gateway/test_requests.py::"
HISTORIES = "tests/unit/gateway/test_histories.py::test_what_was_sampled_and_used_is_trained_once"
TURNS = "tests/unit/gateway/test_turns.py::"
DIALECTS = "tests/unit/dialects/test_dialects.py::"
ANTHROPIC = "tests/unit/dialects/test_anthropic.py::"
CHAT = "tests/unit/dialects/test_openai_chat.py::"
PARSE = "tests/unit/tokens/test_parse.py::"
TREE = "tests/unit/tokens/test_tree.py::"
SAMPLES = "tests/unit/tokens/test_samples.py::"
TRUTH = "tests/unit/tokens/test_token_truth.py::test_whatever_the_history_does_tokens_stay_true"
VERIFY = "tests/unit/tokens/test_verify.py::"
BOX = "src/rollwright/testing/sandbox_contract.py::"
CLAUDE = "tests/unit/harnesses/test_claude_code.py::"
CODEX = "tests/unit/harnesses/test_codex.py::"
RUNS = "tests/e2e/test_runs.py::"
HERE = "tests/contract/test_peer_requirements.py::"

ONE_BRANCH = WIRES + "test_a_conversation_is_one_branch_of_exactly_what_was_sampled"


@dataclass(frozen=True)
class Requirement:
    number: str
    text: str
    shown_by: tuple[str, ...]
    better: str = ""


def _(number: str, text: str, *shown_by: str, better: str = "") -> Requirement:
    return Requirement(number, text, shown_by, better)


REQUIREMENTS = [
    # ------------------------------------------------------------------ adapters
    _(
        "A1",
        "Anthropic session id: bearer, else x-api-key, else 'default'",
        REQUESTS + "test_a_key_is_taken_from_either_header",
        WIRES + "test_an_unknown_key_is_an_authentication_error",
        better="the key is a random secret, not the id, and an unknown or missing one is 401, not a session 'default'",
    ),
    _(
        "A2",
        "OpenAI session id: bearer, else body metadata or user, else 'default'",
        REQUESTS + "test_a_key_is_taken_from_either_header",
        WIRES + "test_an_unknown_key_is_an_authentication_error",
        better="nothing in a body names a session",
    ),
    _(
        "A3",
        "Anthropic to chat messages: system first, thinking, calls with mapped arguments, tool results",
        ANTHROPIC + "test_the_system_prompt_may_be_text_or_blocks",
        ANTHROPIC + "test_thinking_carries_the_signature_we_gave",
        ANTHROPIC + "test_tool_results_come_in_order_and_know_their_tool",
        DIALECTS + "test_an_echoed_reply_is_parsed_back_to_the_message_it_was",
    ),
    _(
        "A4",
        "OpenAI to chat messages: developer is system, parts flattened, arguments mapped, wire ids dropped",
        CHAT + "test_a_developer_is_a_system",
        CHAT + "test_content_may_be_text_parts_or_nothing",
        CHAT + "test_arguments_are_parsed_when_they_are_an_object_and_kept_as_text_when_not",
        better="ids are kept as carriers: they name the turn that comes back",
    ),
    _(
        "A5",
        "Anthropic whole: a message, end_turn, one row with mask 1 and the engine's logprobs on the sampled ids",
        ONE_BRANCH,
        ANTHROPIC + "test_stop_reasons",
        WIRES + "test_the_trainers_sampling_is_used_and_the_clients_is_recorded",
        better="max_new_tokens is the trainer's, not the client's",
    ),
    _("A6", "OpenAI whole: the same for chat.completion", ONE_BRANCH),
    _(
        "A7",
        "Anthropic stream: message_start first, deltas, message_stop last",
        DIALECTS + "test_a_stream_adds_up_to_the_body_of_the_unstreamed_reply",
        WIRES + "test_a_slow_generation_is_kept_alive_by_events_and_shows_nothing_early",
        better="headers at once and pings meanwhile",
    ),
    _(
        "A8",
        "OpenAI stream: role first, finish_reason last, then [DONE]",
        DIALECTS + "test_a_stream_adds_up_to_the_body_of_the_unstreamed_reply",
        CHAT + "test_a_stream_without_usage_still_ends",
    ),
    _("A9", "Two-turn tool call: parsed, one routing key, prefix kept, rows aligned", ONE_BRANCH, HISTORIES),
    _(
        "A10",
        "A turn cap answers 429 beyond the cap",
        TURNS + "test_a_request_beyond_the_last_turn_ends_the_session",
        better="400, and the session says so at once: CLIs retry 429 for minutes",
    ),
    _(
        "A11",
        "A system message in mid-list is folded into the user message before it",
        DIALECTS + "test_system_text_in_mid_list_becomes_a_user_message_of_its_own",
        DIALECTS + "test_a_longer_history_begins_with_the_translation_of_the_shorter_one",
        better="a message of its own: folding changes a message that the policy has already seen",
    ),
    _("A12", "Plain text parses as text", PARSE + "test_plain_text_is_content_and_nothing_else"),
    _("A13", "<think> is split off", PARSE + "test_a_reasoning_block_is_split_off"),
    _(
        "A14",
        "XML calls are parsed and taken out of the text around them",
        PARSE + "test_parallel_calls_are_all_kept_in_order_with_the_text_around_them",
    ),
    _(
        "A15",
        "Calls of unknown tools stay text",
        PARSE + "test_an_unknown_tool_stays_a_call",
        better="it is a call: the CLI answers it in its own words, and the policy learns from that",
    ),
    # ------------------------------------------------------------------ whole rollouts
    _(
        "R1",
        "Full rollout: aligned rows, trained tokens, exit code, reward",
        RUNS + "test_a_scripted_policy_solves_its_task_and_leaves_training_samples",
    ),
    _(
        "R2",
        "An agent that never calls the gateway gives an aborted row",
        HERE + "test_a_session_nobody_used_has_no_sample",
        RUNS + "test_an_engine_that_fails_for_good_is_never_a_reward",
        better="no row at all: the rollout is an infrastructure outcome (`AgentSilent`), out of loss and baseline",
    ),
    _(
        "R3",
        "A task without image is refused before any sandbox",
        "tests/e2e/test_bad_input.py::test_a_missing_image_is_named",
        "tests/e2e/test_bad_input.py::test_a_row_without_a_field_names_row_and_field",
        better="before the run begins, naming row and field",
    ),
    _(
        "R4",
        "The Codex pair closes the same loop",
        "tests/e2e/test_fidelity.py::test_every_token_of_seven_turns_is_trained_on_one_branch",
        better="with the real Codex over Responses, which no longer speaks Chat",
    ),
    # ------------------------------------------------------------------ harness
    _(
        "H1",
        "Launch: exit code, environment, own session",
        BOX + "test_how_a_job_ended_is_a_value",
        BOX + "test_environment_arguments_and_folder_are_exact",
    ),
    _("H2", "Non-zero exit codes pass through", BOX + "test_how_a_job_ended_is_a_value"),
    _(
        "H3",
        "No marker within the budget: time budget exceeded",
        BOX + "test_a_deadline_ends_all_that_the_job_started",
        better="the tree is killed, and a timeout is a value of its own",
    ),
    _(
        "H4",
        "Claude Code config: onboarding done, permissions accepted",
        CLAUDE + "test_its_files_are_in_the_agents_home",
    ),
    _(
        "H5",
        "Claude Code launch: prompt, bypassed permissions, URL, token, model",
        CLAUDE + "test_it_speaks_to_the_endpoint_with_the_sessions_secret",
        CLAUDE + "test_the_prompt_and_the_secret_never_reach_argv",
        better="the prompt goes through stdin: 200 KiB fit",
    ),
    _(
        "H6",
        "Codex config: provider with /v1, wire_api chat",
        CODEX + "test_it_talks_responses_to_the_gateway_and_to_nobody_else",
        better="wire_api responses, the only one Codex still has",
    ),
    _(
        "H7",
        "Codex launch: exec, key and URL in the environment",
        CODEX + "test_it_has_full_access_and_reads_the_prompt_from_stdin",
        better="with full access: otherwise every edit fails",
    ),
    _("H8", "The agent's user owns the workdir", BOX + "test_users_are_who_they_say", BOX + "test_a_file_is_its_users"),
    _(
        "H9",
        "User, then config, then launch",
        RUNS + "test_a_scripted_policy_solves_its_task_and_leaves_training_samples",
    ),
    # ------------------------------------------------------------------ exec
    _(
        "E1",
        "A second call with the same tag really runs again",
        BOX + "test_an_id_follows_from_the_callers_key",
        better="tags are ids: another id runs, the same one never twice",
    ),
    _("E2", "A replayed start does not run twice", BOX + "test_a_job_runs_once_however_often_it_is_started"),
    # ------------------------------------------------------------------ the tree
    _("1.1", "One turn is one chain, one row", SAMPLES + "test_one_line_is_one_sample_that_says_what_happened"),
    _("1.2", "Two turns with a tool are one row, both trained", ONE_BRANCH),
    _(
        "1.3",
        "Another system prompt is another root, two rows",
        TREE + "test_a_new_conversation_is_a_root_without_drift",
    ),
    _("1.4", "Same system, other user: a fork", TREE + "test_an_edited_history_keeps_our_answers_as_they_were_sampled"),
    _(
        "1.5",
        "The same prompt twice is two leaves, two rows",
        WIRES + "test_an_equal_request_after_a_delivered_reply_is_another_sample",
        HISTORIES,
        better="unless the client went on from one of them: then the other is superseded and trains nothing",
    ),
    _(
        "1.6",
        "Another tool result under a shared answer is a fork, the shared answer trained once",
        SAMPLES + "test_a_shared_turn_is_trained_once_and_context_elsewhere",
    ),
    _(
        "1.7",
        "Token drift with equal messages is no fork; it stays in the masked prompt",
        TREE + "test_odd_tokens_of_the_policy_stay_as_they_were_sampled",
        better="there is no drift: the stored ids are the prompt",
    ),
    _("1.8", "Several tool results in one turn, one row", ONE_BRANCH),
    _("1.9", "Sessions are isolated", HERE + "test_sessions_of_one_gateway_share_nothing"),
    _("1.10", "An empty answer gives no row", SAMPLES + "test_a_branch_without_sampled_tokens_is_no_sample"),
    _("2.1", "Logprobs and reward are carried", SAMPLES + "test_one_line_is_one_sample_that_says_what_happened"),
    _(
        "2.2",
        "Between answers mask 0 and logprob 0.0",
        SAMPLES + "test_one_line_is_one_sample_that_says_what_happened",
        VERIFY + "test_a_lie_is_seen",
    ),
    _(
        "2.3",
        "Drift in an earlier prompt: fork, both trained",
        TREE + "test_an_edited_history_keeps_our_answers_as_they_were_sampled",
    ),
    _(
        "2.4",
        "Drift inside the newest answer, short: that answer is masked and replaced",
        HISTORIES,
        TREE + "test_an_echo_that_keeps_the_meaning_is_our_turn",
        better="nothing is masked: an echo that keeps the meaning is the stored turn, another meaning forks",
    ),
    _(
        "2.5",
        "The same, long: fork",
        TREE + "test_a_changed_meaning_is_a_fork_with_a_drift",
        better="the length decides nothing",
    ),
    _(
        "2.6",
        "Threshold 0: always fork",
        TREE + "test_a_changed_meaning_is_a_fork_with_a_drift",
        better="there is no threshold",
    ),
    _(
        "2.7",
        "Drift in an older answer: fork",
        TREE + "test_a_rewritten_turn_forks_where_it_stands_and_keeps_the_turns_before_it",
    ),
    _(
        "2.8",
        "Fork: full reward on both rows",
        SAMPLES + "test_a_shared_turn_is_trained_once_and_context_elsewhere",
        HERE + "test_both_rows_of_a_fork_have_the_reward_and_share_its_weight",
        better="and weights that sum to 1, so that fan-out cannot skew a group",
    ),
    _("2.9", "Two leaves: full reward on both", HERE + "test_both_rows_of_a_fork_have_the_reward_and_share_its_weight"),
    _(
        "2.10",
        "A shared answer is trained once, its logprobs zeroed elsewhere",
        SAMPLES + "test_a_shared_turn_is_trained_once_and_context_elsewhere",
    ),
    _("2.11", "An answer the engine never gave is context", TREE + "test_an_answer_nobody_gave_is_context_and_told"),
    _(
        "2.12",
        "Reading a session consumes it",
        HERE + "test_closing_twice_gives_the_same_and_samples_can_be_made_again",
        better="closing is idempotent, and the log rebuilds the trajectory at any time",
    ),
    _(
        "3.1",
        "A replayed answer that differs slightly is merged and loses training",
        HISTORIES,
        TREE + "test_an_echo_that_keeps_the_meaning_is_our_turn",
        better="it is merged and keeps its training",
    ),
    _("3.2", "The same, long: fork, trained alone", HISTORIES, better="merged and trained, however long"),
    _("3.3", "Threshold 0: fork", HISTORIES, better="merged and trained; there is no threshold"),
    _(
        "3.4",
        "Two candidates: fork",
        TREE + "test_ids_tell_apart_siblings_that_said_the_same",
        better="the ids we minted tell which it is",
    ),
    _("3.5", "After a merge later replays follow the merged node", HISTORIES, better="in every later turn"),
    _("3.6", "Tree fork plus token drift: 3 rows", TRUTH),
    _(
        "3.7",
        "Three leaves share two answers, each trained once",
        TRUTH,
        SAMPLES + "test_two_hundred_turns_and_three_branches_are_sealed_in_a_moment",
    ),
    _("3.8", "Seven turns with a replace and a fork: every answer trained once", TRUTH),
    _(
        "4.2",
        "logprobs of another length raise",
        TREE + "test_a_turn_that_does_not_add_up_is_refused",
        TURNS + "test_an_engine_that_breaks_its_contract_makes_no_turn",
    ),
    _(
        "4.3",
        "Empty prompt messages: nothing recorded",
        REQUESTS + "test_a_conversation_the_template_refuses_is_the_clients_error",
        DIALECTS + "test_a_malformed_request_names_the_field",
        better="and refused by name",
    ),
    _("4.4", "base_sample is required", HERE + "test_a_sample_cannot_be_made_without_saying_whose_it_is"),
    _(
        "4.5",
        "A turn without logprobs is trained with 0.0",
        TURNS + "test_an_engine_that_breaks_its_contract_makes_no_turn",
        SAMPLES + "test_a_logprob_that_is_no_number_is_masked_and_counted",
        better="logprobs are never invented: without them there is no turn, and one that is no number is masked",
    ),
    _("4.6", "The threshold compares the incoming answer's length", HISTORIES, better="there is no threshold"),
]


def test_the_list_is_whole() -> None:
    assert len({requirement.number for requirement in REQUIREMENTS}) == len(REQUIREMENTS) == 65


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.number)
def test_each_requirement_is_shown_by_tests_that_exist(requirement: Requirement) -> None:
    assert requirement.shown_by
    assert dangling(requirement.shown_by) == []


# --------------------------------------------------------------------------- shown here


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def samples_of(trajectory: Any, **more: Any) -> list[Sample]:
    settings = {"task_id": "t", "group_id": "g", "rollout_id": "r", "reward": 0.5}
    samples = build_samples(trajectory, **settings, trainable=True, counts_in_baseline=True, **more)
    assert verify(trajectory, samples, None).violations == ()
    return samples


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


async def ask(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=30) as client:
        return (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]


@pytest.mark.anyio
async def test_a_session_nobody_used_has_no_sample(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        assert samples_of(await loop.session.close()) == []


@pytest.mark.anyio
async def test_sessions_of_one_gateway_share_nothing(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x", "y")) as loop:
        other = loop.gateway.open("task.2", log=None, limits=SessionLimits())
        reply = await ask(loop.url, loop.session.secret, said("one"))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            async with loop.gateway.listening(sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                # The very conversation of the first session is a new one in the second.
                more = {"messages": [*said("one")["messages"], reply, *said("two")["messages"]]}
                await ask(url, other.secret, more)
        first, second = await loop.session.close(), await other.close()
    assert [turn.parent for turn in first.turns] == [None]
    assert [turn.parent for turn in second.turns] == [None]
    assert first.turns[0].messages[0].content == "one"
    assert len(second.turns[0].messages) == 4
    assert loop.engine.calls[0].session_key != loop.engine.calls[1].session_key


@pytest.mark.anyio
async def test_both_rows_of_a_fork_have_the_reward_and_share_its_weight(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        reply = await ask(loop.url, loop.session.secret, said("one"))
        for then in ("two", "three"):
            more = {"messages": [*said("one")["messages"], reply, *said(then)["messages"]]}
            await ask(loop.url, loop.session.secret, more)
        samples = samples_of(await loop.session.close())
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert sum(sample.weight for sample in samples) == pytest.approx(1.0)
    assert [sample.n_segments for sample in samples] == [2, 2]


@pytest.mark.anyio
async def test_closing_twice_gives_the_same_and_samples_can_be_made_again(renderer: TemplateRenderer) -> None:
    async with loopback_gateway(renderer, scripted_engine(renderer, "x")) as loop:
        await ask(loop.url, loop.session.secret, said("one"))
        first, second = await loop.session.close(), await loop.session.close()
    assert first is second
    assert samples_of(first) == samples_of(second)


def test_a_sample_cannot_be_made_without_saying_whose_it_is() -> None:
    unnamed: Any = build_samples
    with pytest.raises(TypeError, match="rollout_id"):
        unnamed(None, task_id="t", group_id="g", reward=None, trainable=True, counts_in_baseline=True)
