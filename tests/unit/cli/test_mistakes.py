"""What a newcomer gets wrong in the first ten minutes: one line that names the fix, exit 1, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollwright.cli import main


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Call the command line in an empty folder; what it says of the mistake, after `rollwright: `."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("rollwright: ")
        return err.removeprefix("rollwright: ").strip()

    return call


@pytest.mark.parametrize(
    ("arguments", "hints"),
    [
        (("rn", "run.toml"), ['Did you mean "run"?', "see rollwright --help"]),
        (
            ("run", "run.toml", "--concurency", "4"),
            ["Did you mean --concurrency?", "see rollwright run --help"],
        ),
        (("sandbox", "list"), ['Did you mean "ls"?', "see rollwright sandbox --help"]),
        (("run",), ["JOB", "see rollwright run --help"]),
        (("run", "run.toml", "-j", "four"), ["-j", '"four"', "int"]),
        (("run", "run.toml"), ["there is no run file run.toml", "`rollwright init` writes one"]),
        (("verify", "runs/latest"), ["there is no run folder runs/latest"]),
        (("verify", "."), ["not a run folder"]),
        (("list", "grader"), ["did you mean 'graders'?"]),
        (("harness", "bundle", "pii"), ["Did you mean 'pi'?"]),
        (("sandbox", "ls", "--kind", "namespace"), ["Did you mean 'namespaces'?"]),
        (("gateway", "--tokenizer", ".", "--port", "0"), ["tokenizer.json"]),
        (("gateway", "--tokenizer", ".", "--port", "0", "--top-p", "2"), ["--top-p", "less than or equal to 1"]),
        (("gateway", "--tokenizer", ".", "--port", "0", "--max-turns", "0"), ["--max-turns", "greater than 0"]),
        (("gateway", "--tokenizer", ".", "--port", "0", "--trained", "man"), ["--trained", "main"]),
        (("e2b-server",), ["E2B_API_KEY"]),
    ],
)
def test_a_mistake_is_one_line_with_the_fix(
    said: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], hints: list[str]
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    text = said(*arguments)
    assert [hint for hint in hints if hint not in text] == [], text
    assert len(text.splitlines()) <= 2


def test_a_run_file_of_another_name_is_found(said: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("")
    assert said("run", "run.toml").endswith("did you mean job.toml?")
    assert said("run", str(tmp_path)).endswith(f"is a folder, not a run file; did you mean {tmp_path / 'job.toml'}?")


def test_a_typo_in_the_run_file_names_the_setting_that_was_meant(said: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\natempts = 2\n[tasks]\npath = 'tasks.jsonl'\n[policy]\npath = 'policy'\n")
    assert said("run", "run.toml") == "run.toml: run.atempts is not a setting; did you mean 'attempts'?"
    file.write_text("[tasks]\npath = 'tasks.jsonl'\n")
    assert said("run", "run.toml") == "run.toml: policy is missing, and has no default"
    file.write_text("[run\n")
    assert said("run", "run.toml").startswith("run.toml cannot be read: ")


def test_a_reader_of_help_sees_every_verb_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "  rollwright run run.toml --dry-run" in out
    assert "│" not in out
    assert "\x1b" not in out
