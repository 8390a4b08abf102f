"""Starts pytest in the grading box. Runs as the agent user under the image's python3 (3.6 or newer).

The first line it writes proves that pytest could be imported before any code of the patch had a chance to run.
"""

import json
import os
import sys
from pathlib import Path


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    nonce = plan["nonce"]
    workdir = str(Path.cwd())
    path = sys.path[1:]
    sys.path[:] = [p for p in path if p and not (os.path.realpath(p) + os.sep).startswith(workdir + os.sep)]
    try:
        import pytest
    except ImportError as e:
        say(f"rollwright {nonce} cannot import pytest: {e}")
        return 97
    sys.path[:] = path
    say(f"rollwright {nonce} pytest {pytest.__version__} python {sys.version.split()[0]}")
    select = None if plan["select"] is None else set(plan["select"])

    class Launch:
        # By now plugins are loaded: metadata in the working folder can no longer name one.
        @pytest.hookimpl(tryfirst=True)
        def pytest_load_initial_conftests(self) -> None:
            if workdir not in sys.path:
                sys.path.insert(0, workdir)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config: "pytest.Config", items: "list[pytest.Item]") -> None:
            if select is None:
                return
            dropped = [item for item in items if item.nodeid not in select]
            if dropped:
                config.hook.pytest_deselected(items=dropped)
                items[:] = [item for item in items if item.nodeid in select]

    targets = [t for t in plan["targets"] if Path(t).exists()]
    return int(pytest.main(plan["options"] + targets, plugins=[Launch()]))


if __name__ == "__main__":
    sys.exit(main())
