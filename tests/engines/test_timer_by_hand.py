"""What the timer does at one tick, ticked by hand: no race decides how much of it is due."""

from __future__ import annotations

import asyncio
import math
from time import monotonic

import pytest

from engines.facade import never, until
from semel import Policy, StoreUnavailable
from semel.engine.colours.tasks import Timer
from semel.testing import Delay, Refuse
from tasks_at_once import tasks_that_end_at_once

SHORT = 0.3
HURRIED = Policy(lease=SHORT, wait_interval=60.0)  # too long a pause: the timer saves, not the call


@pytest.fixture
def stopped(memory_world):
    """An engine whose timer never ticks by itself."""
    engine = memory_world.engine(policy=HURRIED)
    memory_world.kind.finish(engine.engine.internals.renewer.timer.stop)
    return engine


def tick(engine):
    engine._kind.finish(engine.engine.internals.renewer.tick)


def test_saving_late_stops_when_a_renewal_is_due(stopped):
    stopped.store.inject("complete", Refuse(), times=2)
    for key in ("a", "b"):
        assert stopped.execute(key, lambda: 1) == 1
    stopped.store.inject("complete", Delay(2 * SHORT))  # by then both have to be renewed
    tick(stopped)
    assert stopped.commands("complete") == 3
    assert len(stopped.engine.internals.leases.unsaved()) == 1
    tick(stopped)
    assert not stopped.engine.internals.leases.unsaved()


def test_giving_back_stops_when_a_renewal_is_due(stopped):
    stopped.store.inject("claim", Refuse(), times=2)
    for key in ("a", "b"):
        with pytest.raises(StoreUnavailable):
            stopped.execute(key, never)
    give_back = stopped.engine.internals.renewer._give_back_doubtful
    stopped._kind.finish(give_back, math.inf, -math.inf)
    assert len(stopped.engine.internals.leases._unsure) == 1
    stopped._kind.finish(give_back, math.inf, math.inf)
    assert not stopped.engine.internals.leases._unsure


async def test_what_falls_due_during_a_tick_is_followed_by_another():
    ticks = []

    async def tick():
        ticks.append(len(ticks))
        if len(ticks) == 1:
            timer.due(monotonic())
        return math.inf

    timer = Timer(tick)
    timer.due(monotonic())
    await until(lambda: len(ticks) == 2)
    await timer.stop()


async def test_a_timer_goes_on_where_tasks_begin_at_once():
    ticks = []

    async def tick():
        ticks.append(len(ticks))
        return math.inf

    timer = Timer(tick)
    with tasks_that_end_at_once():
        for count in (1, 2):
            timer.due(monotonic())
            await until(lambda count=count: len(ticks) == count)
    await timer.stop()


async def test_stopping_a_timer_waits_for_its_tick():
    reached, released = asyncio.Event(), asyncio.Event()

    async def tick():
        reached.set()
        await released.wait()
        return math.inf

    timer = Timer(tick)
    timer.due(monotonic())
    await reached.wait()
    stopping = asyncio.create_task(timer.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    released.set()
    await stopping
    assert timer._ticking is None
