"""The one door to the `swebench` package: its parsers and its verdicts, loaded without its heavy dependencies.

From 5.0 on a row says which parser reads its log. 4.1 has tables of repositories instead. Both packages import Docker,
Modal and `datasets` on the way to their graders; stand-ins for those parent modules, taken away again at once, save
half a gigabyte and seconds of import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from rollwright.errors import ConfigError

__all__ = [
    "INSTALL",
    "OfficialReport",
    "OfficialTask",
    "Package",
    "installed_version",
    "load_package",
    "load_parser",
    "parser_names",
    "problem",
]

INSTALL = 'pip install --no-deps "swebench==5.0.2" unidiff'
_ANSI = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_INSTALL_TABLES = 'pip install --no-deps "swebench==4.1.0" unidiff'


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialTask:
    """What the package must know of a row to judge its log."""

    instance_id: str
    repo: str
    version: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    log_parser: str = ""
    """From 5.0 on."""
    eval_type: str = ""
    """`pass_and_fail` or `fail_only`; from 5.0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialReport:
    """The package's own reading of a log."""

    resolved: bool
    found: bool
    """Whether it found a run in the log."""


LogParser: TypeAlias = Callable[[str, Any], dict[str, str]]
"""The package's: a log and a spec in, test → status out."""


class Package(Protocol):
    """One loaded version. `check` says what keeps a row from being judged by it."""

    version: str

    def check(self, task: OfficialTask, *, has_script: bool) -> list[str]: ...

    def eval_script(self, row: Mapping[str, Any]) -> str:
        """The official script of a row that brings none. Raises `ConfigError` where there are no tables."""
        ...

    def parse(self, task: OfficialTask, log: str) -> Mapping[str, str]:
        """The statuses in a piece of a log."""
        ...

    def report(self, task: OfficialTask, log: str) -> OfficialReport:
        """`get_eval_report` of a whole log."""
        ...

    def fail_only(self, task: OfficialTask) -> bool:
        """Whether only an explicit failure counts against the patch."""
        ...

    def parsers(self) -> Mapping[str, LogParser]:
        """Its parsers by name."""
        ...


def installed_version() -> str | None:
    """The version of the installed package, without importing it."""
    try:
        return importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        return None


def problem() -> str | None:
    """What keeps the package from being used here, with the install line; None when it is ready."""
    version = installed_version()
    if version is None:
        return f"the package swebench is not installed: {INSTALL} (for rows without eval_script: {_INSTALL_TABLES})"
    if not version.startswith(("4.1.", "5.")):
        return f"swebench {version} is not a version this grader knows: {INSTALL} (or 4.1.0)"
    if importlib.util.find_spec("unidiff") is None:
        return "swebench needs the package unidiff: pip install unidiff"
    try:
        load_package()
    except ImportError as e:
        return f"swebench {version} cannot be imported ({e}): {INSTALL}"
    return None


@cache
def load_package() -> Package:
    """The installed package. Raises `ConfigError` when there is none, `ImportError` when it cannot be imported."""
    version = installed_version()
    spec = importlib.util.find_spec("swebench")
    if version is None or spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package swebench is not installed: {INSTALL}")
    folder = spec.submodule_search_locations[0]
    return _Tables(version, folder) if version.startswith("4.") else _Rows(version, folder)


def parser_names() -> frozenset[str]:
    """The parsers of the installed package. Raises as `load_package` does."""
    return frozenset(load_package().parsers())


def load_parser(name: str) -> Callable[[str], Mapping[str, str]]:
    """One of them, for a log that belongs to no row of SWE-bench. Raises `ConfigError` for an unknown name."""
    parser = load_package().parsers().get(name)
    if parser is None:
        raise ConfigError(f"swebench {installed_version()} has no log parser {name!r}")
    return lambda log: parser(log, None)


class _Remembering:
    """A parser that still knows what it found in its last log: the package and we read the same one, of megabytes."""

    def __init__(self, parser: LogParser) -> None:
        self._parser = parser
        self._last: tuple[str, dict[str, str]] | None = None

    def __call__(self, log: str, spec: Any) -> dict[str, str]:
        last, self._last = self._last, None
        if last is not None and last[0] == log:
            return last[1]
        found = self._parser(log, spec)
        self._last = (log, dict(found))
        return found


class _Rows:
    """From 5.0 on."""

    def __init__(self, version: str, folder: str) -> None:
        self.version = version
        with _stand_ins({"swebench.harness": _hollow("swebench.harness", f"{folder}/harness")}):
            self._grading = importlib.import_module("swebench.harness.grading")
            self._types = importlib.import_module("swebench.types")
        self._parsers: Mapping[str, LogParser] = dict(self._grading.PARSER_REGISTRY)
        self._remembering = {name: _Remembering(parser) for name, parser in self._parsers.items()}
        vars(self._grading)["PARSER_REGISTRY"] = self._remembering

    def check(self, task: OfficialTask, *, has_script: bool) -> list[str]:
        problems: list[str] = []
        if not has_script:
            problems.append(
                f"eval_script: is missing, and swebench {self.version} has no tables to make one from; use rows of "
                f"SWE-bench 5 (image, eval_script, log_parser, eval_type), or {_INSTALL_TABLES}"
            )
        elif task.log_parser not in self._parsers:
            problems.append(f"log_parser: swebench {self.version} has no parser {task.log_parser!r}")
        elif task.eval_type not in {kind.value for kind in self._grading.EvalType}:
            problems.append(f"eval_type: {task.eval_type!r} is neither pass_and_fail nor fail_only")
        return problems

    def eval_script(self, row: Mapping[str, Any]) -> str:
        raise ConfigError(
            f"{row.get('instance_id')}: swebench {self.version} has no tables to make an eval_script from"
        )

    def parse(self, task: OfficialTask, log: str) -> Mapping[str, str]:
        return self._remembering[task.log_parser](log, self._spec(task))

    def report(self, task: OfficialTask, log: str) -> OfficialReport:
        return _report(self._grading, self._spec(task), task.instance_id, log)

    def fail_only(self, task: OfficialTask) -> bool:
        return task.eval_type == "fail_only"

    def parsers(self) -> Mapping[str, LogParser]:
        return self._parsers

    def _spec(self, task: OfficialTask) -> Any:
        return self._types.TestSpec(
            instance_id=task.instance_id,
            image="",
            eval_script_list=[],
            repo=task.repo,
            version=task.version,
            FAIL_TO_PASS=list(task.fail_to_pass),
            PASS_TO_PASS=list(task.pass_to_pass),
            log_parser=task.log_parser,
            eval_type=task.eval_type,
        )


