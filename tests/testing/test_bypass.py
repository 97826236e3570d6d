"""The switch that turns idempotency off: here and now, and nowhere else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semel.testing import bypass, bypassed


def test_nothing_is_bypassed_unless_asked():
    assert bypassed() is False


def test_a_block_is_bypassed_and_the_code_after_it_is_not():
    with bypass():
        assert bypassed() is True
        with bypass():
            assert bypassed() is True
        assert bypassed() is True
    assert bypassed() is False


def test_an_exception_switches_back_too():
    with pytest.raises(ValueError, match="inside"), bypass():
        raise ValueError("inside")
    assert bypassed() is False


def test_a_decorated_function_is_bypassed_at_each_call():
    @bypass()
    def inside(value, *, twice):
        """Say it."""
        return bypassed(), value * 2 if twice else value

    assert inside(3, twice=True) == (True, 6)
    assert inside(3, twice=False) == (True, 3)
    assert bypassed() is False
    assert inside.__doc__ == "Say it."


async def test_a_decorated_async_function_is_bypassed_until_it_ends():
    @bypass()
    async def inside():
        await asyncio.sleep(0)
        return bypassed()

    assert await inside() is True
    assert bypassed() is False


async def test_a_task_beside_is_not_bypassed():
    switched, looked = asyncio.Event(), asyncio.Event()

    async def switches_off():
        with bypass():
            switched.set()
            await looked.wait()

    task = asyncio.create_task(switches_off())
    await switched.wait()
    assert bypassed() is False
    looked.set()
    await task


def test_a_thread_beside_is_not_bypassed():
    seen = []
    with bypass():
        thread = threading.Thread(target=lambda: seen.append(bypassed()))
        thread.start()
        thread.join()
    assert seen == [False]
