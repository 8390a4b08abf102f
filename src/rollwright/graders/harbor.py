"""The `harbor` protocol: task folders (task.toml, instruction.md, tests/, solution/) judged by the reward they write.

`tests/test.sh` writes `/logs/verifier/reward.json` or `reward.txt`. No reward, an empty one, NaN or one outside [0, 1]
says nothing about the patch and is an error. Shared verifiers run in the patched box; separate ones in a box of their
own that gets nothing but the artifacts.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

from rollwright.errors import ConfigError, GradingFailed, TaskError
from rollwright.graders import Collect, RawRun, Script, TestPlan
from rollwright.graders.rows import Row, whole_lines
from rollwright.types import AgentView, GraderView, Task, Verdict, VerdictStatus

__all__ = ["Harbor", "read_reward"]

_LOGS = "/logs/verifier"
_JSON, _TEXT = f"{_LOGS}/reward.json", f"{_LOGS}/reward.txt"
_ARTIFACTS = "/logs/artifacts"
_SCRATCH = (_LOGS, _ARTIFACTS, "/logs/agent")
_FOLDER_BYTES = 64 << 20
_FOLDER_FILES = 2000
_REWARD_BYTES = 1 << 20


class Harbor:
    """Options of the run file's `[grading.harbor]` table.

    `image`: the image of tasks that name none, with `{name}` for the folder's name. `workdir`: of tasks that say none.
    `user`: who runs the tests where task.toml does not say. `network`: let verifiers that ask for a public network have
    one. `reward_key`: which number of reward.json counts, if there are several and none is called `reward`.
    """

    name = "harbor"
    version = "2"

    def __init__(
        self,
        *,
        image: str = "",
        workdir: str = "/app",
        user: Literal["agent", "root"] = "agent",
        network: bool = False,
        reward_key: str = "reward",
    ) -> None:
        if user not in ("agent", "root"):
            raise ConfigError(f"grading.harbor.user: {user!r} is neither 'agent' nor 'root'")
        if not workdir.startswith("/") or workdir.rstrip("/") == "":
            raise ConfigError(f"grading.harbor.workdir: {workdir!r} is not an absolute path of a folder")
        self._image = image
        self._workdir = workdir
        self._user: Literal["agent", "root"] = user
        self._network = network
        self._reward_key = reward_key

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        folder = Path(reader.require("metadata.task_dir"))
        if not folder.is_absolute():
            raise reader.error("metadata.task_dir", f"is not an absolute path: {str(folder)!r}")
        tests = _files_below(reader, folder / "tests")
        solution = _files_below(reader, folder / "solution")
        prompt = _text(reader, folder / "instruction.md")
        toml_text = _text(reader, folder / "task.toml")
        try:
            toml = Row(tomllib.loads(toml_text), where)
        except tomllib.TOMLDecodeError as e:
            raise reader.error("task.toml", f"is not TOML: {e}") from e
        dockerfile = folder / "environment" / "Dockerfile"
        workdir = (
            toml.text("environment.workdir")
            or (_workdir_of(_text(reader, dockerfile)) if dockerfile.is_file() else None)
            or self._workdir
        )
        if not workdir.startswith("/") or "/../" in workdir + "/" or workdir.rstrip("/") == "":
            raise reader.error("environment.workdir", f"is not an absolute path of a folder: {workdir!r}")
        image = toml.text("environment.docker_image") or self._image.replace("{name}", folder.name)
        if not image:
            raise reader.error(
                "environment.docker_image",
                "is missing: build environment/Dockerfile and name the image by grading.harbor.image",
            )
        patch = solution.get("solution.patch")
        return Task(
            agent=AgentView(
                id=_digest(toml_text, prompt, tests, solution),
                image=image,
                workdir=workdir.rstrip("/"),
                prompt=prompt,
            ),
            grader=GraderView(
                source_id=toml.text("task.name") or folder.name,
                protocol=self.name,
                payload={"toml": toml.data, "tests": tests, "solution": solution},
                gold_patch=None if patch is None or "solve.sh" in solution else whole_lines(patch.decode()),
            ),
        )

    def preflight(self) -> list[str]:
        return []

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        toml = Row(payload["toml"], task.grader.source_id)
        problems: list[str] = []
        if "test.sh" not in payload["tests"]:
            problems.append("tests/test.sh is missing")
        for field, what in (
            ("steps", "several steps"),
            ("environment.mcp_servers", "MCP servers"),
            ("environment.healthcheck", "services with a health check"),
            ("environment.env", "an environment of its own (environment.env)"),
            ("environment.gpus", "GPUs"),
        ):
            _, value = toml.find(field)
            if value:
                problems.append(f"it needs {what}, which is not supported")
        if (toml.text("environment.os") or "linux") != "linux":
            problems.append("it is not for Linux")
        mode = toml.text("verifier.environment_mode") or "shared"
        if mode not in ("shared", "separate"):
            problems.append(f"verifier.environment_mode is {mode!r}, neither shared nor separate")
        network = toml.text("verifier.network_mode") or "no-network"
        if network == "public" and not self._network:
            problems.append("its verifier wants a public network; grading.harbor.network = true gives it one")
        elif network not in ("public", "no-network"):
            problems.append(f"its verifier wants the network mode {network!r}, which no sandbox here has")
        problems += _env_problems(toml, "verifier.env") + _env_problems(toml, "solution.env")
        try:
            self.plan(task, nonce="")
            self.solution(task)
        except TaskError as e:
            problems.append(e.message)
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        toml = Row(payload["toml"], task.grader.source_id)
        user = self._user_of(toml, "verifier.user")
        separate = toml.text("verifier.environment_mode") == "separate"
        tests: Mapping[str, bytes] = payload["tests"]
        return TestPlan(
            argv=("bash", "/tests/test.sh"),
            files={f"/tests/{name}": data for name, data in tests.items()},
            env=_env(toml, "verifier.env"),
            outputs=(_JSON, _TEXT),
            scratch=_SCRATCH,
            user=user,
            network=self._network and toml.text("verifier.network_mode") == "public",
            seconds=_seconds(toml, "verifier.timeout_sec"),
            collect=self._collect(task, toml, user, nonce) if separate else None,
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        if raw.state == "timeout":
            return self._verdict(VerdictStatus.TEST_TIMEOUT, 0.0, raw)
        as_json, as_text = raw.reports.get(_JSON), raw.reports.get(_TEXT)
        signals: list[str] = []
        try:
            if raw.state == "exited" and raw.exit_code is None:
                raise ValueError("it was killed, and whatever lies there may be another's")
            reward = read_reward(as_json, as_text, key=self._reward_key)
            if as_json is not None and as_text is not None:
                other = read_reward(None, as_text)
                if other != reward:  # one of them may be written by what was tested
                    signals.append(f"rewards_disagree: {reward:g} and {other:g}")
                    reward = min(reward, other)
        except ValueError as e:
            said = raw.log[-2000:].decode("utf-8", "replace")
            raise GradingFailed(
                f"the verifier left no usable reward: {e}", state=raw.state, exit_code=raw.exit_code, evidence=said
            ) from e
        status = VerdictStatus.RESOLVED if reward == 1.0 else VerdictStatus.UNRESOLVED
        return self._verdict(status, reward, raw, signals)

    def solution(self, task: Task) -> Script | None:
        """solution/solve.sh, for `validate`."""
        scripts: Mapping[str, bytes] = task.grader.payload["solution"]
        if "solve.sh" not in scripts:
            return None
        toml = Row(task.grader.payload["toml"], task.grader.source_id)
        return Script(
            argv=("bash", "/solution/solve.sh"),
            files={f"/solution/{name}": data for name, data in scripts.items()},
            env=_env(toml, "solution.env"),
            seconds=_seconds(toml, "agent.timeout_sec"),
        )

    def _verdict(self, status: VerdictStatus, reward: float, raw: RawRun, signals: Sequence[str] = ()) -> Verdict:
        odd = () if raw.exit_code == 0 else (f"exit_code_{raw.exit_code}",)
        return Verdict(
            status=status,
            reward=reward,
            grader=self.name,
            grader_version=self.version,
            exit_code=raw.exit_code,
            signals=(*signals, *odd),
        )

    def _user_of(self, toml: Row, field: str) -> Literal["agent", "root"]:
        said = toml.text(field)
        return "root" if said == "root" else self._user if said is None else "agent"

    def _collect(self, task: Task, toml: Row, user: Literal["agent", "root"], nonce: str) -> Collect:
        folder = f"/var/rollwright-tests/{nonce}"
        commit = files("rollwright.graders").joinpath("assets", "commit.sh").read_bytes()
        commands = [Script(argv=("sh", f"{folder}/commit.sh"), files={f"{folder}/commit.sh": commit}, user="root")]
        for number, hook in enumerate(_tables(toml, "verifier.collect")):
            path = f"{folder}/collect{number}.sh"
            commands.append(
                Script(
                    argv=("bash", path),
                    files={path: hook.require("command").encode() + b"\n"},
                    user=user,
                    seconds=_seconds(hook, "timeout_sec"),
                    required=False,
                )
            )
        return Collect(
            commands=tuple(commands),
            artifacts=tuple(dict.fromkeys((_ARTIFACTS, *_artifacts(toml)))),
            image=toml.text("verifier.environment.docker_image") or task.agent.image,
            workdir=(toml.text("verifier.environment.workdir") or task.agent.workdir).rstrip("/"),
        )


def read_reward(as_json: bytes | None, as_text: bytes | None, *, key: str = "reward") -> float:
    """The reward of a verifier: reward.json first, else reward.txt. Raises `ValueError` for what is no number in
    [0, 1]."""
    if as_json is not None:
        if len(as_json) > _REWARD_BYTES:
            raise ValueError("reward.json is too large")
        try:
            found: Any = json.loads(as_json)
        except RecursionError as e:
            raise ValueError("reward.json is nested too deep") from e
        if not isinstance(found, dict):
            raise ValueError("reward.json is not an object")
        rewards = cast("dict[str, Any]", found)
        value = rewards.get(key)
        if value is None and len(rewards) == 1:
            value = next(iter(rewards.values()))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"reward.json has no number called {key!r}")
        reward = float(value)
    elif as_text is not None:
        reward = float(as_text[:100].decode("ascii", "strict").strip())
    else:
        raise ValueError("there is neither reward.json nor reward.txt, or they are empty")
    if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
        raise ValueError(f"{reward!r} is not in [0, 1]")
    return reward


def _text(reader: Row, path: Path) -> str:
    try:
        if path.stat().st_size > _FOLDER_BYTES:
            raise reader.error(path.name, f"has more than {_FOLDER_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise reader.error(path.name, f"is missing in {path.parent}") from e
    except (OSError, UnicodeDecodeError) as e:
        raise reader.error(path.name, f"cannot be read: {e}") from e


def _files_below(reader: Row, folder: Path) -> dict[str, bytes]:
    """Relative path → content of the regular files. A link may not lead out of the folder."""
    found: dict[str, bytes] = {}
    total = 0
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if not path.resolve().is_relative_to(root):
            raise reader.error(folder.name, f"has a link that leads out of it: {path}")
        total += path.stat().st_size
        if total > _FOLDER_BYTES or len(found) >= _FOLDER_FILES:
            raise reader.error(folder.name, f"has more than {_FOLDER_BYTES} bytes or {_FOLDER_FILES} files")
        try:
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
        except OSError as e:
            raise reader.error(folder.name, f"cannot be read: {e}") from e
    return found


def _digest(*parts: str | Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        items = [("", part.encode())] if isinstance(part, str) else sorted(part.items())
        for name, data in items:
            digest.update(repr((name, hashlib.sha256(data).hexdigest())).encode())
    return digest.hexdigest()[:16]


def _workdir_of(dockerfile: str) -> str | None:
    """The last absolute WORKDIR of a Dockerfile."""
    found: str | None = None
    for line in dockerfile.splitlines():
        words = line.split()
        if len(words) == 2 and words[0].upper() == "WORKDIR" and words[1].startswith("/"):
            found = words[1]
    return found


def _tables(toml: Row, field: str) -> list[Row]:
    _, value = toml.find(field)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise toml.error(field, "is not a list of tables")
    return [Row(item, toml.where) for item in cast("list[dict[str, Any]]", value)]


def _artifacts(toml: Row) -> list[str]:
    _, value = toml.find("artifacts")
    paths: list[str] = []
    for item in cast("list[Any]", value) if isinstance(value, list) else []:
        path = cast("dict[str, Any]", item).get("source") if isinstance(item, dict) else item
        if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/"):
            raise toml.error("artifacts", f"holds what is not an absolute path: {path!r}")
        paths.append(path)
    return paths


def _env(toml: Row, field: str) -> dict[str, str]:
    _, value = toml.find(field)
    return {str(k): str(v) for k, v in cast("dict[str, Any]", value).items()} if isinstance(value, dict) else {}


def _env_problems(toml: Row, field: str) -> list[str]:
    """Values may name variables of the host, which no box of ours gets."""
    return [f"{field}.{name} takes a variable of the host ({v})" for name, v in _env(toml, field).items() if "${" in v]


def _seconds(toml: Row, field: str) -> float:
    _, value = toml.find(field)
    if value is None:
        return 600.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise toml.error(field, f"is not a positive number: {value!r}")
    return float(value)
