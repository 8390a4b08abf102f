"""What a box can be asked: one try of each thing, with errors of ours.

A command never depends on one stream: `exec.sh` in the box runs it once under a nonce of ours and answers again when
asked again, so that cut streams, lost replies and doubled requests change nothing.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import re
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio

from rollwright.errors import (
    AmbiguousOutcome,
    LimitError,
    PathNotFound,
    ProvisionFailed,
    RollwrightError,
    SandboxBroken,
    SandboxError,
    SandboxGone,
    Unreachable,
    UsageError,
)
from rollwright.sandboxes import ExecResult
from rollwright.sandboxes.e2b.sdk import classify
from rollwright.sandboxes.lease import Lease

if TYPE_CHECKING:
    from rollwright.sandboxes.e2b.sdk import AsyncSandbox

FOLDER = "/run/rollwright"
"""On a file system of its own almost everywhere, so that a full disk cannot keep an answer back."""

_BIG_FOLDER = "/var/lib/rollwright"
"""For input that would crowd `FOLDER`, which is often memory."""
_BIG = 1 << 20
_FILE_LIMIT = 256 << 20
_INLINE = 1 << 20
"""Up to this size a file or a part of it is read by a command: the files API knows whole files only."""
_COMMAND_LIMIT = 120_000
"""Bytes of a command line: Linux takes 128 KiB for one argument, and the SDK sends it as one."""
_OPEN_SECONDS = 15.0
_TRANSFER_SECONDS = 300.0
_BYTES_A_SECOND = 1 << 20
"""The slowest way for input that a box's lease is to last for."""
_FORGET_AT_ONCE = 16
_ANSWER = re.compile(r"^rollwright-exec 1 ([0-9a-f]{32}) ([a-z]+) ([0-9]+) ([0-9]+) ([0-9]+)\n", re.MULTILINE)
_READY = re.compile(r"^rollwright-setup 1 done ([01]) ([01])$", re.MULTILINE)

# Makes our folders, the script (its text is the argument), the user `agent`, and a note of how to become another user
# and of PATH as it was before the login shell's profile; says whether jobs can have PID namespaces, and whether it had
# been run before. May run again at any time.
_SETUP = f"""
umask 077
if [ -f {FOLDER}/found ]; then before=1; else before=0; fi
mkdir -p {FOLDER}/in {FOLDER}/exec {_BIG_FOLDER}/in && chmod 700 {FOLDER} {_BIG_FOLDER} || exit 1
printf %s "$1" >{FOLDER}/exec.sh.$$ && mv {FOLDER}/exec.sh.$$ {FOLDER}/exec.sh || exit 1
path=$(tr '\\0' '\\n' <"/proc/$PPID/environ" | sed -n 's/^PATH=//p')
if setpriv --reuid=0 true 2>/dev/null; then dropper=setpriv; else dropper=su; fi
printf '%s\\n' $dropper "${{path:-$PATH}}" >{FOLDER}/found.$$ && mv {FOLDER}/found.$$ {FOLDER}/found || exit 1
if ! grep -q '^agent:' /etc/passwd; then
    id=10001
    echo "agent:x:$id:$id::/home/agent:/bin/sh" >>/etc/passwd
    grep -q '^agent:' /etc/group || echo "agent:x:$id:" >>/etc/group
    umask 022
    mkdir -p /home/agent && chown $id:$id /home/agent || exit 1
fi
if unshare --pid --fork --kill-child --mount-proc true 2>/dev/null; then nests=1; else nests=0; fi
echo; echo "rollwright-setup 1 done $nests $before"
"""

# Fills a file beside its place and moves it there. Arguments: path, mode, nonce.
_PLACE = """
LC_ALL=C; export LC_ALL
folder=${1%/*}/ name=${1##*/}
[ ! -d "$1" ] || { echo "is a directory" >&2; exit 21; }
mkdir -p -- "$folder" || exit 22
new=$folder.$(printf %.64s "$name").$3
(umask 077; cat >"$new") && chmod "$2" "$new" && mv -f -- "$new" "$1" && exit 0
rm -f -- "$new"
exit 23
"""

# Unpacks a compressed tar archive. Arguments: target folder.
_UNPACK = """
LC_ALL=C; export LC_ALL
mkdir -p -- "$1" && tar -x -z -o -p -f - -C "$1"
"""

