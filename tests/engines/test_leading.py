"""Who leads a shared execution when its leader leaves just before another call sits down."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines.facade import PATIENCE, until, wait_until
from semel.core.records import Finished, State
from semel.engine.colours import tasks, threads
from semel.engine.colours.leaders import LEAD, Seats, SeatsOfLoops


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
            self.end(place, FINISHED)
        return leads


def test_who_sits_down_as_the_leader_leaves_leads():
    seats = LeavingLeader()
    assert seats.lead("place", ME)
    assert seats.take_lead("place", ME, lambda _: object()) is None


def test_a_seat_in_a_row_that_is_gone_by_then_is_none():
    seats: Seats[object] = Seats()
    assert seats.lead("place", ME)

    def sit_down_slowly(_) -> object:
        assert seats.end("place", FINISHED) == ()  # the leader has seen nobody
        return object()

    assert seats.take_lead("place", OTHER, sit_down_slowly) is None
    assert not seats.lead("place", ME)


def test_a_thread_leads_when_its_leader_was_interrupted_without_saying_so(monkeypatch):
    monkeypatch.setattr(threads, "LOOK", 0.01)
    flights, leader, given = threads.Flights(Seats()), Caller(), []
    assert flights.lead("place", leader)
    follower = threading.Thread(target=lambda: given.append(flights.join("place", OTHER, None)))
    follower.start()
    wait_until(lambda: len(flights._seats._waiting["place"]) == 1)
    del leader
    follower.join(PATIENCE)
    assert given == [LEAD]


@pytest.mark.parametrize("looks", ["often", "at the wrong moment"])
def test_a_thread_that_was_not_woken_finds_the_answer(monkeypatch, looks):
    """As the last one of many does, or after an exception that struck the leader meanwhile."""
    monkeypatch.setattr(threads, "LOOK", 0.01)
    seats: Seats[threads.Seat] = Seats()
    flights, given = threads.Flights(seats), []
    ended = threading.Event()
    is_orphaned = seats.is_orphaned

    def after_the_end(*seat):
        assert ended.wait(PATIENCE)
        return is_orphaned(*seat)

    if looks == "at the wrong moment":
        monkeypatch.setattr(seats, "is_orphaned", after_the_end)
    assert flights.lead("place", ME)
    follower = threading.Thread(target=lambda: given.append(flights.join("place", OTHER, None)))
    follower.start()
    wait_until(lambda: len(seats._waiting["place"]) == 1)
    assert len(seats.end("place", FINISHED)) == 1  # and nobody is woken
    ended.set()
    follower.join(PATIENCE)
    assert given == [FINISHED]


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
        flights._seats.end("place", FINISHED)  # and interrupted before it told anybody
    async with asyncio.timeout(PATIENCE):
        assert await first is LEAD
        flights.share("place", FINISHED)
        assert await second is FINISHED
    await until(lambda: flights._looking is None)  # nobody waits: nobody looks
