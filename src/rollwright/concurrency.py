"""What anyio leaves to its users: errors that leave a task group as themselves."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import cast

from rollwright.errors import RollwrightError


@contextmanager
def plain_errors() -> Generator[None]:
    """Let an error of ours leave the task groups inside as itself, not wrapped in an `ExceptionGroup`.

    Of several errors of ours the first one is raised and carries the others as notes. A group that holds anything
    else (a bug) stays a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        ours = [leaf for leaf in leaves if isinstance(leaf, RollwrightError)]
        if len(ours) == len(leaves):
            first, *others = ours
            for other in others:
                first.add_note(f"also: {type(other).__name__}: {other}")
            raise first from group
        if len(leaves) == 1:
            raise leaves[0] from group
        raise


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
