"""Which sandbox backends work here, what limits they keep, and whether they have the data set's images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio.to_thread

from rollwright.doctor import Check, Finding, Look, found, of_error
from rollwright.doctor.subject import Subject
from rollwright.errors import RollwrightError, Unsupported
from rollwright.sandboxes import Capabilities
from rollwright.sandboxes.namespaces import cgroups

_KNOWN = ("namespaces", "docker", "e2b")
_FIXES = {
    "namespaces": "see docs/sandboxes.md, or use another backend: sandbox.kind=docker",
    "docker": "start the daemon, or name another one's socket with sandbox.docker.url",
    "e2b": "check E2B_API_KEY, and sandbox.e2b.domain or api_url for a cluster of your own",
}


def checks(subject: Subject) -> list[Check]:
    backends = [*_KNOWN, *([subject.backend] if subject.backend not in _KNOWN else [])]
    looks = [
        Check(name=kind, look=_backend(kind), fix=_FIXES.get(kind, f"see the options of [sandbox.{kind}]"), seconds=30)
        for kind in backends
    ]
    if subject.backend == "namespaces":
        looks.append(Check(name="cgroups", look=_cgroups, fix="run as root"))
    if subject.config is not None:
        looks.append(Check(name="images", look=_images, fix="see docs/sandboxes.md on images", seconds=60))
    return looks


def _backend(kind: str) -> Look:
    async def look(subject: Subject) -> list[Finding]:
        wanted = subject.backend == kind
        if kind == "e2b" and not (wanted or subject.e2b_key):
            return found(kind, "skipped", "not configured, and no E2B_API_KEY in the environment")
        try:
            _, has = await subject.provider(kind).own()
        except RollwrightError as error:
            asked = wanted or (kind == "e2b" and not isinstance(error, Unsupported))
            return [of_error(kind, error, _FIXES.get(kind, ""), state="fail" if asked else "skipped")]
        return found(kind, "ok", _can(has))

    return look


def _can(has: Capabilities) -> str:
    parts = ["boxes boot" if has.name == "namespaces" else "answers"]
    parts.append("two users" if has.users else "one user only, so job records can be forged")
    parts.append(f"networks {', '.join(sorted(has.networks))}")
    parts.append("memory and pids limits" if has.memory_limit and has.pids_limit else "no memory or pids limits")
    return ", ".join(parts)


async def _cgroups(subject: Subject) -> list[Finding]:
    """Which limits of a box can be kept."""
    limits = await anyio.to_thread.run_sync(cgroups.find)
    settings = {"memory": "sandbox.memory_mb", "pids": "sandbox.pids"}
    lost = [setting for name, setting in settings.items() if limits is None or getattr(limits, name) is None]
    if limits is not None and not lost:
        return found("cgroups", "ok", f"version {limits.version}, memory and pids are ours to limit")
    seen = f"version {_version()}, not delegated to us: {' and '.join(lost)} cannot be kept"
    box = None if subject.config is None else subject.config.sandbox
    if box is not None and box.memory_mb is None and box.pids is None:
        return found("cgroups", "ok", f"{seen}, and are not set")
    return found("cgroups", "warn", seen, "run as root, in a container with a writable /sys/fs/cgroup")


def _version() -> int:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return 2 if any(line.split(" ")[2] == "cgroup2" for line in lines) else 1


async def _images(subject: Subject) -> list[Finding]:
    provider, _ = await subject.provider(subject.backend).get()
    tasks = await subject.tasks.get()
    wanted = sorted({task.agent.image for task in tasks.tasks.values()})
    problems: list[RollwrightError] = []
    for image in wanted:
        try:
            await provider.check_image(image)
        except RollwrightError as error:
            problems.append(error)
    if not problems:
        return found("images", "ok", f"all {len(wanted)} are there")
    first = of_error("images", problems[0], "build or pull the images; see docs/sandboxes.md")
    return [replace(first, seen=f"{len(problems)} of {len(wanted)} are missing, the first: {first.seen}")]
