"""The batcher itself, before a store that tells what reaches it and answers when the test says so."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from semel.core.records import (
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    GetRequest,
    Identity,
)
from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable
from semel.stores import batching
from semel.stores.batching import ALONE, AsyncBatcher, RequestQueue, weight_of_claim
from stores.sqlite_helpers import in_a_fork
from tasks_at_once import tasks_that_end_at_once

RESULT = Encoded("json", b"1")
caller_of = contextvars.ContextVar("caller_of", default=None)


def ask(key, owner=b"owner-------"):
    return ClaimRequest(Identity("s", str(key)), owner, None, 30.0, 60.0)


class Store:
    """Answers Claimed with the number of the request; each request waits while `gate` is shut."""

    def __init__(self):
        self.requests = []
        """One key for a single verb, a list of keys for a batch."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.single_gate = asyncio.Event()
        self.single_gate.set()
        self.trouble = {}
        """What a batch (by "batch") or a single key meets or, in a batch, gets for an answer."""
        self.contexts = []

    async def ask(self, request):
        self.requests.append(request.identity.key)
        number = len(self.requests)
        await asyncio.sleep(0)
        await self.single_gate.wait()
        trouble = self.trouble.get(request.identity.key)
        if isinstance(trouble, Exception):
            raise trouble
        return Claimed(number, 1) if isinstance(request, ClaimRequest) else True

    async def send(self, requests):
        self.requests.append([request.identity.key for request in requests])
        self.contexts.append(caller_of.get())
        number = len(self.requests)
        await self.gate.wait()
        if "batch" in self.trouble:
            raise self.trouble["batch"]
        usual = Claimed(number, 1) if isinstance(requests[0], ClaimRequest) else True
        return [self.trouble.get(request.identity.key, usual) for request in requests]


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def batcher(store):
    return AsyncBatcher(store.ask, store.send)


def task(awaitable):
    return asyncio.ensure_future(awaitable)


