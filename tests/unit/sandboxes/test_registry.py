"""The registry of boxes, cgroup discovery and id ranges."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rollwright.errors import SandboxBroken, StoreError
from rollwright.sandboxes.namespaces import cgroups
from rollwright.sandboxes.namespaces.registry import Process, Record, Registry, boot_id, now


def record(**more: object) -> Record:
    me = Process.of(os.getpid())
    assert me is not None
    made = Record(
        id="b1",
        key="k",
        labels={"run": "r"},
        boot=boot_id(),
        owner=me,
        init=None,
        created=now(),
        lease_until=now() + 5,
        cgroups=("/g",),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "boxes")
    assert registry.records() == []
    made = record(init=Process(pid=1, started=2))
    registry.write(made)
    registry.write(record(id="b0", created=0.0))
    assert [r.id for r in registry.records()] == ["b0", "b1"]
    assert registry.records()[1] == made
    registry.renew("b1", 99.0)
    assert registry.records()[1].lease_until == 99.0
    registry.remove("b1")
    registry.remove("b1")
    registry.renew("b1", 1.0)
    assert [r.id for r in registry.records()] == ["b0"]


def test_a_strange_file_in_the_registry_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(StoreError, match=r"x\.json"):
        Registry(tmp_path).records()


def test_a_process_is_not_taken_for_another_of_its_number() -> None:
    child = subprocess.Popen(["sleep", "60"])
    process = Process.of(child.pid)
    assert process is not None
    assert process.alive
    assert not replace(process, started=process.started - 1).alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive, "a zombie does not live"
    child.wait()
    assert Process.of(child.pid) is None


def test_cgroup_controllers_are_found_where_they_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "pids").mkdir()
    (tmp_path / "cpu").mkdir()
    v1 = "".join(
        f"cgroup {tmp_path}/{folder} cgroup rw,{options} 0 0\n"
        for folder, options in (("memory", "memory"), ("pids", "pids"), ("cpu", "cpu,cpuacct"))
    )
    found = cgroups.find(v1)
    assert found is not None
    assert (found.version, found.memory, found.pids, found.cpu) == (
        1,
        tmp_path / "memory/rollwright",
        tmp_path / "pids/rollwright",
        tmp_path / "cpu/rollwright",
    )
    found.create("box", memory_mb=None, pids=None, cpus=0.5)
    assert [(tmp_path / "cpu/rollwright/box" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")] == [
        "50000",
        "100000",
    ]
    v2 = tmp_path / "v2"
    v2.mkdir()
    (v2 / "cgroup.controllers").write_text("cpu memory pids\n")
    (v2 / "cgroup.subtree_control").write_text("")
    found = cgroups.find(f"cgroup2 {v2} cgroup2 rw 0 0\n")
    assert found is not None
    assert (found.version, found.memory, found.cpu) == (2, v2 / "rollwright", v2 / "rollwright")
    found.create("box", memory_mb=1, pids=7, cpus=1.5)
    limits = [(v2 / "rollwright/box" / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")]
    assert limits == ["1048576", "7", "150000 100000"]
    (v2 / "cgroup.controllers").write_text("memory pids\n")
    found = cgroups.find(f"cgroup2 {v2} cgroup2 rw 0 0\n")
    assert found is not None
    assert found.cpu is None
    (v2 / "cgroup.controllers").write_text("hugetlb\n")
    assert cgroups.find(f"cgroup2 {v2} cgroup2 rw 0 0\n") is None
    assert cgroups.find("tmpfs /tmp tmpfs rw 0 0\n") is None


@pytest.mark.anyio
async def test_a_cgroup_that_does_not_go_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "box" / "held").mkdir(parents=True)
    with pytest.raises(SandboxBroken, match="box"):
        await cgroups.remove([tmp_path / "gone", tmp_path / "box"], seconds=0.1)
    (tmp_path / "box" / "held").rmdir()
    await cgroups.remove([tmp_path / "gone", tmp_path / "box"])
    assert not (tmp_path / "box").exists()
