"""What goes wrong where commands in sandboxes hang on one stream and a marker file, and the tests that show it does not
here. The rows are those of a study of existing systems."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "src/rollwright/testing").glob("*_contract.py"))

ROWS: dict[str, tuple[str, ...]] = {
    "W1 every command waits for the next poll": ("test_a_short_job_is_told_of_by_the_request_that_started_it",),
    "W2 exit, exec, set -e or a syntax error skip the marker": ("test_how_a_job_ended_is_a_value",),
    "W3 a command that ends with a backslash swallows the marker": ("test_how_a_job_ended_is_a_value",),
    "W4 a login banner is read as the exit code": (
        "test_what_a_login_shell_says_and_sets_does_not_matter",
        "test_noise_of_a_login_shell_around_the_answer_does_not_matter",
    ),
    "W5 a killed launcher uses the whole budget up": (
        "test_a_killed_supervisor_is_a_lost_job_and_takes_the_job_along",
        "test_what_a_killed_supervisor_left_is_ended_when_it_is_asked_for",
    ),
    "W6 what ran out of time goes on running": ("test_a_deadline_ends_all_that_the_job_started",),
    "W7 what was cancelled goes on running": (
        "test_cancelling_run_cancels_the_job",
        "test_cancel_ends_the_tree_and_says_so",
    ),
    "W8 two calls of one name get each other's result": ("test_many_jobs_at_once_keep_their_own_results",),
    "W9 a late copy of a request undoes a finished job": (
        "test_requests_that_come_twice_or_late",
        "test_a_late_copy_of_a_create_does_not_raise_the_dead",
    ),
    "W10 a cut between claim and start, and it never runs": (
        "test_over_a_bad_line_each_job_runs_once_with_its_own_result",
        "test_half_a_script_is_never_run",
    ),
    "W11 one failing poll ends the wait": (
        "test_every_connection_is_cut_after_a_second_and_a_half",
        "test_passing_failures_are_tried_again_and_polls_get_shorter_then_longer",
    ),
    "W12 the wrong HOME, a failed cd that is ignored": (
        "test_environment_arguments_and_folder_are_exact",
        "test_a_folder_that_is_not_there_has_its_own_code",
    ),
    "W13 what root ran, the agent may not": ("test_what_root_ran_the_agent_may_run_after_it",),
    "W14 a job writes its own result": (
        "test_a_job_cannot_reach_its_supervisor_or_its_record",
        "test_the_agent_cannot_reach_its_supervisor_or_its_records",
    ),
    "W15 a full disk loses the exit code": (
        "test_a_full_disk_loses_neither_code_nor_output",
        "test_a_full_disk_loses_no_code_where_records_lie_on_that_disk",
        "test_a_full_disk_keeps_no_answer_back",
    ),
    "W16 output is read whole into memory": ("test_300_megabytes_of_output_are_bounded_everywhere",),
    "W17 a failed read is an empty file": (
        "test_a_file_that_is_not_there_is_an_error_not_an_empty_one",
        "test_a_download_that_breaks_off_is_never_a_shorter_file",
    ),
    "W18 grandchildren outlive the command": (
        "test_nothing_is_left_after_a_normal_end",
        "test_a_daemon_that_scrubs_its_environment_and_a_thousand_children_die",
        "test_a_daemon_that_scrubs_its_environment_ends_with_its_job",
        "test_a_job_that_hides_from_its_supervisor_is_ended_all_the_same",
    ),
    "W19 signals as codes, mixed streams, the wall clock, deadlines on the host alone": (
        "test_how_a_job_ended_is_a_value",
        "test_streams_are_apart_or_merged_in_order",
        "test_no_clock_that_somebody_could_set_is_read",
        "test_the_deadline_is_kept_when_nobody_watches",
    ),
    "W20 after a cut the tests are started again beside the running ones": (
        "test_a_job_runs_once_however_often_it_is_started",
        "test_a_run_on_e2b_goes_on_while_its_requests_go_wrong",
    ),
    "T1 resetting a pool kills the neighbours": ("test_what_happens_to_one_box_is_not_felt_by_its_neighbours",),
    "T2 with newer SDKs the reset does nothing": ("test_a_command_is_asked_for_again_and_still_runs_once",),
    "T3 errors are told apart by the names of their classes": (
        "test_a_fault_of_a_command_is_named",
        "test_a_fault_of_an_upload_is_named",
        "test_an_error_that_no_adapter_knows_shows_by_its_type",
    ),
    "T4 a box whose removal failed once stays": ("test_a_close_that_goes_wrong_still_removes_the_box",),
    "T5 a lost answer to create leaves a box behind": (
        "test_a_create_that_goes_wrong_makes_one_box",
        "test_a_create_that_is_given_up_leaves_no_box",
        "test_a_lost_answer_to_create_makes_no_second_container",
    ),
    "T6 nobody removes the boxes of a killed trainer": (
        "test_what_a_killed_orchestrator_left_is_reaped_and_nothing_else",
        "test_nothing_outlives_a_killed_orchestrator",
        "test_what_a_killed_orchestrator_left_is_reaped",
        "test_boxes_ahead_of_a_killed_process_are_reaped",
    ),
}


@pytest.fixture(scope="module")
def tests() -> set[str]:
    found: set[str] = set()
    for path in PLACES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_each_has_its_tests(row: str, tests: set[str]) -> None:
    assert set(ROWS[row]) <= tests
