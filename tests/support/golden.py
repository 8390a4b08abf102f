"""What the real CLIs asked, cut to its shape: `tests/golden/NAME.json`. `python tests/support/golden.py` records anew.

Long texts (the vendors' prompts) are cut to their beginnings, each to the same, so that what repeats still does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.harnesses import DialectName

GOLDEN = Path(__file__).parents[1] / "golden"
_SHOWN = 120
_SECRET = ("authorization", "x-api-key", "host", "content-length")
_CUT_WHOLE = ("description", "metadata", "client_metadata", "format")
_SCHEMAS = ("parameters", "input_schema")


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """One run of a CLI."""

    name: str
    dialect: DialectName
    requests: list[dict[str, Any]]
    """`headers` with lower-case names, and `body`."""


def transcripts() -> Iterator[Transcript]:
    for path in sorted(GOLDEN.glob("*.json")):
        data = json.loads(path.read_bytes())
        yield Transcript(name=path.stem, dialect=data["dialect"], requests=data["requests"])


def _cut(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in _CUT_WHOLE}
        return {name: {} if name in _SCHEMAS else _cut(item, name) for name, item in kept.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    if isinstance(value, str) and key not in ("arguments", "signature", "encrypted_content"):
        return value if len(value) <= _SHOWN else value[:_SHOWN] + "…"
    return value


def _record() -> None:
    from rollwright.harnesses.claude_code import ClaudeCode
    from rollwright.harnesses.opencode import OpenCode
    from rollwright.harnesses.pi import Pi
    from rollwright.harnesses.qwen_code import QwenCode
    from support import clis
    from support.cli_runner import run
    from support.model_server import Reply, serve

    full = "This model's maximum context length is 32768 tokens: prompt is too long: 40000 tokens > 32768 maximum"

    def save(name: str, cli: clis.Cli, *script: Reply, harness: Any = None) -> None:
        with tempfile.TemporaryDirectory() as folder, serve(*script) as model:
            run(harness or cli.harness, Path(folder), "Fix a.py.", model.base_url)
        requests = [
            {
                "headers": {key: value[:200] for key, value in headers.items() if key not in _SECRET},
                "body": _cut(body),
            }
            for headers, body in zip(model.headers, model.requests, strict=True)
        ]
        data = {"dialect": (harness or cli.harness).dialect, "requests": requests}
        (GOLDEN / f"{name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def agent(tool: str, kind: str) -> Reply:
        asked = {"description": "look", "prompt": "SUBTASK: say what you see.", "subagent_type": kind}
        return Reply(calls=((tool, asked),))

    GOLDEN.mkdir(exist_ok=True)
    ways = {
        "pi": clis.PI,
        "pi-anthropic": clis.PI_ANTHROPIC,
        "claude-code": clis.CLAUDE,
        "codex": clis.CODEX,
        "opencode": clis.OPENCODE,
        "qwen-code": clis.QWEN,
        "qwen-code-chat": clis.QWEN_CHAT,
        "mini-swe-agent": clis.MINI,
    }
    for name, cli in ways.items():
        look = Reply(thinking="Hm.", text="I look.", calls=(cli.call("echo hi"), cli.call("echo ho")))
        save(name, cli, look, Reply(calls=(cli.call("exit 3"),)), cli.done())
    for name, cli, harness in (
        ("pi", clis.PI, Pi(compaction=True)),
        ("claude-code", clis.CLAUDE, ClaudeCode(compaction=True)),
        ("opencode", clis.OPENCODE, OpenCode(compaction=True)),
        ("qwen-code", clis.QWEN, QwenCode(compaction=True, bare=False)),
    ):
        long = Reply(calls=(cli.call("seq 100000000 100002000"),))
        ends = (Reply(status=400, text=full), Reply(text="<summary>We looked.</summary>"), Reply(text="Done."))
        save(f"{name}-compaction", cli, *[long] * 3, *ends, harness=harness)
    for name, cli, call, harness in (
        ("claude-code", clis.CLAUDE, agent("Agent", "general-purpose"), ClaudeCode()),
        ("opencode", clis.OPENCODE, agent("task", "general"), OpenCode()),
        ("qwen-code", clis.QWEN, agent("agent", "general-purpose"), QwenCode(bare=False)),
    ):
        save(f"{name}-subagent", cli, call, Reply(text="I saw nothing."), Reply(text="Done."), harness=harness)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _record()
