"""Boxes that are containers of a Docker (or Podman) daemon.

provider.py  claims, boots, lists, reaps      daemon.py   the one door to the SDK: threads, errors, retries
box.py       one box: jobs, files, life       command.py  the connection of a command that is told when to start
container.py commands in a container          loopback.py the gateway's socket inside
guest/       the scripts that run in there
"""

from __future__ import annotations

from rollwright.sandboxes.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
