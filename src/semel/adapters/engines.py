"""The engines of an integration: one for all threads, or one for each event loop.

Both kinds are written by hand, for a loop has no counterpart on threads. They have the same names,
so that the rest of an integration is written once.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Final, NamedTuple

from semel.aio import AsyncIdempotency
from semel.errors import ConfigError
from semel.stores.forking import Places
from semel.stores.loops import running_loop
from semel.sync import Idempotency

LARGE_AT_ONCE: Final = 8
"""How many large answers an integration saves at the same time; the others wait for their turn."""

aio_place: Final = running_loop
"""Says which of the engines is used: that of the running event loop."""


class AsyncTurns(asyncio.Semaphore):
    """Lets few save a large answer at the same time."""

    async def take(self) -> bool:
        """Wait for a turn."""
        return await self.acquire()

    def give(self, _: bool) -> None:
        """End a turn."""
        self.release()


class AsyncHere(NamedTuple):
    """What an integration has for one event loop."""

    engine: AsyncIdempotency
    large: AsyncTurns


class AsyncEngines(dict[asyncio.AbstractEventLoop, AsyncHere]):
    """An engine belongs to one event loop; of those that are opened here, each loop has its own.

    A test client may run every request on another loop.
    """

    def __init__(self, idempotency: AsyncIdempotency | str) -> None:
        self._url = idempotency if isinstance(idempotency, str) else None
        engine = AsyncIdempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, AsyncIdempotency):
            raise ConfigError(
                f"an AsyncIdempotency or a URL is needed, not {type(engine).__name__}"
            )
        self.first = engine
        """The one by whose settings the rules are made."""
        self._unused = [engine]

    def __missing__(self, loop: asyncio.AbstractEventLoop) -> AsyncHere:
        # Loops run in threads of their own: each step here is atomic.
        here = AsyncHere(self._next(), AsyncTurns(LARGE_AT_ONCE))
        # An engine keeps its loop alive, so it is for us to let both go.
        for other in self.copy():
            if other.is_closed():
                self.pop(other, None)
        self[loop] = here
        return here

    def _next(self) -> AsyncIdempotency:
        if self._url is None:
            return self.first
        try:
            return self._unused.pop()
        except IndexError:
            return AsyncIdempotency(self._url)

    async def close(self) -> None:
        """Close the engine of the running event loop."""
        loop = running_loop()
        await self[loop].engine.close()
        del self[loop]


async def aio_awaited(given: Any) -> Any:
    """Return what a function of the application gave, which may be async."""
    return await given if inspect.isawaitable(given) else given


# --- on threads ----------------------------------------------------------------------------------


def place() -> str:
    """Say which of the engines is used: there is one, whatever the thread."""
    return "threads"


class Turns:
    """Lets few save a large answer at the same time."""

    def __init__(self, count: int) -> None:
        self._places = Places(count)

    def take(self) -> Any:
        """Wait for a turn."""
        return self._places.get()

    def give(self, turn: Any) -> None:
        """End a turn."""
        self._places.give(turn)


class Here(NamedTuple):
    """What an integration has for all threads."""

    engine: Idempotency
    large: Turns


class Engines(dict[str, Here]):
    """One engine for all threads."""

    def __init__(self, idempotency: Idempotency | str) -> None:
        engine = Idempotency(idempotency) if isinstance(idempotency, str) else idempotency
        if not isinstance(engine, Idempotency):
            raise ConfigError(f"an Idempotency or a URL is needed, not {type(engine).__name__}")
        self.first = engine
        self[place()] = Here(engine, Turns(LARGE_AT_ONCE))

    def close(self) -> None:
        """Close the engine."""
        self.first.close()


def awaited(given: Any) -> Any:
    """Return what a function of the application gave; one that is async cannot be awaited here."""
    if inspect.iscoroutine(given):
        given.close()
        raise ConfigError(
            "an async function needs an integration for asyncio; this one is for threads"
        )
    return given
