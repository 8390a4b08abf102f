"""The error tree: each class says whose fault it is, is in the drawn tree, and survives a process boundary."""

from __future__ import annotations

import pickle

import pytest

from rollwright import errors
from rollwright.errors import InfraError, RollwrightError


def classes() -> list[type[RollwrightError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RollwrightError)]


@pytest.mark.parametrize("cls", classes())
def test_an_error_survives_pickling_with_its_details(cls: type[RollwrightError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what to do", box="b1", tries=3)))
    assert type(error) is cls
    assert (str(error), error.details) == ("what to do", {"box": "b1", "tries": 3})


@pytest.mark.parametrize("cls", classes())
def test_every_error_is_in_the_drawn_tree_and_documented(cls: type[RollwrightError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__doc__


def test_no_infrastructure_failure_is_the_policys_fault() -> None:
    assert not [c for c in classes() if issubclass(c, InfraError) and c.fault == "policy"]
