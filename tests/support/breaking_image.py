"""An image of the quickstart that breaks when a test says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

_BREAKS_THE_TESTS = """
import sys
if any("launch.py" in arg for arg in sys.orig_argv):
    sys.modules["cart"] = None
"""


def image_that_may_break(images: Path, copies: Path) -> Callable[[], None]:
    """The image of the task `cart` in another folder of images, and what breaks it."""
    cart = copies / "quickstart" / "cart"
    shutil.copytree(images / "quickstart" / "cart", cart, symlinks=True)
    (image := cart / "image.json").write_text(
        image.read_text().replace("../_python", str(images / "quickstart" / "_python"))
    )

    def breaks() -> None:
        lib = Path("opt/quickstart/lib")
        (python,) = (images / "quickstart" / "_python" / "layer" / lib).iterdir()
        site = cart / "layer" / lib / python.name / "site-packages"
        site.mkdir(parents=True)
        (site / "sitecustomize.py").write_text(_BREAKS_THE_TESTS)

    return breaks
