"""The pictures of docs/img, taken by a real Chromium (`make screenshots`).

The quickstart is run for them; what it cannot show (drift, sub-agents, two runs) comes from made run folders.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollwright.store import RunDir
from rollwright.testing.run_folder import build_run
from support.chromium import chromium
from support.commandline import QUICKSTART, ROOT, Rollwright

TARGET = ROOT / "docs" / "img"


@dataclass(frozen=True, kw_only=True)
class Shot:
    name: str
    path: str
    dark: bool = False
    height: int = 800
    act: Callable[[Any], None] = lambda page: None
    """What is done on the page first."""


def shots(run: RunDir, made: RunDir) -> list[Shot]:
    solved = next(record for record in run.records() if record.status == "resolved").rollout
    by_shape = {
        "subagent": next(record for record in made.records() if record.traffic.get("subagent")).rollout,
        "drift": next(record for record in made.records() if record.drift.get("assistant_rewritten")).rollout,
        "updated": next(record for record in made.records() if "2" in record.versions).rollout,
    }

    def heat(page: Any) -> None:
        page.check("input[value=heat]")
        page.locator("#stream").scroll_into_view_if_needed()
        page.locator(".run.trained b").nth(4).hover()
        page.evaluate("document.querySelector('.run.trained').scrollIntoView({block: 'center'})")

    def conversation(page: Any) -> None:
        page.evaluate("document.querySelector('#conversation').scrollIntoView()")

    return [
        Shot(name="run", path="runs/quickstart/", height=860),
        Shot(name="run-dark", path="runs/quickstart/", dark=True, height=860),
        Shot(name="failures", path="runs/after/", height=860),
        Shot(name="tasks", path="runs/quickstart/tasks/", height=720),
        Shot(name="rollout", path=f"runs/quickstart/rollouts/{solved}/", height=900),
        Shot(name="conversation", path=f"runs/quickstart/rollouts/{solved}/", act=conversation),
        Shot(name="tokens", path=f"runs/after/rollouts/{by_shape['subagent']}/tokens/", height=900),
        Shot(name="tokens-heat", path=f"runs/after/rollouts/{by_shape['updated']}/tokens/", act=heat),
        Shot(name="drift", path=f"runs/after/rollouts/{by_shape['drift']}/tokens/", dark=True, height=900),
        Shot(name="compare", path="compare/before/after/", height=900),
    ]


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        cli = Rollwright(home=home)
        subprocess.run([sys.executable, QUICKSTART / "prepare.py"], check=True)
        if len(sys.argv) > 1:  # a finished quickstart
            shutil.copytree(sys.argv[1], home / "quickstart")
        else:
            subprocess.run(
                cli.argv("run", cli.job, f"run.output={home}", "run.name=quickstart"), env=cli.env, check=True
            )
        build_run(home / "made" / "before", tasks=40, attempts=8, seed=5)
        made = build_run(home / "made" / "after", tasks=40, attempts=8, seed=6, skill=0.15, policy=home / "made/policy")
        viewer = cli.start("view", home / "quickstart", home / "made")
        assert viewer.stdout is not None
        url = viewer.stdout.readline().strip()
        try:
            for shot in shots(RunDir(home / "quickstart"), made):
                take(url, shot)
        finally:
            viewer.terminate()
            viewer.communicate()


def take(url: str, shot: Shot) -> None:
    scheme = "dark" if shot.dark else "light"
    size = {"width": 1280, "height": shot.height}
    with chromium(color_scheme=scheme, viewport=size, device_scale_factor=1.5) as (page, said):
        page.goto(url + shot.path)
        page.wait_for_selector(".live:not([hidden])")
        shot.act(page)
        page.screenshot(path=TARGET / f"{shot.name}.png")
    if said:
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
