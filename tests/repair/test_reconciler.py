"""What a reconciler does with abandoned attempts: on each store, with threads and with asyncio."""

from __future__ import annotations

import asyncio
import logging

import pytest

from contract.reference_store import DictStore
from engines.facade import World, never, wait_until
from repair.conftest import OWNER, Repairs, patch
from semel import (
    ConfigError,
    OutcomeUnknown,
    Policy,
    PreviousFailure,
    ResultUnavailable,
    State,
    StoreError,
    StoreUnavailable,
    open_store,
)
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.events import ResultOmitted, StoreFailed
from semel.repair import (
    AsyncReconciler,
    Failed,
    GaveUp,
    Overtaken,
    Reconciler,
    Resolved,
    ResolverFailed,
    Succeeded,
    Unknown,
    Unresolved,
)
from semel.stores.memory import AsyncMemoryStore
from semel.testing import Refuse


class Asked:
    """A resolver that says the same each time, and remembers whom it was asked about."""

    def __init__(self, answer):
        self.answer = answer
        self.records = []

    def __call__(self, record):
        self.records.append(record)
        return self.answer


# --- what resolvers say ------------------------------------------------------------------


@pytest.mark.parametrize("hold", [True, False])
def test_what_succeeded_is_replayed_from_now_on(repairs, hold):
    identity = repairs.abandon("a", hold=hold)
    resolver = Asked(Succeeded({"charge": "ch_1"}))
    report = repairs.run(repairs.reconciler({"orders": resolver}))
    assert report.resolved == 1
    assert repairs.engine.execute("a", never, scope="orders") == {"charge": "ch_1"}
    (asked,) = resolver.records
    assert (asked.scope, asked.key, asked.number, asked.hold) == ("orders", "a", 1, hold)
    (event,) = repairs.told(Resolved)
    assert (event.identity, event.number, event.verdict) == (identity, 1, "succeeded")
    assert event.fence == asked.fence == repairs.record(identity).fence


def test_what_failed_for_good_is_told_to_later_callers(repairs):
    repairs.abandon("a")
    repairs.run(repairs.reconciler({"orders": Asked(Failed("the card was declined", False))}))
    with pytest.raises(PreviousFailure, match="the card was declined"):
        repairs.engine.execute("a", never, scope="orders")
    assert [event.verdict for event in repairs.told(Resolved)] == ["failed"]


def test_what_failed_and_may_run_again_runs_again(repairs):
    repairs.abandon("a")
    repairs.run(repairs.reconciler({"orders": Asked(Failed("never sent", True))}))
    assert repairs.engine.run("a", lambda: "ran", scope="orders").attempt.number == 2
    assert [event.verdict for event in repairs.told(Resolved)] == ["retryable"]


def test_what_is_unknown_stays_unknown_to_callers(repairs):
    identity = repairs.abandon("a")
    report = repairs.run(repairs.reconciler({"orders": Asked(Unknown("no answer yet"))}))
    with pytest.raises(OutcomeUnknown):
        repairs.engine.execute("a", never, scope="orders")
    assert repairs.record(identity).hold is True
    (event,) = report.decisions
    assert isinstance(event, Unresolved)
    assert (event.reason, event.tries, event.identity) == ("no answer yet", 1, identity)
    assert repairs.told(Unresolved) == [event]
    assert report.resolved == 0


def test_nothing_stuck_is_nothing_to_do(repairs):
    report = repairs.run(repairs.reconciler({"orders": never}))
    assert (report.decisions, report.moved_on, report.errors, report.waiting) == ((), 0, 0, 0)


def test_what_was_abandoned_only_now_is_left_alone(repairs):
    identity = repairs.abandon("a")
    report = repairs.run(repairs.reconciler({"orders": never}, older_than=600))
    assert report.decisions == ()
    assert repairs.record(identity).owner == OWNER


def test_a_scope_without_a_resolver_is_reported_once_and_never_touched(repairs):
    identity = repairs.abandon("a", scope="parcels")
    reconciler = repairs.reconciler({"orders": never})
    first, second = repairs.run(reconciler), repairs.run(reconciler)
    (event,) = first.decisions
    assert isinstance(event, Unresolved)
    assert (event.tries, event.identity) == (0, identity)
    assert second.decisions == ()
    assert (first.waiting, second.waiting) == (1, 1)
    record = repairs.record(identity)
    assert (record.owner, record.number) == (OWNER, 1)


