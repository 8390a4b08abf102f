"""The order of an engine's weights: told, seen with tokens, and known from an earlier process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollwright.gateway.versions import WeightOrder

VERSIONS = st.sampled_from(["v0", "v1", "v2", "v3"])
CALLS = st.lists(st.tuples(st.sampled_from(["given", "seen"]), VERSIONS), max_size=12)


def after(calls: list[tuple[str, str]], earlier: list[str] | None = None) -> list[str]:
    order = WeightOrder(earlier or [])
    for what, version in calls:
        getattr(order, what)(version)
    return order.versions


@given(CALLS, st.lists(VERSIONS))
def test_each_version_is_in_it_once_and_what_was_given_last_is_never_older_than_before(
    calls: list[tuple[str, str]], earlier: list[str]
) -> None:
    found = after(calls, earlier)
    assert sorted(found) == sorted({*earlier, *(version for _, version in calls)})
    given_last = [version for what, version in calls if what == "given"][-1:]
    seen_after: set[str] = set()
    for what, version in reversed(calls):
        if what == "given":
            break
        seen_after.add(version)
    for version in given_last:
        assert set(found[found.index(version) + 1 :]) <= seen_after, "only weights that nobody told of can be newer"


@given(CALLS)
def test_a_later_process_that_hears_of_nothing_has_the_same_order(calls: list[tuple[str, str]]) -> None:
    assert after([], after(calls)) == after(calls)


@given(st.lists(VERSIONS, unique=True, min_size=1), st.data())
def test_the_order_in_which_copies_of_the_engine_are_heard_of_does_not_undo_a_known_one(
    earlier: list[str], data: st.DataObject
) -> None:
    seen = data.draw(st.permutations(earlier))
    assert after([("seen", version) for version in seen], earlier) == earlier


def test_an_engine_that_went_back_to_a_checkpoint_has_its_weights_newest() -> None:
    earlier = ["v0", "v1", "v2"]
    assert after([("seen", "v0")], earlier) == ["v1", "v2", "v0"]
    assert after([("given", "v1")], earlier) == ["v0", "v2", "v1"]
    assert after([("seen", "v1"), ("given", "v2")], earlier) == ["v0", "v1", "v2"]
    assert after([("seen", "v1"), ("given", "v2"), ("seen", "v3"), ("seen", "v1")], earlier) == ["v0", "v1", "v2", "v3"]
