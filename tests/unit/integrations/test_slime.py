"""slime: every environment name, samples of its own class, and advantages that count each rollout once."""

from __future__ import annotations

import ipaddress
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config import RunConfig
from rollwright.errors import ConfigError, SandboxGone, TaskError
from rollwright.integrations.ray.node import with_own_address
from rollwright.integrations.record import StoredRollout
from rollwright.integrations.slime.names import NAMES
from rollwright.integrations.slime.rewards import keep_informative, post_process_rewards
from rollwright.integrations.slime.rows import check_data, row_of, task_of
from rollwright.integrations.slime.samples import KEY, Filler, failure_of, is_graded
from rollwright.integrations.slime.sampling import check_sampling, sampling_of
from rollwright.integrations.slime.settings import RUN_FILE, protocol_for, run_config, seconds_needed, to_be_stored
from rollwright.integrations.slime.unsupported import check_options
from rollwright.rollout import RolloutPlan
from rollwright.run import load_graders
from rollwright.testing.scripted_executor import plain_task, scripted_attempt
from rollwright.types import Sampling
from support.commandline import QUICKSTART, ROOT
from support.slime import Sample, arguments

ARGS = arguments(QUICKSTART / "policy")
FILLER = Filler(decode=lambda ids: " ".join(map(str, ids)), run="runs/x")


def settings(**environ: str) -> RunConfig:
    return run_config(ARGS, environ)


# --------------------------------------------------------------------------- settings


def test_without_any_name_all_is_as_in_slimes_example() -> None:
    config = settings()
    assert (config.harness.kind, config.harness.seconds) == ("claude-code", 1800)
    assert (config.sandbox.kind, config.sandbox.boot_concurrency) == ("e2b", 16)
    assert (config.tasks.protocol, config.grading.options["scaleswe"]["seconds"]) == ("scaleswe", 600)
    assert (config.gateway.bind, config.gateway.public_port, config.gateway.public_host) == ("0.0.0.0", 18001, None)
    assert config.engine.chosen == {"url": "http://127.0.0.1:30000"}
    assert config.policy.tool_parser == "qwen3_coder"
    assert config.run.rollout_seconds >= 1800 + 2 * 600


EXPORTED: dict[str, tuple[str, Any]] = {
    "SWE_AGENT": ("pi", lambda c: c.harness.kind == "pi"),
    "SWE_TRAIN_PROTOCOL": ("swebench", lambda c: c.tasks.protocol == "swebench"),
    "SWE_EVAL_PROTOCOL": (
        "swebench",
        lambda c: (
            protocol_for(c, {"SWE_EVAL_PROTOCOL": "swebench"}, evaluation=True) == "swebench"
            and protocol_for(c, {"SWE_EVAL_PROTOCOL": "swebench"}, evaluation=False) == "scaleswe"
        ),
    ),
    "SWE_AGENT_TIME_BUDGET_SEC": ("60", lambda c: c.harness.seconds == 60),
    "SWE_EVAL_TIMEOUT_SEC": (
        "45",
        lambda c: {c.grading.options[name]["seconds"] for name in ("scaleswe", "swebench", "swebench_pro")} == {45},
    ),
    "SWE_ROLLOUT_GUARD_SEC": ("5000", lambda c: c.run.rollout_seconds == 5000),
    "SWE_BOOT_CONCURRENCY": ("3", lambda c: c.sandbox.boot_concurrency == 3),
    "SWE_BOOT_RETRIES": ("4", lambda c: c.sandbox.boot_retries == 3),
    "ADAPTER_PUBLIC_HOST": ("10.0.0.7", lambda c: c.gateway.public_host == "10.0.0.7"),
    "ADAPTER_BIND_HOST": ("10.0.0.8", lambda c: c.gateway.bind == "10.0.0.8"),
    "ADAPTER_PORT": ("19000", lambda c: c.gateway.public_port == 19000),
    "SLIME_AGENT_SANDBOX_BACKEND": ("namespaces", lambda c: c.sandbox.kind == "namespaces"),
    "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": (
        "image",
        lambda c: c.sandbox.options["e2b"]["image_metadata_key"] == "image",
    ),
    "E2B_API_KEY": ("e2b_0", lambda c: c.sandbox.options["e2b"]["api_key"] == "e2b_0"),
    "SLIME_AGENT_CC_TARBALL": ("/x/cc.tgz", lambda c: c.harness.options["claude-code"]["tarball"] == "/x/cc.tgz"),
    "SLIME_AGENT_CC_EXTRA_ARGS": (
        "--agents '{\"a\": {}}' --x",
        lambda c: c.harness.options["claude-code"]["extra_args"] == ["--agents", '{"a": {}}', "--x"],
    ),
    "SLIME_AGENT_CC_EXTRA_ENVS": (
        '{"MAX_THINKING_TOKENS": 1000}',
        lambda c: c.harness.options["claude-code"]["extra_env"] == {"MAX_THINKING_TOKENS": "1000"},
    ),
}
"""Name → a value, and what it makes of the settings. Two more have tests of their own."""


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_an_exported_name_is_a_setting(name: str) -> None:
    value, holds = EXPORTED[name]
    assert holds(settings(**{name: value}))
    empty = settings(**{name: ""})
    assert empty == settings(), "an empty variable counts as not exported"


