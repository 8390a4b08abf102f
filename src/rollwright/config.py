"""The run file: TOML plus dotted overrides, checked into one frozen object that is written into the run folder."""

from __future__ import annotations

import difflib
import os.path
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rollwright.errors import ConfigError
from rollwright.types import HistoryPolicy, Sampling, TrafficClass


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _WithOptions(_Table):
    """A table whose sub-tables are options of implementations, by their names."""

    options: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, data: Any) -> Any:
        if isinstance(data, str) and "kind" in cls.model_fields:
            return {"kind": data}
        if not isinstance(data, dict):
            return data
        table = cast("dict[str, Any]", data)
        options: dict[str, Any] = dict(table.get("options", {}))
        plain: dict[str, Any] = {}
        for key, value in table.items():
            if key not in cls.model_fields and isinstance(value, dict):
                # Settings that were written down have these under `options`; an override names them as a run file does.
                options[key] = {**options.get(key, {}), **cast("dict[str, Any]", value)}
            elif key != "options":
                plain[key] = value
        return plain | {"options": options}


class _Pluggable(_WithOptions):
    """A table that chooses an implementation: `kind` names it, the sub-table of that name holds its options.

    Example: `[engine] kind = "local"` with `[engine.local] model = "policy"`. Sub-tables of other kinds may stay, so
    that switching is one line.
    """

    kind: str

    @property
    def chosen(self) -> dict[str, Any]:
        """The options of the chosen kind."""
        return self.options.get(self.kind, {})


class RunTable(_Table):
    name: str = ""
    """Folder name under `output`; empty: the run file's stem and the time."""
    output: Path = Path("runs")
    attempts: PositiveInt = 1
    """Rollouts per task: the group size."""
    concurrency: PositiveInt = 4
    """Rollouts at a time; with Ray, on each node."""
    limit: PositiveInt | None = None
    """Only the first so many tasks."""
    retries: int = Field(default=1, ge=0, le=10)
    """How often a rollout that failed by a retryable infrastructure error is begun again."""
    rollout_seconds: PositiveFloat = 14400
    """Longest life of one rollout, all stages together: a failure of ours, so more than agent and tests may take."""
    executor: Literal["local", "ray"] = "local"
    """Where rollouts run: in this process, or on the nodes of a Ray cluster (`[ray]`)."""
    seed: int | None = None
    """Sampling seed of the run; each rollout derives its own. None: not reproducible."""


class TasksTable(_Table):
    path: Path
    protocol: str = "scaleswe"
    """Grader of rows that do not name one in `metadata.protocol`."""
    require_lock: bool = False
    """Refuse tasks that `rollwright validate` has not proved (tasks.lock.json beside the data set)."""


class PolicyTable(_Table):
    path: Path
    """Folder with tokenizer.json and the chat template."""
    model: str = "policy"
    """The name the CLI sees."""
    renderer: Literal["auto", "renderers", "template"] = "auto"
    tool_parser: str | None = "qwen3_coder"
    reasoning_parser: str | None = None
    special_text: Literal["plain", "special"] = "plain"
    """What text of a message that spells a control token becomes: plain text, or that token."""


class SamplingTable(_Table):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: PositiveInt = 1024

    def sampling(self, seed: int | None) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
        )


class EngineTable(_Pluggable):
    kind: str = "local"


class HarnessTable(_Pluggable):
    kind: str = "pi"
    seconds: PositiveFloat = 1800
    """The agent's time budget."""
    npm: str = "npm"


class SandboxTable(_Pluggable):
    kind: str = "namespaces"
    memory_mb: PositiveInt | None = None
    pids: PositiveInt | None = None
    cpus: PositiveFloat | None = None
    """Cpu time a second of a box, in seconds."""
    disk_mb: PositiveInt = 2048
    boot_seconds: PositiveFloat = 120
    boot_concurrency: PositiveInt = 16
    """Boots at a time."""
    boot_rate: PositiveFloat | None = None
    """Boots that may begin a second. None: any number."""
    boot_retries: int = Field(default=2, ge=0, le=20)
    """How often a boot that failed is begun again."""
    warm: int = Field(default=0, ge=0)
    """Boxes kept ready of every kind in use."""
    prewarm: bool = False
    """Boot a box of each image before the first rollout."""


class GatewayTable(_Table):
    port: int = Field(default=18001, ge=1024, le=65535)
    """Loopback port inside each sandbox."""
    public_host: str | None = None
    """Name or address of this machine for boxes on other ones (`e2b`)."""
    public_port: int = Field(default=18001, ge=0, le=65535)
    """Port they reach it at; 0: a free one."""
    public_url: str | None = None
    """All of that, when something stands in between: a tunnel, or a proxy with TLS."""
    bind: str = "0.0.0.0"
    """Address of this machine to listen at for them."""
    keepalive_seconds: PositiveFloat = 10
    max_turns: PositiveInt = 200
    max_sampled_tokens: PositiveInt | None = None
    history: HistoryPolicy = "exact"
    """What a prompt is where the CLI rewrites what others than the policy said."""
    trained: tuple[TrafficClass, ...] = ("main", "subagent", "compaction")
    """The classes of traffic whose turns are trained."""


