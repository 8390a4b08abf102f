"""Clients that leave, ask again and ask twice, in numbers. `pytest -m soak` runs the long one."""

from __future__ import annotations

import gc
import socket

import pytest

from rollwright.engines.scripted import Rule, Script, ScriptedEngine
from rollwright.gateway.server import Gateway
from rollwright.tokens.render_template import TemplateRenderer
from rollwright.types import Sampling
from support.soak import MANNERS, Soaked, soak

pytestmark = pytest.mark.anyio


async def soaked_in(renderer: TemplateRenderer, *, sessions: int, turns: int, seed: int, rounds: int = 1) -> Soaked:
    """One gateway for all rounds; its memory after the first must not grow in the others."""
    script = Script(script=(Rule(replies=tuple(f"I look at file {number}." for number in range(turns))),))
    engine = ScriptedEngine(renderer=renderer, script=script, seconds_per_turn=0.01)
    gateway = Gateway(engine=engine, renderer=renderer, sampling=Sampling(), model="policy")
    total = Soaked()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        port = sock.getsockname()[1]
        async with engine, gateway, gateway.listening(sock):
            held: list[int] = []
            for number in range(rounds):
                soaked = await soak(gateway, port, sessions=sessions, turns=turns, seed=seed + number)
                total.turns += soaked.turns
                total.lost += soaked.lost
                total.doubled += soaked.doubled
                total.violations += soaked.violations
                total.manners += soaked.manners
                gc.collect()
                held.append(len(gc.get_objects()))
    assert max(held) < 1.1 * held[0] + 5000, f"objects after each round: {held}"
    return total


async def test_no_turn_is_lost_or_doubled_whatever_clients_do(renderer: TemplateRenderer) -> None:
    soaked = await soaked_in(renderer, sessions=8, turns=8, seed=1, rounds=2)
    assert (soaked.violations, soaked.lost, soaked.doubled) == ([], 0, 0)
    assert soaked.turns == 2 * 8 * 8
    assert set(soaked.manners) == set(MANNERS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_256_sessions_of_60_turns(renderer: TemplateRenderer, request: pytest.FixtureRequest) -> None:
    if "soak" not in request.config.getoption("markexpr"):
        pytest.skip("opt-in: pytest -m soak")
    soaked = await soaked_in(renderer, sessions=256, turns=60, seed=2, rounds=2)
    assert (soaked.violations, soaked.lost, soaked.doubled) == ([], 0, 0)
    assert soaked.turns == 2 * 256 * 60
