"""From a task to the proof that its verdicts mean something: gold resolves it, doing nothing does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollwright.errors import TaskError
from rollwright.graders import Grader, Script, SolvedByScript
from rollwright.graders.grading import Grading, GradingLimits, grade, pass_to_pass, required
from rollwright.graders.patch import Baseline, Patch, adopt, capture, take_baseline
from rollwright.graders.testrun import Clock, boot, run_script
from rollwright.graders.workspace import make_base, prepare
from rollwright.sandboxes import Provider, Sandbox, SandboxSpec
from rollwright.types import Task, Verdict, VerdictStatus

__all__ = ["NO_GOLD", "Validation", "validate_task"]

NO_GOLD = "the row has no gold patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a task can be trusted: its gold patch resolves it every time, doing nothing does not and breaks
    nothing."""

    task: Task
    golds: tuple[Grading, ...]
    """One a run; empty when there is no usable gold patch."""
    noop: Grading
    problems: tuple[str, ...]

    @property
    def gold(self) -> Grading | None:
        """The last gold run."""
        return self.golds[-1] if self.golds else None

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def flaky(self) -> dict[str, float]:
        """Required test → share of the gold runs that it did not pass; only those that passed in some."""
        runs = [required(gold.verdict) for gold in self.golds]
        rates = {name: sum(run.get(name) != "passed" for run in runs) / len(runs) for run in runs for name in run}
        return {name: rate for name, rate in rates.items() if 0 < rate < 1}

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        """Required tests that the gold patch makes pass."""
        return self._passing(also_before=False)

    @property
    def pass_to_pass(self) -> tuple[str, ...]:
        """Required tests that pass with and without it."""
        return self._passing(also_before=True)

    def _passing(self, *, also_before: bool) -> tuple[str, ...]:
        before = required(self.noop.verdict)
        golds = [required(gold.verdict) for gold in self.golds]
        always = [name for name in (golds[0] if golds else ()) if all(g.get(name) == "passed" for g in golds)]
        return tuple(name for name in always if (before.get(name) == "passed") == also_before)


async def validate_task(
    *,
    provider: Provider,
    spec: SandboxSpec,
    task: Task,
    grader: Grader,
    key: str,
    limits: GradingLimits | None = None,
    gold_runs: int = 1,
) -> Validation:
    """Grade the gold patch `gold_runs` times and the untouched base once. Raises what `grade` raises."""
    limits = replace(limits or GradingLimits(), p2p_reruns=0)  # a flake is to be seen, not forgiven
    problems: list[str] = list(grader.check(task))
    golds: list[Grading] = []

    async def graded(patch: Patch | None, name: str) -> Grading:
        return await grade(
            provider=provider, spec=spec, task=task, patch=patch, grader=grader, key=f"{key}.{name}", limits=limits
        )

    script = grader.solution(task) if isinstance(grader, SolvedByScript) else None
    if task.grader.gold_patch is None and script is None:
        problems.append(NO_GOLD)
    else:
        try:
            patch = await _gold(provider, spec, task, script, f"{key}.patch", limits)
        except TaskError as e:
            problems.append(f"gold: {e.message}")
        else:
            for run in range(1, gold_runs + 1):
                golds.append(await graded(patch, f"gold{run}"))
            problems += _gold_problems(golds)
    noop = await graded(None, "noop")
    problems += _noop_problems(task, noop.verdict)
    return Validation(task=task, golds=tuple(golds), noop=noop, problems=tuple(problems))


def _gold_problems(golds: list[Grading]) -> list[str]:
    resolved = sum(gold.verdict.status is VerdictStatus.RESOLVED for gold in golds)
    if resolved == len(golds):
        return []
    if resolved:
        return [f"the gold patch resolves in {resolved} of {len(golds)} runs only"]
    return [f"the gold patch is {golds[-1].verdict.status}, not resolved"]


def _noop_problems(task: Task, verdict: Verdict) -> list[str]:
    """The tests must run on the untouched base, with no other result than that the bug is there."""
    problems: list[str] = []
    if verdict.status is not VerdictStatus.UNRESOLVED:
        problems.append(f"doing nothing is {verdict.status}, not unresolved")
    lost = [signal for signal in verdict.signals if signal.startswith(("no_report", "unreadable_report", "run_ended"))]
    if lost:
        problems.append(f"doing nothing leaves no result ({lost[0]})")
    names = pass_to_pass(task)
    broken = [f"{o.id} ({o.status})" for o in verdict.tests if o.id in names and o.status != "passed"]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        problems.append(f"without a patch, tests that should pass do not: {', '.join(broken[:3])}{more}")
    return problems


async def _gold(
    provider: Provider, spec: SandboxSpec, task: Task, script: Script | None, key: str, limits: GradingLimits
) -> Patch:
    clock = Clock()
    box = await boot(provider, spec, key, limits, clock)
    try:
        with clock.step("prepare"):
            await prepare(box, task.agent, seconds=limits.step_seconds)
            await make_base(box, task, for_agent=True, seconds=limits.step_seconds)
        with clock.step("baseline"):
            baseline = await take_baseline(box, task.agent.workdir, seconds=limits.step_seconds)
        with clock.step("gold"):
            if script is not None:
                return await _solve(box, baseline, script, limits)
            assert task.grader.gold_patch is not None
            return await adopt(box, baseline, task.grader.gold_patch, seconds=limits.step_seconds)
    finally:
        await box.close()


async def _solve(box: Sandbox, baseline: Baseline, script: Script, limits: GradingLimits) -> Patch:
    ended = await run_script(box, script, cwd=baseline.workdir)
    if not ended.ok:
        said = ended.stdout.data()[-2000:].decode("utf-8", "replace").strip()
        words = said.splitlines()[-1] if said else "it said nothing"
        raise TaskError(f"the solution script {ended.state} {ended.exit_code}: {words}", evidence=said)
    return await capture(box, baseline, seconds=limits.step_seconds)
