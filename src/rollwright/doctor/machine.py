"""The machine itself: versions, memory, disk, and the limits of this process for the wanted concurrency."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from pathlib import Path

from rollwright import __version__
from rollwright.doctor import Check, Finding, found
from rollwright.doctor.subject import Blocked, Subject

_FILES, _FILES_PER_ROLLOUT = 64, 8
"""Measured: 17, and 7 more for each rollout whose CLI keeps one connection."""
_ROOMY_FILES_PER_ROLLOUT = 24
"""With sub-agents, a connection each, and engine calls to match."""
_PROCESSES_PER_ROLLOUT = 128
"""A CLI in node, and a test run with its workers."""
_JOBS_MB = 512
"""What the records of a box's jobs may take beside its writable layer."""
_ROLLOUT_MB = 16
"""Of a stored rollout: logs at their caps, and the samples of some 100,000 tokens."""
_LITTLE_MB = 1024
_SETTINGS = {"disk": "run.output", "cache": "XDG_CACHE_HOME", "state": "XDG_STATE_HOME"}
_DEFAULT_CONCURRENCY = 4


def checks(subject: Subject) -> list[Check]:
    return [
        Check(name="versions", look=_versions, fix="use Linux 6.6 or newer and Python 3.11 or newer"),
        Check(name="git", look=_git, fix="install git (Debian: apt-get install git)"),
        Check(name="limits", look=_limits, fix="raise the limits of this shell with ulimit"),
        Check(name="memory", look=_memory, fix="lower run.concurrency"),
        Check(name="disk", look=_disk, fix="set run.output to a bigger disk"),
    ]


def _concurrency(subject: Subject) -> int:
    return _DEFAULT_CONCURRENCY if subject.config is None else subject.config.run.concurrency


async def _versions(subject: Subject) -> list[Finding]:
    seen = f"rollwright {__version__}, Python {platform.python_version()}, Linux {platform.release()}"
    return found("versions", "ok", seen)


async def _git(subject: Subject) -> list[Finding]:
    """Boxes made of the host's own files work with the host's git."""
    path = shutil.which("git")
    if path is not None:
        return found("git", "ok", path)
    state = "fail" if subject.backend == "namespaces" else "skipped"
    return found("git", state, "there is no git in PATH", "install git (Debian: apt-get install git)")


async def _limits(subject: Subject) -> list[Finding]:
    wanted = _concurrency(subject)
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed_processes = _running() + wanted * _PROCESSES_PER_ROLLOUT
    roomy = _FILES + wanted * _ROOMY_FILES_PER_ROLLOUT
    if _less(files, roomy):
        seen = f"{files} open files are allowed, {wanted} rollouts at a time may want {roomy}"
        who = " (as root), or lower run.concurrency" if _less(most_files, roomy) else ""
        short = _less(files, _FILES + wanted * _FILES_PER_ROLLOUT)
        return found("limits", "fail" if short else "warn", seen, f"ulimit -n {roomy}{who}")
    if os.geteuid() != 0 and _less(processes, needed_processes):
        return found(
            "limits",
            "warn",
            f"{processes} processes are allowed, {wanted} rollouts at a time may want {needed_processes}",
            f"ulimit -u {needed_processes}, or lower run.concurrency",
        )
    return found("limits", "ok", f"{_shown(files)} open files, enough for {wanted} rollouts at a time")


def _less(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def _running() -> int:
    """This user's processes, as the limit counts them."""
    mine = os.geteuid()
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                count += entry.stat().st_uid == mine
            except OSError:  # it has ended
                continue
    return count


async def _memory(subject: Subject) -> list[Finding]:
    """What boxes write is in memory."""
    if subject.backend != "namespaces":
        return found("memory", "skipped", f"boxes of {subject.backend} write to its own disk")
    available = _available_mb()
    wanted = _concurrency(subject)
    if subject.config is None:
        return found("memory", "ok", f"{_gib(available)} free")
    box = subject.config.sandbox
    each = min(box.disk_mb + _JOBS_MB, box.memory_mb or box.disk_mb + _JOBS_MB)
    seen = f"{_gib(available)} free; {wanted} boxes may write {_gib(wanted * each)}"
    if wanted * each > available:
        return found("memory", "warn", seen, "lower run.concurrency or sandbox.disk_mb")
    return found("memory", "ok", seen)


def _available_mb() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    raise Blocked("needs MemAvailable in /proc/meminfo")


async def _disk(subject: Subject) -> list[Finding]:
    output = Path.cwd() if subject.config is None else subject.config.run.output
    planned = 0
    if subject.config is not None:
        run = subject.config.run
        tasks = len((await subject.tasks.get()).tasks)
        planned = min(tasks, run.limit or tasks) * run.attempts
    findings: list[Finding] = []
    for name, folder, needed in (
        ("disk", output, max(_LITTLE_MB, planned * _ROLLOUT_MB)),
        ("cache", subject.places.cache, _LITTLE_MB),
        ("state", subject.places.state, 0),
    ):
        there = _nearest(folder)
        free = shutil.disk_usage(there).free >> 20
        seen = f"{_gib(free)} free at {there}"
        if not os.access(there, os.W_OK | os.X_OK):
            fix = f"make {there} writable for this user, or set {_SETTINGS[name]} to another folder"
            findings += found(name, "fail", f"{there} may not be written", fix)
        elif free < needed:
            fix = f"set {_SETTINGS[name]} to a bigger disk"
            state = "fail" if free < _LITTLE_MB // 4 else "warn"
            findings += found(name, state, f"{seen}; this run may want {_gib(needed)}", fix)
        else:
            findings += found(name, "ok", seen)
    return findings


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"