def test_each_name_has_a_test_and_a_line_in_the_docs() -> None:
    own = {"SLIME_AGENT_NODE_TARBALL", "SWE_CC_PROMPT"}
    assert {name.name for name in NAMES} == set(EXPORTED) | own
    page = (ROOT / "docs" / "slime.md").read_text()
    for name in NAMES:
        names = ", ".join(f"`{each}`" for each in (name.name, *name.also))
        default = f"`{name.default}`" if name.default else "–"
        setting = name.setting if name.setting.startswith("(") else f"`{name.setting}`"
        assert f"| {names} | {default} | {setting} | {name.meaning} |" in page, name.name


def test_older_spellings_are_read_and_the_newer_wins() -> None:
    for name in NAMES:
        for old in name.also:
            value = EXPORTED.get(name.name, ("/x", None))[0]
            assert settings(**{old: value}) == settings(**{name.name: value}), old
    assert settings(ADAPTER_PORT="1", SHIM_PORT="2").gateway.public_port == 1


def test_a_node_tarball_is_for_clis_that_need_node() -> None:
    assert settings(SWE_AGENT="pi", SLIME_AGENT_NODE_TARBALL="/n").harness.options["pi"] == {"node_tarball": "/n"}
    assert "codex" not in settings(SWE_AGENT="codex", SLIME_AGENT_NODE_TARBALL="/n").harness.options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SWE_AGENT_TIME_BUDGET_SEC", "soon"),
        ("SWE_BOOT_CONCURRENCY", "0"),
        ("SLIME_AGENT_CC_EXTRA_ARGS", "'unclosed"),
        ("SLIME_AGENT_CC_EXTRA_ENVS", "[1]"),
        ("SWE_GENERATE_GUARD_SEC", "-1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        settings(**{name: value})


def test_explicit_settings_win_over_names_and_a_table_over_the_run_file(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[harness]\nkind = "codex"\nseconds = 7\n[sandbox.namespaces]\nimages = "images"\n')
    environ = {RUN_FILE: str(file), "SWE_AGENT": "pi", "SWE_AGENT_TIME_BUDGET_SEC": "60"}
    config = run_config(ARGS, environ)
    assert (config.harness.kind, config.harness.seconds) == ("codex", 7)
    assert config.base == tmp_path, "paths of the run file are from its folder"
    args = arguments(QUICKSTART / "policy", rollwright={"harness": {"seconds": 9}})
    assert (run_config(args, environ).harness.kind, run_config(args, environ).harness.seconds) == ("codex", 9)
    with pytest.raises(ConfigError, match=RUN_FILE):
        run_config(ARGS, {RUN_FILE: str(tmp_path / "missing.toml")})


def test_a_kind_alone_in_the_run_file_is_short_for_it(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('harness = "codex"\nsandbox = "namespaces"\n')
    config = run_config(ARGS, {RUN_FILE: str(file), "SWE_AGENT_TIME_BUDGET_SEC": "60", "SWE_BOOT_CONCURRENCY": "3"})
    assert (config.harness.kind, config.harness.seconds) == ("codex", 60)
    assert (config.sandbox.kind, config.sandbox.boot_concurrency) == ("namespaces", 3)


def test_the_guard_leaves_room_for_agent_and_tests() -> None:
    for own in ({}, {"harness": {"seconds": 7000}}, {"grading": {"swebench": {"seconds": 3000}}}):
        config = run_config(arguments(QUICKSTART / "policy", rollwright=own), {})
        assert config.run.rollout_seconds > seconds_needed(config)
    assert seconds_needed(settings(SWE_AGENT_TIME_BUDGET_SEC="100", SWE_EVAL_TIMEOUT_SEC="10")) == 100 + 3 * 10


def test_without_a_setting_only_slime_bounds_what_is_in_flight() -> None:
    assert settings().run.concurrency > 10_000
    assert run_config(arguments(QUICKSTART, rollwright={"run": {"concurrency": 7}}), {}).run.concurrency == 7


def test_on_ray_each_nodes_gateway_has_its_own_address() -> None:
    def host(**gateway: Any) -> str | None:
        own = {"run": {"executor": "ray"}, "gateway": gateway}
        config = run_config(arguments(QUICKSTART, rollwright=own), {"ADAPTER_PUBLIC_HOST": "10.0.0.1"})
        return config.gateway.public_host

    assert host() == "node"
    assert host(public_host="10.0.0.2") == "10.0.0.2"
    assert host(public_url="https://tunnel") == "10.0.0.1"
    assert settings(ADAPTER_PUBLIC_HOST="10.0.0.1").gateway.public_host == "10.0.0.1"


def test_a_host_called_node_is_the_address_of_this_one() -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    config = settings(ADAPTER_PUBLIC_HOST="node")
    assert ipaddress.ip_address(with_own_address(config).gateway.public_host or "")
    named = settings(ADAPTER_PUBLIC_HOST="10.0.0.1")
    assert with_own_address(named) == named


# --------------------------------------------------------------------------- sampling

STOPS = frozenset({7, 8})
PARAMETERS = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": -1,
    "max_new_tokens": 77,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""As slime's rollout function makes them of its own defaults."""


def test_slimes_sampling_is_ours() -> None:
    assert sampling_of(PARAMETERS, Sampling(), STOPS) == Sampling(
        temperature=0.8, top_p=0.95, top_k=0, max_new_tokens=77
    )
    default = Sampling(max_new_tokens=5)
    assert (
        sampling_of({}, default, STOPS) == sampling_of({"temperature": None, "top_k": None}, default, STOPS) == default
    )
    assert sampling_of({"sampling_seed": 3}, default, STOPS).seed == 3


@pytest.mark.parametrize(
    "asked",
    [
        {"stop": ["</answer>"]},
        {"stop": "END"},
        {"min_p": 0.05},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 16},
        {"ignore_eos": True},
        {"regex": "[0-9]+"},
        {"stop_token_ids": [7, 9]},
    ],
)
def test_a_sampling_that_no_engine_is_asked_for_is_refused_by_name(asked: dict[str, Any]) -> None:
    """Dropped silently, the tokens would have other probabilities than the trainer believes."""
    (name,) = asked
    with pytest.raises(ConfigError, match=name):
        sampling_of(PARAMETERS | asked, Sampling(), STOPS)


def test_what_means_nothing_or_is_so_anyway_is_no_reason_to_refuse() -> None:
    nothing = {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "stop": [], "n": 1, "json_schema": None}
    assert sampling_of(PARAMETERS | nothing | {"stop_token_ids": [8]}, Sampling(), STOPS) == sampling_of(
        PARAMETERS, Sampling(), STOPS
    )


def test_stops_on_slimes_command_line_are_refused_before_the_first_rollout() -> None:
    check_sampling(arguments(QUICKSTART, rollout_stop=None, rollout_stop_token_ids=[7, 8]), Sampling(), STOPS)
    wrong: list[dict[str, Any]] = [{"rollout_stop": ["x"]}, {"rollout_stop_token_ids": [1]}]
    for more in wrong:
        with pytest.raises(ConfigError, match="stop"):
            check_sampling(arguments(QUICKSTART, **more), Sampling(), STOPS)


@pytest.mark.parametrize("flag", ["partial_rollout", "group_rm", "use_rollout_routing_replay"])
def test_a_flag_that_cannot_be_served_is_refused_by_name(flag: str) -> None:
    off: dict[str, Any] = {flag: False}
    on: dict[str, Any] = {flag: True}
    check_options(arguments(QUICKSTART, **off), Sample())
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}"):
        check_options(arguments(QUICKSTART, **on), Sample())


def test_a_slime_that_replays_top_p_is_refused_only_with_one() -> None:
    class Replaying(Sample):
        rollout_top_p_token_ids: Any = None

    check_options(arguments(QUICKSTART, rollout_top_p=1.0), Replaying())
    check_options(arguments(QUICKSTART, rollout_top_p=0.9), Sample())
    with pytest.raises(ConfigError, match="--rollout-top-p"):
        check_options(arguments(QUICKSTART, rollout_top_p=0.9), Replaying())


# --------------------------------------------------------------------------- rows


def test_a_prompt_is_text_or_what_the_first_user_message_says() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Fix it."}]}]
    assert row_of(chat, None, {"a": 1}) == {"prompt": "Fix it.", "metadata": {"a": 1}}
    assert row_of("Fix it.", "x", None) == {"prompt": "Fix it.", "metadata": {}, "label": "x"}


def test_the_prompt_of_the_environment_comes_before_the_statement() -> None:
    config, row = settings(), json.loads((QUICKSTART / "tasks.jsonl").read_text().splitlines()[0])
    graders = load_graders(config)
    plain, told = (
        task_of(row, graders, config, environ, evaluation=False, where="row 1").agent.prompt
        for environ in ({}, {"SWE_CC_PROMPT": "Ask a sub-agent first."})
    )
    assert told == f"Ask a sub-agent first.\n\n{plain}"


def test_every_row_is_checked_before_the_first_rollout(tmp_path: Path) -> None:
    config = settings()
    good = (QUICKSTART / "tasks.jsonl").read_text()
    data = tmp_path / "train.jsonl"
    data.write_text(good + '{"prompt": "x", "metadata": {"image": "i"}}\n')
    with pytest.raises(TaskError, match=r"train\.jsonl line 12"):
        check_data(arguments(tmp_path, prompt_data=f"{data}@[0:4]"), load_graders(config), config, {})
    data.write_text(good)
    check_data(arguments(tmp_path, prompt_data=str(data)), load_graders(config), config, {})
    evaluated = arguments(tmp_path, eval_prompt_data=["own", str(data)])
    with pytest.raises(TaskError, match="scaleswe protocol"):
        check_data(evaluated, load_graders(config), config, {"SWE_EVAL_PROTOCOL": "swebench"})


def test_an_evaluation_set_is_read_as_slime_will_read_it(tmp_path: Path) -> None:
    """Its keys, its additions to the metadata, and only if its rollouts are ours."""
    rows = [json.loads(line) for line in (QUICKSTART / "tasks.jsonl").read_text().splitlines()]
    data = tmp_path / "eval.jsonl"
    data.write_text("".join(json.dumps({"question": row["prompt"], "meta": row["metadata"]}) + "\n" for row in rows))
    other = tmp_path / "aime.jsonl"
    other.write_text('{"question": "1 + 1"}\n')

    def checked(*sets: Namespace) -> None:
        args = arguments(tmp_path, eval_datasets=list(sets), custom_generate_function_path="ours")
        config = settings()
        check_data(args, load_graders(config), config, {"SWE_EVAL_PROTOCOL": "swebench"})

    def evaluation_set(path: Path, protocol: str, function: str | None = None) -> Namespace:
        return Namespace(
            path=f"{path}@[0:8]",
            input_key="question",
            label_key=None,
            metadata_key="meta",
            custom_generate_function_path=function,
            inject_metadata=lambda metadata: {**(metadata or {}), "protocol": protocol},
        )

    checked(evaluation_set(data, "scaleswe"), evaluation_set(data, "scaleswe", "ours"))
    checked(evaluation_set(other, "scaleswe", "theirs"))
    with pytest.raises(TaskError, match=r"eval\.jsonl line 1"):
        checked(evaluation_set(data, "swebench"))
    with pytest.raises(TaskError, match=r"aime\.jsonl line 1"):
        checked(evaluation_set(other, "scaleswe"))


# --------------------------------------------------------------------------- samples


def ended(name: str, reward: float | None, *, failure: str | None = None) -> Any:
    plan = RolloutPlan(run="run", task_name=name, task=plain_task(name), attempt=1)
    return scripted_attempt(plan, reward=reward, failure=failure)


def test_a_sample_is_slimes_own_with_the_response_cut_off_the_prompt(calc: list[StoredRollout]) -> None:
    base = Sample(index=5, group_index=2, prompt="p", metadata={"mine": 1})
    for rollout in calc:
        for made in FILLER.samples(base, rollout, evaluation=False):
            made.check()
            assert (made.index, made.group_index, made.rollout_id, made.metadata["mine"]) == (5, 2, 5, 1)
            if rollout.record.graded and made.metadata[KEY]["trainable"]:
                own = rollout.samples[made.metadata[KEY]["segment_index"]] if len(rollout.samples) == 1 else None
                if own is not None:
                    assert made.tokens == own.tokens.tolist()
                    assert sum(made.loss_mask) == sum(own.loss_mask)
                    assert made.loss_mask == own.loss_mask.tolist()[own.prompt_length :]
    assert base == Sample(index=5, group_index=2, prompt="p", metadata={"mine": 1}), "slime's sample is not changed"


def test_every_trained_token_reaches_slime_once(calc: list[StoredRollout]) -> None:
    for rollout in calc:
        rows = FILLER.samples(Sample(index=1), rollout, evaluation=False)
        trained = sum(sum(row.loss_mask) for row in rows if not row.remove_sample)
        assert trained == (rollout.record.trained_tokens if rollout.record.trainable else 0)
        assert len({row.rollout_id for row in rows}) == 1


def test_an_evaluation_counts_a_rollout_once(calc: list[StoredRollout]) -> None:
    for rollout in calc:
        assert len(FILLER.samples(Sample(index=1), rollout, evaluation=True)) == 1


def test_our_failure_is_aborted_with_its_reason_and_out_of_loss_and_baseline() -> None:
    for rows in (
        FILLER.samples(Sample(index=1), ended("a", None, failure="SandboxGone"), evaluation=False),
        FILLER.aborted(Sample(index=1), SandboxGone("it died"), evaluation=False),
    ):
        (made,) = rows
        made.check()
        assert made.status is Sample.Status.ABORTED
        assert made.remove_sample
        assert "SandboxGone" in made.metadata["abort_reason"]
        assert sum(made.loss_mask) == 0
        assert made.rollout_id == 1, "slime refuses a list whose samples have none"
        assert made.metadata[KEY]["counts_in_baseline"] is False
        assert (is_graded(made), failure_of(made)) == (False, "SandboxGone")


def test_a_sample_that_was_aborted_and_comes_again_says_nothing_of_it() -> None:
    (aborted,) = FILLER.samples(Sample(index=1), ended("a", None, failure="SandboxGone"), evaluation=False)
    (again,) = FILLER.samples(aborted, ended("a", 1.0), evaluation=False)
    assert again.status is Sample.Status.COMPLETED
    assert (again.remove_sample, again.reward) == (False, 1.0)
    assert "abort_reason" not in again.metadata
    (lost,) = FILLER.aborted(again, SandboxGone("it died"), evaluation=False)
    assert (lost.weight_versions, lost.reward) == ([], 0.0)


def test_a_key_of_the_environment_is_not_written_down() -> None:
    config = settings(E2B_API_KEY="e2b_secret", ADAPTER_PUBLIC_HOST="10.0.0.1")
    resolved = {"config": config.dump(), "versions": {}}
    assert "e2b_secret" in json.dumps(resolved)
    written = to_be_stored(resolved)
    assert "e2b_secret" not in json.dumps(written)
    assert RunConfig.resolve({k: v for k, v in written["config"].items() if k != "base"}, base=config.base, where="x")


def test_a_reward_key_is_kept() -> None:
    filler = Filler(decode=str, reward_key="score")
    (made,) = filler.samples(Sample(index=1), ended("a", 1.0), evaluation=False)
    assert made.reward == {"score": 1.0}


@pytest.mark.parametrize("keys", [(None, None), ("score", None), (None, "solved"), ("score", "solved")])
def test_an_evaluation_has_its_reward_where_slime_asks_for_it(keys: tuple[str | None, str | None]) -> None:
    reward_key, eval_reward_key = keys
    args = arguments(QUICKSTART, reward_key=reward_key, eval_reward_key=eval_reward_key)
    filler = Filler(decode=str, reward_key=reward_key, eval_reward_key=eval_reward_key)
    for evaluated, reward in (
        (filler.samples(Sample(index=1), ended("a", 1.0), evaluation=True), 1.0),
        (filler.aborted(Sample(index=1), SandboxGone("it died"), evaluation=True), 0.0),
    ):
        key = args.eval_reward_key or args.reward_key  # as slime's evaluation reads it
        assert (evaluated[0].reward[key] if key else evaluated[0].reward) == reward
        if reward_key:
            assert evaluated[0].get_reward_value(args) == reward
    (trained,) = filler.samples(Sample(index=1), ended("a", 1.0), evaluation=False)
    assert trained.get_reward_value(args) == 1.0


@pytest.mark.parametrize("name", ["SWE_TRAIN_PROTOCOL", "SWE_EVAL_PROTOCOL"])
def test_a_protocol_that_is_unknown_ends_the_job_even_if_no_row_can_be_read(name: str) -> None:
    """Else each rollout would come back aborted, and slime would ask for ever."""
    environ = {name: "swebnech"}
    config = settings(**environ)
    with pytest.raises(ConfigError, match=f"{name}: 'swebnech'"):
        check_data(ARGS, load_graders(config), config, environ)


# --------------------------------------------------------------------------- advantages


def group(rewards: Sequence[float | None], segments: Sequence[int], group_index: int = 0) -> list[Sample]:
    """One sample for each segment of each rollout; None: ungraded."""
    made: list[Sample] = []
    for index, (reward, count) in enumerate(zip(rewards, segments, strict=True)):
        for _ in range(count):
            note = {"rollout": f"t.{index}", "counts_in_baseline": reward is not None}
            status = Sample.Status.ABORTED if reward is None else Sample.Status.COMPLETED
            made.append(
                Sample(index=index, group_index=group_index, reward=reward or 0.0, status=status, metadata={KEY: note})
            )
    return made


def test_a_rollout_in_three_pieces_is_one_value_of_the_baseline() -> None:
    """slime's own way makes 0.75 of [1, 1, 1, 0]."""
    args = arguments(QUICKSTART, grpo_std_normalization=False)
    _, normalized = post_process_rewards(args, group([1.0, 0.0], [3, 1]))
    assert normalized == [0.5, 0.5, 0.5, -0.5]


def test_a_group_below_the_quorum_of_its_run_teaches_nothing() -> None:
    samples = group([1.0, 0.0, None, None], [1, 1, 1, 1])
    assert any(post_process_rewards(ARGS, samples)[1])
    for sample in samples:
        sample.metadata[KEY]["quorum"] = 3
    assert post_process_rewards(ARGS, samples)[1] == [0.0] * 4


def test_an_aborted_rollout_moves_nobody() -> None:
    whole, less = group([1.0, 0.0, None, None], [1, 2, 1, 1]), group([1.0, 0.0], [1, 2])
    raw, with_aborted = post_process_rewards(ARGS, whole)
    _, without = post_process_rewards(ARGS, less)
    assert with_aborted[:3] == without
    assert with_aborted[3:] == [0.0, 0.0]
    assert raw == [1.0, 0.0, 0.0, 0.0, 0.0]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0, None]), st.integers(1, 3)), min_size=2, max_size=6),
        min_size=1,
        max_size=3,
    )
)
def test_groups_do_not_touch_each_other(groups: list[list[tuple[float | None, int]]]) -> None:
    batch = [group([r for r, _ in g], [n for _, n in g], at) for at, g in enumerate(groups)]
    _, together = post_process_rewards(ARGS, [sample for each in batch for sample in each])
    apart = [value for each in batch for value in post_process_rewards(ARGS, each)[1]]
    assert together == apart


