"""envd's files: whole files over plain HTTP, everything else about the file system over RPC."""

from __future__ import annotations

import datetime
import stat
import zlib
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rollwright.e2b_server.connect import RpcError
from rollwright.errors import LimitError, PathNotFound, SandboxGone, UsageError
from rollwright.sandboxes.namespaces.box import NamespacesSandbox

__all__ = ["HttpError", "download", "filesystem", "home_of", "upload"]

_BODY_LIMIT = 272 << 20
_FILE_LIMIT = 256 << 20
_FIELDS = ("%f", "%Y", "%s", "%m", "%u", "%g", "%T@", "%l", "%p", "%y")
_PRINTF = "".join(f"{field}\\0" for field in _FIELDS)

# The thing itself, then what it is when links are followed.
_STAT = 'find "$1" -maxdepth 0 -printf "$2" && { find -L "$1" -maxdepth 0 -printf "$2" 2>/dev/null || true; }'
_MAKE = 'if [ -d "$1" ]; then exit 17; fi; mkdir -p -- "$1"'
_MOVE = '[ -e "$1" ] || [ -L "$1" ] || exit 2; mkdir -p -- "${2%/*}/" && mv -Tf -- "$1" "$2"'
_EXISTS, _MISSING = 17, 2


class HttpError(Exception):
    """A plain HTTP call that failed, as the client is to see it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def home_of(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _absolute(path: str, user: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = home_of(user) + path[1:]
    if not path.startswith("/"):
        path = f"{home_of(user)}/{path}"
    return path.rstrip("/") or "/"


# ----------------------------------------------------------------------------- whole files


async def download(box: NamespacesSandbox, path: str, user: str) -> Response:
    """Raises `HttpError`."""
    try:
        return Response(await box.get(_absolute(path, user)), media_type="application/octet-stream")
    except PathNotFound as e:
        raise HttpError(404, e.message) from e
    except (UsageError, LimitError) as e:
        raise HttpError(400, e.message) from e


async def upload(box: NamespacesSandbox, request: Request, user: str) -> list[dict[str, str]]:
    """The files of a body, plain or multipart, each written as a whole or not at all. Raises `HttpError`."""
    body = await _body(request)
    kind = request.headers.get("content-type", "")
    path = request.query_params.get("path")
    if kind.startswith("multipart/form-data"):
        files = [(path or name, data) for name, data in _parts(kind, body)]
    elif path:
        files = [(path, body)]
    else:
        raise HttpError(400, "path is missing")
    written: list[dict[str, str]] = []
    for name, data in files:
        target = _absolute(name, user)
        try:
            await box.put(target, data, user=user)
        except LimitError as e:
            raise HttpError(507, f"not enough disk space: {e.message}") from e
        except UsageError as e:
            raise HttpError(400, e.message) from e
        written.append({"name": target.rsplit("/", 1)[1], "type": "file", "path": target})
    return written


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_LIMIT:
            raise HttpError(413, f"the request has more than {_BODY_LIMIT} bytes")
    if request.headers.get("content-encoding") != "gzip":
        return bytes(body)
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        data = reader.decompress(bytes(body), _FILE_LIMIT + 1)
    except zlib.error as e:
        raise HttpError(400, f"the body is not gzip: {e}") from e
    if len(data) > _FILE_LIMIT:
        raise HttpError(413, f"the file has more than {_FILE_LIMIT} bytes")
    if not reader.eof:
        raise HttpError(400, "the gzip body is cut off")
    return data


def _parts(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    """File name and content of each part of a multipart body."""
    boundary = kind.partition("boundary=")[2].split(";")[0].strip('"')
    if not boundary:
        raise HttpError(400, "the multipart body has no boundary")
    mark = b"\r\n--" + boundary.encode()
    found: list[tuple[str, bytes]] = []
    for piece in (b"\r\n" + body).split(mark)[1:-1]:
        head, separator, data = piece.partition(b"\r\n\r\n")
        _, named, rest = head.partition(b'filename="')
        if not separator or not named:
            raise HttpError(400, "a part of the multipart body is no file")
        name = rest.partition(b'"')[0].decode(errors="surrogateescape")
        for code, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
            name = name.replace(code, character)
        found.append((name, data))
    return found


# ----------------------------------------------------------------------------- the file system


async def filesystem(box: NamespacesSandbox, method: str, message: Mapping[str, Any], user: str) -> dict[str, Any]:
    """One unary call of `filesystem.Filesystem`. Raises `RpcError`, `SandboxGone`."""
    match method:
        case "Stat":
            return {"entry": await _stat(box, _path(message, "path", user), user)}
        case "ListDir":
            return {"entries": await _list(box, _path(message, "path", user), message.get("depth"), user)}
        case "MakeDir":
            path = _path(message, "path", user)
            await _run(box, _MAKE, path, user=user)
            return {"entry": await _stat(box, path, user)}
        case "Move":
            target = _path(message, "destination", user)
            await _run(box, _MOVE, _path(message, "source", user), target, user=user)
            return {"entry": await _stat(box, target, user)}
        case "Remove":
            await _run(box, 'rm -rf -- "$1"', _path(message, "path", user), user=user)
            return {}
        case _:
            raise RpcError("unimplemented", f"filesystem.Filesystem/{method} is not supported by this server")


def _path(message: Mapping[str, Any], name: str, user: str) -> str:
    path = message.get(name)
    if not isinstance(path, str) or not path or "\0" in path:
        raise RpcError("invalid_argument", f"{name} must be a path")
    return _absolute(path, user)


async def _stat(box: NamespacesSandbox, path: str, user: str) -> dict[str, Any]:
    itself, *followed = _entries(await _run(box, _STAT, path, _PRINTF, user=user))
    entry = followed[0] if followed else itself
    if itself["isSymlink"]:
        entry |= {"isSymlink": True, "symlinkTarget": itself["symlinkTarget"]}
    return entry


async def _list(box: NamespacesSandbox, path: str, depth: object, user: str) -> list[dict[str, Any]]:
    levels = depth if isinstance(depth, int) and depth > 0 else 1
    if (await _stat(box, path, user))["type"] != "FILE_TYPE_DIRECTORY":
        raise RpcError("invalid_argument", f"{path} is not a directory")
    script = f'find "$1/" -mindepth 1 -maxdepth {levels} -printf "$2"'
    return sorted(_entries(await _run(box, script, path, _PRINTF, user=user)), key=lambda entry: entry["path"])


async def _run(box: NamespacesSandbox, script: str, *arguments: str, user: str) -> bytes:
    try:
        result = await box.exec(["env", "LC_ALL=C", "sh", "-c", script, "sh", *arguments], user=user)
    except SandboxGone:
        raise
    except (UsageError, LimitError) as e:
        raise RpcError("invalid_argument", e.message) from e
    if result.exit_code == 0:
        return result.stdout
    said = result.stderr.decode(errors="replace").strip()[-300:]
    if result.exit_code == _EXISTS:
        raise RpcError("already_exists", f"{arguments[0]} already exists")
    if result.exit_code == _MISSING or "No such file" in said:
        raise RpcError("not_found", f"{arguments[0]} does not exist")
    raise RpcError("permission_denied" if "Permission denied" in said else "internal", said)


def _entries(printed: bytes) -> list[dict[str, Any]]:
    texts = [text.decode(errors="replace") for text in printed.split(b"\0")[:-1]]
    rows = [texts[i : i + len(_FIELDS)] for i in range(0, len(texts), len(_FIELDS))]
    return [_entry(dict(zip(_FIELDS, row, strict=True))) for row in rows]


def _entry(row: Mapping[str, str]) -> dict[str, Any]:
    kind = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY"}.get(row["%Y"], "FILE_TYPE_UNSPECIFIED")
    mode = int(row["%m"], 8)
    bits = stat.S_IFDIR if row["%Y"] == "d" else stat.S_IFREG
    modified = datetime.datetime.fromtimestamp(float(row["%T@"]), datetime.UTC)
    entry: dict[str, Any] = {
        "name": row["%f"],
        "type": kind,
        "path": row["%p"].replace("//", "/"),
        "size": row["%s"],
        "mode": mode,
        "permissions": stat.filemode(bits | mode),
        "owner": row["%u"],
        "group": row["%g"],
        "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
        "isSymlink": row["%y"] == "l",
    }
    return entry | ({"symlinkTarget": row["%l"]} if row["%y"] == "l" else {})
