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
    looks.append(Check(name="box limits", look=_box_limits, fix="run as root", seconds=30))
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
    return ", ".join(parts)


async def _box_limits(subject: Subject) -> list[Finding]:
    """Which limits of a box this backend can keep here, against those that the run file sets."""
    _, has = await subject.provider(subject.backend).get()
    keeps = {"memory_mb": has.memory_limit, "pids": has.pids_limit, "cpus": has.cpu_limit, "disk_mb": has.disk_limit}
    kept = ", ".join(name for name, keeps_it in keeps.items() if keeps_it) or "none"
    lost = [name for name, keeps_it in keeps.items() if not keeps_it]
    seen = f"kept: {kept}"
    if subject.backend == "namespaces":
        seen = f"cgroup version {await anyio.to_thread.run_sync(_cgroup_version)}; {seen}"
    if not lost:
        return found("box limits", "ok", seen)
    box = None if subject.config is None else subject.config.sandbox
    asked = [name for name in lost if box is None or (name in box.model_fields_set and getattr(box, name) is not None)]
    seen = f"{seen}; not kept: {', '.join(lost)}"
    if not asked:
        return found("box limits", "ok", f"{seen}, and not set")
    if subject.backend == "namespaces":
        fix = "run as root, in a container with a writable /sys/fs/cgroup, so that its controllers are ours"
    else:
        fix = f"unset sandbox.{asked[0]}; the {has.name} backend cannot keep it here"
    return found("box limits", "warn", seen, fix)


def _cgroup_version() -> int:
    """Of the controllers that are ours to use, else of those the machine has."""
    ours = cgroups.find()
    if ours is not None:
        return ours.version
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
    if subject.pulls():
        seen = f"{len(problems)} of {len(wanted)} are not here, the run pulls them"
        return found("images", "warn", seen, "pull them before, where time or the network may be short")
    first = of_error("images", problems[0], "build or pull the images; see docs/sandboxes.md")
    return [replace(first, seen=f"{len(problems)} of {len(wanted)} are missing, the first: {first.seen}")]
