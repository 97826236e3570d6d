"""The local cache: off by default; what it answers, the store would answer too."""

from __future__ import annotations

import pytest

from engines.facade import MANY, PATIENCE, held_up, never, wait_until
from semel import (
    DuplicateRequest,
    LeaseLost,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    State,
    WaitTimeout,
    events,
)
from semel.core.records import Identity
from semel.testing import Refuse


@pytest.fixture
def idem(memory_world):
    return memory_world.engine(cache=2)


def asked(idem) -> int:
    """How many claims the store has got."""
    return idem.commands("claim")


def test_it_is_off_by_default(memory_world):
    idem = memory_world.engine()
    idem.execute("k", lambda: 1)
    idem.execute("k", never)
    assert idem.engine.internals.cache is None
    assert asked(idem) == 2


def test_a_cached_replay_asks_the_store_nothing(idem):
    assert idem.execute("k", lambda: [1]) == [1]
    idem.store.calls.clear()
    first, second = idem.execute("k", never), idem.execute("k", never)
    assert first == second == [1]
    assert first is not second, "each caller gets a copy of its own"
    assert idem.consume("k", never) is False
    assert idem.store.calls == []
    assert len(idem.told(events.Replayed)) == 3


def test_a_replay_from_the_store_is_remembered(memory_world, idem):
    memory_world.engine().execute("k", lambda: 1)
    assert [idem.execute("k", never) for _ in range(3)] == [1, 1, 1]
    assert asked(idem) == 1


def test_a_cached_answer_follows_the_rules_of_the_call(idem):
    idem.execute("k", lambda: 1)
    with pytest.raises(DuplicateRequest):
        idem.execute("k", never, policy=Policy(duplicate="reject"))
    assert asked(idem) == 1


def test_a_final_failure_is_told_each_time(idem):
    with pytest.raises(ZeroDivisionError):
        idem.execute("k", lambda: 1 / 0, policy=Policy(failure="final"))
    for _ in range(2):
        with pytest.raises(PreviousFailure):
            idem.execute("k", never)


def test_another_payload_goes_to_the_store(idem):
    idem.execute("k", lambda: 1, payload=1)
    assert idem.execute("k", never, payload=1) == 1
    assert asked(idem) == 1
    with pytest.raises(PayloadMismatch):
        idem.execute("k", never, payload=2)
    assert asked(idem) == 2
    assert idem.execute("k", never) == 1
    assert asked(idem) == 3


def test_what_may_be_replaced_is_never_cached(idem):
    loose = Policy(mismatch="replace")
    idem.execute("k", lambda: 1, payload=1, policy=loose)
    assert idem.execute("k", never, payload=1, policy=loose) == 1
    assert asked(idem) == 2
    assert len(idem.engine.internals.cache._entries) == 0


def test_a_replaced_answer_is_dropped(idem):
    idem.execute("k", lambda: 1, payload=1)
    assert idem.execute("k", lambda: 2, payload=2, policy=Policy(mismatch="replace")) == 2
    with pytest.raises(PayloadMismatch):
        idem.execute("k", never, payload=1)


@pytest.mark.parametrize("by", ["forget", "marks"])
def test_what_is_forgotten_here_runs_again_at_once(idem, by):
    idem.execute("k", lambda: 1)
    if by == "forget":
        assert idem.forget("k") is True
    else:
        idem._kind.finish(idem.engine.marks.delete_many, ["k"])
    assert idem.execute("k", lambda: 2) == 2


def test_a_replay_while_it_is_being_forgotten_is_not_remembered(idem):
    idem.execute("k", lambda: 1)
    idem.store.before["forget"] = lambda: idem.execute("k", never)
    assert idem.forget("k") is True
    assert idem.execute("k", lambda: 2) == 2


def test_a_replay_while_marks_are_being_deleted_is_not_remembered(idem):
    idem.execute("k", lambda: 1)
    idem.store.before["forget_many"] = lambda: idem.execute("k", never)
    idem._kind.finish(idem.engine.marks.delete_many, ["k"])
    assert idem.execute("k", lambda: 2) == 2


