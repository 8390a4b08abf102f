"""The harness that the docs show works as shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rollwright.harnesses import Harness
from rollwright.harnesses.bundle import locate
from support.job_results import ENDPOINT, ended

PAGE = Path(__file__).parents[3] / "docs/harnesses.md"


def test_the_example_of_the_docs_is_a_harness(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)
    assert found
    names: dict[str, Any] = {}
    exec(compile(found[1], str(PAGE), "exec"), names)
    harness: Harness = names["MyAgent"](effort="low")
    started = harness.launch(bundle="/b", home="/home/agent", workdir="/repo", prompt="Fix.", endpoint=ENDPOINT)
    assert started.argv[-2:] == ("--effort", "low")
    assert started.stdin == b"Fix."
    assert harness.report(ended(b"")).ok
    assert not harness.report(ended(b"", exit_code=1)).ok
    assert locate(harness, tmp_path).path.name.startswith("my-agent-1.2.3-")