class _Tables:
    """4.1. Its `make_test_spec` downloads the environment's requirements for many repositories; grading needs the test
    script alone, so that is all that is asked of it."""

    def __init__(self, version: str, folder: str) -> None:
        self.version = version
        names = ("swebench", "swebench.harness", "swebench.harness.utils", "requests")
        hollow = {
            "swebench": _hollow("swebench", folder),
            "swebench.harness": _hollow("swebench.harness", f"{folder}/harness"),
            "swebench.harness.utils": _utils_of_tables(),
            "requests": ModuleType("requests"),
        }
        with _stand_ins({name: hollow[name] for name in names}):
            self._grading = importlib.import_module("swebench.harness.grading")
            self._scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
            self._specs = importlib.import_module("swebench.harness.test_spec.test_spec")
        self._parsers: Mapping[str, LogParser] = dict(self._grading.MAP_REPO_TO_PARSER)
        self._remembering = {repo: _Remembering(parser) for repo, parser in self._parsers.items()}
        vars(self._grading)["MAP_REPO_TO_PARSER"] = self._remembering

    def check(self, task: OfficialTask, *, has_script: bool) -> list[str]:
        if has_script:
            return [f"eval_script: rows of SWE-bench 5 need swebench 5, not {self.version}: {INSTALL}"]
        versions = self._grading.MAP_REPO_VERSION_TO_SPECS.get(task.repo)
        if versions is None or task.repo not in self._parsers:
            return [f"repo: swebench {self.version} has no tests for {task.repo}"]
        if task.version not in versions:
            return [f"version: swebench {self.version} has no tests for {task.repo} {task.version!r}"]
        return []

    def eval_script(self, row: Mapping[str, Any]) -> str:
        specs = self._grading.MAP_REPO_VERSION_TO_SPECS[row["repo"]][row["version"]]
        lines: list[str] = self._scripts.make_eval_script_list(
            dict(row), specs, "testbed", "/testbed", row["base_commit"], row["test_patch"]
        )
        return "\n".join(lines) + "\n"

    def parse(self, task: OfficialTask, log: str) -> Mapping[str, str]:
        return self._remembering[task.repo](log, self._spec(task))

    def report(self, task: OfficialTask, log: str) -> OfficialReport:
        return _report(self._grading, self._spec(task), task.instance_id, log)

    def fail_only(self, task: OfficialTask) -> bool:
        return task.repo in self._grading.FAIL_ONLY_REPOS

    def parsers(self) -> Mapping[str, LogParser]:
        return {getattr(parser, "__name__", repo): parser for repo, parser in self._parsers.items()}

    def _spec(self, task: OfficialTask) -> Any:
        return self._specs.TestSpec(
            instance_id=task.instance_id,
            repo=task.repo,
            version=task.version,
            repo_script_list=[],
            eval_script_list=[],
            env_script_list=[],
            arch="x86_64",
            FAIL_TO_PASS=list(task.fail_to_pass),
            PASS_TO_PASS=list(task.pass_to_pass),
            language="",
            docker_specs={},
            namespace=None,
        )


def _report(grading: ModuleType, spec: Any, instance_id: str, log: str) -> OfficialReport:
    prediction = {"instance_id": instance_id, "model_patch": "", "model_name_or_path": "rollwright"}
    # It wants the path of a log.
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8", newline="") as file:
        file.write(log)
        file.flush()
        report = grading.get_eval_report(spec, prediction, file.name, include_tests_status=False)
    found = report[instance_id]
    return OfficialReport(resolved=bool(found["resolved"]), found=bool(found["patch_successfully_applied"]))


def _utils_of_tables() -> ModuleType:
    """What 4.1's graders take from its `harness.utils`, which itself imports `datasets`."""
    patch_set = importlib.import_module("unidiff").PatchSet

    def get_modified_files(patch: str) -> list[str]:
        files: list[str] = [file.source_file for file in patch_set(patch)]
        return [name[2:] for name in files if name.startswith("a/")]

    def ansi_escape(text: str) -> str:
        return _ANSI.sub("", text)

    def load_cached_environment_yml(instance_id: str) -> None:
        return None

    module = ModuleType("swebench.harness.utils")
    vars(module).update(
        get_modified_files=get_modified_files,
        ansi_escape=ansi_escape,
        load_cached_environment_yml=load_cached_environment_yml,
    )
    return module


def _hollow(name: str, folder: str) -> ModuleType:
    """A package whose submodules can be imported and whose own `__init__` is not run."""
    module = ModuleType(name)
    module.__path__ = [folder]
    return module


@contextmanager
def _stand_ins(modules: Mapping[str, ModuleType]) -> Generator[None]:
    """Put modules where nothing has been imported yet, and take them away again."""
    placed = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(placed)
    try:
        yield
    finally:
        for name, module in placed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
