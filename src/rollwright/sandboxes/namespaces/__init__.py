"""Boxes of Linux namespaces on this machine: no daemon, no image registry, root or not.

provider.py  probes, boots, lists, reaps        images.py    image name to folders
box.py       one box, held by the orchestrator  registry.py  the boxes on disk
client.py    the orchestrator's end of server   cgroups.py   limits
idmap.py     which ids a box may use

server.py    the lean process that forks boxes  boot.py      how a box is made
enter.py     how something runs in a box        syscalls.py, channel.py
"""

from __future__ import annotations

from rollwright.sandboxes.namespaces.provider import NamespacesProvider

__all__ = ["NamespacesProvider"]
