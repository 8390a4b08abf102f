"""Controls: now and then during a run a task's gold patch and no patch are graded again, so that an image that broke is
found before its rollouts teach anything.

An image whose control fails twice in a row is quarantined: the rollouts graded on it since its last good control are
withdrawn, those in flight end ungraded, those still owed are not started.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

import anyio

from rollwright.errors import GraderError, ImageQuarantined, InfraError, LimitError
from rollwright.graders.grading import GradingLimits
from rollwright.graders.validation import NO_GOLD, validate_task
from rollwright.rollout import RolloutPlan, Toolbox, box_spec
from rollwright.store import RolloutRecord

__all__ = ["Check", "Controls", "control_of"]

log = logging.getLogger(__name__)

Check = Callable[[RolloutPlan], Awaitable[tuple[str, ...]]]
"""Grades gold and no patch of a plan's task in its image; what is wrong with the ends, empty when nothing is. Raises
`GraderError` when they have none, other `InfraError`s and `LimitError` when it could not be found out."""

_SUSPICIOUS = frozenset(cls.__name__ for cls in GraderError.__subclasses__())
"""Failures of a rollout that its image may be the reason of: a control is due at once."""


@dataclass(slots=True)
class _Image:
    unproved: list[str] = field(default_factory=list[str])
    """Graded rollouts since the last good control, in order."""
    proved: set[str] = field(default_factory=set[str])
    checking: anyio.Lock = field(default_factory=anyio.Lock)
    broken: ImageQuarantined | None = None


class Controls:
    """The state of each image of a run."""

    def __init__(self, every: int, check: Check) -> None:
        """`every`: graded rollouts of an image between two of its controls; 0: no controls."""
        self._every = every
        self._check = check
        self._images: dict[str, _Image] = {}

    def quarantined(self, plan: RolloutPlan) -> ImageQuarantined | None:
        """Why rollouts of this plan's image may neither be started nor keep a reward."""
        return self._image(plan).broken

    async def ended(self, plan: RolloutPlan, record: RolloutRecord) -> tuple[str, ...]:
        """A rollout has ended and is stored; it may be time for a control, which is waited for. Returns the names of
        stored rollouts that must be withdrawn."""
        if not self._every:
            return ()
        image = self._image(plan)
        if record.graded:
            image.unproved.append(plan.name)
        failed = record.failure is not None and record.failure.error in _SUSPICIOUS
        due = failed or len(image.unproved) >= self._every
        if due and image.broken is None and not image.checking.locked():
            async with image.checking:
                await self._control(plan, image)
        return self._convicted(image)

    async def prove(self, plan: RolloutPlan, earlier: Collection[str]) -> tuple[str, ...]:
        """A control now, when rollouts were graded in the plan's image since its last good one, or some of `earlier` by
        another process. Returns as `ended` does."""
        if not self._every:
            return ()
        image = self._image(plan)
        async with image.checking:
            image.unproved += [name for name in earlier if name not in image.proved and name not in image.unproved]
            if image.unproved and image.broken is None:
                await self._control(plan, image)
        return self._convicted(image)

    def _convicted(self, image: _Image) -> tuple[str, ...]:
        if image.broken is None:
            return ()
        withdrawn, image.unproved = tuple(image.unproved), []
        return withdrawn

    async def _control(self, plan: RolloutPlan, image: _Image) -> None:
        before = len(image.unproved)
        problems: tuple[str, ...] = ()
        for _ in range(2):  # one failure may be a flake of the task
            try:
                problems = await self._check(plan)
            except GraderError as error:
                problems = (error.message,)
            except (InfraError, LimitError) as error:  # says nothing of the image; the next rollout asks again
                log.warning("control of %s could not be run: %s", plan.task_name, error)
                return
            if not problems:
                image.proved.update(image.unproved[:before])
                del image.unproved[:before]
                return
        image.broken = ImageQuarantined(
            f"image {plan.task.agent.image} failed its control with task {plan.task_name}: {'; '.join(problems)}",
            image=plan.task.agent.image,
            task=plan.task_name,
            problems=list(problems),
        )
        log.error("%s", image.broken)

    def _image(self, plan: RolloutPlan) -> _Image:
        return self._images.setdefault(plan.task.agent.image, _Image())


def control_of(tools: Toolbox) -> Controls:
    """The controls that a run's settings ask for, in its sandboxes."""
    grading = tools.config.grading

    async def check(plan: RolloutPlan) -> tuple[str, ...]:
        found = await validate_task(
            provider=tools.provider,
            spec=box_spec(
                tools.config, tools.capabilities, image=plan.task.agent.image, labels={"control": plan.task_name}
            ),
            task=plan.task,
            grader=tools.graders[plan.task.grader.protocol],
            key=f"{plan.run}/control/{plan.task_name}/{secrets.token_hex(4)}",
            limits=GradingLimits(boot_seconds=grading.boot_seconds, step_seconds=grading.step_seconds),
        )
        return tuple(problem for problem in found.problems if problem != NO_GOLD)

    return Controls(grading.controls, check)
