"""Many rollouts: the parts they share, checks before step 0, the workers, and what is stored."""

from rollwright.run.execute import Summary, execute
from rollwright.run.executor import Attempt, Executor, LocalExecutor, Store
from rollwright.run.observer import Observer, Silent, current_rollout
from rollwright.run.parts import (
    Parts,
    Places,
    load_graders,
    make_engine,
    make_harness,
    make_parts,
    make_provider,
    make_renderer,
)
from rollwright.run.prepared import Prepared, checked_tasks, prepare, same_run, sound_tasks, tasks_digest
from rollwright.run.room import Room
from rollwright.run.source import Group, GroupState, Pace, Rollouts
from rollwright.run.toolbox import opened, same_tokens

__all__ = [
    "Attempt",
    "Executor",
    "Group",
    "GroupState",
    "LocalExecutor",
    "Observer",
    "Pace",
    "Parts",
    "Places",
    "Prepared",
    "Rollouts",
    "Room",
    "Silent",
    "Store",
    "Summary",
    "checked_tasks",
    "current_rollout",
    "execute",
    "load_graders",
    "make_engine",
    "make_harness",
    "make_parts",
    "make_provider",
    "make_renderer",
    "opened",
    "prepare",
    "same_run",
    "same_tokens",
    "sound_tasks",
    "tasks_digest",
]
