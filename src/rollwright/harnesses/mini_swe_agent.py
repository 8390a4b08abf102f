"""mini-swe-agent (PyPI `mini-swe-agent`), over OpenAI Chat through its own litellm, without streaming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError
from rollwright.harnesses import AgentReport, DialectName, Endpoint, Launch, Wheels
from rollwright.harnesses.events import REASON_CHARS, last_lines, not_exited, parse_event, without_result
from rollwright.harnesses.options import TOO_LONG, check_max_turns, check_not_empty, check_pin
from rollwright.sandboxes import JobResult

VERSION = "2.4.6"
REQUIREMENTS = Path(__file__).with_suffix(".txt")

# What pip would install as `mini`, but for a bundle that is in no site-packages: PYTHONPATH would reach the commands of
# the policy too. The CLI ends without saying how, so the last line does.
_START = """
import json, sys
root = sys.argv.pop(1)
sys.path[:0] = [root + "/cp%d%d" % sys.version_info[:2], root + "/site"]
from minisweagent.run.mini import app
import minisweagent, minisweagent.models.litellm_model
if sys.argv[1:] == ["--version"]:
    sys.exit(print(minisweagent.__version__))
end = {"type": "result", "exit_status": None, "error": None}
try:
    agent = app(prog_name="mini", standalone_mode=False)
    end["exit_status"] = agent.messages[-1]["extra"]["exit_status"]
except Exception as error:
    end["error"] = type(error).__name__ + ": " + str(error)[:2000]
    raise
finally:
    sys.stdout.write("\\n" + json.dumps(end) + "\\n")
"""

_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    # a call fails three times in its HTTP client before it counts as one attempt
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}
_HOUR = 3600
_POLICYS_END = {"Submitted": "completed", "RepeatedFormatError": "format_errors", "LimitsExceeded": "max_turns"}


class MiniSweAgent:
    """Runs `mini` with the prompt in a configuration file, every command allowed: the sandbox is the fence."""

    name: str = "mini-swe-agent"
    dialect: DialectName = "openai_chat"
    artifacts: tuple[Wheels, ...] = (Wheels(package="mini-swe-agent", version=VERSION, requirements=REQUIREMENTS),)

    def __init__(
        self,
        *,
        python: str = "python3",
        system_prompt: str | None = None,
        instance_template: str | None = None,
        max_turns: int | None = None,
        command_seconds: int | None = None,
        extra_args: tuple[str, ...] = (),
        version: str = VERSION,
        requirements: str = "",
    ) -> None:
        """`python`: the image's CPython, 3.10 to 3.14, by path or by name.

        `system_prompt` and `instance_template` replace the CLI's own; both are Jinja templates, and the second must
        hold `{{task}}`. `command_seconds`: the longest a command may run (None: the CLI's 30). Another `version`
        needs its `requirements` file too.
        """
        check_not_empty(self.name, system_prompt)
        check_max_turns(self.name, max_turns)
        if instance_template is not None and "task" not in instance_template:
            field = "harness.mini-swe-agent.instance_template"
            raise ConfigError(f"{field} has no {{{{task}}}}, so the policy would never see its task", field=field)
        if command_seconds is not None and command_seconds < 1:
            field = "harness.mini-swe-agent.command_seconds"
            raise ConfigError(f"{field} is {command_seconds}, but must be at least 1", field=field)
        check_pin(
            self.name,
            "requirements",
            version_is_default=version == VERSION,
            checksum_is_default=not requirements,
        )
        path = Path(requirements) if requirements else REQUIREMENTS
        self.artifacts = (Wheels(package="mini-swe-agent", version=version, requirements=path),)
        self._python = python
        self._agent: dict[str, Any] = {
            # its costs are those of models it knows, its limit on them stops the others
            "cost_limit": 0,
            "step_limit": max_turns or 0,
            **({} if system_prompt is None else {"system_template": system_prompt}),
            **({} if instance_template is None else {"instance_template": instance_template}),
        }
        self._environment = {} if command_seconds is None else {"timeout": command_seconds}
        self._extra_args = extra_args

    def version_argv(self, bundle: str) -> tuple[str, ...]:
        return (*self._program(bundle), "--version")

    def launch(self, *, bundle: str, home: str, workdir: str, prompt: str, endpoint: Endpoint) -> Launch:
        folder = f"{home}/.config/mini-swe-agent"
        config = {
            "run": {"task": prompt.encode("utf-8", errors="replace").decode()},
            "agent": self._agent,
            "environment": self._environment,
            "model": {
                "model_name": f"openai/{endpoint.model}",
                "cost_tracking": "ignore_errors",
                "model_kwargs": {"api_base": f"{endpoint.base_url}/v1", "timeout": _HOUR},
            },
        }
        return Launch(
            argv=(
                *self._program(bundle),
                *("-c", "mini.yaml", "-c", f"{folder}/run.yaml"),
                *("-y", "--exit-immediately", "-o", f"{folder}/trajectory.json"),
                *self._extra_args,
            ),
            env={
                "HOME": home,
                "MSWEA_GLOBAL_CONFIG_DIR": folder,
                "OPENAI_API_KEY": endpoint.api_key,
                **_ENV,
            },
            files={f"{folder}/run.yaml": json.dumps(config).encode()},  # JSON is YAML
        )

    def report(self, result: JobResult) -> AgentReport:
        return not_exited(result) or _read_result(result) or without_result(result)

    def _program(self, bundle: str) -> tuple[str, ...]:
        # -I: nothing of the repository, of the user or of PYTHON* variables is imported
        return self._python, "-I", "-c", _START, f"{bundle}/{self.artifacts[0].folder}"


def _read_result(result: JobResult) -> AgentReport | None:
    if result.signal is not None:  # a last line would then be the policy's own
        return None
    last = next((line for line in last_lines(result.stdout) if line.strip()), b"")
    event = parse_event(last)
    if not event or event.get("type") != "result":
        return None
    error = event.get("error")
    if error is None:
        status = str(event.get("exit_status"))[:REASON_CHARS]
        return AgentReport(ok=status in _POLICYS_END, reason=_POLICYS_END.get(status, status))
    if TOO_LONG.search(str(error)):
        return AgentReport(ok=True, reason="prompt_too_long")
    return AgentReport(ok=False, reason=f"api_error: {error}"[:REASON_CHARS])
