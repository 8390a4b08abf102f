import pytest
from ratelimit import Bucket


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_burst_is_allowed_up_to_the_capacity():
    bucket = Bucket(rate=1, capacity=3, clock=Clock())
    assert [bucket.allow() for _ in range(4)] == [True, True, True, False]


def test_tokens_come_back_with_time():
    clock = Clock()
    bucket = Bucket(rate=2, capacity=1, clock=clock)
    assert bucket.allow()
    assert not bucket.allow()
    clock.now += 0.5
    assert bucket.allow()


def test_a_long_pause_does_not_save_up_more_than_the_capacity():
    clock = Clock()
    bucket = Bucket(rate=1, capacity=2, clock=clock)
    clock.now += 1000
    assert [bucket.allow() for _ in range(3)] == [True, True, False]


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rate"):
        Bucket(rate=0, capacity=1)
