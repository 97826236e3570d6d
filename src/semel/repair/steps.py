"""Runs the work of this package, which is written once for threads and for asyncio.

The work is in generators that yield steps and receive answers. This module does the steps; it
decides nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, assert_never

from semel.core.records import Record
from semel.repair.decisions import AsyncResolver

T = TypeVar("T")


class Ask(NamedTuple):
    """Ask the store."""

    call: Callable[[], Any]


class Consult(NamedTuple):
    """Ask a resolver."""

    resolver: AsyncResolver
    record: Record


class Pause(NamedTuple):
    """Let others have the store for a while."""

    seconds: float


Step: TypeAlias = Ask | Consult | Pause
Steps: TypeAlias = Generator[Step, Any, T]


def ask(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Ask:
    """Make the step that calls a verb of the store."""
    return Ask(partial(verb, *args, **kwargs))


def run(steps: Steps[T]) -> T:
    """Do the steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                answer = _do(step)
            except Exception as error:  # noqa: BLE001 - the generator decides what it means
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result


async def run_async(steps: Steps[T]) -> T:
    """Do the steps in this task."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await _do_async(step)
            except Exception as error:  # noqa: BLE001 - the generator decides what it means
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result


def _do(step: Step) -> Any:
    match step:
        case Ask(call):
            return call()
        case Consult(resolver, record):
            return resolver(record)
        case Pause(seconds):
            return time.sleep(seconds)
        case _:
            assert_never(step)


async def _do_async(step: Step) -> Any:
    match step:
        case Ask(call):
            return await call()
        case Consult(resolver, record) if inspect.iscoroutinefunction(resolver):
            return await resolver(record)
        case Consult(resolver, record):
            # A resolver asks other systems: a plain function would hold up the event loop.
            answer = await asyncio.to_thread(resolver, record)
            return await answer if inspect.isawaitable(answer) else answer
        case Pause(seconds):
            return await asyncio.sleep(seconds)
        case _:
            assert_never(step)
