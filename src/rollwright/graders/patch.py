"""The patch an agent leaves: taken with a git directory of our own, applied in one piece, proved by tree hash."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollwright.errors import ApplyFailed, CaptureFailed, GradingFailed, LimitError, TaskError
from rollwright.graders.diff import FileChange, MalformedPatch, Refusal, read_patch, refuse
from rollwright.graders.steps import run_step
from rollwright.sandboxes import Sandbox

__all__ = ["Baseline", "CaptureLimits", "Patch", "adopt", "apply", "capture", "take_baseline"]

_ROOT = "/var/rollwright-shadow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The working folder before the agent, as the shadow repository has it."""

    workdir: str
    shadow: str
    """Root-owned folder (0700) outside the workdir."""
    nonce: str
    base_tree: str
    """Git tree hash (40 hex digits) of all files but ignored ones and caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLimits:
    """Above `patch_bytes`, `content_bytes`, `files` or `entries` a capture is a `LimitError`. Above the `ignored_*`
    limits files that are new *and* ignored by the tree's own rules are taken for build products and left out, all of
    them."""

    patch_bytes: int = 64 << 20
    content_bytes: int = 256 << 20
    """Of new and changed files together."""
    files: int = 20_000
    entries: int = 500_000
    """Files and folders in the workdir, old and new: more would take longer to look at than a step may."""
    ignored_bytes: int = 16 << 20
    ignored_files: int = 2_000

    def args(self) -> tuple[str, ...]:
        """As patch.sh takes them."""
        return tuple(map(str, (self.content_bytes, self.files, self.ignored_bytes, self.ignored_files, self.entries)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What the agent changed."""

    data: bytes
    """Git patch with binary hunks and full object names; empty when nothing changed."""
    base_tree: str
    tree: str
    """Tree hash after the change: what applying `data` to `base_tree` must give."""
    sha256: str
    changes: tuple[FileChange, ...] = ()
    refusal: Refusal | None = None
    """Why it must not be applied."""
    left_out: int = 0
    """New ignored files beyond the limits, which are not in `data`."""

    @property
    def empty(self) -> bool:
        return not self.data and self.refusal is None

    @property
    def paths(self) -> tuple[str, ...]:
        """Touched paths, for people."""
        return tuple(change.name for change in self.changes)

    def record(self) -> dict[str, Any]:
        """All but `data`, JSON-able. `Patch.restore` is the way back."""
        refusal = None if self.refusal is None else {"reason": self.refusal.reason, "path": self.refusal.path}
        return {
            "base_tree": self.base_tree,
            "tree": self.tree,
            "sha256": self.sha256,
            "refusal": refusal,
            "left_out": self.left_out,
        }

    @classmethod
    def restore(cls, data: bytes, record: Mapping[str, Any]) -> Patch:
        """A stored patch. Raises `CaptureFailed` when the bytes are not those of the record."""
        patch = _checked(data, base_tree=record["base_tree"], tree=record["tree"], sha256=record["sha256"])
        refusal = record["refusal"]
        return replace(patch, refusal=None if refusal is None else Refusal(**refusal), left_out=record["left_out"])

    @classmethod
    def nothing(cls, base_tree: str) -> Patch:
        """The patch of an agent that changed nothing."""
        return cls(data=b"", base_tree=base_tree, tree=base_tree, sha256=hashlib.sha256(b"").hexdigest())


async def take_baseline(box: Sandbox, workdir: str, *, seconds: float = 300) -> Baseline:
    """Record the working folder in a new shadow repository. Before the agent (or the patch) gets near it.

    Raises `CaptureFailed` (the image has no git, ...) and what the sandbox raises.
    """
    nonce = secrets.token_hex(8)
    shadow = f"{_ROOT}/{nonce}"
    out = await run_step(
        box, "patch.sh", "baseline", workdir, shadow, nonce, seconds=seconds, error=CaptureFailed, what="baseline"
    )
    if "base_tree" not in out:
        raise CaptureFailed("the baseline step named no tree", step="baseline", output=out)
    return Baseline(workdir=workdir, shadow=shadow, nonce=nonce, base_tree=out["base_tree"])


