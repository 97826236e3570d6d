"""Who leads a shared execution when its leader leaves just before another call sits down."""

from __future__ import annotations

import asyncio

from engines.facade import PATIENCE
from semel._mirror import tasks, threads
from semel._mirror.seats import LEAD, Seats
from semel.core.records import Finished, State

FINISHED = Finished(State.SUCCEEDED, None, 1, 1, 60.0)


def test_a_thread_that_comes_to_wait_for_a_leader_who_has_left_leads():
    flights = threads.Flights(Seats())
    assert flights.lead("place")
    assert not flights.lead("place")  # so it is about to wait
    flights.share("place", FINISHED)
    assert flights.join("place", PATIENCE) is LEAD
    assert not flights.lead("place")


async def test_so_does_a_task():
    home = tasks.Home()
    home.check()
    flights = tasks.Flights(Seats[asyncio.Future[object]](), home)
    assert flights.lead("place")
    assert not flights.lead("place")
    flights.share("place", FINISHED)
    assert await flights.join("place", PATIENCE) is LEAD
    assert not flights.lead("place")
