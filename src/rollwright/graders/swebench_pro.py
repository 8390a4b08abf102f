"""The `swebench_pro` protocol: rows of SWE-bench Pro, run by the benchmark's own scripts in the benchmark's own order.

Reset to the base, the patch, the hidden tests (the last line of `before_repo_set_cmd`), `run_script.sh` with the
selected tests, `parser.py`. Solved: every required test is among those that the parser calls PASSED.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

from rollwright.errors import ConfigError
from rollwright.graders import LogParser, RawRun, Script, TestPlan
from rollwright.graders.pytest_run import PROTECTED, SETTINGS
from rollwright.graders.rows import Row, fields, whole_lines, workdir
from rollwright.types import AgentView, GraderView, Task, TestOutcome, TestStatus, Verdict, VerdictStatus

__all__ = ["SwebenchPro", "environment"]

_ROOT = "/var/rollwright-tests"
_SHA = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_ASSET_BYTES = 4 << 20
_LOG_BYTES = 32 << 20
_MAX_REPORTED = 5000
_STATUSES: Mapping[str, TestStatus] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
}
_WORSE: tuple[TestStatus, ...] = ("passed", "xfailed", "skipped", "failed", "error")
_PROTECTED = (
    *PROTECTED,
    "**/__tests__/**",
    "**/*_test.go",
    *(f"**/*.{kind}.{suffix}" for kind in ("test", "spec") for suffix in ("js", "jsx", "ts", "tsx", "mjs", "cjs")),
    "**/jest.config.*",
    "**/vitest.config.*",
    "**/karma.conf.*",
    "**/.mocharc*",
)
_PROMPT = "{problem_statement}\n\nRequirements:\n{requirements}\n\nNew interfaces introduced:\n{interface}"


class SwebenchPro:
    """Options of the run file's `[grading.swebench_pro]` table.

    `assets`: a checkout of the benchmark's repository (`run_scripts/<id>/`, `dockerfiles/*/<id>/`), or a folder with
    `<id>/{run_script.sh,parser.py,Dockerfile}`. `seconds`: the tests' time. `user`: who runs them; images that keep
    their packages in /root need `root`. `images`: repository of the row's `dockerhub_tag`. `prompt`: what the CLI is
    told.
    """

    name = "swebench_pro"
    version = "1"

    def __init__(
        self,
        *,
        assets: Path | None = None,
        seconds: float = 3600,
        user: Literal["agent", "root"] = "agent",
        images: str = "jefzda/sweap-images",
        prompt: str = _PROMPT,
    ) -> None:
        if not seconds > 0:
            raise ConfigError(f"grading.swebench_pro.seconds: {seconds!r} is not a positive number")
        if user not in ("agent", "root"):
            raise ConfigError(f"grading.swebench_pro.user: {user!r} is neither 'agent' nor 'root'")
        if "{problem_statement}" not in prompt:
            raise ConfigError("grading.swebench_pro.prompt: it has no {problem_statement}")
        self._assets = assets
        self._seconds = seconds
        self._user: Literal["agent", "root"] = user
        self._images = images
        self._prompt = prompt

    def parse(self, row: Mapping[str, Any], *, where: str) -> Task:
        reader = Row(row, where)
        reader.must_be(self.name, "metadata.protocol")

        def names(field: str) -> tuple[str, ...]:
            return f"metadata.swepro.{field}", *fields(field)

        source_id = reader.require(*names("instance_id"))
        if not _ID.fullmatch(source_id):
            raise reader.error("instance_id", f"cannot name a folder of scripts: {source_id[:80]!r}")
        before = reader.require(*names("before_repo_set_cmd")).strip().split("\n")
        tests = _checkout(before[-1])
        if tests is None:
            raise reader.error(
                "before_repo_set_cmd", f"its last line is not `git checkout COMMIT -- TESTS`: {before[-1][:80]!r}"
            )
        base = reader.text(*names("base_commit")) or _reset(before[0])
        if base is None or not _SHA.fullmatch(base):
            raise reader.error("base_commit", f"is not a commit: {base!r}")
        image = reader.text(*names("image"))
        tag = reader.text(*names("dockerhub_tag"))
        if image is None and (tag is None or not _TAG.fullmatch(tag)):
            raise reader.error("dockerhub_tag", f"is not the tag of an image (and there is no image): {tag!r}")
        gold = reader.text(*names("patch"))
        payload: dict[str, Any] = {
            "fail_to_pass": reader.ids(*names("fail_to_pass"), *names("FAIL_TO_PASS")),
            "pass_to_pass": reader.ids(*names("pass_to_pass"), *names("PASS_TO_PASS")),
            "selected": reader.ids(*names("selected_test_files_to_run"), *names("selected_test_files")),
            "tests_commit": tests[0],
            "test_paths": tests[1:],
            **self._scripts(reader, source_id),
        }
        return Task(
            agent=AgentView(
                id=reader.digest(),
                image=image or f"{self._images}:{tag}",
                workdir=workdir(reader, "/app"),
                prompt=self._told(reader, names),
                pre_commands=(f"git reset -q --hard {base}", f"git checkout -q {base}"),
            ),
            grader=GraderView(
                source_id=source_id,
                protocol=self.name,
                payload=payload,
                gold_patch=None if gold is None else whole_lines(gold),
            ),
        )

    def preflight(self) -> list[str]:
        if self._assets is None:
            return ["set grading.swebench_pro.assets to a checkout of the benchmark's repository (its run_scripts)"]
        if not self._assets.is_dir():
            return [f"grading.swebench_pro.assets: there is no folder {self._assets}"]
        return []

    def check(self, task: Task) -> list[str]:
        payload = task.grader.payload
        problems: list[str] = []
        for name in ("run_script", "parser"):
            if payload[name] is None:
                problems.append(
                    f"no {_FILES[name]} of {task.grader.source_id} in {self._assets or 'grading.swebench_pro.assets'}"
                )
        if not payload["fail_to_pass"]:
            problems.append("fail_to_pass is empty: nothing would prove a fix")
        if not payload["selected"]:
            problems.append("selected_test_files_to_run is empty: nothing would be run")
        for text in payload["dockerfiles"]:
            problems += _env_problems(text)
        return problems

    def plan(self, task: Task, *, nonce: str) -> TestPlan:
        payload = task.grader.payload
        folder, private = f"{_ROOT}/{nonce}", f"/var/rollwright-parser/{nonce}"
        paths: tuple[str, ...] = payload["test_paths"]
        return TestPlan(
            argv=("bash", f"{folder}/pro_launch.sh", folder, ",".join(payload["selected"])),
            files={
                f"{folder}/pro_launch.sh": files("rollwright.graders").joinpath("assets", "pro_launch.sh").read_bytes(),
                f"{folder}/env.sh": environment(payload["dockerfiles"]).encode(),
                f"{folder}/run_script.sh": payload["run_script"].encode(),
            },
            install=("git", "-c", "core.hooksPath=/dev/null", "checkout", payload["tests_commit"], "--", *paths),
            settings=SETTINGS,
            protected=(*_PROTECTED, *paths, *(f"{path.rstrip('/')}/**" for path in paths)),
            hide_history=True,
            user=self._user,
            seconds=self._seconds,
            merge_stderr=False,
            log_bytes=_LOG_BYTES,
            parser=LogParser(
                script=Script(
                    argv=(
                        "python3",
                        "-I",
                        f"{private}/parser.py",
                        f"{private}/stdout",
                        f"{private}/stderr",
                        f"{private}/output.json",
                    ),
                    files={f"{private}/parser.py": payload["parser"].encode()},
                    user="root",
                    seconds=300,
                ),
                stdout=f"{private}/stdout",
                stderr=f"{private}/stderr",
                output=f"{private}/output.json",
            ),
        )

    def judge(self, task: Task, raw: RawRun) -> Verdict:
        payload = task.grader.payload
        required = list(dict.fromkeys([*payload["fail_to_pass"], *payload["pass_to_pass"]]))
        signals: list[str] = []
        found: dict[str, set[TestStatus]] = {}
        data = next(iter(raw.reports.values()), None)
        if raw.state != "exited":
            signals.append(f"run_ended_as_{raw.state}")
        elif data is None:
            signals.append("no_report")
        else:
            try:
                found = _read(data)
            except (ValueError, RecursionError) as e:
                signals.append(f"unreadable_report: {e}")
        outcomes = [_outcome(name, found.pop(name, set()), expected=True) for name in required]
        passed = bool(required) and all(o.status == "passed" for o in outcomes)
        contradicted = [o.id for o in outcomes if o.message]
        signals += [f"contradicting_results: {name}" for name in contradicted[:20]]
        outcomes += [_outcome(name, statuses, expected=False) for name, statuses in found.items()]
        status = VerdictStatus.RESOLVED if passed else VerdictStatus.UNRESOLVED
        if raw.state == "timeout":
            status = VerdictStatus.TEST_TIMEOUT
        return Verdict(
            status=status,
            reward=1.0 if status is VerdictStatus.RESOLVED else 0.0,
            grader=self.name,
            grader_version=self.version,
            tests=tuple(outcomes[:_MAX_REPORTED]),
            exit_code=raw.exit_code,
            signals=tuple(signals),
            trainable=not contradicted,
        )

    def _told(self, reader: Row, names: Any) -> str:
        text = self._prompt
        texts = {"requirements": reader.text(*names("requirements")), "interface": reader.text(*names("interface"))}
        texts["problem_statement"] = reader.require(*names("problem_statement"))
        parts = re.split(r"\{(problem_statement|requirements|interface)\}", text)
        return "".join((texts[part] or "none") if i % 2 else part for i, part in enumerate(parts))

    def _scripts(self, reader: Row, source_id: str) -> dict[str, Any]:
        """The task's assets as text; None for one that is missing."""
        found: dict[str, Any] = {"run_script": None, "parser": None, "dockerfiles": ()}
        if self._assets is None:
            return found
        named = {
            "run_script": reader.text("metadata.swepro.run_script_path"),
            "parser": reader.text("metadata.swepro.parser_script_path"),
        }
        for name, path in named.items():
            places = [f"run_scripts/{source_id}/{_FILES[name]}", f"{source_id}/{_FILES[name]}"]
            found[name] = self._first(reader, [path] if path else places)
        dockerfiles = [
            self._first(reader, [f"dockerfiles/base_dockerfile/{source_id}/Dockerfile"]),
            self._first(reader, [f"dockerfiles/instance_dockerfile/{source_id}/Dockerfile", f"{source_id}/Dockerfile"]),
        ]
        return found | {"dockerfiles": tuple(text for text in dockerfiles if text)}

    def _first(self, reader: Row, places: list[str]) -> str | None:
        assert self._assets is not None
        root = self._assets.resolve()
        for place in places:
            path = (root / place).resolve()
            if not path.is_relative_to(root):
                raise reader.error("metadata.swepro", f"names a script outside {root}: {place!r}")
            if not path.is_file():
                continue
            if path.stat().st_size > _ASSET_BYTES:
                raise reader.error("metadata.swepro", f"names a script of more than {_ASSET_BYTES} bytes: {path}")
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise reader.error("metadata.swepro", f"names a script that cannot be read: {path}: {e}") from e
        return None


