"""A user's traceback is the user's: at most three of our frames are in it."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import semel
from semel import AsyncIdempotency, Idempotency

OURS = str(Path(semel.__file__).parent)
AT_MOST = 3


def broken():
    raise ZeroDivisionError("the user's own")


async def broken_async():
    raise ZeroDivisionError("the user's own")


def own_frames(error: BaseException) -> list[str]:
    return [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(OURS)
    ]


def check(raised):
    frames = own_frames(raised.value)
    assert len(frames) <= AT_MOST, "\n".join(frames)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None, "nothing of ours is chained to it"


@pytest.fixture
def idem():
    with Idempotency("memory://") as idem:
        yield idem


@pytest.mark.parametrize("method", ["execute", "run", "consume"])
def test_of_a_call(idem, method):
    with pytest.raises(ZeroDivisionError) as raised:
        getattr(idem, method)("k", broken)
    check(raised)


@pytest.mark.parametrize("method", ["__call__", "run"])
def test_of_a_decorated_function(idem, method):
    class Till:
        @idem.once("{a}")
        def pay(self, a):
            return broken()

    once = idem.once(broken)
    for call in (getattr(once, method), lambda: getattr(Till().pay, method)(1)):
        with pytest.raises(ZeroDivisionError) as raised:
            call()
        check(raised)


def test_of_an_attempt_by_hand(idem):
    with pytest.raises(ZeroDivisionError) as raised, idem.attempt("k"):
        broken()
    check(raised)


def test_of_marks(idem):
    with pytest.raises(ZeroDivisionError) as raised:
        idem.marks.do("k", broken)
    check(raised)


@pytest.mark.parametrize("method", ["execute", "run", "consume"])
async def test_of_an_async_call(method):
    async with AsyncIdempotency("memory://") as idem:
        with pytest.raises(ZeroDivisionError) as raised:
            await getattr(idem, method)("k", broken_async)
        check(raised)


@pytest.mark.parametrize("method", ["__call__", "run"])
async def test_of_an_async_decorated_function(method):
    async with AsyncIdempotency("memory://") as idem:
        with pytest.raises(ZeroDivisionError) as raised:
            await getattr(idem.once(broken_async), method)()
        check(raised)


async def test_of_an_async_attempt_by_hand():
    async with AsyncIdempotency("memory://") as idem:
        with pytest.raises(ZeroDivisionError) as raised:
            async with idem.attempt("k"):
                await broken_async()
        check(raised)


async def test_of_async_marks():
    async with AsyncIdempotency("memory://") as idem:
        with pytest.raises(ZeroDivisionError) as raised:
            await idem.marks.do("k", broken_async)
        check(raised)
