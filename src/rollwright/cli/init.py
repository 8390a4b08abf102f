"""`rollwright init`."""

from __future__ import annotations

import shutil
from pathlib import Path

from rollwright.cli.output import OK, shown
from rollwright.errors import UsageError

SAMPLE = Path(__file__).with_name("sample")
_WRITTEN = {
    "run.toml": "what is run, with comments",
    "tasks.jsonl": "one task: a bug, its hidden test, its fix",
    "images": "the task's files",
    "policy": "a tiny tokenizer and chat template, in place of your model's",
    "replies.toml": "what the scripted engine says, in place of your model",
}


def init(folder: Path = Path(), /) -> int:
    """Write a commented run file and a sample task that run as they are.

    They need no model, no GPU and no Docker. Nothing that is there is overwritten.

    Parameters
    ----------
    folder
        Where; made when it is not there.

    Examples
    --------
    rollwright init my-run
    rollwright init            # in this folder
    """
    from rollwright.testing.tiny import tiny_tokenizer

    for path in (*(folder / entry.name for entry in sorted(SAMPLE.iterdir())), folder / "policy"):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is already there, and init overwrites nothing; name an empty folder")
    try:
        shutil.copytree(SAMPLE, folder, dirs_exist_ok=True)
        tiny_tokenizer(folder / "policy")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error}") from error
    here = shown(folder.resolve())
    for name, what in _WRITTEN.items():
        print(f"{here / name!s:{len(str(here / 'replies.toml'))}}  {what}")
    print(f"next: rollwright doctor {here / 'run.toml'}")
    print(f"then: rollwright run {here / 'run.toml'}")
    return OK
