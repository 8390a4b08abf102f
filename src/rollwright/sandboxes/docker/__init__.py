"""Boxes that are containers of a Docker (or Podman) daemon.

provider.py  claims, boots, lists, reaps      daemon.py   the one door to the SDK: threads, errors, retries
box.py       one box                          command.py  one command in a container, told when to start
loopback.py  the gateway's socket inside      guest/      the shell scripts that run in a container
"""

from __future__ import annotations

from rollwright.sandboxes.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
