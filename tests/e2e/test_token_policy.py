"""What is trained of a run is set in its run file: histories, classes of traffic, and how old weights may be."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rollwright.audit import audit_run
from rollwright.export import samples_of
from rollwright.gateway.log import read_turn_log
from rollwright.store import RunDir
from support.commandline import QUICKSTART, Rollwright

pytestmark = pytest.mark.pi


def test_tokens_of_old_weights_are_masked_and_the_sample_says_why(rollwright: Rollwright, tmp_path: Path) -> None:
    rollwright.job = QUICKSTART / "scripted.toml"
    script = tmp_path / "updated.toml"
    fault = "[[fault]]\ncall = 3\nkind = 'version'\nafter_tokens = 5\nversion = 'step-2'\n"
    script.write_text((QUICKSTART / "replies.toml").read_text() + fault)
    run = rollwright.run(f"engine.scripted.script={script}", "samples.max_version_lag=0", "gateway.history=append_only")
    (record,), (sample,) = run.records(), samples_of(run)
    turns = read_turn_log(run.rollout(record.rollout).turns).trajectory.turns
    stale = sum(len(turn.sampled) for turn in turns[:2]) + 5
    assert (record.status, sample.excluded) == ("resolved", {"stale_version": stale})
    assert record.trained_tokens == record.sampled_tokens - stale > 0
    assert (sample.accepted_versions, sample.history) == (["step-2"], "append_only")
    assert audit_run(run).violations == []


def test_a_class_that_is_not_trained_is_context_and_the_engine_gives_its_logprobs_again(rollwright: Rollwright) -> None:
    run = rollwright.run("run.limit=1", "run.attempts=1", "gateway.trained=['subagent']")
    (record,), (sample,) = run.records(), samples_of(run)
    assert (record.trained_tokens, sample.trainable, sample.history) == (0, False, "exact")
    assert sample.excluded == {"class_not_trained": record.sampled_tokens}
    checked = orjson.loads(rollwright("verify", run.path, "--rescore", "--tolerance", "0", "--json").stdout)
    again = checked["rescore"]
    assert (checked["violations"], again["not_compared"]) == ([], {})
    assert (again["compared_tokens"], again["max"], again["mean"]) == (record.sampled_tokens, 0.0, 0.0)
    said = rollwright("verify", run.path, "--rescore", "engine.local.version=later").stdout
    assert f"not compared: {record.sampled_tokens} other_version" in said
    assert "are for --rescore" in rollwright("verify", run.path, "--tolerance", "1", code=1).stderr


def test_what_the_policy_asks_of_itself_is_seen_and_not_trained(rollwright: Rollwright, tmp_path: Path) -> None:
    """Its commands find the key in the environment, and the gateway where the CLI finds it."""
    rollwright.job = QUICKSTART / "scripted.toml"
    ask = """cat > /tmp/ask.py <<'END'
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "Say something easy."}]}
headers = {"authorization": "Bearer " + os.environ["ROLLWRIGHT_API_KEY"], "content-type": "application/json"}
url = "http://127.0.0.1:18001/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
END
python3 /tmp/ask.py"""
    script = tmp_path / "asking.toml"
    call = f"<tool_call>\n<function=bash>\n<parameter=command>\n{ask}\n</parameter>\n</function>\n</tool_call>"
    rules = f"[[script]]\nmatch = 'Start with'\nreplies = ['''{call}''', 'I gave up.']\n"
    script.write_text(rules + "[[script]]\nreplies = ['Something easy.']\n")
    done = rollwright(
        "run", rollwright.job, f"run.output={tmp_path}", "run.name=asks", f"engine.scripted.script={script}"
    )
    assert "1 turns of 1 rollouts, cart.1 first, were not asked for by the CLI" in done.stdout
    run = RunDir(tmp_path / "asks")
    (record,) = run.records()
    assert (record.status, record.traffic) == ("empty_patch", {"main": 2, "foreign": 1})
    main, foreign = samples_of(run)
    assert (main.role, main.excluded, main.trainable) == ("main", {}, True)
    assert (foreign.role, foreign.trainable) == ("side", False)
    assert record.excluded_tokens == foreign.excluded == {"class_not_trained": 10}
    assert "something that is not its CLI" in (run.logs / "run.log").read_text()
    assert audit_run(run).violations == []
