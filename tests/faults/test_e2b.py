"""E2B with everything going wrong between us and the box: each job runs once, with its own code and bytes."""

from __future__ import annotations

import random
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from rollwright.e2b_server import FAULTS, Fault
from rollwright.errors import (
    AmbiguousOutcome,
    ConfigError,
    PathNotFound,
    RateLimited,
    RollwrightError,
    SandboxGone,
    Transient,
    Unreachable,
)
from rollwright.sandboxes import Sandbox
from rollwright.sandboxes.e2b.guest import Guest
from rollwright.testing.chaos_proxy import Cut, chaos_proxy
from rollwright.testing.known_jobs import KnownJob, known_job, run_all, traces
from support.e2b_rig import SPEC, Rig, boxes_of, e2b_rig

pytestmark = pytest.mark.anyio

START = "/process.Process/Start"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2b-faults")


@pytest.fixture
async def rig(state: Path) -> AsyncIterator[Rig]:
    async with e2b_rig(state, seed=1) as rig:
        yield rig


# --------------------------------------------------------------------------- many jobs, much trouble


async def test_app_faults_every_third_of_a_second(rig: Rig) -> None:
    kinds = [kind for kind in FAULTS if kind != "truncate"]
    rig.faults.every(0.35, kinds)
    async with rig.provider() as provider:
        boxes = await boxes_of(provider, 3)
        dice = random.Random(1)
        jobs: list[KnownJob] = []
        while len(jobs) < 60 or (len(jobs) < 600 and not all(rig.faults.counts[kind] for kind in kinds)):
            more = [known_job(boxes[n % 3], dice) for n in range(20)]
            assert await run_all(more, at_once=8) == []
            jobs += more
        rig.faults.stop()
        assert await traces(jobs) == []
        rig.faults.every(0.35, kinds)
    assert all(rig.faults.counts[kind] for kind in kinds), rig.faults.counts
    assert rig.server.boxes.all() == []
    assert sum(provider.retries.counts.values()) > 0
    assert not [kind for _, kind in provider.retries.counts if kind.startswith("unclassified")]


@pytest.mark.parametrize("cut", ["rst", "fin"])
async def test_every_connection_is_cut_after_a_second_and_a_half(rig: Rig, cut: Cut) -> None:
    async with chaos_proxy(rig.port, seconds=1.5, cuts=(cut,)) as proxy:
        rig.url = proxy.url
        async with rig.provider() as provider:
            boxes = await boxes_of(provider, 2)
            dice = random.Random(2)
            jobs: list[KnownJob] = []
            while len(jobs) < 24 or (len(jobs) < 240 and proxy.counts[cut] < 3):
                more = [known_job(boxes[n % 2], dice) for n in range(12)]
                assert await run_all(more, at_once=6) == []
                jobs += more
            proxy.seconds = 0
            assert await traces(jobs) == []
        assert proxy.counts[cut] >= 3
    assert rig.server.boxes.all() == []
    assert not [kind for _, kind in provider.retries.counts if kind.startswith("unclassified")]


async def test_requests_that_come_twice_or_late(rig: Rig) -> None:
    kinds: tuple[Fault, ...] = ("duplicate", "late_duplicate", "delay")
    rig.faults.at_random(0.5, kinds)
    async with rig.provider() as provider:
        boxes = await boxes_of(provider, 2)
        dice = random.Random(3)
        jobs: list[KnownJob] = []
        while len(jobs) < 30 or (len(jobs) < 300 and any(rig.faults.counts[kind] < 5 for kind in kinds)):
            more = [known_job(boxes[n % 2], dice) for n in range(10)]
            assert await run_all(more, at_once=6) == []
            jobs += more
        rig.faults.stop()
        assert await traces(jobs) == []
        rig.faults.at_random(0.5, kinds)
    assert all(rig.faults.counts[kind] >= 5 for kind in kinds), rig.faults.counts
    assert rig.server.boxes.all() == []