def test_all_running_records_are_read_when_asked_to(repairs):
    held, done = repairs.abandon("a"), Identity("orders", "done")
    running = Identity("orders", "running")
    repairs.store("put", done, Encoded("json/1", b"1"), 60.0, owner=OWNER)
    repairs.store("claim", ClaimRequest(running, OWNER, None, 600.0, 600.0))
    report = repairs.run(repairs.reconciler({"orders": Asked(Succeeded(1))}), full=True)
    assert [decision.identity for decision in report.decisions] == [held]


def test_a_record_missing_from_the_index_is_found_by_reading_all(redis_url, redis_of_this_worker):
    with World("threads", redis_url) as world:
        repairs = Repairs(world)
        identity = repairs.abandon("a")
        client = redis_of_this_worker.client()
        assert client.delete(*client.keys("*~leases")) == 1
        client.close()
        reconciler = repairs.reconciler({"orders": Asked(Succeeded(1))})
        assert reconciler.run_once().decisions == ()
        assert reconciler.run_once(full=True).resolved == 1
        assert repairs.record(identity).state is State.SUCCEEDED


def test_every_page_of_the_records_is_read(memory_workshop, monkeypatch):
    patch(monkeypatch, "PAGE", 2)
    for number in range(5):
        memory_workshop.abandon(str(number))
    reconciler = memory_workshop.reconciler({"orders": Asked(Succeeded(1))})
    assert memory_workshop.run(reconciler, full=True).resolved == 5


def test_records_that_nobody_can_resolve_do_not_hide_the_others(memory_workshop, monkeypatch):
    patch(monkeypatch, "BATCH", 2)
    for number in range(5):
        memory_workshop.abandon(str(number), scope="parcels")
    memory_workshop.abandon("last")
    report = memory_workshop.run(memory_workshop.reconciler({"orders": Asked(Succeeded(1))}))
    assert report.resolved == 1


# --- trying again ------------------------------------------------------------------------


def test_a_case_is_tried_again_later_and_later_until_it_is_given_up(memory_workshop, clock):
    memory_workshop.abandon("a")
    resolver = Asked(Unknown())
    reconciler = memory_workshop.reconciler({"orders": resolver}, max_tries=3, backoff=10.0)
    reports = []

    def look(seconds):
        clock.now += seconds
        reports.append(memory_workshop.run(reconciler))
        return len(resolver.records)

    assert look(0) == 1
    assert look(4.9) == 1  # half of the pause at least
    assert look(5.1) == 2
    assert look(9.9) == 2  # twice as long by now
    assert look(10.1) == 3
    (gave_up,) = memory_workshop.told(GaveUp)
    assert (gave_up.tries, reports[-1].waiting) == (3, 1)
    assert gave_up in reports[-1].decisions
    assert look(1_000_000) == 3
    assert reports[-1].waiting == 1
    memory_workshop.run(memory_workshop.reconciler({"orders": resolver}))
    assert len(resolver.records) == 4, "a restarted reconciler tries anew"


def test_a_case_is_tried_again_before_it_counts_as_old_again(memory_workshop, clock):
    identity = memory_workshop.abandon("a")
    answers = [Unknown(), Succeeded("late")]
    reconciler = memory_workshop.reconciler({"orders": lambda _: answers.pop(0)}, backoff=1.0)
    memory_workshop.run(reconciler)
    reconciler._reconciliation._older_than = 600.0  # parked just now: no listing would show it
    clock.now += 1.0
    assert memory_workshop.run(reconciler).resolved == 1
    assert memory_workshop.record(identity).state is State.SUCCEEDED


def test_the_same_key_used_anew_is_another_case(memory_workshop, clock):
    identity = memory_workshop.abandon("a")
    resolver = Asked(Unknown())
    reconciler = memory_workshop.reconciler({"orders": resolver}, max_tries=1)
    memory_workshop.run(reconciler)
    memory_workshop.store("forget", identity)
    memory_workshop.abandon("a")
    memory_workshop.run(reconciler)
    assert len(resolver.records) == 2
    assert len(memory_workshop.told(GaveUp)) == 2


def test_a_pause_between_two_tries_has_an_end(cases, memory_workshop):
    record = memory_workshop.record(memory_workshop.abandon("a"))
    cases._max_tries = 100
    for _ in range(50):
        cases.tried(record, 0.0)
    assert cases.due(0.0) == []
    assert cases.due(3600.0) == [record.identity]


