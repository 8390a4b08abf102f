"""Boxes of E2B and of clusters that speak its API, through the official `e2b` SDK and nothing but its public calls.

provider.py  boots, lists, reaps                  sdk.py   the SDK: its version, its errors
box.py       one box, held by the orchestrator    guest.py one try of each thing a box can be asked, with exec.sh
archives.py  folders packed for the way to a box
"""

from __future__ import annotations

from rollwright.sandboxes.e2b.box import E2BSandbox
from rollwright.sandboxes.e2b.provider import E2BProvider

__all__ = ["E2BProvider", "E2BSandbox"]
