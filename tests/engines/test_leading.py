"""Who leads a shared execution when its leader leaves just before another call sits down."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engines.facade import PATIENCE, until, wait_until
from semel.core.records import Finished, State
from semel.engine.colours import tasks, threads
from semel.engine.colours.leaders import LEAD, Leaders, LeadersOfLoops


class Caller:
    """Stands for a call."""


ME, OTHER = Caller(), Caller()
FINISHED = Finished(State.SUCCEEDED, None, 1, 1, 60.0)


def test_a_thread_that_comes_to_wait_for_a_leader_who_has_left_leads():
    shared = threads.SharedRuns(Leaders())
    assert shared.lead("place", ME)
    assert not shared.lead("place", ME)  # so it is about to wait
    shared.give(shared.end("place", FINISHED), FINISHED)
    assert shared.join("place", ME, PATIENCE) is LEAD
    assert not shared.lead("place", ME)


async def test_so_does_a_task():
    guard = tasks.LoopGuard()
    shared = tasks.SharedRuns(LeadersOfLoops(), guard)
    guard.check()
    assert shared.lead("place", ME)
    assert not shared.lead("place", ME)
    shared.give(shared.end("place", FINISHED), FINISHED)
    assert await shared.join("place", ME, PATIENCE) is LEAD
    assert not shared.lead("place", ME)


def test_an_execution_that_has_ended_ends_again_without_effect():
    leaders = Leaders()
    assert leaders.lead("place", ME)
    leaders.end("place", FINISHED)
    assert tuple(leaders.end("place", FINISHED)) == ()


class LeavingLeader(Leaders[object]):
    """The leader leaves right after somebody has seen that there is one."""

    def lead(self, place, caller):
        leads = super().lead(place, caller)
        if not leads:
            self.end(place, FINISHED)
        return leads


def test_who_sits_down_as_the_leader_leaves_leads():
    leaders = LeavingLeader()
    assert leaders.lead("place", ME)
    assert leaders.take_lead("place", ME, lambda _: object()) is None


def test_a_seat_in_a_row_that_is_gone_by_then_is_none():
    leaders: Leaders[object] = Leaders()
    assert leaders.lead("place", ME)

    def sit_down_slowly(_) -> object:
        assert leaders.end("place", FINISHED) == ()  # the leader has seen nobody
        return object()

    assert leaders.take_lead("place", OTHER, sit_down_slowly) is None
    assert not leaders.lead("place", ME)


def test_a_thread_leads_when_its_leader_was_interrupted_without_saying_so(monkeypatch):
    monkeypatch.setattr(threads, "CHECK_EVERY", 0.01)
    shared, leader, given = threads.SharedRuns(Leaders()), Caller(), []
    assert shared.lead("place", leader)
    follower = threading.Thread(target=lambda: given.append(shared.join("place", OTHER, None)))
    follower.start()
    wait_until(lambda: len(shared._leaders._waiting["place"]) == 1)
    del leader
    follower.join(PATIENCE)
    assert given == [LEAD]


@pytest.mark.parametrize("looks", ["often", "at the wrong moment"])
def test_a_thread_that_was_not_woken_finds_the_answer(monkeypatch, looks):
    """As the last one of many does, or after an exception that struck the leader meanwhile."""
    monkeypatch.setattr(threads, "CHECK_EVERY", 0.01)
    leaders: Leaders[threads.Waiter] = Leaders()
    shared, given = threads.SharedRuns(leaders), []
    ended = threading.Event()
    is_orphaned = leaders.is_orphaned

    def after_the_end(*waiter):
        assert ended.wait(PATIENCE)
        return is_orphaned(*waiter)

    if looks == "at the wrong moment":
        monkeypatch.setattr(leaders, "is_orphaned", after_the_end)
    assert shared.lead("place", ME)
    follower = threading.Thread(target=lambda: given.append(shared.join("place", OTHER, None)))
    follower.start()
    wait_until(lambda: len(leaders._waiting["place"]) == 1)
    assert len(leaders.end("place", FINISHED)) == 1  # and nobody is woken
    ended.set()
    follower.join(PATIENCE)
    assert given == [FINISHED]


@pytest.mark.parametrize("patience", [None, PATIENCE])
@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_a_task_leads_when_its_leader_was_interrupted_without_saying_so(
    monkeypatch, how, patience
):
    monkeypatch.setattr(tasks, "CHECK_EVERY", 0.01)
    guard = tasks.LoopGuard()
    shared, leader = tasks.SharedRuns(LeadersOfLoops(), guard), Caller()
    guard.check()
    assert shared.lead("place", leader)
    first = asyncio.create_task(shared.join("place", ME, patience))
    await until(lambda: len(shared._leaders._waiting["place"]) == 1)
    second = asyncio.create_task(shared.join("place", OTHER, patience))
    await until(lambda: len(shared._leaders._waiting["place"]) == 2)
    looks = shared._checking
    await until(lambda: shared._checking is not looks)
    assert not first.done(), "it is led"
    if how == "gone":
        del leader
    else:
        shared._leaders.end("place", FINISHED)  # and interrupted before it told anybody
    async with asyncio.timeout(PATIENCE):
        assert await first is LEAD
        shared.give(shared.end("place", FINISHED), FINISHED)
        assert await second is FINISHED
    await until(lambda: shared._checking is None)  # nobody waits: nobody looks
