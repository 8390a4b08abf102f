"""The store of prompt caches: longest prefix first, bounded, least recently used out."""

from __future__ import annotations

from typing import Self

from hypothesis import given
from hypothesis import strategies as st

from rollwright.engines.prefixes import PrefixStore


class Held:
    """A cache of ten bytes a token."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.nbytes = 10 * length

    def fork(self, length: int, capacity: int) -> Self:
        return type(self)(length)


def filled(max_bytes: int, *prompts: tuple[str, list[int]]) -> tuple[PrefixStore, list[Held]]:
    store, caches = PrefixStore(max_bytes), []
    for session, ids in prompts:
        caches.append(Held(len(ids)))
        store.put(session, ids, caches[-1])
    return store, caches


short_ids = st.lists(st.integers(0, 2), max_size=8)


@given(
    prompts=st.lists(st.tuples(st.sampled_from("ab"), short_ids.filter(bool)), max_size=8),
    wanted=short_ids,
)
def test_the_longest_shared_prefix_of_all_prompts_is_found(
    prompts: list[tuple[str, list[int]]], wanted: list[int]
) -> None:
    store, _ = filled(10_000, *prompts)

    def shared(ids: list[int]) -> int:
        return next(
            (i for i, (x, y) in enumerate(zip(ids, wanted, strict=False)) if x != y), min(len(ids), len(wanted))
        )

    longest = max((shared(ids) for _, ids in prompts), default=0)
    found = store.find("a", wanted)
    assert (found[1] if found else 0) == longest
    assert found is None or found[0].length >= longest


def test_a_sessions_own_cache_is_preferred_among_equals() -> None:
    store, caches = filled(1000, ("mine", [1, 2, 3]), ("other", [1, 2, 4]))
    assert store.find("mine", [1, 2, 9]) == (caches[0], 2)
    assert store.find("other", [1, 2, 9]) == (caches[1], 2)


def test_a_longer_prompt_of_a_session_replaces_its_beginning() -> None:
    store, _ = filled(1000, ("s", [1, 2]), ("t", [1, 2]), ("s", [1, 2, 3]), ("s", [1, 5]))
    assert store.nbytes == 10 * (2 + 3 + 2)


def test_the_least_recently_used_go_first_and_the_bound_holds() -> None:
    store, caches = filled(60, ("a", [1, 1]), ("b", [2, 2]))
    store.find("a", [1, 1, 7])
    store.put("c", [3, 3, 3], Held(3))
    assert store.find("x", [2, 2]) is None
    assert store.find("x", [1, 1]) == (caches[0], 2)
    store.put("d", [4] * 7, Held(7))
    assert store.nbytes == 0
    store.put("e", [5], Held(1))
    store.clear()
    assert store.find("e", [5]) is None
