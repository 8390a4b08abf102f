"""Which request goes wrong, and how."""

from __future__ import annotations

from rollwright.e2b_server import FAULTS, Faults

START = "/process.Process/Start"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_planned_fault_happens_to_the_next_request_that_it_fits() -> None:
    faults = Faults()
    faults.once("lost_end")
    faults.once("busy", path="/files", times=2)
    assert faults.pick("POST", "/v2/sandboxes") is None
    assert faults.pick("POST", "/files") == "busy"
    assert faults.pick("POST", START) == "lost_end"
    assert faults.pick("POST", START) is None
    assert [faults.pick("GET", "/files") for _ in range(2)] == ["busy", None]


def test_faults_each_so_many_seconds_come_in_turn_and_wait_for_their_request() -> None:
    clock = Clock()
    faults = Faults(clock=clock)
    faults.every(1.0, ["busy", "cut_stream"])
    assert faults.pick("POST", START) is None
    clock.now = 1.0
    assert faults.pick("POST", "/files") == "busy"
    assert faults.pick("POST", "/files") is None
    clock.now = 5.0
    assert faults.pick("POST", "/files") is None
    assert faults.pick("POST", START) == "cut_stream"
    clock.now = 6.0
    assert faults.pick("POST", "/files") == "busy"
    faults.stop()
    clock.now = 100.0
    assert faults.pick("POST", START) is None


def test_the_same_seed_gives_the_same_faults() -> None:
    def picks(seed: int) -> list[str | None]:
        faults = Faults(seed=seed)
        faults.at_random(0.5, FAULTS)
        return [faults.pick("POST", START) for _ in range(50)]

    assert picks(1) == picks(1)
    assert picks(1) != picks(2)
    assert {None, "lost_end", "duplicate"} <= set(picks(3))


def test_how_a_box_is_doing_is_always_answered() -> None:
    faults = Faults()
    faults.at_random(1.0, FAULTS)
    assert faults.pick("GET", "/health") is None
    assert faults.pick("GET", "/files") is not None