class GradingTable(_WithOptions):
    """Graders are chosen by the rows and `tasks.protocol`; `[grading.NAME]` tables hold their options."""

    boot_seconds: PositiveFloat = 120
    """Longest boot of a grading box."""
    step_seconds: PositiveFloat = 300
    """Longest of each step around the tests: prepare, baseline, capture, apply."""
    max_patch_bytes: PositiveInt = 64 << 20
    controls: NonNegativeInt = 0
    """After so many graded rollouts of an image, grade gold and no patch of its task again; 0: never."""
    group_quorum: PositiveInt | Annotated[float, Field(gt=0, lt=1)] = 2
    """How many rollouts of a group must count for it to be trained: a number (never more than the group has), or a
    share of its size. Of several always two."""


class RayTable(_Table):
    """Of runs with `run.executor = "ray"`; `run.concurrency` then is for each node."""

    address: str = "auto"
    """Of the cluster, as `ray.init` takes it."""
    lease_seconds: PositiveFloat = 60
    """A node that is not heard of for so long has lost its rollouts."""


class SamplesTable(_Table):
    max_tokens: PositiveInt | None = None
    """Longer branches are cut from the end, at a turn boundary where there is one."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Tokens that the newest weights but so many have not sampled are not trained. None: all are."""


class TelemetryTable(_WithOptions):
    """Who else hears of the run; `[telemetry.NAME]` tables hold their options."""

    kinds: tuple[str, ...] = ()


class RunConfig(_Table):
    """One run, fully resolved. Relative paths are taken from the run file's folder."""

    run: RunTable = RunTable()
    tasks: TasksTable
    policy: PolicyTable
    sampling: SamplingTable = SamplingTable()
    engine: EngineTable = EngineTable(kind="local")
    harness: HarnessTable = HarnessTable(kind="pi")
    sandbox: SandboxTable = SandboxTable(kind="namespaces")
    gateway: GatewayTable = GatewayTable()
    grading: GradingTable = GradingTable()
    samples: SamplesTable = SamplesTable()
    ray: RayTable = RayTable()
    telemetry: TelemetryTable = TelemetryTable()
    base: Path = Path()
    """Folder of the run file."""

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a run file. Raises `ConfigError` naming file and field."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"there is no run file {path}; {_other_run_files(path)}") from error
        except IsADirectoryError as error:
            raise ConfigError(f"{path} is a folder, not a run file; {_other_run_files(path / 'run.toml')}") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return cls.resolve(overridden(data, overrides), base=path.parent.resolve(), where=str(path))

    @classmethod
    def resolve(cls, data: Mapping[str, Any], *, base: Path, where: str) -> Self:
        """Check plain data. Relative paths become absolute from `base`."""
        try:
            config = cls.model_validate({**data, "base": base})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            hint = ""
            if first["type"] == "extra_forbidden":
                near = difflib.get_close_matches(str(first["loc"][-1]), _fields_at(cls, first["loc"][:-1]), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{where}: {field} is not a setting{hint}", field=field) from error
            if first["type"] == "missing":
                raise ConfigError(f"{where}: {field} is missing, and has no default", field=field) from error
            raise ConfigError(f"{where}: {field}: {first['msg']}", field=field) from error
        return config.model_copy(
            update={
                "run": config.run.model_copy(update={"output": _from(base, config.run.output)}),
                "tasks": config.tasks.model_copy(update={"path": _from(base, config.tasks.path)}),
                "policy": config.policy.model_copy(update={"path": _from(base, config.policy.path)}),
            }
        )

    def dump(self) -> dict[str, Any]:
        """JSON-able, and `resolve` gives an equal object back."""
        return self.model_dump(mode="json")


def _other_run_files(path: Path) -> str:
    """What to type instead of a path that leads to none."""
    here = sorted(str(file) for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), here, n=1, cutoff=0.8)
    if near or len(here) == 1:
        return f"did you mean {(near or here)[0]}?"
    return f"there are {', '.join(here[:5])}" if here else "`rollwright init` writes one"


def _from(base: Path, path: Path) -> Path:
    """Without `..`, for people to read."""
    return Path(os.path.normpath(base / path))


def _fields_at(model: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)


_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def option_of(text: str) -> tuple[str, Any]:
    """`a.b=value` as name and value: TOML where it parses as TOML, else text. Raises `ConfigError`."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"an override looks like run.attempts=4, not {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def overridden(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Plain settings with `a.b=value` applied, in place. Raises `ConfigError`."""
    for override in overrides:
        _apply_override(data, override)
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, value = option_of(override)
    *tables, last = key.split(".")
    at = data
    for part in tables:
        below: Any = at.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"override {override!r}: {part} is not a table", field=key)
        at = cast("dict[str, Any]", below)
    if isinstance(value, str) and isinstance(at.get(last), dict):
        at, last = at[last], "kind"
    at[last] = value
