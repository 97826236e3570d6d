"""A signal may ask for the stop at any line of the thread that waits for it: nothing hangs.

A trace function stands for the signal: it calls the handler at one line after the other, those of
`threading` included, whose `Event` holds a lock at some of them.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from interrupting import PACKAGE
from semel import Idempotency
from semel.adapters import pika
from semel.cli import upkeep
from semel.core.stop import Stop
from semel.repair import Reconciler

PATIENCE = 60.0
ROUNDS = 2
"""After these, a call that goes on until it is stopped is stopped without a signal, too."""

traced = pytest.mark.usefixtures("not_measured")


class Strike:
    """Calls the handler at the n-th line, if there are so many."""

    def __init__(self, number: int, handler: Callable[[], object]) -> None:
        self._number = number
        self._handler = handler
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith((PACKAGE, threading.__file__)):
            return None
        self.lines += 1
        if self.lines == self._number:
            self._handler()
        return self


def strike_at_each_line(prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]]):
    """Let the handler strike a call at each of its lines; returns how many there were."""
    for number in range(1, 10_000):
        call, handler = prepare()
        strike = Strike(number, handler)

        def struck(strike: Strike = strike, call: Callable[[], object] = call) -> None:
            sys.settrace(strike)
            call()

        thread = threading.Thread(target=struck, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"it hangs after a signal at line {number}"
        if strike.lines < number:
            return number
    raise AssertionError("too many lines")


@traced
def test_a_stop_may_be_set_at_any_line_of_its_wait_and_its_set():
    def prepare():
        stop = Stop()

        def call():
            stop.wait(0.0)
            stop.set()
            assert stop.wait(0.0)

        return call, stop.set

    assert strike_at_each_line(prepare) > 5


@traced
def test_a_command_that_repeats_may_be_stopped_at_any_line(monkeypatch):
    handlers: dict[int, Callable[..., object]] = {}
    monkeypatch.setattr(upkeep.signal, "signal", handlers.__setitem__)

    def prepare():
        # Before its own handlers are installed, a signal ends the process as any other.
        handlers[signal.SIGTERM] = lambda *_: None
        rounds = itertools.count()

        def once(_: Callable[[], bool]) -> int:
            if next(rounds) == ROUNDS:
                handlers[signal.SIGTERM](0)
            return 0

        return lambda: upkeep._repeated(once, 0.0), lambda: handlers[signal.SIGTERM](0)

    assert strike_at_each_line(prepare) > 10


@traced
def test_a_pika_consumer_may_be_stopped_at_any_line(monkeypatch):
    monkeypatch.setattr(pika, "_RECONNECT", (0.0,))
    with Idempotency("memory://") as idem:

        def prepare():
            consumer = pika.once(idem, print, queue="orders")
            rounds = itertools.count()

            def connect():
                if next(rounds) == ROUNDS:
                    consumer.stop()
                raise OSError("no broker here")

            return lambda: consumer.run(connect, signals=()), consumer.stop

        assert strike_at_each_line(prepare) > 10


@traced
def test_a_reconciler_may_be_stopped_at_any_line_of_its_start_and_its_stop():
    with Idempotency("memory://") as idem:

        def prepare():
            background = Reconciler(idem, {})._background

            def call():
                background.start(lambda _: 60.0)
                background.stop()

            return call, background.stop

        assert strike_at_each_line(prepare) > 10


def test_a_reconciler_whose_stop_was_interrupted_does_not_come_back_with_the_next_one():
    with Idempotency("memory://") as idem:
        background = Reconciler(idem, {})._background
        entered, go_on, rounds = threading.Event(), threading.Event(), []

        def step(_: object) -> float:
            rounds.append(threading.current_thread())
            entered.set()
            assert go_on.wait(PATIENCE)
            return 0.0

        background.start(step)
        assert entered.wait(PATIENCE)
        first, background.running = background.running, None
        background.stopping.set()  # as `stop` does, up to the line at which it waits
        background.start(step)
        go_on.set()
        first.join(PATIENCE)
        assert not first.is_alive()
        background.stop()
        assert rounds.count(first) == 1


def test_a_real_signal_ends_the_wait_at_once():
    stop = Stop()
    before = signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    strike = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        strike.start()
        assert stop.wait(PATIENCE * 60)
    finally:
        strike.join()
        signal.signal(signal.SIGUSR1, before)


def test_every_thread_that_waits_is_woken():
    stop = Stop()
    assert not stop.wait(0.0)
    waiting = [threading.Thread(target=stop.wait, args=(PATIENCE * 60,)) for _ in range(3)]
    for each in waiting:
        each.start()
    stop.set()
    for each in waiting:
        each.join(PATIENCE)
    assert not any(each.is_alive() for each in waiting)
    assert stop.is_set()
    assert stop.wait(0.0)