# Part of a file, or how many bytes it would be. Arguments: path, offset, limit or nothing, the most to be printed.
_READ = """
[ -e "$1" ] || exit 44
[ -f "$1" ] || exit 45
wanted=$(wc -c <"$1") || exit 1
wanted=$((wanted - $2))
[ $wanted -gt 0 ] || exit 0
[ -z "$3" ] || [ "$3" -gt $wanted ] || wanted=$3
if [ $wanted -gt "$4" ]; then echo $wanted; exit 46; fi
tail -c "+$(($2 + 1))" "$1" | head -c $wanted
"""
_UNREADABLE = {44: (PathNotFound, "no such file"), 45: (UsageError, "not a plain file")}
_TOO_BIG = 46


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What the script in the box answered."""

    state: Literal["exited", "timeout"]
    code: int
    stdout: bytes
    stderr: bytes

    def result(self, argv: Sequence[str], seconds: float) -> ExecResult:
        """Raises `Unreachable` for a command that took too long."""
        if self.state == "timeout":
            raise Unreachable(f"{argv[0]} took longer than {seconds} s")
        return ExecResult(exit_code=self.code, stdout=self.stdout, stderr=self.stderr)


class Guest:
    """One try each of what can be asked of a box, with errors of ours. What jobs are made of."""

    def __init__(self, handle: AsyncSandbox, sdk: Any, *, lease: Lease) -> None:
        """`lease`: by our monotonic clock, since the cluster was asked for the box: its own began then or later."""
        self._handle = handle
        self._files: Any = handle.files
        self._sdk = sdk
        self._lease = lease
        self._told: list[str] = []
        self.closed = False
        self.nests = False
        """Jobs can have PID namespaces here; known once the box is set up."""
        self.known = False
        """It had been set up before; known once it is again."""

    @property
    def id(self) -> str:
        return self._handle.sandbox_id

    async def set_up(self) -> None:
        script = await anyio.Path(Path(__file__).with_name("exec.sh")).read_text()
        said = await self._run(shlex.join(["sh", "-c", _SETUP, "sh", script]), seconds=60)
        found = _READY.search(said)
        if found is None:
            raise ProvisionFailed(f"box {self.id} cannot be set up: {said[-300:]}", box=self.id)
        self.nests, self.known = found[1] == "1", found[2] == "1"

    # ------------------------------------------------------------------ commands

    async def exec(
        self, argv: Sequence[str], *, user: str = "root", cwd: str = "/", input: bytes = b"", seconds: float = 25
    ) -> ExecResult:
        nonce = secrets.token_hex(16)
        ended = await self.attempt(argv, user=user, cwd=cwd, input=input, seconds=seconds, nonce=nonce)
        return ended.result(argv, seconds)

    async def attempt(
        self, argv: Sequence[str], *, user: str, cwd: str, input: bytes, seconds: float, nonce: str
    ) -> Ended:
        """Run a command, or learn how the one of this nonce ended."""
        # A small file is soon there, whatever time it is given.
        await self._stay(min(seconds, _OPEN_SECONDS + len(input) / _BYTES_A_SECOND) if input else seconds)
        staged = ""
        if input:
            staged = f"{_BIG_FOLDER if len(input) > _BIG else FOLDER}/in/{nonce}"
            await self._upload(staged, input)
        forget = ",".join(self._told[:_FORGET_AT_ONCE]) if len(self._told) >= _FORGET_AT_ONCE else ""
        fixed = [nonce, str(math.ceil(seconds)), _user(user), cwd, staged, str(len(input)), forget]
        line = _command_line(["sh", f"{FOLDER}/exec.sh", *fixed, *argv])
        said = await self._run(line, seconds=seconds + 10)
        self._told = [told for told in self._told if told not in forget.split(",")]
        return self._parse(said, nonce)

    async def _run(self, line: str, *, seconds: float) -> str:
        """What a command line printed, after whatever a login shell had to say."""
        async with self._talking("run a command"):
            handle = await self._handle.commands.run(
                # The login shell must not make way for its last command: setting up reads its first environment.
                f"{line}\nexit $?",
                background=True,
                user="root",
                timeout=seconds,
                request_timeout=_OPEN_SECONDS,
            )
            try:
                return (await handle.wait()).stdout
            except self._sdk.CommandExitException as e:
                return f"{e.stdout}\n{e.stderr}"
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await handle.disconnect()
                raise

    def _parse(self, said: str, nonce: str) -> Ended:
        for found in _ANSWER.finditer(said):
            identity, state, code, out, err = found.groups()
            if identity != nonce:
                continue
            if state == "big":
                raise LimitError(f"a command in box {self.id} wrote {int(out) + int(err)} bytes", box=self.id)
            if state == "torn":
                raise AmbiguousOutcome(f"box {self.id} got only a part of a command's input", box=self.id)
            if state in ("exited", "timeout"):
                data = _decode(said[found.end() :], int(out) + int(err), self.id)
                self._told.append(nonce)
                return Ended(state=state, code=int(code), stdout=data[: int(out)], stderr=data[int(out) :])
            raise SandboxBroken(f"a command in box {self.id} left no record ({state})", box=self.id)
        raise AmbiguousOutcome(f"box {self.id} gave no answer to a command, but said {said[-300:]!r}", box=self.id)

    # ------------------------------------------------------------------ files

    async def put(
        self, path: str, data: bytes, *, user: str = "root", mode: int = 0o644, nonce: str | None = None
    ) -> None:
        nonce = nonce or secrets.token_hex(16)
        argv = ["sh", "-c", _PLACE, "sh", absolute(path), f"{mode:o}", nonce]
        ended = await self.attempt(argv, user=user, cwd="/", input=data, seconds=_TRANSFER_SECONDS, nonce=nonce)
        self._check_written(ended, argv, path)

    async def unpack(self, target: str, archive: bytes, *, user: str, nonce: str) -> None:
        argv = ["sh", "-c", _UNPACK, "sh", target]
        ended = await self.attempt(argv, user=user, cwd="/", input=archive, seconds=_TRANSFER_SECONDS, nonce=nonce)
        self._check_written(ended, argv, target)

    def _check_written(self, ended: Ended, argv: Sequence[str], path: str) -> None:
        if ended.result(argv, _TRANSFER_SECONDS).exit_code:
            said = ended.stderr.decode(errors="replace").strip()[-300:]
            kind = LimitError if "No space left" in said or "quota exceeded" in said else UsageError
            raise kind(f"cannot write {path} in box {self.id}: {said}", box=self.id, path=path)

    async def get(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        argv = ["sh", "-c", _READ, "sh", absolute(path), str(offset), "" if limit is None else str(limit), str(_INLINE)]
        result = await self.exec(argv)
        if result.exit_code in _UNREADABLE:
            kind, what = _UNREADABLE[result.exit_code]
            raise kind(f"{what}: {path} in box {self.id}", box=self.id, path=path)
        if result.exit_code == 0:
            return result.stdout
        if result.exit_code != _TOO_BIG:
            said = result.stderr[-300:].decode(errors="replace")
            raise SandboxBroken(f"cannot read {path} in box {self.id}: {said}", box=self.id, path=path)
        wanted = int(result.stdout)
        if wanted > _FILE_LIMIT:
            raise LimitError(f"{path} has more than {_FILE_LIMIT} bytes", box=self.id, path=path)
        async with self._talking("download a file"):
            data = await self._files.read(path, format="bytes", user="root", request_timeout=_TRANSFER_SECONDS)
        return bytes(data[offset : offset + wanted])

    async def _upload(self, path: str, data: bytes) -> None:
        async with self._talking("upload a file"):
            await self._files.write(path, data, user="root", use_octet_stream=True, request_timeout=_TRANSFER_SECONDS)

    # ------------------------------------------------------------------ life

    async def renew(self, seconds: float) -> None:
        self._lease.renew(seconds, now=time.monotonic())
        await self._extend()

    async def _extend(self, busy: float = 0) -> None:
        asked = time.monotonic()
        seconds = math.ceil(self._lease.amount(asked, busy))
        async with self._talking("renew"):
            await self._handle.set_timeout(seconds)
        self._lease.given(seconds, now=asked)

    async def _stay(self, busy: float) -> None:
        """Where leases are shorter than the box is to live, ask for the next one in time."""
        if self._lease.due(time.monotonic(), busy):
            # If it is gone, the command itself will tell.
            with contextlib.suppress(SandboxError):
                await self._extend(busy)

    async def kill(self) -> None:
        """That it is gone already is as good."""
        async with self._talking("remove a box"):
            await self._handle.kill()
        self.closed = True

    @asynccontextmanager
    async def _talking(self, operation: str) -> AsyncGenerator[None]:
        """Whatever the SDK raises inside leaves as an error of ours."""
        if self.closed:
            raise SandboxGone(f"box {self.id} is gone (killed)", box=self.id, reason="killed")
        try:
            yield
        except RollwrightError:
            raise
        except Exception as e:
            ours = classify(e, operation, box=self.id)
            if isinstance(ours, SandboxGone) and time.monotonic() >= self._lease.until:
                ours.details["reason"] = "expired"
            raise ours from e


def _user(name: str) -> str:
    if name not in ("root", "agent"):
        raise UsageError(f"a box has the users root, agent, not {name!r}")
    return name


def absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path or path.endswith("/"):
        raise UsageError(f"not an absolute path of a file: {path!r}")
    return path


def _command_line(argv: Sequence[str]) -> str:
    """The SDK takes no argv. Raises `UsageError` for what a command line cannot carry."""
    line = shlex.join(argv)
    if "\0" in line or any("\ud800" <= character <= "\udfff" for character in line):
        raise UsageError("exec needs an argv of text without NUL bytes")
    if len(line.encode()) > _COMMAND_LIMIT:
        raise UsageError(f"exec takes up to {_COMMAND_LIMIT} bytes of argv; put the rest into a file or into input")
    return line


def _decode(text: str, size: int, box: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise AmbiguousOutcome(f"box {box} answered something that is not base64", box=box) from e
    if len(data) != size:
        raise AmbiguousOutcome(f"box {box} answered {len(data)} bytes instead of {size}", box=box)
    return data