@pytest.mark.parametrize("verb", ["claim", "complete"])
def test_an_answer_that_was_under_way_when_it_was_forgotten_is_not_remembered(
    memory_world, idem, verb
):
    if verb == "claim":
        memory_world.engine().execute("k", lambda: "forgotten")
    on_its_way = held_up(idem, verb)
    call = idem.start("k", lambda: "forgotten")
    on_its_way.wait()
    assert idem.forget("k") is True
    on_its_way.open()
    assert call.result(PATIENCE) == "forgotten"
    assert idem.execute("k", lambda: "new") == "new"


@pytest.mark.parametrize("answer", ["refused", "lost", "not yet known"])
def test_a_result_is_cached_only_after_the_store_has_agreed(memory_world, idem, answer):
    """What runs elsewhere meanwhile is the truth: a result that was not taken is nobody's."""
    other = memory_world.engine()

    def work():
        if answer == "refused":
            assert other.forget("k")
            assert other.execute("k", lambda: "theirs") == "theirs"
        else:
            idem.store.inject("complete", Refuse(), times=MANY)
        return "mine"

    if answer == "refused":
        with pytest.raises(LeaseLost):
            idem.execute("k", work)
        assert idem.execute("k", never) == "theirs"
        return
    if answer == "lost":
        assert idem.execute("k", work) == "mine"  # the effect is done, and saved by the timer
    else:
        saving = idem.start("k", work)
        wait_until(lambda: idem.store.fired("complete"))
    asked_before = asked(idem)
    with pytest.raises(WaitTimeout):
        # By a policy of its own: it neither shares nor waits long.
        idem.execute("k", never, policy=Policy(wait_timeout=0.01))
    assert idem.engine.internals.cache.get(Identity("default", "k"), None, 0.0) is None
    assert asked(idem) >= asked_before
    idem.store.heal()
    if answer == "not yet known":
        assert saving.result(PATIENCE) == "mine"
    wait_until(lambda: idem.peek("k").state is State.SUCCEEDED)
    assert idem.execute("k", never) == "mine"


def test_it_is_bounded_and_the_least_recently_used_goes(idem):
    for key in ("a", "b", "c"):
        idem.execute(key, lambda: 1)
    assert asked(idem) == 3
    idem.execute("b", never)
    idem.execute("c", never)
    assert asked(idem) == 3
    idem.execute("a", never)
    assert asked(idem) == 4


def test_it_answers_no_longer_than_the_record_is_kept_however_often_it_is_asked(idem):
    idem.execute("k", lambda: 1, policy=Policy(ttl=0.2))
    wait_until(lambda: idem.run("k", lambda: 2).value == 2)
    assert idem.run("k", never).replayed


def test_it_answers_no_longer_than_its_ttl_however_often_it_is_asked(memory_world):
    idem, other = memory_world.engine(cache=2, cache_ttl=0.2), memory_world.engine()
    idem.execute("k", lambda: 1)
    other.forget("k")  # elsewhere: not known here
    assert idem.execute("k", never) == 1
    wait_until(lambda: idem.run("k", lambda: 2).value == 2)


def test_a_refreshed_mark_is_learned_anew(idem):
    idem.execute("k", lambda: 1, policy=Policy(ttl=0.2))
    idem._kind.finish(idem.engine.marks.refresh, "k", ttl=500)
    assert idem.execute("k", never) == 1
    assert asked(idem) == 2


def test_what_one_engine_forgets_no_engine_on_the_same_store_answers_from_its_cache(memory_world):
    idem = memory_world.engine(cache=2)
    other = memory_world.engine_on(idem.store, cache=2)
    assert [idem.execute("k", lambda: 1), other.execute("k", never), other.execute("k", never)] == [
        1,
        1,
        1,
    ]
    assert asked(other) == 2, "the other engine has it in its cache"
    idem.forget("k")
    assert other.execute("k", lambda: 2) == 2
    assert idem.execute("k", never) == 2