def test_a_sample_that_slime_ended_itself_has_no_advantage() -> None:
    """Its reward is None."""
    samples = group([1.0, 0.0], [1, 1])
    samples.append(Sample(index=9, group_index=0, status=Sample.Status.ABORTED))
    raw, normalized = post_process_rewards(ARGS, samples)
    assert raw == [1.0, 0.0, 0.0]
    assert normalized[0] == -normalized[1] > 0 == normalized[2]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
def test_an_estimator_with_a_group_baseline_gets_one(estimator: str) -> None:
    args = arguments(QUICKSTART, advantage_estimator=estimator)
    _, normalized = post_process_rewards(args, group([1.0, 0.0], [1, 1]))
    assert normalized[0] == -normalized[1] > 0


@pytest.mark.parametrize(
    ("rewards", "kept", "reason"),
    [
        ([1.0, 0.0, None], True, None),
        ([1.0, 1.0, 1.0], False, "constant"),
        ([1.0, None, None], False, "below_quorum"),
        ([None, None], False, "below_quorum"),
        ([1.0, 1.0, None], False, "constant"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_group_is_kept_when_its_verdicts_say_something(
    rewards: list[float | None], kept: bool, reason: str | None, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's own filters take an aborted rollout's 0 for a verdict, and end at a rollout of several samples."""
    module = ModuleType("slime.rollout.filter_hub.base_types")
    module.DynamicFilterOutput = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    samples = group(rewards, [1 + nested] * len(rewards))
    for sample in samples:
        sample.metadata[KEY]["quorum"] = 2
    given: list[Any] = [samples[at : at + 2] for at in range(0, len(samples), 2)] if nested else samples
    found = keep_informative(ARGS, given, rollout_id=3)
    assert (found.keep, found.reason) == (kept, reason)


@pytest.mark.parametrize("changed", [{"advantage_estimator": "ppo"}, {"rewards_normalization": False}])
def test_without_a_group_baseline_rewards_are_handed_through(changed: dict[str, Any]) -> None:
    raw, normalized = post_process_rewards(arguments(QUICKSTART, **changed), group([1.0, 0.0], [1, 1]))
    assert raw == normalized == [1.0, 0.0]
