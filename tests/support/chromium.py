"""A real, headless browser, and what it complains of."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

VARIABLE = "ROLLWRIGHT_BROWSER"


def missing() -> str:
    """Why there is no browser here; empty when there is one."""
    if not os.environ.get(VARIABLE):
        return f"no browser: `make test-browser` names one in {VARIABLE}"
    return "" if find_spec("playwright") else "needs the extra: pip install 'rollwright[browser]'"


@contextmanager
def chromium(**settings: Any) -> Generator[tuple[Any, list[str]]]:
    """A page of Debian's Chromium, and everything its console has said."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=os.environ[VARIABLE], args=["--no-sandbox"])
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **settings})
        page.set_default_timeout(30_000)
        page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
        page.on("requestfailed", lambda request: said.append(f"failed: {request.url} {request.failure}"))
        yield page, said
        browser.close()
