import pytest
from headers import too_many_requests
from ratelimit import Bucket


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def drained(rate, capacity=1):
    clock = Clock()
    bucket = Bucket(rate=rate, capacity=capacity, clock=clock)
    for _ in range(capacity):
        assert bucket.allow()
    return bucket, clock


@pytest.mark.parametrize(("rate", "seconds"), [(1, 1.0), (0.5, 2.0), (4, 0.25)])
def test_an_empty_bucket_says_how_long_to_wait(rate, seconds):
    bucket, _ = drained(rate)
    assert bucket.retry_after() == pytest.approx(seconds)


def test_waiting_as_long_as_told_is_enough():
    bucket, clock = drained(rate=0.25, capacity=3)
    clock.now += bucket.retry_after()
    assert bucket.allow()


def test_a_full_bucket_needs_no_wait():
    assert Bucket(rate=1, capacity=5, clock=Clock()).retry_after() == 0.0


def test_the_header_is_in_whole_seconds():
    bucket, _ = drained(rate=0.4)
    assert too_many_requests(bucket) == (429, {"Retry-After": "3"})


def test_the_limit_itself_is_kept():
    bucket, clock = drained(rate=1, capacity=2)
    assert not bucket.allow()
    clock.now += 1
    assert bucket.allow()
    assert not bucket.allow()
