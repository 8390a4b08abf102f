"""Where boxes on other machines reach the gateway."""

from __future__ import annotations

import errno
import socket
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from rollwright.config import GatewayTable
from rollwright.errors import ConfigError

__all__ = ["public_socket", "public_url"]


def public_socket(settings: GatewayTable, stack: AsyncExitStack) -> socket.socket:
    """Listens for boxes on other machines. Raises `ConfigError` before anything slow is begun."""
    if settings.public_url is None and settings.public_host is None:
        raise ConfigError(
            "the boxes of this backend are on other machines and reach the gateway by a public address only: set "
            "gateway.public_host to a name or address of this one (or gateway.public_url, behind a tunnel or proxy)",
            field="gateway.public_host",
        )
    if settings.public_url is not None and not _is_url(settings.public_url):
        raise ConfigError(
            f"gateway.public_url must be like https://name:port, not {settings.public_url!r}",
            field="gateway.public_url",
        )
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    try:
        return stack.enter_context(
            socket.create_server((settings.bind, settings.public_port), family=family, backlog=1024)
        )
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
        raise ConfigError(
            f"port {settings.public_port} of {settings.bind}, for the gateway, {why}", field="gateway.public_port"
        ) from error


def public_url(settings: GatewayTable, sock: socket.socket) -> str:
    """What boxes are told, of the socket that `public_socket` made."""
    if settings.public_url is not None:
        return settings.public_url.rstrip("/")
    host = settings.public_host or ""
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def _is_url(text: str) -> bool:
    """Scheme and host, and no path: CLIs append their own."""
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and parts.hostname is not None and not parts.path.strip("/")