_FILES = {"run_script": "run_script.sh", "parser": "parser.py"}


def environment(dockerfiles: tuple[str, ...]) -> str:
    """The `ENV` lines of Dockerfiles as a script of `export`s, in order. Of a value only `$NAME` is expanded."""
    lines: list[str] = []
    for text in dockerfiles:
        for name, value in _env_pairs(text):
            lines.append(f"export {name}={_quoted(value)}")
    return "\n".join(lines) + "\n"


_ENV_LINE = re.compile(r"^\s*ENV\s+(.+)$", re.IGNORECASE | re.MULTILINE)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def _env_pairs(dockerfile: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for rest in _ENV_LINE.findall(dockerfile.replace("\\\r\n", " ").replace("\\\n", " ")):
        name, space, value = rest.strip().partition(" ")
        if "=" not in name:
            pairs += [(name, value.strip())] if space else []
            continue
        pairs += [(key, value) for key, _, value in (word.partition("=") for word in shlex.split(rest))]
    return [(name, value) for name, value in pairs if _ENV_NAME.fullmatch(name)]


def _env_problems(dockerfile: str) -> list[str]:
    try:
        _env_pairs(dockerfile)
    except ValueError as e:
        return [f"an ENV line of its Dockerfile cannot be read: {e}"]
    return []


def _quoted(value: str) -> str:
    parts = _REFERENCE.split(value)
    out = ""
    for i in range(0, len(parts), 3):
        out += shlex.quote(parts[i]) if parts[i] else ""
        if i + 1 < len(parts):
            out += '"${%s-}"' % (parts[i + 1] or parts[i + 2])
    return out or "''"


def _checkout(line: str) -> tuple[str, ...] | None:
    """Commit and paths of `git checkout COMMIT -- PATHS`."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    if len(words) < 5 or words[:2] != ["git", "checkout"] or words[3] != "--" or not _SHA.fullmatch(words[2]):
        return None
    paths = words[4:]
    if any(path.startswith(("/", ":", "-")) or ".." in path.split("/") or not path for path in paths):
        return None
    return (words[2], *paths)


def _reset(line: str) -> str | None:
    words = line.split()
    return words[3] if words[:3] == ["git", "reset", "--hard"] and len(words) == 4 else None


def _read(data: bytes) -> dict[str, set[TestStatus]]:
    """Test → all statuses the parser gave it. Raises `ValueError`."""
    report: Any = json.loads(data)
    tests: Any = cast("dict[str, Any]", report).get("tests") if isinstance(report, dict) else None
    if not isinstance(tests, list):
        raise ValueError("it has no list of tests")
    found: dict[str, set[TestStatus]] = {}
    for item in cast("list[Any]", tests):
        entry = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        name, status = entry.get("name"), entry.get("status")
        if not isinstance(name, str) or not isinstance(status, str):
            raise ValueError("an entry is not a name and a status")
        found.setdefault(name, set()).add(_STATUSES.get(status.upper(), "error"))
    return found


def _outcome(name: str, statuses: set[TestStatus], *, expected: bool) -> TestOutcome:
    """The official rule is that one PASSED is enough; a name that also failed says so in its message."""
    worst: TestStatus = "missing"
    for status in _WORSE:
        if status in statuses:
            worst = status
    if "passed" in statuses:
        message = f"also {worst}" if worst in ("failed", "error") else ""
        return TestOutcome(id=name, status="passed", expected=expected, message=message)
    return TestOutcome(id=name, status=worst, expected=expected)
