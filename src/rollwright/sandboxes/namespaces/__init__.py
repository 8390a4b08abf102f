"""Boxes of Linux namespaces on this machine: no daemon, no image registry, root or not.

provider.py  probes, boots, lists, reaps        images.py    image name to folders
box.py       one box, held by the orchestrator  layers.py    layers of image files, unpacked once
client.py    the orchestrator's end of server   registry.py  the boxes on disk
idmap.py     which ids a box may use            cgroups.py   limits

In lean processes of their own (lean.py starts them):

server.py    forks boxes and enters them        unpack.py    unpacks a layer
boot.py      how a box is made                  oci.py       reads what an image file says of itself
enter.py     how something runs in a box        seccomp.py   what no program in a box may call
syscalls.py, channel.py
"""

from __future__ import annotations

from rollwright.sandboxes.namespaces.provider import NamespacesProvider

__all__ = ["NamespacesProvider"]
