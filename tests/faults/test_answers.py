"""The store did what it was asked; its answer is lost, or comes late.

| fault | expected |
|---|---|
| 2 claim applied, reply lost | the same attempt asks again and is told Claimed |
| 6 complete applied, reply lost | the same owner asks again: success |
| 40 claim given late, or to nobody | made again before the function runs; forgotten, also under hold |

On Redis a proxy cuts the connection once the server has answered, or holds the answers back.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from engines.facade import PATIENCE, Effect, Stop, World, intercepted, never, wait_until
from faults.outages import short_of_time
from semel import Policy, StoreUnavailable, current_attempt, events
from semel.core.records import Claimed, ClaimRequest, Identity, State
from semel.stores.redis import commands
from semel.testing import Call, Delay, LoseReply
from servers.proxy import proxy_to

fault = pytest.mark.fault


@pytest.fixture
def proxy(redis_of_this_worker, redis_url):
    """Stands between an engine and Redis, which knows the scripts already."""
    with contextlib.closing(redis_of_this_worker.client()) as client:
        for script in (commands.CLAIM, commands.END, commands.RENEW):
            client.script_load(script.text)
    with proxy_to(redis_of_this_worker.port) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(kind, proxy):
    with World(kind, proxy.url) as opened:
        yield opened


def sends(script):
    return lambda request: script.sha.encode() in request


def verbs(calls: list[Call]) -> list[str]:
    return [call.verb for call in calls]


# --- lost -------------------------------------------------------------------------------------


@fault(2)
def test_a_claim_whose_reply_was_lost_on_the_way_runs_once(behind_proxy, proxy, redis_url):
    engine = behind_proxy.engine()
    effect = Effect()
    proxy.lose_reply(sends(commands.CLAIM))
    outcome = engine.run("k", effect)
    assert proxy.lost == 1
    assert (outcome.value, outcome.replayed, outcome.attempt.number) == ("done", False, 1)
    assert effect.runs == 1
    assert engine.execute("k", never) == "done"


@fault(2)
def test_a_claim_that_is_sent_again_by_the_same_attempt_is_given_again(world):
    engine = world.engine()
    engine.store.twice.add("claim")
    effect = Effect()
    outcome = engine.run("k", effect)
    assert (outcome.value, outcome.replayed, outcome.attempt.number) == ("done", False, 1)
    assert effect.runs == 1


@fault(2)
@fault(40)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_claim_whose_reply_is_lost_for_good_runs_nothing_and_does_not_keep_the_key(
    kind, proxy, abandoned
):
    policy = Policy(abandoned=abandoned)
    with World(kind, proxy.url) as world, short_of_time(world) as engine:
        engine.ask_store("get", Identity("warm", "up"))  # connects
        proxy.refusing = True
        proxy.lose_reply(sends(commands.CLAIM))
        with pytest.raises(StoreUnavailable):
            engine.execute("k", never, policy=policy)
        assert proxy.lost == 1
        proxy.refusing = False
        assert engine.execute("k", Effect(), policy=policy) == "done"  # long before the lease ends


@fault(6)
def test_a_complete_whose_reply_was_lost_on_the_way_is_a_success(behind_proxy, proxy):
    engine = behind_proxy.engine()
    effect = Effect()
    proxy.lose_reply(sends(commands.END))
    assert engine.execute("k", effect) == "done"
    assert proxy.lost == 1
    assert engine.told(events.Ran)
    assert not engine.told(events.LostLease)
    assert engine.execute("k", never) == "done"
    assert effect.runs == 1


@fault(6)
def test_a_complete_that_is_told_to_have_failed_is_repeated_and_is_a_success(world):
    engine = world.engine()
    effect = Effect()
    engine.store.inject("complete", LoseReply())
    assert engine.execute("k", effect) == "done"
    assert engine.store.fired("complete") == 1
    assert engine.commands("complete") == 2
    assert engine.told(events.Ran)
    assert not engine.told(events.LostLease)
    assert world.engine().execute("k", never) == "done"
    assert effect.runs == 1


# --- late -------------------------------------------------------------------------------------


class LateAnswer:
    """Lets the store give a claim at once, and its caller hear of it only when told."""

    def __init__(self, world: World, engine, verb: str = "claim") -> None:
        self.given = threading.Event()
        self.tell = threading.Event()
        self._store = engine.store.store
        late = self._late if world.name == "threads" else self._late_async
        intercepted(self._store, verb, late)

    def _late(self, ask, request):
        answer = self._once(ask(request))
        assert self.tell.wait(PATIENCE)
        return answer

    async def _late_async(self, ask, request):
        answer = self._once(await ask(request))
        await asyncio.to_thread(self.tell.wait, PATIENCE)
        return answer

    def _once(self, answer):
        assert answer is True or isinstance(answer, Claimed)
        del self._store.ask
        self.given.set()
        return answer


@fault(40)
def test_a_claim_answered_after_a_third_of_the_lease_is_made_again_before_the_function_runs(
    behind_proxy, proxy
):
    engine = behind_proxy.engine()
    engine.ask_store("get", Identity("warm", "up"))  # connects, which has answers of its own
    seen = []

    def work():
        proxy.delay = 0.0
        seen.extend(verbs(engine.store.calls))
        return current_attempt().lost

    proxy.delay = 0.5
    assert engine.execute("k", work, policy=Policy(lease=1.2)) is False
    assert seen == ["claim", "claim"]


@fault(40)
def test_a_claim_that_was_blocked_for_a_third_of_the_lease_is_made_again_before_the_function_runs(
    world,
):
    engine, other = world.engine(), world.engine()
    late = LateAnswer(world, engine)
    seen = []

    def work():
        seen.extend((verbs(engine.store.calls), other.peek("k").lease_until))

    running = engine.start("k", work, policy=Policy(lease=0.9))
    assert late.given.wait(PATIENCE)
    first_end = other.peek("k").lease_until
    threading.Timer(0.35, late.tell.set).start()
    running.result(PATIENCE)
    calls, end = seen
    assert calls == ["claim", "claim"]
    assert end > first_end, "the lease was not begun anew"


@fault(40)
def test_a_function_never_starts_on_a_lease_that_is_over(world):
    """The claim is answered late, and what begins its lease anew is answered even later."""
    engine, other = world.engine(), world.engine()
    first = LateAnswer(world, engine)
    effect = Effect("by the other").held()
    running = engine.start("k", never, policy=Policy(lease=0.6))
    assert first.given.wait(PATIENCE)
    time.sleep(0.3)  # more than a third of the lease
    later = [LateAnswer(world, engine, verb) for verb in ("claim", "renew")]
    first.tell.set()
    wait_until(lambda: any(answer.given.is_set() for answer in later))
    taking_over = other.start("k", effect)
    effect.wait_started()  # so the lease was over
    for answer in later:
        answer.tell.set()
    wait_until(lambda: engine.commands("claim") >= 3)
    effect.release()
    assert running.result(PATIENCE) == taking_over.result(PATIENCE) == "by the other"
    assert effect.runs == 1


@fault(40)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_claim_that_is_always_answered_too_late_is_given_back(kind, abandoned):
    policy = Policy(lease=0.2, abandoned=abandoned)
    with World(kind, "memory://") as world:
        engine = world.engine(policy=policy)
        engine.store.inject("claim", Delay(0.3), times=3)
        with pytest.raises(StoreUnavailable, match=r"0\.2 s, after 3 tries; nothing ran"):
            engine.execute("k", never)
        assert engine.commands("claim") == 3
        wait_until(lambda: engine.peek("k").state is State.FAILED)
        assert engine.execute("k", Effect("next"), policy=Policy(lease=60)) == "next"


def test_a_takeover_is_told_also_when_its_claim_was_answered_late(kind):
    identity = Identity("default", "k")
    with World(kind, "memory://") as world:
        engine = world.engine(policy=Policy(lease=3))
        engine.ask_store("claim", ClaimRequest(identity, b"gone", None, 60.0, 60.0))
        engine.ask_store("renew", identity, b"gone", 0.0)  # its owner has crashed
        engine.store.inject("claim", Delay(1.1))
        assert engine.execute("k", Effect("taken over")) == "taken over"
        assert engine.commands("claim") == 2
        assert [event.number for event in engine.told(events.TakenOver)] == [2]


@fault(40)
def test_a_claim_given_so_late_that_another_has_done_the_work_does_not_run(world):
    engine, other = world.engine(), world.engine()
    late = LateAnswer(world, engine)
    effect = Effect("by the other")
    running = engine.start("k", never, policy=Policy(lease=0.2))
    assert late.given.wait(PATIENCE)
    assert other.execute("k", effect) == "by the other"  # after the lease
    late.tell.set()
    assert running.result(PATIENCE) == "by the other"
    assert effect.runs == 1


@fault(40)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_claim_that_nobody_wants_any_more_is_forgotten(store_url, abandoned):
    """The task that asked is cancelled while the answer is on its way."""
    policy = Policy(abandoned=abandoned)
    with World("asyncio", store_url) as world:
        engine, other = world.engine(), world.engine()
        late = LateAnswer(world, engine)
        asking = engine.start("k", never, policy=policy)
        assert late.given.wait(PATIENCE)
        assert other.peek("k").state is State.PROCESSING  # the fault: given, and nobody is told
        asking.cancel()
        late.tell.set()
        wait_until(lambda: other.peek("k").state is State.FAILED)
        assert other.execute("k", Effect("next"), policy=policy) == "next"


@fault(40)
@pytest.mark.parametrize("abandoned", ["takeover", "hold"])
def test_a_claim_whose_thread_was_interrupted_is_forgotten(store_url, abandoned):
    policy = Policy(abandoned=abandoned)
    with World("threads", store_url) as world:
        engine, other = world.engine(), world.engine()
        engine.store.inject("claim", LoseReply(Stop()))
        with pytest.raises(Stop):
            engine.execute("k", never, policy=policy)
        assert engine.store.fired("claim") == 1
        assert other.peek("k").state is State.FAILED
        assert other.execute("k", Effect("next"), policy=policy) == "next"
