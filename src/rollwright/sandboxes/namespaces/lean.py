"""Starting a Python that imports these modules alone, without the package around them: small, and soon there."""

from __future__ import annotations

import sys
from pathlib import Path

_BOOTSTRAP = """
import sys, types
names = ("rollwright", "rollwright.sandboxes", "rollwright.sandboxes.namespaces")
for name, path in zip(names, sys.argv[2:]):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from rollwright.sandboxes.namespaces.{module} import main
main()
"""


def command(module: str, argument: str) -> list[str]:
    """The argv that runs `main()` of a module beside this one, which finds `argument` in `sys.argv[1]`."""
    package = Path(__file__).parent
    places = [str(package.parents[1]), str(package.parent), str(package)]
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP.format(module=module), argument, *places]
