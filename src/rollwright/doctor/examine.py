"""All checks at once, each with its own deadline: a broken one hides no other."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import anyio

from rollwright.concurrency import plain_errors
from rollwright.config import RunConfig
from rollwright.doctor import Check, Finding, backends, found, inside, machine, of_error, policy, services, tasks
from rollwright.doctor.subject import Blocked, Subject
from rollwright.errors import RollwrightError
from rollwright.run import Places
from rollwright.tasks import TaskSet

__all__ = ["examine", "examining", "healthy", "node_checks"]

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 20.0


async def examine(subject: Subject, checks: Sequence[Check] | None = None) -> list[Finding]:
    """What every check saw, in the order of the checks. Never raises for what a check ran into.

    `checks`: all that fit the subject, where none are named.
    """
    checks = _checks(subject) if checks is None else checks
    seen: list[list[Finding]] = [[] for _ in checks]

    async def look(index: int, check: Check) -> None:
        seen[index] = await _one(check, subject)

    async with anyio.create_task_group() as group:
        for index, check in enumerate(checks):
            group.start_soon(look, index, check)
    return [finding for findings in seen for finding in findings]


@contextlib.asynccontextmanager
async def examining(
    places: Places,
    config: RunConfig | None,
    *,
    tasks: TaskSet | None = None,
    e2b_key: bool = False,
    ray_address: str | None = None,
) -> AsyncGenerator[Subject]:
    """A subject whose boxes are gone at the end. A registry of sandboxes that is there is used; one that is not there
    is not made. `tasks`: the data set, where it is not to be read from the run file's place."""
    with tempfile.TemporaryDirectory(prefix="rollwright-doctor-", ignore_cleanup_errors=True) as folder:
        state = places.state / "boxes"
        subject = Subject(
            places=places,
            state=state if state.is_dir() else Path(folder),
            config=config,
            tasks=tasks,
            e2b_key=e2b_key,
            ray_address=ray_address,
        )
        try:
            yield subject
        finally:
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                try:
                    await subject.close()
                except RollwrightError as error:  # what was seen is worth more; the box's lease ends it
                    log.warning("a box of the doctor could not be removed: %s", error)


def healthy(findings: Sequence[Finding]) -> bool:
    """Nothing failed."""
    return all(finding.state != "fail" for finding in findings)


def _checks(subject: Subject) -> list[Check]:
    groups = [machine, backends, inside, services]
    if subject.config is not None:
        groups += [policy, tasks]
    return [check for group in groups for check in group.checks(subject)]


def node_checks(subject: Subject) -> list[Check]:
    """What a machine is looked at for that only runs rollouts, as others tell it to."""
    return [check for group in (machine, backends, inside, policy) for check in group.checks(subject)]


async def _one(check: Check, subject: Subject) -> list[Finding]:
    try:
        with plain_errors(), anyio.fail_after(check.seconds):
            return await check.look(subject)
    except Blocked as error:
        return found(check.name, "skipped", str(error))
    except TimeoutError:
        return found(check.name, "fail", f"no answer in {check.seconds:g} s", check.fix)
    except RollwrightError as error:
        return [of_error(check.name, error, check.fix)]
    except Exception as error:  # one check's boundary: its bug must not hide what the others found
        log.debug("check %s", check.name, exc_info=True)
        return found(check.name, "fail", f"the check itself broke: {type(error).__name__}: {error}", check.fix)
