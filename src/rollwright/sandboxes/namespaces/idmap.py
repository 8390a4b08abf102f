"""Which ids of the host a box's user namespace may use."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

AGENT_ID = 10001
"""Of the user `agent`, in an image that has none."""
_WANTED = 65536
_TOOLS = (Path("/usr/bin/newuidmap"), Path("/usr/bin/newgidmap"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Maps:
    """Rows of (first id inside, first id outside, count)."""

    uid: list[list[int]]
    gid: list[list[int]]

    @property
    def single(self) -> bool:
        """There is one uid only, so the agent and the supervisor share it."""
        return len(self.uid) == 1 and self.uid[0][2] == 1


def find() -> Maps:
    """The best there is: as root the machine's own ids, else a subordinate range, else one's own id alone.

    As root the numbers stay the same inside and outside, so that files of the image keep their owners; all power of
    these ids ends at the user namespace.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        count = min(_own_range("uid"), _own_range("gid"), _WANTED)
        if count > AGENT_ID:
            return Maps(uid=[[0, 0, count]], gid=[[0, 0, count]])
    elif all(tool.exists() for tool in _TOOLS):
        uids, gids = _subordinate("uid", uid), _subordinate("gid", uid)
        if uids and gids:
            return Maps(uid=[[0, uid, 1], [1, *uids]], gid=[[0, gid, 1], [1, *gids]])
    return own_id_alone()


def own_id_alone() -> Maps:
    """What every user may map."""
    return Maps(uid=[[0, os.geteuid(), 1]], gid=[[0, os.getegid(), 1]])


def _own_range(kind: str) -> int:
    """How many ids from 0 on exist in our own user namespace."""
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside == 0:
            return count
    return 0


def _subordinate(kind: str, uid: int) -> list[int] | None:
    """The first big enough range of /etc/subuid or /etc/subgid: (first, count)."""
    names = {str(uid)}
    try:
        names.add(pwd.getpwuid(uid).pw_name)
        lines = Path(f"/etc/sub{kind}").read_text().splitlines()
    except (KeyError, OSError):
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if name in names and first.isdecimal() and count.isdecimal() and int(count) > AGENT_ID:
            return [int(first), min(int(count), _WANTED - 1)]
    return None