# --- the age of what stays unknown -------------------------------------------------------


def stuck_for(record):
    return record.now - record.lease_until


def test_what_stays_unknown_keeps_the_age_it_had(repairs):
    identity = repairs.abandon("a")
    repairs.store("renew", identity, OWNER, -3600.0)
    for _ in range(2):  # the second one knows nothing of the first
        repairs.run(repairs.reconciler({"orders": Asked(Unknown())}))
        assert 3600 <= stuck_for(repairs.record(identity)) < 3700
    (listed,) = repairs.store("stuck", older_than=3600.0)
    assert listed.identity == identity


def test_the_time_a_resolver_takes_counts_too(memory_workshop, clock):
    identity = memory_workshop.abandon("a")

    def slow(record):
        clock.now += 40.0
        return Unknown()

    memory_workshop.run(memory_workshop.reconciler({"orders": slow}))
    assert 40 <= stuck_for(memory_workshop.record(identity)) < 100


def test_the_age_outlasts_a_store_that_fails_while_the_record_is_ours(memory_workshop):
    identity = memory_workshop.abandon("a")
    memory_workshop.store("renew", identity, OWNER, -3600.0)
    reconciler = memory_workshop.reconciler({"orders": Asked(Unknown())}, lease=0.3)
    memory_workshop.engine.store.inject("renew", Refuse(StoreUnavailable("down")))
    assert memory_workshop.run(reconciler).errors == 1
    assert memory_workshop.run(reconciler).moved_on == 1, "our own lease is still running"
    wait_until(lambda: memory_workshop.record(identity).abandoned)
    assert len(memory_workshop.run(reconciler).decisions) == 1
    assert stuck_for(memory_workshop.record(identity)) >= 3600


def test_another_attempt_has_an_age_of_its_own(memory_workshop):
    identity = memory_workshop.abandon("a", hold=False)
    memory_workshop.store("renew", identity, OWNER, -500.0)  # within its ttl, else it may go
    other = b"another own\x00"

    def take_over():
        memory_workshop.store("claim", ClaimRequest(identity, other, None, 600.0, 600.0))
        memory_workshop.store("renew", identity, other, 0.0)

    memory_workshop.engine.store.before["adopt"] = take_over
    memory_workshop.run(memory_workshop.reconciler({"orders": Asked(Unknown())}))
    record = memory_workshop.record(identity)
    assert (record.number, stuck_for(record) < 60) == (2, True)


# --- what was left to a person -----------------------------------------------------------


@pytest.fixture
def given_up(repairs):
    """A case that its reconciler has given up, with all that is needed to look again."""
    identity = repairs.abandon("a")
    reconciler = repairs.reconciler({"orders": Asked(Unknown())}, max_tries=1)
    assert repairs.run(reconciler).waiting == 1
    return repairs, reconciler, identity


def test_a_case_that_a_person_decided_is_closed(given_up):
    repairs, reconciler, identity = given_up
    assert repairs.store("adopt", identity, OWNER, 60.0) is not None
    assert repairs.store("complete", identity, OWNER, Encoded("json/1", b"1"), 600.0)
    assert repairs.run(reconciler).waiting == 0
    assert reconciler._reconciliation._open_cases._open == {}


def test_a_case_whose_record_is_gone_is_closed(given_up):
    repairs, reconciler, identity = given_up
    repairs.store("forget", identity)
    assert repairs.run(reconciler).waiting == 0


def test_a_case_whose_key_was_used_anew_is_closed(given_up):
    repairs, reconciler, identity = given_up
    repairs.store("forget", identity)
    repairs.store("claim", ClaimRequest(identity, OWNER, None, 600.0, 600.0))
    assert repairs.run(reconciler).waiting == 0


def test_a_case_that_somebody_is_looking_into_stays_open(given_up):
    repairs, reconciler, identity = given_up
    assert repairs.store("adopt", identity, OWNER, 600.0) is not None
    assert repairs.run(reconciler).waiting == 1


def test_a_case_that_cannot_be_looked_at_stays_open(given_up):
    repairs, reconciler, identity = given_up
    repairs.store("forget", identity)
    repairs.engine.store.inject("get", Refuse(StoreUnavailable("down")))
    report = repairs.run(reconciler)
    assert (report.waiting, report.errors) == (1, 1)
    assert repairs.run(reconciler).waiting == 0


