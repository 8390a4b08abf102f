"""Random jobs, commands and files while connections break and requests get lost, doubled and late: nothing shows it."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import anyio
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rollwright.e2b_server import FAULTS
from rollwright.sandboxes import Job, JobResult, JobSpec
from rollwright.testing.chaos_proxy import chaos_proxy
from rollwright.testing.known_jobs import alive
from support.e2b_rig import SPEC, e2b_rig

RATES = st.floats(0.2, 0.6)
LIVES = st.sampled_from([0.2, 0.5, 1.5])
"""Seconds of a connection."""
INJECTED: Counter[str] = Counter()
"""Faults of all examples."""


class E2BMachine(RuleBasedStateMachine):
    """One box behind a proxy and a server that both go wrong; a model of what must have happened in it."""

    @initialize(seed=st.integers(0, 1 << 30), rate=RATES, seconds=LIVES)
    def open(self, seed: int, rate: float, seconds: float) -> None:
        self.stack = ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal())
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.dice = random.Random(seed)
        self.jobs: dict[str, tuple[JobSpec, Job, int, bytes]] = {}
        self.ended: dict[str, JobResult] = {}
        self.files: dict[str, bytes] = {}
        self.commands = 0
        self.stack.enter_context(self.portal.wrap_async_context_manager(self._rig(folder, seed)))
        self.requests_go_wrong(rate)
        self.connections_break(seconds)

    def _rig(self, folder: Path, seed: int) -> AsyncExitStack:
        machine = self

        class Rig(AsyncExitStack):
            async def __aenter__(self) -> Rig:
                machine.rig = await self.enter_async_context(e2b_rig(folder, seed=seed))
                machine.proxy = await self.enter_async_context(chaos_proxy(machine.rig.port, seconds=0, seed=seed))
                machine.rig.url = machine.proxy.url
                machine.provider = await self.enter_async_context(machine.rig.provider())
                machine.box = await machine.provider.create(SPEC, key="k")
                return self

        return Rig()

    # ------------------------------------------------------------------ trouble

    @rule(rate=RATES)
    def requests_go_wrong(self, rate: float) -> None:
        self.rig.faults.at_random(rate, FAULTS)

    @rule(seconds=LIVES)
    def connections_break(self, seconds: float) -> None:
        self.proxy.seconds = seconds

    # ------------------------------------------------------------------ work

    @rule(code=st.integers(0, 120), seconds=st.sampled_from([0, 0.1, 0.7]))
    def start_job(self, code: int, seconds: float) -> None:
        id, out = self.dice.randbytes(16).hex(), self.dice.randbytes(self.dice.choice([0, 10, 5000]))
        script = f"echo ran >>/tmp/ran.{id}; (sleep 300; echo late >>/tmp/ran.{id}) & sleep {seconds}; cat; exit {code}"
        spec = JobSpec(id=id, argv=("sh", "-c", script), user="agent", cwd="/tmp", stdin=out, seconds=60)
        self.jobs[id] = (spec, self.portal.call(self.box.start, spec), code, out)

    @precondition(lambda self: self.jobs)
    @rule()
    def start_a_job_again(self) -> None:
        spec = self.dice.choice(list(self.jobs.values()))[0]
        self.portal.call(self.box.start, spec)

    @precondition(lambda self: self.jobs)
    @rule()
    def wait_for_a_job(self) -> None:
        self._end(self.dice.choice(list(self.jobs)), cancel=False)

    @precondition(lambda self: self.jobs)
    @rule()
    def cancel_a_job(self) -> None:
        self._end(self.dice.choice(list(self.jobs)), cancel=True)

    def _end(self, id: str, *, cancel: bool) -> None:
        _, job, code, out = self.jobs[id]
        result = self.portal.call(job.cancel if cancel else job.wait)
        assert result.survivors == 0
        if id in self.ended:
            assert result == self.ended[id]
        elif result.state == "exited":
            assert (result.exit_code, result.stdout.data()) == (code, out)
        else:
            assert cancel
            assert result.state == "cancelled"
        self.ended[id] = result

    @rule()
    def run_a_command(self) -> None:
        result = self.portal.call(self.box.exec, ["sh", "-c", "echo x >>/tmp/commands; cat; exit 3"])
        assert result.exit_code == 3
        self.commands += 1

    @rule(name=st.sampled_from(["a", "b"]), size=st.sampled_from([0, 100, 2_000_000]))
    def put_a_file(self, name: str, size: int) -> None:
        data = self.dice.randbytes(size)
        self.portal.call(self.box.put, f"/srv/{name}", data)
        self.files[name] = data

    @precondition(lambda self: self.files)
    @rule()
    def get_a_file(self) -> None:
        name = self.dice.choice(list(self.files))
        assert self.portal.call(self.box.get, f"/srv/{name}") == self.files[name]

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        with self.stack:
            for id in self.jobs:
                self._end(id, cancel=False)
            self.rig.faults.stop()
            self.proxy.seconds = 0
            # What is still on its way arrives.
            self.portal.call(anyio.sleep, 1.5 if self.rig.faults.counts["late_duplicate"] else 0)
            for id in self.jobs:
                traces = self.portal.call(self.box.exec, ["sh", "-c", f"cat /tmp/ran.{id}"]).stdout
                # One that was cancelled may have come to nothing before.
                assert traces == b"ran\n" or (traces == b"" and self.ended[id].state == "cancelled")
            counted = self.portal.call(self.box.exec, ["sh", "-c", "cat /tmp/commands 2>/dev/null | wc -l"])
            assert int(counted.stdout) == self.commands
            for name, data in self.files.items():
                assert self.portal.call(self.box.get, f"/srv/{name}") == data
            assert self.portal.call(alive, self.box) == []
            INJECTED.update(self.rig.faults.counts)
            INJECTED.update(self.proxy.counts)
        assert self.rig.server.boxes.all() == []


def test_whatever_happens_every_job_and_command_ran_once() -> None:
    INJECTED.clear()
    for _ in range(5):
        run_state_machine_as_test(
            E2BMachine,
            settings=settings(
                max_examples=4,
                stateful_step_count=12,
                deadline=None,
                derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )
        if sum(INJECTED.values()) >= 20 and INJECTED["rst"] + INJECTED["fin"] >= 1:
            break
    assert sum(INJECTED.values()) >= 20, INJECTED
    assert INJECTED["rst"] + INJECTED["fin"] >= 1, INJECTED
