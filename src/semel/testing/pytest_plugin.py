"""Fixtures for tests of code that uses semel; a `conftest.py` asks for them.

pytest_plugins = ["semel.testing.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semel.sync import Idempotency


@pytest.fixture
def idempotency() -> Iterator[Idempotency]:
    """Give an engine in memory, empty for each test, and close it afterwards."""
    with Idempotency("memory://") as engine:
        yield engine