# --------------------------------------------------------------------------- what each fault is to us


@pytest.fixture
async def guest(rig: Rig) -> AsyncIterator[Guest]:
    """One box, asked once only."""
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key=secrets.token_hex(8))
        yield box._guest
        rig.faults.stop()


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("cut_stream", (Unreachable, AmbiguousOutcome)),
        ("lost_end", (AmbiguousOutcome,)),
        ("unavailable", (Unreachable,)),
        ("bad_gateway", (Unreachable,)),
        ("late_bad_gateway", (Unreachable,)),
        ("drop_reply", (Unreachable, AmbiguousOutcome)),
        ("busy", (Unreachable,)),
        ("rate_limited", (RateLimited,)),
    ],
)
async def test_a_fault_of_a_command_is_named(
    rig: Rig, guest: Guest, fault: Fault, kinds: tuple[type[RollwrightError], ...]
) -> None:
    rig.faults.once(fault, path=START)
    with pytest.raises(kinds) as raised:
        await guest.exec(["sleep", "0.3"])
    assert type(raised.value) in kinds
    assert "unclassified" not in raised.value.details
    assert rig.faults.counts == {fault: 1}
    assert (await guest.exec(["echo", "well"])).stdout == b"well\n"


@pytest.mark.parametrize("fault", ["busy", "rate_limited", "bad_gateway", "drop_reply"])
async def test_a_fault_of_an_upload_is_named(rig: Rig, guest: Guest, fault: Fault) -> None:
    rig.faults.once(fault, path="/files")
    with pytest.raises((Transient, AmbiguousOutcome)) as raised:
        await guest.put("/tmp/file", b"x")
    assert "unclassified" not in raised.value.details
    assert rig.faults.counts == {fault: 1}


async def test_a_download_that_breaks_off_is_never_a_shorter_file(rig: Rig, guest: Guest) -> None:
    data = random.Random(4).randbytes(3_000_000)
    await guest.put("/tmp/file", data)
    rig.faults.once("truncate")
    with pytest.raises((Transient, AmbiguousOutcome)):
        await guest.get("/tmp/file")
    assert rig.faults.counts == {"truncate": 1}
    assert await guest.get("/tmp/file") == data


async def test_a_box_that_died_is_gone_at_once_and_not_asked_again(rig: Rig) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        (theirs,) = rig.server.boxes.all()
        await rig.server.boxes.kill(theirs)
        for ask in (box.exec(["true"]), box.put("/tmp/x", b"x"), box.get("/tmp/x"), box.renew(100)):
            with pytest.raises(SandboxGone):
                await ask
        await box.close()
        assert set(provider.retries.counts.values()) == {1}


async def test_a_refused_key_is_a_setting_to_mend(rig: Rig) -> None:
    async with rig.provider(api_key="another") as provider:
        with pytest.raises(ConfigError, match="Unauthorized"):
            await provider.probe()


# --------------------------------------------------------------------------- boxes


@pytest.mark.parametrize("fault", ["drop_reply", "late_bad_gateway", "duplicate", "late_duplicate", "busy"])
async def test_a_create_that_goes_wrong_makes_one_box(rig: Rig, fault: Fault) -> None:
    rig.faults.once(fault, path="/v2/sandboxes", times=2)
    async with rig.provider() as provider:
        await provider.create(SPEC, key="k")
        assert len(rig.server.boxes.all()) == 1
        rig.faults.stop()
    assert rig.faults.counts[fault] >= 1
    assert rig.server.boxes.all() == []


async def test_a_late_copy_of_a_create_does_not_raise_the_dead(rig: Rig) -> None:
    rig.faults.once("late_duplicate", path="/v2/sandboxes")
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        await box.close()
        # The copy comes within a second, and this takes longer.
        other = await provider.create(SPEC, key="k")
        await other.exec(["sleep", "1.2"])
        assert rig.faults.counts == {"late_duplicate": 1}
        assert [theirs.id for theirs in rig.server.boxes.all()] == [other.id]


