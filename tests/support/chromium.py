"""A real, headless browser, and what it complains of."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

VARIABLE = "ROLLWRIGHT_BROWSER"


@contextmanager
def chromium(**settings: Any) -> Generator[tuple[Any, list[str]]]:
    """A page of Debian's Chromium, and everything its console has said. Skips where there is none."""
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"no browser: `make test-browser` names one in {VARIABLE}")
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra: pip install 'rollwright[browser]'")
    said: list[str] = []
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 800}, **settings})
        page.set_default_timeout(30_000)
        page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
        page.on("requestfailed", lambda request: said.append(f"failed: {request.url} {request.failure}"))
        yield page, said
        browser.close()
