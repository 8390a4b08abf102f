"""The order of an engine's weights: told, seen with tokens, and known from an earlier process."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.scripted import Fault
from rollwright.errors import StoreError
from rollwright.gateway.gate import EngineGate
from rollwright.gateway.versions import WeightOrder, merged_order, read_order, write_order
from rollwright.testing.loopback_gateway import scripted_engine
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling

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


@given(st.lists(VERSIONS, unique=True), st.data())
def test_an_order_that_is_heard_puts_what_is_new_in_its_place_and_moves_nothing(
    whole: list[str], data: st.DataObject
) -> None:
    told = [version for version in whole if data.draw(st.booleans())]
    order = WeightOrder(["old"])
    for version in told:
        order.given(version)
    order.heard(whole)
    order.heard(whole)
    assert order.versions == ["old", *whole]


def test_an_order_that_is_heard_late_says_nothing_against_what_came_since() -> None:
    order = WeightOrder()
    for version in ("v1", "v2", "v1"):
        order.given(version)
    order.heard(["v0", "v1", "v2"])
    assert order.versions == ["v0", "v2", "v1"]
    order.heard(["v2", "v3"])
    assert order.versions == ["v0", "v2", "v3", "v1"]


@given(st.lists(VERSIONS, unique=True), st.data())
def test_what_several_processes_know_in_part_is_one_order(whole: list[str], data: st.DataObject) -> None:
    """Whatever any of them knows of two versions holds, where all of them saw the same updates."""
    known = st.lists(st.sampled_from(range(len(whole))), unique=True) if whole else st.just(list[int]())
    orders = [[whole[index] for index in sorted(part)] for part in data.draw(st.lists(known, max_size=4))]
    merged = merged_order(orders)
    assert sorted(merged) == sorted({version for order in orders for version in order})
    for order in orders:
        assert [version for version in merged if version in order] == order


def test_of_processes_that_contradict_each_other_none_is_left_out() -> None:
    assert merged_order([["v1", "v2"], ["v2", "v1", "v3"]]) == ["v1", "v2", "v3"]


@given(versions=st.lists(st.text(max_size=8), unique=True, max_size=6))
def test_an_order_that_was_written_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, versions: list[str]
) -> None:
    path = tmp_path_factory.mktemp("order") / "weights.json"
    assert read_order(path) == []
    write_order(path, versions)
    assert read_order(path) == versions
    for damaged in (b"{}", b'{"versions": 3}', b'{"versions": ["v1"', b"[]"):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged"):
            read_order(path)


@pytest.mark.anyio
async def test_no_token_of_new_weights_is_handed_on_before_they_are_noted(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """Also of calls that return together: what a killed process has in its logs must be in its order."""
    path = tmp_path / "weights.json"
    noted: list[list[str]] = []
    faults = [Fault(call=call, kind="version", version=f"v{call // 4}") for call in (4, 8)]
    engine = scripted_engine(renderer, "said", faults=faults)
    async with engine, anyio.create_task_group() as group:
        gate = EngineGate(engine, path)

        async def one(number: int) -> None:
            part = await gate.generate(
                [1], Sampling(), stop_ids=renderer.stop_ids, request_id=str(number), session_key=str(number)
            )
            noted.append(read_order(path))
            assert {span.version for span in part.versions} <= set(noted[-1])

        for number in range(12):
            group.start_soon(one, number)
    assert len(noted) == 12
    assert noted[-1] == gate.order.versions == read_order(path)
    path.unlink()
    path.mkdir()
    gate.given("v9")
    with pytest.raises(StoreError, match="cannot be written"):
        await gate.store_order()