async def turns(count=5):
    """Let every task go as far as it can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def crowd(batcher, store, keys):
    """Ask for each key at once, with the first batch under way and kept there."""
    store.gate.clear()
    tasks = [task(batcher.ask(ask(key))) for key in keys]
    await turns()
    return tasks


# --- idle and busy -----------------------------------------------------------------------


async def test_an_idle_queue_asks_in_the_task_of_its_caller(batcher, store):
    coroutine = batcher.ask(ask("a"))
    store.single_gate.clear()
    coroutine.send(None)
    assert store.requests == ["a"], "sent before anything else had a turn"
    coroutine.close()


async def test_callers_one_after_the_other_are_never_batched(batcher, store):
    for key in "abc":
        await batcher.ask(ask(key))
        await batcher.ask(CompleteRequest(Identity("s", key), b"o", RESULT, 60.0))
    assert store.requests == ["a", "a", "b", "b", "c", "c"]


async def test_who_comes_while_a_batch_is_away_leaves_with_the_next(batcher, store):
    first = await crowd(batcher, store, "abc")
    assert store.requests == ["a", ["b", "c"]]
    second = [task(batcher.ask(ask(key))) for key in "def"]
    await turns()
    assert store.requests == ["a", ["b", "c"]], "one batch is away at a time"
    store.gate.set()
    assert [await one for one in first] == [Claimed(1, 1), Claimed(2, 1), Claimed(2, 1)]
    assert [await one for one in second] == [Claimed(3, 1)] * 3
    assert store.requests[2:] == [["d", "e", "f"]]


async def test_who_went_together_comes_back_together(batcher, store):
    for keys in ("abc", "defg"):
        await asyncio.gather(*(batcher.ask(ask(key)) for key in keys))
    assert store.requests == ["a", ["b", "c"], ["d", "e", "f", "g"]], "none of them went ahead"


async def one_in_each_turn(batcher, keys):
    """Ask for a key, and for the next one when every task has had a turn."""
    tasks = []
    for key in keys:
        tasks.append(task(batcher.ask(ask(key))))
        await asyncio.sleep(0)
    return tasks


async def test_a_batch_waits_for_the_turns_that_bring_more_members(batcher, store):
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    await asyncio.gather(*await one_in_each_turn(batcher, "defghi"))
    sizes = [len(batch) for batch in store.requests[2:]]
    assert sum(sizes) == 6
    assert 1 < max(sizes) <= 1 + batching.MOST_TURNS, "not alone, and not for ever"


async def test_a_batch_does_not_wait_when_a_turn_brings_nobody(batcher, store):
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    store.gate.clear()
    alone = task(batcher.ask(ask("d")))
    await turns(3)  # the caller's, the one in which nobody comes, the batch's
    assert store.requests[2:] == [["d"]]
    store.gate.set()
    await alone


async def test_a_full_batch_does_not_wait(store):
    batcher = AsyncBatcher(store.ask, store.send, most_members=2)
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    store.gate.clear()
    full = [task(batcher.ask(ask(key))) for key in "de"]
    await turns(2)  # the callers', and the batch's
    assert store.requests[2:] == [["d", "e"]]
    store.gate.set()
    await asyncio.gather(*full)


async def test_calls_that_are_made_before_any_is_awaited_leave_together(batcher, store):
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    assert sorted(map(str, store.requests)) == ["['b', 'c']", "a"]


async def test_a_call_that_is_never_awaited_keeps_nobody_from_going_straight_through(
    batcher, store
):
    batcher.ask(ask("forgotten")).close()
    for key in "ab":
        await batcher.ask(ask(key))
    assert store.requests == ["a", "b"]


def test_a_call_that_is_made_before_its_event_loop_runs_belongs_to_the_one_that_awaits_it():
    store = Store()

    async def awaited(call):
        return await call

    assert asyncio.run(awaited(AsyncBatcher(store.ask, store.send).ask(ask("a")))) == Claimed(1, 1)


async def test_after_a_batch_of_one_the_next_call_goes_straight_through(batcher, store):
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    for key in "de":
        await batcher.ask(ask(key))
    assert store.requests == ["a", ["b", "c"], ["d"], "e"]


async def test_a_single_call_that_hangs_keeps_no_batch_waiting(batcher, store):
    store.single_gate.clear()
    stuck = task(batcher.ask(ask("stuck")))
    await turns()
    others = [batcher.ask(ask(key)) for key in "ab"]
    assert await asyncio.gather(*others) == [Claimed(2, 1)] * 2
    assert await batcher.ask(ask("c")) == Claimed(3, 1)
    assert store.requests == ["stuck", ["a", "b"], ["c"]]
    store.single_gate.set()
    assert await stuck == Claimed(1, 1)


async def test_claims_and_completes_have_a_queue_each(batcher, store):
    claims = await crowd(batcher, store, "ab")
    completing = task(batcher.ask(CompleteRequest(Identity("s", "x"), b"o", RESULT, 60.0)))
    assert await completing is True
    store.gate.set()
    await asyncio.gather(*claims)


async def test_completes_leave_together_too(batcher, store):
    answers = [
        batcher.ask(CompleteRequest(Identity("s", key), b"o", RESULT, 60.0)) for key in "abc"
    ]
    assert await asyncio.gather(*answers) == [True] * 3
    assert store.requests == ["a", ["b", "c"]]


async def test_other_requests_go_straight_through(batcher, store):
    requests = [GetRequest(Identity("s", key)) for key in "abc"]
    assert await asyncio.gather(*map(batcher.ask, requests)) == [True] * 3
    assert store.requests == ["a", "b", "c"]


async def test_a_batch_runs_in_nobodys_context(batcher, store):
    caller_of.set("a caller")
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "abc"))
    assert store.contexts == [None]


# --- what a batch may hold ---------------------------------------------------------------


async def test_nobody_waits_for_ever_where_tasks_begin_at_once():
    async def gone(_):
        raise StoreUnavailable("gone")

    queue = RequestQueue(gone, gone, weight=lambda _: 1)
    queue._crowded = True
    with tasks_that_end_at_once():
        for answer in [queue.ask(ask(key)) for key in "abc"]:
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(answer, 10)
    await queue.close()


async def test_an_identity_is_in_a_batch_once_and_its_order_is_kept(batcher, store):
    first = await crowd(batcher, store, "a-")
    owners = [b"1", b"2", b"3"]
    waiting = [task(batcher.ask(ask("k", owner))) for owner in owners]
    other = task(batcher.ask(ask("other")))
    await turns()
    store.gate.set()
    answers = [await one for one in waiting]
    await asyncio.gather(*first, other)
    assert store.requests == ["a", ["-"], ["k", "other"], ["k"], ["k"]]
    assert [answer.number for answer in answers] == [3, 4, 5]


async def test_a_batch_has_a_limit_of_members(store):
    batcher = AsyncBatcher(store.ask, store.send, most_members=2)
    tasks = await crowd(batcher, store, "abcdef")
    store.gate.set()
    await asyncio.gather(*tasks)
    assert store.requests == ["a", ["b", "c"], ["d", "e"], ["f"]]


async def test_who_does_not_fit_into_one_batch_is_spread_evenly_over_some(store):
    batcher = AsyncBatcher(store.ask, store.send, most_members=4)
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "-abcdef"))
    assert store.requests == ["-", ["a", "b", "c"], ["d", "e", "f"]], "not four and two"


async def test_a_batch_has_a_limit_of_bytes(store):
    batcher = AsyncBatcher(store.ask, store.send, most_bytes=5000)
    store.gate.clear()
    store.single_gate.clear()
    sizes = {"first": 1, "big": 10_000, "a": 1, "b": 1}
    tasks = [
        task(
            batcher.ask(
                CompleteRequest(Identity("s", key), b"o", Encoded("json", b"x" * size), 60.0)
            )
        )
        for key, size in sizes.items()
    ]
    await turns()
    store.gate.set()
    store.single_gate.set()
    await asyncio.gather(*tasks)
    assert store.requests == ["first", ["big"], ["a", "b"]]


# --- members with an answer of their own -------------------------------------------------


async def test_each_member_has_its_own_answer(batcher, store):
    store.trouble = {"b": Busy(1.0), "c": StoreError("damaged"), "e": StoreFull("no room")}
    a, b, c, d, e = await asyncio.gather(
        *(batcher.ask(ask(key)) for key in "abcde"), return_exceptions=True
    )
    assert (a, b, d) == (Claimed(1, 1), Busy(1.0), Claimed(2, 1))
    assert isinstance(c, StoreError)
    assert isinstance(e, StoreFull)


async def test_a_member_that_a_batch_cannot_tell_is_asked_for_alone_and_holds_up_nobody(
    batcher, store
):
    store.trouble = {"b": ALONE, "c": ALONE}
    tasks = await crowd(batcher, store, "abcd")
    store.single_gate.clear()
    store.gate.set()
    assert await tasks[3] == Claimed(2, 1)
    assert store.requests == ["a", ["b", "c", "d"], "b", "c"]
    following = [batcher.ask(ask(key)) for key in "ef"]
    store.single_gate.set()
    await asyncio.gather(*tasks, *following)


async def test_a_batch_that_fails_is_sent_again_one_by_one(batcher, store):
    store.trouble = {"batch": ValueError("one of them is bad"), "c": ValueError("this one")}
    answers = await asyncio.gather(
        *(batcher.ask(ask(key)) for key in "abcd"), return_exceptions=True
    )
    assert store.requests == ["a", ["b", "c", "d"], "b", "c", "d"]
    assert [type(answer) for answer in answers] == [Claimed, Claimed, ValueError, Claimed]


async def test_a_store_that_is_away_is_asked_once_and_each_member_has_its_own_error(batcher, store):
    away = StoreRefused("wrong password")
    away.__cause__ = OSError("down")
    store.trouble = {"batch": away}
    _, *errors = await asyncio.gather(
        *(batcher.ask(ask(key)) for key in "abcd"), return_exceptions=True
    )
    assert store.requests == ["a", ["b", "c", "d"]]
    assert [type(error) for error in errors] == [StoreRefused] * 3
    assert {str(error) for error in errors} == {"wrong password"}
    assert {error.__cause__ for error in errors} == {away.__cause__}
    assert len({id(error) for error in errors}) == 3


async def test_who_waits_while_a_batch_learns_that_the_store_is_away_is_told_at_once(store):
    batcher = AsyncBatcher(store.ask, store.send, most_members=2)
    store.trouble["batch"] = StoreUnavailable("away")
    calls = await crowd(batcher, store, range(7))
    assert len(store.requests) == 2, "the first went straight through, and one batch is away"
    store.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(answer) for answer in answers[1:]] == ["away"] * 6
    assert len({id(answer) for answer in answers}) == 7
    assert len(store.requests) == 2
    del store.trouble["batch"]
    assert isinstance(await batcher.ask(ask("later")), Claimed)


async def test_an_outage_of_one_member_rejects_neither_its_batch_nor_those_that_wait(store):
    """As on a Redis Cluster, where one node may be down."""
    batcher = AsyncBatcher(store.ask, store.send, most_members=2)
    store.trouble["1"] = StoreUnavailable("gone")
    calls = await crowd(batcher, store, range(5))
    assert len(store.requests) == 2, "the first went straight through, and one batch is away"
    store.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert str(answers.pop(1)) == "gone"
    assert [type(answer) for answer in answers] == [Claimed] * 4


# --- cancelled callers -------------------------------------------------------------------


async def cancel(*tasks):
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)
    assert all(one.cancelled() for one in tasks)


async def test_a_cancelled_caller_is_free_at_once_and_the_others_get_their_answers(batcher, store):
    first, gone, other = await crowd(batcher, store, "abc")
    waiting, gone_too = task(batcher.ask(ask("d"))), task(batcher.ask(ask("e")))
    await turns()
    await cancel(gone, gone_too)
    assert not store.gate.is_set()
    store.gate.set()
    assert await other == Claimed(2, 1)
    assert await waiting == Claimed(3, 1)
    assert await first == Claimed(1, 1)
    assert store.requests[2:] == [["d"]], "who left before the batch did is not sent"


async def test_answers_and_errors_of_cancelled_callers_are_dropped(batcher, store):
    store.trouble = {"b": StoreError("damaged"), "c": ALONE, "d": ALONE}
    tasks = await crowd(batcher, store, "abcde")
    await cancel(tasks[1], tasks[4])
    store.single_gate.clear()
    store.gate.set()
    await turns()
    assert store.requests[2:] == ["c", "d"]
    await cancel(*tasks[2:4])
    store.trouble = {"d": StoreError("damaged")}
    store.single_gate.set()
    await tasks[0]
    await batcher.close()


async def test_nothing_is_asked_again_for_a_caller_who_left(batcher, store):
    store.trouble = {"b": ALONE, "c": ALONE}
    first, gone, other = await crowd(batcher, store, "abc")
    await cancel(gone)
    store.gate.set()
    await asyncio.gather(first, other)
    assert store.requests == ["a", ["b", "c"], "c"], "it would get a claim that nobody gives back"


async def test_what_an_owner_asks_after_it_left_does_not_overtake_what_is_asked_alone(
    batcher, store
):
    store.trouble = {"b": ALONE}
    first, gone, _ = await crowd(batcher, store, "abc")
    store.single_gate.clear()
    store.gate.set()
    await turns()
    assert store.requests[2:] == ["b"]
    await cancel(gone)
    store.trouble = {}
    giving_back = task(batcher.ask(ask("b")))
    others = [task(batcher.ask(one)) for one in (ask("b", b"another-----"), ask("d"))]
    await turns()
    assert store.requests[3:] == [["b", "d"]], "who is not this owner waits for nothing"
    store.single_gate.set()
    await asyncio.gather(first, giving_back, *others)
    assert store.requests[4:] == [["b"]]


# --- the end -----------------------------------------------------------------------------


async def test_closing_refuses_who_waits_and_lets_what_is_away_come_back(batcher, store):
    store.trouble = {"c": ALONE}
    away = await crowd(batcher, store, "abc")
    waiting = task(batcher.ask(ask("late")))
    await turns()
    closing = task(batcher.close())
    await turns()
    with pytest.raises(StoreUnavailable, match="closed"):
        await waiting
    assert not closing.done()
    store.gate.set()
    await closing
    assert [await one for one in away] == [Claimed(1, 1), Claimed(2, 1), Claimed(3, 1)]
    store.trouble = {"after": StoreUnavailable("the store's own word on it")}
    with pytest.raises(StoreUnavailable, match="own word"):
        await batcher.ask(ask("after"))


async def test_a_closed_queue_forms_no_batch(batcher, store):
    await batcher.close()
    await asyncio.gather(*(batcher.ask(ask(key)) for key in "ab"))
    assert store.requests == ["a", "b"]


async def test_nobody_waits_for_ever_when_the_tasks_of_a_queue_are_cancelled(batcher, store):
    store.trouble = {"b": ALONE}
    store.single_gate.clear()
    first, straggler = await crowd(batcher, store, "ab")
    store.gate.set()
    await turns()
    store.gate.clear()
    waiting = [task(batcher.ask(ask(key))) for key in "cd"]
    await turns()
    queued = task(batcher.ask(ask("e")))
    await turns()
    callers = {first, straggler, *waiting, queued, asyncio.current_task()}
    for one in asyncio.all_tasks() - callers:
        one.cancel()
    for one in (straggler, *waiting, queued):
        with pytest.raises(StoreUnavailable, match="event loop"):
            await one
    store.single_gate.set()
    await first
    store.gate.set()
    assert isinstance(await batcher.ask(ask("f")), Claimed)


async def test_a_sender_that_is_cancelled_between_two_batches_ends_nothing_that_is_asked_for_alone(
    batcher, store
):
    first = await crowd(batcher, store, "abc")
    store.trouble = {"b": ALONE, "c": ALONE}
    store.single_gate.clear()
    waiting = task(batcher.ask(ask("d")))
    await asyncio.sleep(0)
    store.gate.set()
    queue = batcher._claims
    for _ in range(10):
        if queue._stragglers:
            break
        await asyncio.sleep(0)
    queue._sender.cancel()  # while it waits for more members than "d"
    with pytest.raises(StoreUnavailable):
        await waiting
    store.single_gate.set()
    assert all([isinstance(await one, Claimed) for one in first])


def test_another_event_loop_is_the_stores_business():
    store = None

    async def make():
        nonlocal store
        store = Store()
        queue = RequestQueue(store.ask, store.send, weight=weight_of_claim)
        store.single_gate.clear()
        return queue, task(queue.ask(ask("a"))), await turns()

    async def use(queue):
        store.single_gate = asyncio.Event()
        store.single_gate.set()
        return await queue.ask(ask("b"))

    with asyncio.Runner() as first, asyncio.Runner() as second:
        queue, _, _ = first.run(make())
        assert second.run(use(queue)) == Claimed(2, 1)
    assert store.requests == ["a", "b"], "not with those of the first loop"


async def test_a_forked_child_starts_idle(batcher, store):
    tasks = await crowd(batcher, store, "abc")

    async def ask_together():
        store.requests.clear()
        store.gate = asyncio.Event()
        store.gate.set()
        await asyncio.gather(*(batcher.ask(ask(key)) for key in "def"))
        return store.requests

    def child():
        asyncio._set_running_loop(None)
        return asyncio.new_event_loop().run_until_complete(ask_together())

    assert in_a_fork(child) == "['d', ['e', 'f']]", "they do not wait for the parent's batch"
    store.gate.set()
    await asyncio.gather(*tasks)
    assert store.requests == ["a", ["b", "c"]]


async def test_the_requests_of_a_batch_are_the_callers_own(batcher):
    seen = []

    class Recorder(Store):
        async def send(self, requests):
            seen.extend(requests)
            return [True for _ in requests]

    store = Recorder()
    batcher = AsyncBatcher(store.ask, store.send)
    await asyncio.gather(
        *(batcher.ask(CompleteRequest(Identity("s", key), b"owner", RESULT, 9.0)) for key in "ab")
    )
    assert seen == [CompleteRequest(Identity("s", "b"), b"owner", RESULT, 9.0)]
