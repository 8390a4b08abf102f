"""The run file: what is accepted, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.config import RunConfig, overridden
from rollwright.errors import ConfigError

MINIMAL = """
[tasks]
path = "tasks.jsonl"
[policy]
path = "policy"
[engine]
kind = "local"
[engine.local]
model = "policy"
[engine.sglang]
url = "http://127.0.0.1:30000"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_paths_are_taken_from_the_run_files_folder(job: Path) -> None:
    config = RunConfig.load(job)
    assert config.tasks.path == job.parent / "tasks.jsonl"
    assert config.run.output == job.parent / "runs"


def test_switching_an_implementation_is_one_line(job: Path) -> None:
    assert RunConfig.load(job).engine.chosen == {"model": "policy"}
    assert RunConfig.load(job, ["engine.kind=sglang"]).engine.chosen == {"url": "http://127.0.0.1:30000"}


def test_a_name_in_place_of_a_table_is_its_kind_and_keeps_the_options(job: Path) -> None:
    assert RunConfig.load(job, ["engine=sglang"]).engine.chosen == {"url": "http://127.0.0.1:30000"}
    assert RunConfig.load(job, ["harness=codex"]).harness.kind == "codex"
    with pytest.raises(ConfigError, match="sampling"):
        RunConfig.load(job, ["sampling=hot"])


def test_what_was_written_down_takes_overrides_as_a_run_file_does(job: Path) -> None:
    data = RunConfig.load(job).dump()
    base = Path(data.pop("base"))
    config = RunConfig.resolve(overridden(data, ["engine.local.model=other"]), base=base, where="resolved.json")
    assert config.engine.chosen == {"model": "other"}
    assert config.engine.options["sglang"] == {"url": "http://127.0.0.1:30000"}


def test_overrides_are_toml_where_they_parse_and_text_elsewhere(job: Path) -> None:
    config = RunConfig.load(
        job, ["run.attempts=8", "policy.model=tiny", "sampling.temperature=0.5", "harness.pi.tools=['a']"]
    )
    assert (config.run.attempts, config.policy.model, config.sampling.temperature) == (8, "tiny", 0.5)
    assert config.harness.options == {"pi": {"tools": ["a"]}}


def test_a_resolved_run_resolves_to_itself(job: Path) -> None:
    config = RunConfig.load(job, ["run.attempts=3", "run.seed=7"])
    data = config.dump()
    assert RunConfig.resolve(data, base=Path(data.pop("base")), where="resolved.json") == config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.atempts=3", r"run\.atempts is not a setting; did you mean 'attempts'"),
        ("run.attempts=0", r"run\.attempts: .*greater than 0"),
        ("run.attempts=many", r"run\.attempts: .*integer"),
        ("sampling.top_p=0", r"sampling\.top_p"),
        ("sampling.temperature=nan", r"sampling\.temperature"),
        ("harness.seconds=inf", r"harness\.seconds: .*finite"),
        ("gateway.port=80", r"gateway\.port"),
        ("run.attempts.x=3", r"attempts is not a table|run\.attempts"),
        ("attempts", r"an override looks like"),
        ("policy.renderer=jinja", r"policy\.renderer"),
        ("nonsense=1", r"nonsense is not a setting"),
    ],
)
def test_a_wrong_setting_names_the_field(job: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.load(job, [override])


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[policy]\npath = "p"\n')
    with pytest.raises(ConfigError, match="tasks"):
        RunConfig.load(path)


def test_a_missing_or_broken_run_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run file .*nowhere\.toml"):
        RunConfig.load(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[tasks\n")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read"):
        RunConfig.load(broken)