# --- resolvers that fail -----------------------------------------------------------------


def test_a_resolver_that_raises_does_not_know(memory_workshop, caplog):
    def broken(record):
        raise LookupError("password=hunter2")

    memory_workshop.abandon("a")
    report = memory_workshop.run(memory_workshop.reconciler({"orders": broken}))
    (event,) = report.decisions
    assert isinstance(event, ResolverFailed)
    assert event.reason == "LookupError"
    assert ("semel.repair", logging.ERROR) in [each[:2] for each in caplog.record_tuples]
    assert "resolver of orders failed" in caplog.text
    with pytest.raises(OutcomeUnknown):
        memory_workshop.engine.execute("a", never, scope="orders")


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_whatever_a_resolver_raises_it_does_not_know(memory_workshop, error):
    def leaving(record):
        raise error

    memory_workshop.abandon("a", scope="left")
    memory_workshop.abandon("b")
    report = memory_workshop.run(
        memory_workshop.reconciler({"left": leaving, "orders": Asked(Succeeded("found out"))})
    )
    kinds = {type(decision): decision for decision in report.decisions}
    assert kinds[ResolverFailed].reason == type(error).__name__
    assert Resolved in kinds  # the next record has its turn


def test_a_resolver_that_finds_nothing_does_not_know(memory_workshop):
    memory_workshop.abandon("a")
    report = memory_workshop.run(memory_workshop.reconciler({"orders": lambda _: next(iter(()))}))
    (event,) = report.decisions
    assert isinstance(event, ResolverFailed)


def test_an_answer_that_is_no_resolution_is_not_guessed_at(memory_workshop):
    memory_workshop.abandon("a")
    report = memory_workshop.run(memory_workshop.reconciler({"orders": Asked(answer=True)}))
    (event,) = report.decisions
    assert isinstance(event, ResolverFailed)
    assert "bool" in event.reason


# --- values ------------------------------------------------------------------------------


def test_a_value_is_written_with_the_codec_of_its_scope(kind):
    with World(kind, "memory://") as world:
        repairs = Repairs(world, scopes={"orders": Policy(codec="msgpack")})
        identity = repairs.abandon("a")
        repairs.run(repairs.reconciler({"orders": Asked(Succeeded((1, b"\xff")))}))
        assert repairs.record(identity).outcome.codec.startswith("msgpack")
        assert repairs.engine.execute("a", never, scope="orders") == (1, b"\xff")


def test_a_value_that_cannot_be_kept_is_still_a_success(memory_workshop):
    memory_workshop.abandon("a")
    memory_workshop.run(memory_workshop.reconciler({"orders": Asked(Succeeded(object()))}))
    assert len(memory_workshop.told(ResultOmitted)) == 1
    with pytest.raises(ResultUnavailable):
        memory_workshop.engine.execute("a", never, scope="orders")


# --- others who write --------------------------------------------------------------------


def test_an_owner_that_comes_back_first_has_the_last_word(repairs):
    identity = repairs.abandon("a")

    def come_back():
        assert repairs.store("complete", identity, OWNER, Encoded("json/1", b'"mine"'), 600.0)

    repairs.engine.store.before["adopt"] = come_back
    report = repairs.run(repairs.reconciler({"orders": never}))
    assert (report.moved_on, report.decisions) == (1, ())
    assert repairs.engine.execute("a", never, scope="orders") == "mine"


def test_an_owner_that_comes_back_later_is_refused(repairs):
    identity = repairs.abandon("a")
    refused = []

    def meanwhile(record):
        refused.append(repairs.store("complete", identity, OWNER, Encoded("json/1", b"1"), 600.0))
        refused.append(repairs.store("renew", identity, OWNER, 600.0))
        return Succeeded("found out")

    repairs.run(repairs.reconciler({"orders": meanwhile}))
    assert refused == [False, False]
    assert repairs.engine.execute("a", never, scope="orders") == "found out"


