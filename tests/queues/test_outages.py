"""`make soak-outages` cannot rot: it finds repeats that are brought about by hand, and says why."""

from __future__ import annotations

import os
import signal
import time

import pytest

from queues import outages
from queues.aof import Write
from queues.ledger import Note
from queues.outages import LEASE, MODES, WALL, Answered, Hindrances, Span, cause_of, round_of
from queues.workers import Waits

pytestmark = pytest.mark.timeout(300)


def test_a_soak_of_outages_reports_a_repeat_when_redis_keeps_nothing(servers, tmp_path):
    with round_of("always", (), servers.rabbitmq, servers.parent, tmp_path) as begun:
        one = begun.deployed[0]
        order = one.send(one.order(), "wait")
        begun.ledger.wait_for("began", order)
        begun.outage(seconds=0)
        one.send(order, "wait")
        begun.ledger.wait_for("began", order, 2)
        begun.ledger.let_go(order)
        one.settled()
        found = begun.found()
    [repeat] = found.repeats
    assert (repeat.order, repeat.cause) == (order, outages.NO_CLAIM)
    assert not repeat.explained
    assert "Redis killed, ready again" in repeat.history
    assert "LostLease" in repeat.history


def test_a_soak_of_outages_reports_a_repeat_that_no_outage_explains(servers, tmp_path):
    """One consumer is paused for longer than its lease, and another one runs beside it."""
    with round_of("always", MODES["always"], servers.rabbitmq, servers.parent, tmp_path) as begun:
        one = begun.deployed[0]
        survives = one.send(one.order(), "wait")
        begun.ledger.wait_for("began", survives)
        begun.outage(seconds=0)
        one.send(survives, "wait")

        order = one.send(one.order(), "wait")
        [first] = begun.ledger.wait_for("began", order)
        os.kill(first.worker, signal.SIGSTOP)
        for _ in begun.deployed[0].workers + begun.deployed[1].workers:
            one.send(order, "wait")  # one of them goes to another consumer
        begun.ledger.wait_for("began", order, 2)
        os.kill(first.worker, signal.SIGCONT)
        begun.ledger.let_go()
        one.settled()
        found = begun.found()
    [repeat] = found.repeats
    assert (repeat.order, repeat.cause) == (order, outages.LATE)
    assert not repeat.explained
    assert "processing number=1" in repeat.history
    assert "succeeded number=2" in repeat.history
    assert found.orders == 2


BEGAN = time.monotonic()
FIRST, SECOND = "aa", "bb"


def effect(owner: str, at: float) -> Note:
    return Note("effect", "order", 1, BEGAN + at, {"owner": owner})


def write(owner: str, at: float, *, state: str = "processing", ends: int = 50) -> Write:
    """A claim or a renewal at this time, or an end."""
    return Write(ends, state, owner, 1, 1, BEGAN + at + LEASE + WALL)


def spans(*given: tuple[float, float]) -> list[Span]:
    return [Span(BEGAN + begin, BEGAN + end) for begin, end in given]


@pytest.mark.parametrize(
    ("kept", "down", "starved", "answered", "cause"),
    [
        ([], [(1, 2)], [], (False, 0), outages.NO_CLAIM),
        ([write(SECOND, 3)], [(1, 2)], [], (False, 0), outages.NO_CLAIM),
        ([write(FIRST, 0), write(SECOND, 8)], [(1, 2)], [], (True, 0), outages.NO_OUTCOME),
        ([write(FIRST, 0), write(SECOND, 8)], [(2, 4)], [], (False, 1), outages.NO_RENEWAL),
        ([write(FIRST, 4), write(SECOND, 8)], [(4.5, 8)], [], (False, 4), outages.DOWN_TOO_LONG),
        (
            [write(FIRST, 4), write(SECOND, 8)],
            [(4, 6)],
            [(5, 8)],
            (False, 4),
            outages.BUSY_TOO_LONG,
        ),
        ([write(FIRST, 4), write(SECOND, 8)], [(4, 6)], [(6.6, 8)], (False, 4), outages.LATE),
        ([write(FIRST, 4), write(SECOND, 8)], [(4.5, 5.5)], [], (False, 4), outages.LATE),
        ([write(FIRST, 4)], [(4.5, 8)], [], (False, 4), outages.UNKNOWN),
    ],
)
def test_the_cause_of_a_repeat_is_read_from_what_redis_has_kept(
    kept, down, starved, answered, cause
):
    outcome, renewed = answered
    found = cause_of(
        effect(FIRST, 0.1),
        effect(SECOND, 9),
        kept,
        Hindrances(spans(*down), spans(*starved)),
        Answered(outcome, BEGAN + renewed),
    )
    assert found == cause


def test_a_thread_that_ended_takes_no_time_from_what_the_others_waited(tmp_path):
    def tell(thread, waited):
        (tmp_path / thread).mkdir(exist_ok=True)
        (tmp_path / thread / "schedstat").write_text(f"5 {waited}000000 7\n")

    tell("1", 1000)
    tell("2", 4000)
    waits = Waits(tmp_path)
    tell("1", 1500)
    (tmp_path / "2" / "schedstat").unlink()  # as of a thread that ends while it is looked at
    tell("3", 250)
    assert waits.since_last() == 0.75
    assert waits.since_last() == 0