@pytest.mark.parametrize("fault", ["delay", "drop_reply", "bad_gateway"])
async def test_a_create_that_is_given_up_leaves_no_box(rig: Rig, fault: Fault) -> None:
    async with rig.provider() as provider:
        given_up = 0
        for n in range(1, 20):
            rig.faults.once(fault, path="/v2/sandboxes")
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(_cancel_when_injected, rig, fault, n, scope)
                    await (await provider.create(SPEC, key=f"k{n}")).close()
                    group.cancel_scope.cancel()
            given_up += scope.cancelled_caught
            if given_up:  # on some machines the second request is there before we are
                break
        assert given_up
        # The server is still busy with the first request for up to a second.
        await anyio.sleep(1.5)
        with anyio.fail_after(30):
            while rig.server.boxes.all():  # noqa: ASYNC110 - what is waited for has no event
                await anyio.sleep(0.05)
    assert rig.faults.counts == {fault: n}


async def _cancel_when_injected(rig: Rig, fault: Fault, count: int, scope: anyio.CancelScope) -> None:
    while rig.faults.counts[fault] < count:  # noqa: ASYNC110 - what is waited for has no event
        await anyio.sleep(0.001)
    scope.cancel()


async def test_the_pace_that_a_cluster_asks_for_is_kept(rig: Rig) -> None:
    rig.faults.once("rate_limited", path="/v2/sandboxes")
    async with rig.provider() as provider:
        started = anyio.current_time()
        await provider.create(SPEC, key="k")
        assert anyio.current_time() - started >= 1
    assert rig.faults.counts == {"rate_limited": 1}


@pytest.mark.skipif(shutil.which("busybox") is None, reason="needs busybox")
async def test_a_box_without_setpriv_has_an_agent_all_the_same(rig: Rig) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        await box.exec(["sh", "-c", "rm /usr/bin/setpriv && cp $(command -v busybox) /usr/local/bin/su"])
        await box._guest.set_up()
        result = await box.exec(["sh", "-c", 'echo "$(id -un) $HOME $1 $2"', "sh", "-x", "a b"], user="agent")
        assert result.stdout == b"agent /home/agent -x a b\n"
        assert (await box.exec(["sh", "-c", "exit 3"], user="agent", input=b"x")).exit_code == 3


async def test_big_input_is_not_copied_into_memory_and_does_not_stay(rig: Rig) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        data = random.Random(7).randbytes(5_000_000)
        assert (await box.exec(["cksum"], input=data)).exit_code == 0
        rig.faults.once("late_bad_gateway", path=START)
        await box.put("/tmp/file", data)
        assert rig.faults.counts == {"late_bad_gateway": 1}
        used = await box.exec(["sh", "-c", "du -s /run/rollwright/exec /var/lib/rollwright | cut -f1"])
        assert all(int(kilobytes) < 1000 for kilobytes in used.stdout.split())


@pytest.mark.parametrize("fault", ["drop_reply", "bad_gateway", "late_bad_gateway", "busy"])
async def test_a_close_that_goes_wrong_still_removes_the_box(rig: Rig, fault: Fault) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        rig.faults.once(fault, path=f"/sandboxes/{box.id}")
        await box.close()
    assert rig.faults.counts == {fault: 1}
    assert rig.server.boxes.all() == []


async def test_what_a_login_shell_says_and_sets_does_not_matter(rig: Rig) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC, key="k")
        noise = b"echo Welcome; echo 'rollwright-exec 1'; export PATH=/nowhere:$PATH HOME=/wrong\n"
        await box.put("/etc/profile.d/noise.sh", noise)
        assert b"Welcome" in noise
        result = await box.exec(["sh", "-c", 'echo "$PATH $HOME"'])
        assert b"nowhere" not in result.stdout
        assert result.stdout.endswith(b" /root\n")
        job = await box.run(known_job(box, random.Random(5)).spec)
        assert job.state == "exited"


