"""A model folder's digest, and the run that goes on only with the weights it began with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollwright.engines import HoldsWeights
from rollwright.engines.local import LocalEngine
from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.engines.weights import weights_digest
from rollwright.errors import ConfigError
from rollwright.run import Prepared, same_run, tasks_digest
from rollwright.tasks import TaskSet
from rollwright.testing.tiny_llama import write_random_llama
from rollwright.tokens import Renderer

NO_TASKS = cast(TaskSet, SimpleNamespace(tasks={}))


def test_the_digest_tells_weights_apart_and_the_same_ones_not(tmp_path: Path) -> None:
    first = weights_digest(write_random_llama(tmp_path / "a"))
    assert weights_digest(write_random_llama(tmp_path / "b")) == first
    assert weights_digest(write_random_llama(tmp_path / "c", seed=1)) != first


def test_of_a_large_file_samples_all_over_it_are_read(tmp_path: Path) -> None:
    size, file = 80 << 20, tmp_path / "model.safetensors"
    with file.open("wb") as sparse:
        sparse.truncate(size)
    before = weights_digest(tmp_path)
    for at in (100, 40 << 20, size - 1):
        start = max(0, at - (1 << 19))
        with file.open("r+b") as sparse:
            sparse.seek(start)
            sparse.write(b"\x01" * min(1 << 20, size - start))
        after = weights_digest(tmp_path)
        assert after != before
        before = after


def prepared_with(engine: object, renderer: Renderer) -> Prepared:
    return Prepared(parts=cast(Any, SimpleNamespace(engine=engine, renderer=renderer)), tasks=NO_TASKS)


def test_a_run_does_not_go_on_with_other_weights_unless_a_trainer_changes_them(
    renderer: Renderer, tmp_path: Path
) -> None:
    model = write_random_llama(tmp_path / "model", vocab_size=renderer.vocab_size)
    engine = LocalEngine(renderer=renderer, model=model)
    assert isinstance(engine, HoldsWeights)
    resolved = {
        "tasks": {"digest": tasks_digest(NO_TASKS)},
        "renderer": {"fingerprint": renderer.fingerprint},
        "engine": {"weights": engine.weights},
    }
    same_run(prepared_with(engine, renderer), resolved, tmp_path)
    write_random_llama(model, vocab_size=renderer.vocab_size, seed=1)
    with pytest.raises(ConfigError, match=r"weights have changed since .* start a new one, or put the old"):
        same_run(prepared_with(engine, renderer), resolved, tmp_path)
    same_run(prepared_with(engine, renderer), resolved, tmp_path, trained=True)


def test_an_engine_without_weights_of_its_own_is_not_asked(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(renderer=renderer, script=Script(script=(Rule(replies=("x",)),)))
    resolved = {
        "tasks": {"digest": tasks_digest(NO_TASKS)},
        "renderer": {"fingerprint": renderer.fingerprint},
        "engine": {"weights": None},
    }
    same_run(prepared_with(engine, renderer), resolved, tmp_path)
