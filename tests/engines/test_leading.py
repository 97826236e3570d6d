"""Who leads a shared execution when its leader leaves just before another call sits down."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines.facade import PATIENCE, until, wait_until
from semel._mirror import tasks, threads
from semel._mirror.seats import LEAD, Seats, SeatsOfLoops
from semel.core.records import Finished, State


class Caller:
    """Stands for a call."""


ME, OTHER = Caller(), Caller()
FINISHED = Finished(State.SUCCEEDED, None, 1, 1, 60.0)


def test_a_thread_that_comes_to_wait_for_a_leader_who_has_left_leads():
    flights = threads.Flights(Seats())
    assert flights.lead("place", ME)
    assert not flights.lead("place", ME)  # so it is about to wait
    flights.share("place", FINISHED)
    assert flights.join("place", ME, PATIENCE) is LEAD
    assert not flights.lead("place", ME)


async def test_so_does_a_task():
    home = tasks.Home()
    flights = tasks.Flights(SeatsOfLoops(), home)
    home.check()
    assert flights.lead("place", ME)
    assert not flights.lead("place", ME)
    flights.share("place", FINISHED)
    assert await flights.join("place", ME, PATIENCE) is LEAD
    assert not flights.lead("place", ME)


class LeavingLeader(Seats[object]):
    """The leader leaves right after somebody has seen that there is one."""

    def lead(self, place, caller):
        leads = super().lead(place, caller)
        if not leads:
            self.end(place)
        return leads


def test_who_sits_down_as_the_leader_leaves_leads():
    seats = LeavingLeader()
    assert seats.lead("place", ME)
    assert seats.take_lead("place", ME, object) is None


def test_a_seat_in_a_row_that_is_gone_by_then_is_none():
    seats: Seats[object] = Seats()
    assert seats.lead("place", ME)

    def sit_down_slowly() -> object:
        assert seats.end("place") == ()  # the leader has seen nobody
        return object()

    assert seats.take_lead("place", OTHER, sit_down_slowly) is None
    assert not seats.lead("place", ME)


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_thread_leads_when_its_leader_was_interrupted_without_saying_so(monkeypatch, how):
    monkeypatch.setattr(threads, "LOOK", 0.01)
    flights, leader, given = threads.Flights(Seats()), Caller(), []
    assert flights.lead("place", leader)
    follower = threading.Thread(target=lambda: given.append(flights.join("place", OTHER, None)))
    follower.start()
    wait_until(lambda: len(flights._seats._waiting["place"]) == 1)
    if how == "gone":
        del leader
    else:
        flights._seats.end("place")  # and interrupted before it told anybody
    follower.join(PATIENCE)
    assert given == [LEAD]


@pytest.mark.parametrize("patience", [None, PATIENCE])
@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_a_task_leads_when_its_leader_was_interrupted_without_saying_so(
    monkeypatch, how, patience
):
    monkeypatch.setattr(tasks, "LOOK", 0.01)
    home = tasks.Home()
    flights, leader = tasks.Flights(SeatsOfLoops(), home), Caller()
    home.check()
    assert flights.lead("place", leader)
    first = asyncio.create_task(flights.join("place", ME, patience))
    await until(lambda: len(flights._seats._waiting["place"]) == 1)
    second = asyncio.create_task(flights.join("place", OTHER, patience))
    await until(lambda: len(flights._seats._waiting["place"]) == 2)
    looks = flights._looking
    await until(lambda: flights._looking is not looks)
    assert not first.done(), "it is led"
    if how == "gone":
        del leader
    else:
        flights._seats.end("place")  # and interrupted before it told anybody
    async with asyncio.timeout(PATIENCE):
        assert await first is LEAD
        flights.share("place", FINISHED)
        assert await second is FINISHED
    await until(lambda: flights._looking is None)  # nobody waits: nobody looks


def test_what_a_thread_was_given_is_there_however_often_it_looks():
    seat = threads.Seat()
    seat.give(LEAD)
    assert [seat.wait(PATIENCE), seat.wait(PATIENCE)] == [LEAD, LEAD]
