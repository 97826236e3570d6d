"""The switch that turns idempotency off for a while, made for tests.

This module holds one context variable. It belongs to the thread or task that set it (and the tasks
started from there), so that a test which switches off cannot disturb another one beside it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

BYPASSED: ContextVar[bool] = ContextVar("semel_bypassed", default=False)
"""Asked by every call: the variable itself, because a function around it would be half the cost."""


def bypassed() -> bool:
    """Whether the running thread or task has switched idempotency off."""
    return BYPASSED.get()


class bypass:  # noqa: N801  read as a verb: `with bypass():`, `@bypass()`
    """Run every call straight through, without a key or a store: `with bypass(): ...`."""

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
