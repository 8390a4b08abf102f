"""Where boxes on other machines find the gateway."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollwright.config import GatewayTable
from rollwright.errors import ConfigError
from rollwright.run.public_address import public_socket, public_url

pytestmark = pytest.mark.anyio


def table(**settings: Any) -> GatewayTable:
    return GatewayTable(**{"bind": "127.0.0.1", "public_port": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"public_host": "203.0.113.7"}, "http://203.0.113.7:{port}"),
        ({"public_host": "trainer.example.org"}, "http://trainer.example.org:{port}"),
        ({"public_host": "2001:db8::7"}, "http://[2001:db8::7]:{port}"),
        ({"public_url": "https://gw.example.org/"}, "https://gw.example.org"),
        ({"public_url": "http://10.0.0.7:8443", "public_host": "ignored"}, "http://10.0.0.7:8443"),
    ],
)
async def test_boxes_are_told_where_it_is(settings: dict[str, Any], url: str) -> None:
    async with AsyncExitStack() as stack:
        sock = public_socket(table(**settings), stack)
        assert public_url(table(**settings), sock) == url.format(port=sock.getsockname()[1])
    assert sock.fileno() == -1


async def test_without_an_address_the_setting_is_named() -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"gateway\.public_host"):
            public_socket(table(), stack)


@pytest.mark.parametrize("url", ["gw.example.org", "ftp://gw.example.org", "https://", "https://gw.example.org/v1"])
async def test_what_no_cli_could_call_is_refused(url: str) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"gateway\.public_url"):
            public_socket(table(public_url=url), stack)


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with AsyncExitStack() as stack:
            with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1, for the gateway, is in use") as raised:
                public_socket(table(public_host="here", public_port=port), stack)
    assert raised.value.details["field"] == "gateway.public_port"
