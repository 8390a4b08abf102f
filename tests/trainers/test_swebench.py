"""SWE-bench's own loader reads our predictions; pandas and duckdb read our Parquet."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rollwright.export import export_run
from rollwright.integrations.record import StoredRollout
from rollwright.store import RunDir

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]
Need = Callable[[str], Any]


class _Stub(ModuleType):
    """Stands in for a package that its loader imports and does not use."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def test_swebench_loads_our_predictions(
    need: Need, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("modal", "ghapi", "ghapi.all", "git", "bs4", "chardet")
    for name in [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]:
        monkeypatch.setitem(sys.modules, name, _Stub(name))
    monkeypatch.setitem(sys.modules, "swebench.harness.modal_eval", _Stub("swebench.harness.modal_eval"))
    load = need("swebench.harness.utils").get_predictions_from_file
    assert export_run(run, "preds", tmp_path / "preds.json").count == 5
    assert load(str(tmp_path / "preds.json"), "SWE-bench", "test") == [
        {
            "instance_id": "org__calc-1",
            "model_name_or_path": "rollwright-tiny",
            "model_patch": "diff of calc.1\n",
        }
    ]


def test_parquet_opens_in_pandas_and_duckdb(need: Need, run: RunDir, calc: list[StoredRollout], tmp_path: Path) -> None:
    need("pyarrow")
    pandas, duckdb = need("pandas"), need("duckdb")
    target = tmp_path / "all.parquet"
    assert export_run(run, "parquet", target).count == 5
    samples = [sample for rollout in calc for sample in rollout.samples]
    frame = pandas.read_parquet(target).set_index(["rollout_id", "segment_index"])
    for sample in samples:
        row = frame.loc[(sample.rollout_id, sample.segment_index)]
        assert row["tokens"].tolist() == sample.tokens.tolist()
        assert row["logprobs"].tolist() == sample.logprobs.tolist()
    (trained,) = duckdb.sql(f"select sum(list_sum(loss_mask)), count(*) from '{target}'").fetchall()
    assert trained == (sum(sum(sample.loss_mask) for sample in samples), 5)
