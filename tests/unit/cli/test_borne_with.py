"""What a run tells of the failures beneath it."""

from __future__ import annotations

from rollwright.cli.rollouts import borne_with
from rollwright.sandboxes.retry import Tally


def test_the_most_frequent_come_first_and_a_gap_in_a_backend_is_named() -> None:
    failures = {(f"op{n}", "Unreachable"): n for n in range(1, 8)} | {("exec", "unclassified vendor.Oops"): 9}
    first, down, unknown = borne_with(Tally(failures=failures, outages=2, down=True).to_json())
    assert first == (
        "borne with: 37 failed requests (exec unclassified vendor.Oops 9, op7 Unreachable 7, op6 Unreachable 6, "
        "op5 Unreachable 5, op4 Unreachable 4, 3 more kinds)"
    )
    assert down == "the sandbox backend was down 2 times, and is now"
    assert unknown == "errors that the backend does not know, please report them: vendor.Oops 9"


def test_nothing_is_told_where_nothing_failed() -> None:
    assert borne_with(Tally().to_json()) == []
    assert borne_with({}) == []
