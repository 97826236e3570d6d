"""The batcher for threads, before a store that notes what reaches it and answers when it may."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from interrupting import TimeLimit, Trace
from semel.core.records import (
    ClaimRequest,
    CompleteRequest,
    Encoded,
    GetRequest,
    Identity,
)
from semel.errors import StoreError, StoreFull, StoreUnavailable
from semel.stores.batching import ALONE
from semel.stores.thread_batching import BATCHES, FULL, STRAIGHT, Batcher, ThreadQueue, Turn
from servers.redis import wait_until
from stores.sqlite_helpers import in_a_fork

PATIENCE = 30.0
RESULT = Encoded("json", b"1")


def ask(key: object, owner: bytes = b"owner-------") -> ClaimRequest:
    return ClaimRequest(Identity("s", str(key)), owner, None, 30.0, 60.0)


class Store:
    """Answers Claimed with the number of the request, while the gates are open."""

    def __init__(self) -> None:
        self.single: list[str] = []
        self.batches: list[list[str]] = []
        self.single_gate = threading.Semaphore(0)
        self.batch_gate = threading.Semaphore(0)
        self.errors: dict[str, Any] = {}
        """What a batch (by "batch") or a single key raises or, in a batch, has for an answer."""

    def ask(self, request: Any) -> Any:
        self.single.append(request.identity.key)
        assert self.single_gate.acquire(timeout=PATIENCE)
        error = self.errors.get(request.identity.key)
        if isinstance(error, Exception):
            raise error
        return "alone"

    def send(self, requests: Any) -> Any:
        self.batches.append([request.identity.key for request in requests])
        assert self.batch_gate.acquire(timeout=PATIENCE)
        if "batch" in self.errors:
            raise self.errors["batch"]
        return [self.errors.get(request.identity.key, "batch") for request in requests]

    def open(self, *gates: threading.Semaphore) -> None:
        for gate in gates or (self.single_gate, self.batch_gate):
            gate.release(10_000)


class Caller(threading.Thread):
    """One thread that asks once."""

    def __init__(self, batcher: Batcher, request: Any) -> None:
        super().__init__(daemon=True)
        self._batcher = batcher
        self._request = request
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._batcher.ask(self._request)
        except BaseException as error:
            self.answer = error

    def result(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "a caller waits for ever"
        return self.answer


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.open()


@pytest.fixture
def batcher(store: Store) -> Batcher:
    return Batcher(store.ask, store.send)


def straight(batcher: Batcher, store: Store) -> list[Caller]:
    """Fill the queue with calls that go straight, and stay under way."""
    callers = [Caller(batcher, ask(f"straight {n}")) for n in range(STRAIGHT)]
    wait_until(lambda: len(store.single) == STRAIGHT, "calls that go straight")
    return callers


def leader(batcher: Batcher, store: Store) -> Caller:
    """Let one more call lead a batch, which stays under way."""
    before = len(store.batches)
    caller = Caller(batcher, ask("leader"))
    wait_until(lambda: len(store.batches) > before, "a batch")
    return caller


def waiting(batcher: Batcher, keys: Any, make: Callable[[Any], Any] = ask) -> list[Caller]:
    """Let callers wait for the next batch, in this order."""
    queue = batcher._claims if make is ask else batcher._completes
    callers = []
    for key in keys:
        before = len(queue.waiting.members)
        callers.append(Caller(batcher, make(key)))
        wait_until(
            lambda before=before: len(queue.waiting.members) == before + 1, "a caller that waits"
        )
    return callers


def test_calls_of_an_idle_queue_go_straight(batcher, store):
    store.open()
    assert [batcher.ask(ask(n)) for n in range(3 * STRAIGHT)] == ["alone"] * 3 * STRAIGHT
    assert store.batches == []


def test_the_call_after_those_that_go_straight_leads_a_batch_and_waits_for_none_of_them(
    batcher, store
):
    callers = straight(batcher, store)
    store.open(store.batch_gate)
    assert Caller(batcher, ask("next")).result() == "batch"
    assert store.batches == [["next"]]
    store.open(store.single_gate)
    assert [caller.result() for caller in callers] == ["alone"] * STRAIGHT


def test_those_that_come_while_a_batch_is_away_leave_together(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    others = waiting(batcher, range(FULL - 1))
    store.open()
    assert [caller.result() for caller in (first, *others)] == ["batch"] * FULL
    assert store.batches == [["leader"], [str(n) for n in range(FULL - 1)]]


class LateLeader:
    """Keeps the next leader from taking its batch, as a busy machine does."""

    def __init__(self, queue: Any) -> None:
        self.appointed = threading.Event()
        self.may_take = threading.Event()
        take, queue._take_batch = queue._take_batch, self
        self._take = take

    def __call__(self, leader: Turn) -> None:
        self.appointed.set()
        assert self.may_take.wait(PATIENCE)
        self._take(leader)


def test_those_that_come_before_the_next_leader_is_awake_leave_with_it(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    next_leader = LateLeader(batcher._claims)
    others = waiting(batcher, ["a"])
    store.open()
    assert first.result() == "batch"
    assert next_leader.appointed.wait(PATIENCE)
    others += waiting(batcher, range(FULL))  # one leader is enough for all of them
    next_leader.may_take.set()
    assert {caller.result() for caller in others} == {"batch"}
    assert store.batches == [["leader"], ["a", *map(str, range(FULL))]]


def test_a_leader_that_is_rejected_before_it_is_awake_sends_nothing(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    next_leader = LateLeader(batcher._claims)
    (other,) = waiting(batcher, ["a"])
    store.open()
    assert first.result() == "batch"
    assert next_leader.appointed.wait(PATIENCE)
    batcher.close()
    next_leader.may_take.set()
    assert isinstance(other.result(), StoreUnavailable)
    assert store.batches == [["leader"]]
    assert not batcher._claims.leaders


def test_while_a_batch_is_away_no_call_goes_straight(batcher, store):
    callers = straight(batcher, store)
    first = leader(batcher, store)
    store.open(store.single_gate)
    assert [caller.result() for caller in callers] == ["alone"] * STRAIGHT
    (other,) = waiting(batcher, ["other"])
    store.open(store.batch_gate)
    assert (first.result(), other.result()) == ("batch", "batch")
    assert batcher.ask(ask("idle again")) == "alone"


def test_a_full_batch_leaves_beside_the_one_that_is_away_and_a_third_waits(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    others = waiting(batcher, range(FULL - 1))
    others.append(Caller(batcher, ask("full")))
    wait_until(lambda: len(store.batches) == BATCHES, "the second batch")
    later = waiting(batcher, range(100, 100 + FULL))
    assert len(store.batches) == BATCHES
    store.batch_gate.release()
    wait_until(lambda: len(store.batches) == BATCHES + 1, "the third batch")
    store.open()
    assert {caller.result() for caller in (first, *others, *later)} == {"batch"}


def test_an_identity_is_in_a_batch_once(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    others = waiting(batcher, ["a", "b", "a", "c"])
    store.open()
    assert {caller.result() for caller in (first, *others)} == {"batch"}
    assert store.batches[1:] == [["a", "b", "c"], ["a"]]


def test_a_batch_ends_with_the_member_that_fills_it(store):
    batcher = Batcher(store.ask, store.send, most_members=2, most_bytes=200)

    def complete(key):
        data = b"x" * 200 if key == "large" else b""
        return CompleteRequest(Identity("s", str(key)), b"o", Encoded("json", data), 60.0)

    callers = [Caller(batcher, complete(n)) for n in range(STRAIGHT + 1)]
    wait_until(lambda: store.batches, "a batch")
    callers += waiting(batcher, ["large", "b", "c", "d"], complete)
    store.open()
    assert {caller.result() for caller in callers} == {"alone", "batch"}
    assert store.batches[1:] == [["large"], ["b", "c"], ["d"]]


def test_other_requests_go_straight(batcher, store):
    straight(batcher, store)
    leader(batcher, store)
    store.open(store.single_gate)
    assert batcher.ask(GetRequest(Identity("s", "read"))) == "alone"


def test_a_member_that_its_batch_cannot_answer_is_asked_for_alone(batcher, store):
    store.errors = {"a": ALONE, "b": StoreFull("no room"), "c": StoreUnavailable("this one")}
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "abc")
    store.open()
    assert [caller.result() for caller in (first, callers[0])] == ["batch", "alone"]
    assert isinstance(callers[1].result(), StoreFull)
    assert isinstance(callers[2].result(), StoreUnavailable)


def test_members_of_a_batch_that_failed_ask_for_themselves(batcher, store):
    store.errors = {"batch": StoreError("one of them"), "a": StoreError("this one")}
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "ab")
    store.open()
    assert [caller.result() for caller in (first, callers[1])] == ["alone", "alone"]
    assert str(callers[0].result()) == "this one"


def test_a_store_that_is_away_is_not_asked_again_and_again(batcher, store):
    store.errors = {"batch": StoreUnavailable("gone")}
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "abc")
    store.batch_gate.release()
    errors = [caller.result() for caller in (first, *callers)]
    assert {str(error) for error in errors} == {"gone"}
    assert len(set(map(id, errors))) == len(errors)
    assert store.batches == [["leader"]]


def test_an_outage_of_one_member_rejects_neither_its_batch_nor_those_that_wait(batcher, store):
    """As on a Redis Cluster, where one node may be down."""
    store.errors = {"b": StoreUnavailable("gone")}
    straight(batcher, store)
    first = leader(batcher, store)
    together = waiting(batcher, "abc")
    store.batch_gate.release()
    assert first.result() == "batch"
    wait_until(lambda: len(store.batches) == 2, "the second batch")
    later = waiting(batcher, "de")
    store.batch_gate.release()
    assert [together[0].result(), together[2].result()] == ["batch", "batch"]
    assert str(together[1].result()) == "gone"
    wait_until(lambda: len(store.batches) == 3, "the third batch")
    store.open()
    assert [caller.result() for caller in later] == ["batch", "batch"]


def test_each_member_of_a_batch_that_finds_the_store_away_has_its_own_error(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "abc")
    store.batch_gate.release()
    assert first.result() == "batch"
    wait_until(lambda: len(store.batches) == 2, "the second batch")
    store.errors = {"batch": StoreUnavailable("gone")}
    store.batch_gate.release()
    errors = [caller.result() for caller in callers]
    assert {str(error) for error in errors} == {"gone"}
    assert len(set(map(id, errors))) == len(errors), "one error would gather their tracebacks"
    assert store.batches == [["leader"], ["a", "b", "c"]]


def test_close_rejects_those_that_wait_and_what_is_away_comes_back(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "ab")
    batcher.close()
    assert {str(caller.result()) for caller in callers} == {"the store was closed"}
    store.open()
    assert first.result() == "batch"
    assert store.batches == [["leader"]]


@pytest.mark.parametrize("error", [TimeLimit(), KeyboardInterrupt(), MemoryError()])
def test_a_leader_that_is_interrupted_raises_it_and_its_followers_ask_for_themselves(
    batcher, store, error
):
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "abc")
    store.batch_gate.release()
    wait_until(lambda: len(store.batches) == 2, "the second batch")
    store.errors = {"batch": error}
    store.open()
    assert first.result() == "batch"
    assert callers[0].result() is error
    assert [caller.result() for caller in callers[1:]] == ["alone", "alone"]
    assert batcher.ask(ask("next")) == "alone"


@pytest.mark.parametrize("strikes", [1, 2])
def test_a_leader_that_is_interrupted_again_while_it_leaves_leaves_nobody_behind(
    batcher, store, monkeypatch, strikes
):
    straight(batcher, store)
    first = leader(batcher, store)
    callers = waiting(batcher, "abc")
    leave, struck = ThreadQueue.leave, []

    def leave_interrupted(queue, turn):
        if turn.request.identity.key == "a" and len(struck) < strikes:
            struck.append(TimeLimit())
            raise struck[-1]
        leave(queue, turn)

    monkeypatch.setattr(ThreadQueue, "leave", leave_interrupted)
    store.batch_gate.release()
    wait_until(lambda: len(store.batches) == 2, "the second batch")
    store.errors = {"batch": KeyboardInterrupt()}
    store.open()
    assert first.result() == "batch"
    assert callers[0].result() is struck[-1]
    assert [caller.result() for caller in callers[1:]] == ["alone", "alone"]
    assert batcher.ask(ask("next")) == "alone"


def test_a_follower_that_is_interrupted_leaves_when_its_batch_is_back(batcher, store, monkeypatch):
    error, struck, stays = TimeLimit(), threading.Event(), threading.Event()
    sleep = Turn.sleep

    def sleep_interrupted(turn: Turn) -> None:
        if turn.request.identity.key != "b":
            sleep(turn)
        elif not struck.is_set():
            wait_until(lambda: turn.sent, "its batch")
            struck.set()
            raise error
        else:
            stays.set()
            sleep(turn)

    monkeypatch.setattr(Turn, "sleep", sleep_interrupted)
    straight(batcher, store)
    first = leader(batcher, store)
    ahead, follower = waiting(batcher, "ab")
    store.batch_gate.release()
    wait_until(lambda: stays.is_set() or not follower.is_alive(), "the exception")
    assert stays.is_set(), "what its owner sends next would overtake its batch"
    store.open()
    assert follower.result() is error
    assert [first.result(), ahead.result()] == ["batch", "batch"]


def test_a_fork_starts_idle(batcher, store):
    straight(batcher, store)
    first = leader(batcher, store)
    others = waiting(batcher, "ab")

    def child() -> object:
        store.single_gate = threading.Semaphore(1)
        return batcher.ask(ask("in the child"))

    assert in_a_fork(child) == "alone"
    store.open()
    assert {caller.result() for caller in (first, *others)} == {"batch"}


class Scene:
    """A call of this thread that goes straight, leads a batch, or follows another thread's."""

    def __init__(self, role: str) -> None:
        self.store = Store()
        self.batcher = Batcher(self.store.ask, self.store.send)
        self.claims = self.batcher._claims
        self.callers: list[Caller] = []
        if role != "goes straight":
            self.callers += straight(self.batcher, self.store)
        if role in ("leads later", "follows"):
            self.callers.append(leader(self.batcher, self.store))
        if role == "follows":
            self.callers += waiting(self.batcher, ["before"])
        self._busy = len(self.claims.waiting.members), len(self.store.batches)
        self._ended = threading.Event()
        self._others = threading.Thread(target=self._go_on, args=[role], daemon=True)
        self._others.start()

    def _go_on(self, role: str) -> None:
        """Let the store answer when the call has arrived, or has ended before."""

        def arrived() -> bool:
            busy = len(self.claims.waiting.members), len(self.store.batches)
            return role == "goes straight" or busy > self._busy or self._ended.is_set()

        wait_until(arrived, "the call")
        if role == "leads at once" and not self._ended.is_set():
            self.callers += [Caller(self.batcher, ask(n)) for n in range(3)]
        self.store.open()

    def call(self, trace: Trace) -> Any:
        try:
            return trace.run(lambda: self.batcher.ask(ask("mine")))
        except TimeLimit:
            return "struck"
        finally:
            self._ended.set()

    def answers(self) -> set[Any]:
        self._others.join(PATIENCE)
        return {caller.result() for caller in self.callers}


@pytest.mark.parametrize("role", ["goes straight", "leads at once", "leads later", "follows"])
def test_an_exception_at_any_step_leaves_nobody_behind(role):
    steps = Trace()
    assert Scene(role).call(steps) == ("alone" if role == "goes straight" else "batch")
    for step in steps.steps:
        scene = Scene(role)
        trace = Trace(step, TimeLimit())
        answer = scene.call(trace)
        assert (answer == "struck") == trace.struck.is_set()
        assert sys.exc_info() == (None, None, None), "left to the tests that follow"
        assert scene.answers() <= {"alone", "batch"}
        assert not scene.claims.leaders
        assert not scene.claims.waiting.members
        assert scene.claims._straight._free.qsize() == STRAIGHT
