"""Fixtures for tests of code that uses semel; a `conftest.py` asks for them.

pytest_plugins = ["semel.testing.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semel.aio import AsyncIdempotency
from semel.sync import Idempotency


@pytest.fixture
def idempotency() -> Iterator[Idempotency]:
    """Return an engine in memory, empty for each test, and close it afterwards."""
    with Idempotency("memory://") as engine:
        yield engine


@pytest.fixture
def async_idempotency() -> AsyncIdempotency:
    """Return an engine for asyncio in memory, empty for each test.

    It belongs to the event loop of the test, whichever plugin runs it (pytest-asyncio, AnyIO).
    Therefore this fixture is not async itself: a plugin could run it in another loop. Memory has no
    connections that would have to be closed.
    """
    return AsyncIdempotency("memory://")
