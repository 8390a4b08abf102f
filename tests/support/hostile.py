"""A run folder in which everything that others wrote attacks whoever shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson

from rollwright.messages import Message
from rollwright.store import RunDir, RunWriter
from rollwright.testing.run_folder import Talk, write_rollout
from rollwright.testing.tiny import tiny_tokenizer
from rollwright.tokens.render import load_renderer
from rollwright.types import Failure, Stage

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onmouseover=alert(3) x='{{7*7}}{% raw %}"
CODES = "\x1b[31mred\x1b[0m\x1b]8;;javascript:alert(4)\x07link\x1b]8;;\x07\x1b[2J\x9b31m\x00\x08"
TURNED = "abc\u202eexe.fdp\u2066\u200b\ufeff"
NASTY = f"{MARKUP} {CODES} {TURNED}"
TASK = "<b onclick=alert(5)>task & \"quotes\" 'x' %2e%2e #?"
LONG = 5_000_000


def hostile_run(path: Path) -> RunDir:
    """Two rollouts of one task: `<TASK>.1` was judged, `<TASK>.2` was not."""
    policy = tiny_tokenizer(path.parent / "policy")
    renderer = load_renderer(policy)
    resolved = {
        "config": {
            "run": {"name": NASTY, "attempts": 2},
            "policy": {"path": str(policy), "model": MARKUP},
            "harness": {"kind": MARKUP},
            MARKUP: {MARKUP: [NASTY]},
        },
        "renderer": {"fingerprint": renderer.fingerprint},
        "tasks": {"count": 1},
    }
    writer = RunWriter.create(path, run_file=b"", resolved=resolved)
    try:
        judged = write_rollout(writer, renderer, f"{TASK}.1", _talk, patch=_patch())
        failed = write_rollout(writer, renderer, f"{TASK}.2", _talk, outcome="ungraded")
    finally:
        writer.close()
    run = RunDir(path)
    failure = Failure(
        stage=Stage.GRADED,
        error=MARKUP,
        message=NASTY,
        fault=MARKUP,
        retryable=True,
        details={MARKUP: NASTY},
        evidence=NASTY,
    )
    lines = [replace(judged, status=MARKUP, stop_reason=NASTY), replace(failed, failure=failure, stop_reason=MARKUP)]
    run.index.write_bytes(
        b"".join(line.to_line() for line in lines) + b'{"schema": 1, "rollout": "../../up"}\nnonsense\n'
    )
    for rollout in (judged.rollout, failed.rollout):
        turns = run.rollout(rollout).turns
        turns.write_bytes(turns.read_bytes().replace(b'"role":"main"', b'"role":' + orjson.dumps(NASTY)))
    log = NASTY.encode() + b"\n\xff\xfe\xc3(\n" + b"A" * LONG + b"\n" + MARKUP.encode() + b"\n"
    for name in (judged.rollout, failed.rollout):
        folder = run.rollout(name)
        folder.agent_log.write_bytes(log)
        folder.grade_log.write_bytes(log)
    verdict = orjson.loads(run.rollout(judged.rollout).verdict.read_bytes())
    verdict["graded"] |= {
        "signals": [NASTY],
        "dropped_paths": [NASTY],
        "grader": MARKUP,
        "tests": [
            {"id": NASTY, "status": MARKUP, "expected": True, "seconds": None, "message": NASTY + "\n" + "x" * 100_000},
            {"id": 5, "status": None, "message": ["no", "text"]},
        ],
    }
    run.rollout(judged.rollout).verdict.write_bytes(orjson.dumps(verdict))
    return run


def _talk(talk: Talk) -> None:
    messages = [Message(role="system", content=NASTY), Message(role="user", content=NASTY + "\n" * 40)]
    reply = talk.turn(
        messages,
        f"{MARKUP}\n<tool_call>\n<function=bash>\n<parameter=command>\n{NASTY}\n</parameter>\n</function>\n</tool_call>",
    )
    answer = Message(role="tool", content=NASTY + "B" * 100_000, tool_call_id=reply.tool_calls[0].id)
    # A client that says the policy had said something else.
    edited = replace(reply, content=NASTY)
    talk.turn([*messages, edited, answer], NASTY)


def _patch() -> bytes:
    name = MARKUP.encode().replace(b" ", b"_").replace(b"/", b"_")
    return (
        b"diff --git a/"
        + name
        + b" b/"
        + name
        + b"\nnew file mode 100644\n--- /dev/null\n+++ b/"
        + name
        + b"\n@@ -0,0 +1,4 @@\n"
        b"+" + NASTY.encode() + b"\n+\xff\xfe\xc3(\n+" + b"C" * LONG + b"\n+" + MARKUP.encode() + b"\n"
    )
