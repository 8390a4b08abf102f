from lru import LRU


def filled(size):
    cache = LRU(size)
    for key in range(size):
        cache.put(key, key * key)
    return cache


def test_an_entry_that_was_just_read_stays():
    cache = filled(2)
    assert cache.get(0) == 0
    cache.put("new", 1)
    assert 0 in cache
    assert 1 not in cache


def test_entries_leave_in_the_order_of_their_last_use():
    cache = filled(4)
    for key in (2, 0, 3):
        cache.get(key)
    gone = []
    for number in range(4):
        cache.put(f"new-{number}", None)
        gone += [key for key in range(4) if key not in cache and key not in gone]
    assert gone == [1, 2, 0, 3]


def test_without_reads_the_oldest_leaves():
    cache = filled(3)
    cache.put("new", None)
    assert 0 not in cache
    assert 1 in cache


def test_a_miss_changes_nothing():
    cache = filled(2)
    assert cache.get("other") is None
    cache.put("new", None)
    assert 0 not in cache
    assert 1 in cache
