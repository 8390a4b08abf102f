import pytest
from lru import LRU


def test_the_oldest_entry_makes_room():
    cache = LRU(2)
    for key in "abc":
        cache.put(key, key.upper())
    assert "a" not in cache
    assert len(cache) == 2


def test_storing_again_makes_an_entry_recent():
    cache = LRU(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 3)
    cache.put("c", 4)
    assert "b" not in cache
    assert cache.get("a") == 3


def test_hits_and_misses_are_counted():
    cache = LRU(2)
    cache.put("a", None)
    assert cache.get("a", "default") is None
    assert cache.get("b", "default") == "default"
    assert (cache.hits, cache.misses) == (1, 1)


def test_a_cache_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        LRU(0)
