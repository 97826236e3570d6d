"""Engines that behave otherwise in a test, for a while.

`with in_memory(idem):` gives an engine another store; `with bypass():` turns idempotency off, for
the thread or task that says so (and the tasks started from there), so that tests beside it are not
disturbed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable
from contextvars import Token
from time import monotonic
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast, overload

from semel.aio import AsyncIdempotency
from semel.core.settings import BYPASSED
from semel.default import default_engine
from semel.errors import ConfigError
from semel.events import logger
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.sync import Idempotency

Function = TypeVar("Function", bound=Callable[..., Any])
S = TypeVar("S", bound="Store | AsyncStore")

_LEFT_WITHIN: Final = 5.0
"""Seconds for which the end of a block waits for calls that still run, as `close` does."""


class _Block:
    """An open block: the inside of its engine, its state there, and that before the block."""

    def __init__(self, engine: Any, store: Any) -> None:
        self.before: dict[str, Any] = engine.use_store(store)
        self.engine, self.mine, self.process = engine, vars(engine), os.getpid()


_lock = threading.RLock()
_blocks: list[_Block] = []
"""The blocks that are open, of all engines; the newest is the last."""


class in_memory(Generic[S]):  # noqa: N801 - read as words: `with in_memory(idem):`
    """Switch an engine to records in memory for a test: `with in_memory(idem): ...`.

    Everything that uses the engine switches with it, in every thread: functions decorated at import
    time, integrations, marks. The engine keeps its policies, hooks, and codecs, and begins with no
    records. When the block ends, also with an exception, the engine is as before: its own store was
    not touched, and a `close()` inside the block did not close it. You can nest blocks.

    `engine`: an `Idempotency` or an `AsyncIdempotency`; without one, the default engine behind
    `semel.once` and `semel.execute`.

    `store`: the store to use in place of a new `MemoryStore` (`AsyncMemoryStore`), such as
    `MemoryStore(clock=FakeClock())` or `FaultyStore(MemoryStore())`. The block returns the store.

    An `AsyncIdempotency` belongs to the first event loop that uses it inside the block, whatever
    loop it belonged to before. `async with` waits at the end for its calls; a plain `with`, in a
    test or fixture that is not async, does not.

    Begin and end a block while the engine is idle: it raises `ConfigError` if a call still runs
    when it begins, and calls that still run when it ends are not recorded.

    Examples:
        >>> idem = Idempotency("redis://localhost:6379/0")
        >>> @idem.once("charge:{order}")
        ... def charge(order: str) -> str:
        ...     return f"receipt of {order}"
        >>> with in_memory(idem):
        ...     charge.run("o1").replayed, charge.run("o1").replayed
        (False, True)
    """

    @overload
    def __init__(
        self: in_memory[MemoryStore], engine: Idempotency | None = None, store: None = None
    ) -> None: ...
    @overload
    def __init__(
        self: in_memory[AsyncMemoryStore], engine: AsyncIdempotency, store: None = None
    ) -> None: ...
    @overload
    def __init__(self, engine: Idempotency | AsyncIdempotency | None, store: S) -> None: ...
    @overload
    def __init__(
        self, engine: Idempotency | AsyncIdempotency | None = None, *, store: S
    ) -> None: ...
    def __init__(self, engine: Any = None, store: Any = None) -> None:
        if engine is not None and not isinstance(engine, Idempotency | AsyncIdempotency):
            raise ConfigError(
                f"in_memory needs an Idempotency or an AsyncIdempotency, not "
                f"{type(engine).__name__}; give the integration an engine in place of a URL, and "
                "pass that engine here"
            )
        self._given, self._store = engine, store
        self._block: _Block | None = None

    def __enter__(self) -> S:
        with _lock:
            if self._block is not None:
                raise ConfigError("this in_memory block is open already: make another one")
            engine: Any = default_engine() if self._given is None else self._given
            store: Any = self._store
            if store is None:
                is_async = isinstance(engine, AsyncIdempotency)
                store = AsyncMemoryStore() if is_async else MemoryStore()
            self._block = _Block(engine.internals, store)
            _blocks.append(self._block)
        opened: S = store
        return opened

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = cast("_Block", self._block)
        try:
            if not block.engine.setup.asynchronous and _can_wait(block):
                block.engine.close_after((), (), monotonic() + _LEFT_WITHIN)
        finally:
            self._end()

    async def __aenter__(self) -> S:
        if not isinstance(self._given, AsyncIdempotency):
            raise ConfigError("an Idempotency needs `with in_memory(idem)`, without async")
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = cast("_Block", self._block)
        try:
            loop = block.engine.loop_guard.loop
            if loop is asyncio.get_running_loop() and _can_wait(block):
                await block.engine.close_after((), (), monotonic() + _LEFT_WITHIN)
        finally:
            self._end()

    def _end(self) -> None:
        """Let the engine, or the block inside this one, go back to what was before."""
        with _lock:
            block, self._block = cast("_Block", self._block), None
            engine = block.engine
            inside = next((each for each in _blocks if each.before is block.mine), None)
            if inside is not None:
                inside.before, inside.process = block.before, block.process
            else:
                engine.__dict__ = block.before
            _blocks.remove(block)
        if inside is None and block.process != os.getpid():
            engine.after_fork()  # the connections belong to the parent
        block.mine["renewer"].retire()
        running = len(block.mine["leases"])
        if running:  # logged last: a signal that comes meanwhile must not keep the engine here
            logger.warning(
                "%d calls still ran when their in_memory block ended: their results are not "
                "recorded, and they raise LeaseLost. Let the calls of a test end before it",
                running,
            )


def _can_wait(block: _Block) -> bool:
    """Take no more calls; True if those that run can be waited for from here."""
    engine = block.engine
    if vars(engine) is not block.mine:
        return False  # another block is open inside this one: it was not ended in its turn
    engine.closed = True
    return not engine.held_here() and not engine.claiming_here()


def bypassed() -> bool:
    """Return whether the running thread or task has switched idempotency off."""
    return BYPASSED.get()


class bypass:  # noqa: N801  read as a verb: `with bypass():`, `@bypass()`
    """Run every call unprotected, without a key or a store: `with bypass(): ...`."""

    _token: Token[bool]

    def __enter__(self) -> None:
        self._token = BYPASSED.set(True)

    def __exit__(self, *exc_info: object) -> None:
        BYPASSED.reset(self._token)

    def __call__(self, function: Function) -> Function:
        """Decorate a function, or an async one, so that it runs bypassed."""
        # A fresh switch for each call: a decorated function may run in many threads and tasks.
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def straight_async(*args: Any, **kwargs: Any) -> Any:
                with bypass():
                    return await function(*args, **kwargs)

            return cast("Function", straight_async)

        @functools.wraps(function)
        def straight(*args: Any, **kwargs: Any) -> Any:
            with bypass():
                return function(*args, **kwargs)

        return cast("Function", straight)
