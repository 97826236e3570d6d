"""The browser that looks at the documentation: a private Chromium, without a window."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def missing(what: str) -> Any:
    message = f"{what}: run `make servers`"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser that the system has."""
    program = shutil.which("chromium")
    if program is None:
        missing("no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