async def test_a_full_disk_keeps_no_answer_back(rig: Rig) -> None:
    async with rig.provider() as provider:
        box = await provider.create(SPEC.__class__(image="small", network="none"), key="k")
        job = known_job(box, random.Random(6))
        script = "head -c 40000000 /dev/zero >/tmp/full; echo done; exit 5"
        result = await box.run(job.spec.__class__(id=job.spec.id, argv=("sh", "-c", script), user="agent"))
        assert (result.state, result.exit_code, result.stdout.data()) == ("exited", 5, b"done\n")
        with pytest.raises(PathNotFound):
            await box.get("/tmp/none")


async def test_a_command_is_asked_for_again_and_still_runs_once(rig: Rig) -> None:
    async with rig.provider() as provider:
        box: Sandbox = await provider.create(SPEC, key="k")
        for fault in ("drop_reply", "cut_stream", "lost_end", "late_bad_gateway", "duplicate"):
            rig.faults.once(fault, path=START)
            result = await box.exec(["sh", "-c", f"echo x >>/tmp/{fault}; sleep 0.2; wc -c </tmp/{fault}"])
            assert result.stdout.strip() == b"2", fault
        assert sum(rig.faults.counts.values()) == 5


async def test_what_happens_to_one_box_is_not_felt_by_its_neighbours(rig: Rig) -> None:
    async with rig.provider() as provider:
        victim, *others = await boxes_of(provider, 4)
        ended: list[bytes] = []

        async def work(box: Sandbox) -> None:
            ended.append((await box.exec(["sh", "-c", "until [ -e /tmp/go ]; do sleep 0.02; done; echo well"])).stdout)

        async with anyio.create_task_group() as group:
            for box in others:
                group.start_soon(work, box)
            for fault in ("cut_stream", "lost_end", "unavailable", "drop_reply"):
                rig.faults.once(fault, path=START)
                await victim.exec(["sleep", "0.3"])
            for box in others:
                await box.put("/tmp/go", b"")
        assert ended == [b"well\n"] * 3
        assert sum(rig.faults.counts.values()) == 4
        assert sum(provider.tally().failures.values()) == 4, "of the one box alone"


# --------------------------------------------------------------------------- a cluster that forgets requests


@pytest.fixture
async def forgetful(state: Path) -> AsyncIterator[Rig]:
    async with e2b_rig(state / "forgetful", seed=1, forgetful=True) as rig:
        yield rig


@pytest.mark.parametrize("fault", ["drop_reply", "late_bad_gateway"])
async def test_a_box_whose_answer_was_lost_is_found_by_its_labels_or_removed_in_the_end(
    forgetful: Rig, fault: Fault
) -> None:
    forgetful.faults.once(fault, path="/v2/sandboxes")
    async with forgetful.provider() as provider:
        box = await provider.create(SPEC, key="k")
        assert (await box.exec(["echo", "well"])).stdout == b"well\n"
        # A 502 is repeated by the SDK itself, which knows no labels.
        assert len(forgetful.server.boxes.all()) == (1 if fault == "drop_reply" else 2)
    assert forgetful.faults.counts == {fault: 1}
    assert forgetful.server.boxes.all() == []


async def test_a_boot_begun_again_finds_the_box_of_the_first(forgetful: Rig) -> None:
    forgetful.faults.once("drop_reply", path="/v2/sandboxes")
    async with forgetful.provider(patience_seconds=0) as provider:
        with pytest.raises(AmbiguousOutcome):
            await provider.create(SPEC, key="k")
        (made,) = forgetful.server.boxes.all()
        assert (await provider.create(SPEC, key="k")).id == made.id
    assert forgetful.server.boxes.all() == []
