"""Tools for tests: of code that uses semel, and of stores that other people write.

`StoreContract` needs pytest and is imported when it is asked for; nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from semel.core.optional import Needed
from semel.testing.attempts import RecordedEvents, crash, crash_async, record_events
from semel.testing.driver import FakeClock, StoreDriver
from semel.testing.faults import (
    AsyncFaultyStore,
    Call,
    Delay,
    FaultyStore,
    LoseReply,
    Refuse,
)
from semel.testing.switching import bypass, bypassed, in_memory

if TYPE_CHECKING:
    from semel.testing.contract import StoreContract

__all__ = [
    "AsyncFaultyStore",
    "Call",
    "Delay",
    "FakeClock",
    "FaultyStore",
    "LoseReply",
    "RecordedEvents",
    "Refuse",
    "StoreContract",
    "StoreDriver",
    "bypass",
    "bypassed",
    "crash",
    "crash_async",
    "in_memory",
    "record_events",
]

CONTRACT = "semel.testing.contract"


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with Needed("pytest", by="semel.testing.StoreContract"):
        import pytest  # noqa: PLC0415  the one name that needs it

    # Before the import: only then do the contract's plain asserts show both sides when they fail.
    pytest.register_assert_rewrite(CONTRACT)
    return importlib.import_module(CONTRACT).StoreContract
