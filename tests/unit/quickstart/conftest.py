"""The quickstart's scripts are programs, not a package: their folder goes on the path."""

from __future__ import annotations

import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