async def capture(
    box: Sandbox, baseline: Baseline, *, limits: CaptureLimits | None = None, seconds: float = 300
) -> Patch:
    """What changed since the baseline. The agent's processes must be gone. May be called again.

    Raises `LimitError` when the change is too large (it is never cut), `CaptureFailed` when it could not be taken, and
    what the sandbox raises. No change is `Patch.empty`, and nothing else is.
    """
    limits = limits or CaptureLimits()
    out = await run_step(
        box,
        "patch.sh",
        "capture",
        baseline.workdir,
        baseline.shadow,
        baseline.nonce,
        baseline.base_tree,
        str(limits.patch_bytes),
        *limits.args(),
        seconds=seconds,
        error=CaptureFailed,
        what="capture",
    )
    if "over" in out:
        raise LimitError(f"the change is too large to be a patch ({out['over']})", step="capture")
    if "tree" not in out or "sha256" not in out:
        raise CaptureFailed("the capture step named no tree", step="capture", output=out)
    data = await box.get(f"{baseline.shadow}/patch")
    patch = _checked(data, base_tree=baseline.base_tree, tree=out["tree"], sha256=out["sha256"])
    refusal = refuse(patch.changes, workdir=baseline.workdir)
    if "refused" in out:
        refusal = Refusal(reason="unstorable_path", path=out["refused"])
    return replace(patch, refusal=refusal, left_out=int(out.get("left_out", "0")))


async def apply(
    box: Sandbox, baseline: Baseline, patch: Patch, *, limits: CaptureLimits | None = None, seconds: float = 300
) -> None:
    """Apply `patch` to the untouched working folder of `baseline`, and prove the result by its tree hash.

    Raises `GradingFailed` when this box's base is not the one the patch was made on, `ApplyFailed` when the bases are
    equal and the patch still does not apply (our bug), and what the sandbox raises.
    """
    if baseline.base_tree != patch.base_tree:
        raise GradingFailed(
            "the grading sandbox's files differ from those the agent was given; "
            "the image or the row's pre_commands are not reproducible",
            step="apply",
            agent_base=patch.base_tree,
            grading_base=baseline.base_tree,
        )
    if not patch.data:
        return
    await box.put(f"{baseline.shadow}/patch", patch.data, mode=0o600)
    out = await _apply(box, baseline, limits or CaptureLimits(), seconds)
    if "failed" in out:
        raise ApplyFailed(
            f"the captured patch does not apply to an equal base: {out['failed']}", step="apply", sha256=patch.sha256
        )
    if out.get("tree") != patch.tree:
        raise ApplyFailed(
            "the applied patch gives another tree than was captured",
            step="apply",
            sha256=patch.sha256,
            expected=patch.tree,
            found=out.get("tree", out),
        )


async def adopt(box: Sandbox, baseline: Baseline, foreign: bytes, *, seconds: float = 300) -> Patch:
    """Make a patch of ours from one of another origin (a row's gold): apply it here and capture the result.

    Raises `TaskError` when it does not apply, and what `capture` raises.
    """
    await box.put(f"{baseline.shadow}/patch", foreign, mode=0o600)
    out = await _apply(box, baseline, CaptureLimits(), seconds)
    if "failed" in out:
        raise TaskError(f"the patch does not apply to the task's files: {out['failed']}")
    return await capture(box, baseline, seconds=seconds)


async def _apply(box: Sandbox, baseline: Baseline, limits: CaptureLimits, seconds: float) -> dict[str, str]:
    return await run_step(
        box,
        "patch.sh",
        "apply",
        baseline.workdir,
        baseline.shadow,
        baseline.nonce,
        *limits.args(),
        seconds=seconds,
        error=GradingFailed,
        what="apply",
    )


def _checked(data: bytes, *, base_tree: str, tree: str, sha256: str) -> Patch:
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise CaptureFailed("the patch was damaged on its way", step="capture", expected=sha256, found=digest)
    if bool(data) == (tree == base_tree):
        raise CaptureFailed("the patch and the tree hashes disagree", step="capture", bytes=len(data), tree=tree)
    try:
        changes = read_patch(data)
    except MalformedPatch as e:
        raise CaptureFailed(f"the captured patch cannot be read: {e}", step="capture") from e
    return Patch(data=data, base_tree=base_tree, tree=tree, sha256=sha256, changes=changes)