@pytest.mark.parametrize("answer", [Succeeded("mine"), Unknown()])
def test_a_resolver_that_takes_too_long_may_be_overtaken(repairs, answer):
    identity = repairs.abandon("a")
    other = b"another own\x00"

    def overtake():
        record = repairs.record(identity)
        repairs.store("renew", identity, record.owner, 0.0)  # its lease has ended
        assert repairs.store("adopt", identity, other, 600.0) is not None
        assert repairs.store("complete", identity, other, Encoded("json/1", b'"theirs"'), 600.0)

    verb = "complete" if isinstance(answer, Succeeded) else "renew"
    repairs.engine.store.before[verb] = overtake
    report = repairs.run(repairs.reconciler({"orders": Asked(answer)}))
    assert report.resolved == 0
    assert len(repairs.told(Overtaken)) == (1 if isinstance(answer, Succeeded) else 0)
    assert repairs.engine.execute("a", never, scope="orders") == "theirs"


# --- stores that fail --------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["adopt", "complete"])
@pytest.mark.parametrize("error", [StoreError, StoreUnavailable])
def test_trouble_with_one_record_does_not_keep_the_others_waiting(memory_workshop, verb, error):
    for key in ("a", "b", "c"):
        memory_workshop.abandon(key)
    memory_workshop.engine.store.inject(verb, Refuse(error("not this one")))
    report = memory_workshop.run(memory_workshop.reconciler({"orders": Asked(Succeeded(1))}))
    assert (report.errors, report.resolved) == (1, 2)
    (event,) = memory_workshop.told(StoreFailed)
    assert "not this one" in event.error


def test_a_record_that_met_trouble_is_tried_again_by_the_next_run(memory_workshop):
    memory_workshop.abandon("a")
    memory_workshop.engine.store.inject("adopt", Refuse(StoreUnavailable("down")))
    reconciler = memory_workshop.reconciler({"orders": Asked(Succeeded(1))})
    assert memory_workshop.run(reconciler).errors == 1
    assert memory_workshop.run(reconciler).resolved == 1


def test_a_store_that_cannot_even_list_ends_the_run(memory_workshop):
    memory_workshop.engine.store.inject("stuck", Refuse(StoreUnavailable("down")))
    with pytest.raises(StoreUnavailable):
        memory_workshop.run(memory_workshop.reconciler({"orders": never}))


# --- what cannot work is said at once ----------------------------------------------------


@pytest.mark.parametrize(
    "resolvers", [None, ["orders"], {"orders": "a text"}], ids=["none", "a list", "no function"]
)
def test_resolvers_are_functions_by_scope(memory_workshop, resolvers):
    with pytest.raises(ConfigError, match="resolvers"):
        memory_workshop.reconciler(resolvers)


def test_an_async_resolver_needs_the_async_reconciler():
    async def resolve(record):
        return Succeeded(1)

    with pytest.raises(ConfigError, match="AsyncReconciler"):
        Reconciler(open_store("memory://"), {"orders": resolve})


def test_a_store_must_be_able_to_give_records_away():
    with pytest.raises(ConfigError, match="DictStore cannot list and adopt"):
        Reconciler(DictStore(), {})


def test_a_store_for_asyncio_must_be_able_to_give_records_away_too():
    class Unlisted(AsyncMemoryStore):
        unsupported = DictStore.unsupported

    with pytest.raises(ConfigError, match="Unlisted cannot list and adopt"):
        AsyncReconciler(Unlisted(), {})


@pytest.mark.parametrize(
    "option", ["older_than", "every", "max_tries", "backoff", "lease"], ids=lambda name: name
)
def test_wrong_options_are_refused(memory_workshop, option):
    with pytest.raises(ConfigError, match=option):
        memory_workshop.reconciler({}, **{option: -1})


def test_a_wrong_duration_is_called_by_its_name(memory_workshop):
    with pytest.raises(ConfigError, match=r"^older_than must be zero or more seconds; got -1$"):
        memory_workshop.reconciler({}, older_than=-1)


@pytest.mark.parametrize("name", ["", "  ", 7])
def test_whoever_decides_has_a_name(memory_workshop, name):
    with pytest.raises(ConfigError, match=r"^name must be a string"):
        memory_workshop.reconciler({}, name=name)


def test_an_engine_that_was_given_stays_open(memory_workshop):
    memory_workshop.do(memory_workshop.reconciler({}).close)
    assert memory_workshop.engine.execute("a", lambda: "ran") == "ran"


def test_a_reconciler_takes_a_store_object_and_leaves_it_open(sqlite_url):
    store = open_store(sqlite_url)
    Reconciler(store, {}).close()
    assert store.get(Identity("orders", "a")) is None
    store.close()
