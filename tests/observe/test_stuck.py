"""What is stuck in a store, as Prometheus sees it: asked for seldom, and never by counting all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from copy import copy
from time import monotonic
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engines.facade import KINDS, PATIENCE, Gate, World, intercepted, wait_until
from observe.test_prometheus import check_with_promtool, samples
from semel import AsyncIdempotency, Idempotency, open_async_store, open_store
from semel.core.records import ClaimRequest, Identity, StuckRequest
from semel.errors import ConfigError
from semel.observe import prometheus
from semel.observe.prometheus import AsyncStuckCollector, StuckCollector
from semel.testing import Refuse
from stores.sqlite_helpers import start_fork

MINUTE = 60.0
NOWHERE = "redis://127.0.0.1:1"


class Clock:
    """When collectors ask again, moved on by hand."""

    ahead = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(prometheus, "monotonic", made)
    return made


class Scraped:
    """A store of either kind, its collector, and what Prometheus gets to read."""

    def __init__(self, kind: str, url: str, *, through: str = "store", **options: Any) -> None:
        self.world = World(kind, url)
        self.idem = self.world.engine()
        self.store = self.idem.store
        target = self.store if through == "store" else self.idem.engine
        made = StuckCollector if kind == "threads" else AsyncStuckCollector
        self.collector: Any = made(target, **options)
        self.registry = CollectorRegistry()
        self.registry.register(self.collector)

    def read(self) -> dict[tuple[str, ...], float]:
        if isinstance(self.collector, AsyncStuckCollector):
            self.world.kind.finish(self.collector.update)
        return samples(generate_latest(self.registry).decode())

    def abandon(self, scope: str, key: str, *, age: float, hold: bool = False) -> None:
        """Leave an attempt behind whose lease ended this long ago."""
        identity, owner = Identity(scope, key), key.encode().rjust(12, b"-")
        self.idem.ask_store("claim", ClaimRequest(identity, owner, None, 60.0, 600.0, hold))
        assert self.idem.ask_store("renew", identity, owner, -age)

    def asked(self) -> list[str]:
        return [call.verb for call in self.store.calls]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@contextlib.contextmanager
def scraping(kind: str, url: str = "memory://", **options: Any):
    scraped = Scraped(kind, url, **options)
    with scraped.world:
        yield scraped


# --- what is shown ---------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["store", "engine"])
def test_what_is_stuck_is_shown_by_scope_and_whether_it_is_held(kind, store_url, through):
    with scraping(kind, store_url, through=through) as scraped:
        scraped.abandon("payments", "a", age=10 * MINUTE, hold=True)
        scraped.abandon("payments", "b", age=20 * MINUTE, hold=True)
        scraped.abandon("payments", "c", age=5 * MINUTE)
        scraped.abandon("mails", "a", age=MINUTE)
        scraped.idem.execute("done", lambda: "sent", scope="mails")
        found = scraped.read()
    ages = {key[1]: found.pop(key) for key in list(found) if "oldest" in key[0]}
    assert found == {
        ("semel_stuck", "payments", "true"): 2,
        ("semel_stuck", "payments", "false"): 1,
        ("semel_stuck", "mails", "true"): 0,
        ("semel_stuck", "mails", "false"): 1,
        ("semel_store_up",): 1,
    }
    assert {scope: int(age // MINUTE) for scope, age in ages.items()} == {
        "payments": 20,
        "mails": 1,
    }


def test_what_is_not_stuck_any_more_is_shown_as_nothing(kind, clock):
    with scraping(kind) as scraped:
        assert scraped.read() == {("semel_store_up",): 1}
        scraped.abandon("payments", "a", age=MINUTE, hold=True)
        clock.ahead += 15
        assert scraped.read()["semel_stuck", "payments", "true"] == 1
        scraped.idem.forget("a", scope="payments")
        clock.ahead += 15
        assert scraped.read() == {
            ("semel_stuck", "payments", "true"): 0,
            ("semel_stuck", "payments", "false"): 0,
            ("semel_stuck_oldest_seconds", "payments"): 0,
            ("semel_store_up",): 1,
        }


def test_the_audit_trail_is_no_scope_to_watch(kind):
    with scraping(kind) as scraped:
        scraped.abandon("semel.audit", "a", age=MINUTE)
        assert scraped.read() == {("semel_store_up",): 1}


def test_after_a_hundred_scopes_all_further_ones_are_shown_together(kind):
    with scraping(kind) as scraped:
        for number in range(110):
            scraped.abandon(f"tenant-{number}", "a", age=200.0 - number)
        found = scraped.read()
    scopes = {key[1] for key in found if key[0] == "semel_stuck"}
    assert scopes == {*(f"tenant-{number}" for number in range(100)), "(other)"}
    assert found["semel_stuck", "(other)", "false"] == 10


def test_promtool_finds_nothing_wrong_with_what_is_stuck():
    with scraping("threads") as scraped:
        scraped.abandon("payments", "a", age=MINUTE, hold=True)
        assert scraped.read()["semel_stuck", "payments", "true"] == 1
        text = generate_latest(scraped.registry).decode()
    check_with_promtool(text)


# --- what is asked ---------------------------------------------------------------------------


def test_the_store_is_asked_at_most_every_fifteen_seconds_and_only_for_what_is_stuck(kind, clock):
    with scraping(kind) as scraped:
        assert scraped.asked() == []  # not by registering
        first = scraped.read()
        clock.ahead += 14
        scraped.abandon("payments", "a", age=MINUTE)
        assert scraped.read() == first
        assert scraped.asked() == ["stuck"]
        clock.ahead += 1
        assert scraped.read()["semel_stuck", "payments", "false"] == 1
        assert scraped.asked() == ["stuck", "stuck"]


def test_how_often_the_store_is_asked_can_be_chosen(kind, clock):
    with scraping(kind, every=60) as scraped:
        for _ in range(5):
            scraped.read()
            clock.ahead += 20
        assert scraped.asked() == ["stuck", "stuck"]


def test_no_more_than_ten_thousand_records_are_read(kind):
    limits = []
    with scraping(kind) as scraped:
        answer = scraped.store.store.ask

        def note(ask, request):
            limits.append(request.limit)
            return answer(request)

        intercepted(scraped.store.store, "stuck", note)
        scraped.read()
    assert limits == [10_000]


def test_who_comes_while_the_store_is_asked_gets_the_last_answer(clock):
    with scraping("threads") as scraped:
        scraped.abandon("payments", "a", age=MINUTE)
        before = scraped.read()
        gate = Gate()
        clock.ahead += 15
        scraped.store.before["stuck"] = gate
        slow = threading.Thread(target=scraped.read)
        slow.start()
        gate.wait()
        assert scraped.read() == before
        gate.open()
        slow.join(PATIENCE)
        assert scraped.asked() == ["stuck", "stuck"]


# --- a store that does not answer ------------------------------------------------------------


def test_a_store_that_is_down_is_shown_as_down_until_it_answers_again(kind, clock, caplog):
    with scraping(kind) as scraped:
        scraped.abandon("payments", "a", age=MINUTE)
        scraped.store.inject("stuck", Refuse())
        with caplog.at_level(logging.WARNING, "semel.observe"):
            assert scraped.read() == {("semel_store_up",): 0}  # and nothing that nobody knows
        [warning] = caplog.records
        assert warning.getMessage().startswith("the store could not list what is stuck: ")
        assert scraped.read() == {("semel_store_up",): 0}
        clock.ahead += 15
        found = scraped.read()
        assert found["semel_store_up",] == 1
        assert found["semel_stuck", "payments", "false"] == 1


def test_a_store_that_hangs_is_shown_as_down_and_keeps_nobody_waiting(clock, monkeypatch):
    """Prometheus waits for 10 seconds, then it has none of the metrics of the whole process."""
    with scraping("threads") as scraped:
        scraped.abandon("payments", "a", age=MINUTE)
        assert scraped.read()["semel_store_up",] == 1
        gate = Gate()
        scraped.store.before["stuck"] = gate
        clock.ahead += 15
        with monkeypatch.context() as patch:
            patch.setattr(prometheus, "LONGEST_WAIT", 0.01)
            for _ in range(6):
                assert scraped.read() == {("semel_store_up",): 0}
                clock.ahead += 15
        assert scraped.asked() == ["stuck"]  # before; and not again while it is held up
        gate.open()
        wait_until(lambda: scraped.read().get(("semel_stuck", "payments", "false")) == 1)


def test_a_store_that_hangs_from_the_beginning_is_down_as_well(monkeypatch):
    with scraping("threads") as scraped:
        gate = Gate()
        scraped.store.before["stuck"] = gate
        monkeypatch.setattr(prometheus, "LONGEST_WAIT", 0.01)
        assert scraped.read() == {("semel_store_up",): 0}
        gate.open()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_is_forked_while_the_store_hangs_asks_for_itself(
    sqlite_url, clock, monkeypatch
):
    with Idempotency(sqlite_url) as idem:
        registry, gate = CollectorRegistry(), Gate()
        registry.register(StuckCollector(idem))
        answer = idem.internals.store.stuck
        with monkeypatch.context() as patch:
            patch.setattr(prometheus, "LONGEST_WAIT", 0.01)
            patch.setattr(
                idem.internals.store, "stuck", lambda limit: gate() or answer(limit=limit)
            )
            assert samples(generate_latest(registry).decode()) == {("semel_store_up",): 0}

        clock.ahead += 15

        def read_in_child() -> None:
            assert samples(generate_latest(registry).decode()) == {("semel_store_up",): 1}

        child = start_fork(read_in_child)
        child.join(PATIENCE)
        gate.open()
        assert child.exitcode == 0


def test_a_server_that_is_not_there_is_down():
    store = open_store(NOWHERE, timeout=0.2)
    registry = CollectorRegistry()
    registry.register(StuckCollector(store))
    assert samples(generate_latest(registry).decode()) == {("semel_store_up",): 0}
    store.close()


def test_an_engine_that_was_closed_has_no_store_that_answers(sqlite_url):
    idem = Idempotency(sqlite_url)
    registry = CollectorRegistry()
    registry.register(StuckCollector(idem))
    idem.close()
    assert samples(generate_latest(registry).decode()) == {("semel_store_up",): 0}


def test_an_answer_that_nobody_asked_for_in_a_minute_is_not_shown(clock):
    with scraping("asyncio") as scraped:
        assert scraped.read() == {("semel_store_up",): 1}
        clock.ahead += 59
        assert samples(generate_latest(scraped.registry).decode()) == {("semel_store_up",): 1}
        clock.ahead += 2
        assert samples(generate_latest(scraped.registry).decode()) == {}


# --- several stores --------------------------------------------------------------------------


class Two:
    """Two stores of either kind in one process, and what Prometheus gets to read."""

    def __init__(self, kind: str) -> None:
        self.payments = Scraped(kind, "memory://")
        self.orders = copy(self.payments)
        world = self.payments.world
        self.other = world.kind.open_store("memory://")
        self.orders.idem = world.engine_on(world.kind.steered(self.other))
        self.orders.store = self.orders.idem.store
        self.registry = CollectorRegistry()
        stores = {"payments": self.payments.idem.engine, "orders": self.orders.store}
        self.collector = type(self.payments.collector)(stores, registry=self.registry)

    def read(self) -> dict[tuple[str, ...], float]:
        if isinstance(self.collector, AsyncStuckCollector):
            self.payments.world.kind.finish(self.collector.update)
        return samples(generate_latest(self.registry).decode())


@pytest.fixture
def two(kind):
    made = Two(kind)
    with made.payments.world as world:
        yield made
        world.kind.finish(made.other.close)


def test_of_several_stores_each_is_shown_by_its_name(two):
    two.payments.abandon("http", "a", age=10 * MINUTE, hold=True)
    two.orders.abandon("http", "a", age=MINUTE)
    two.orders.abandon("http", "b", age=MINUTE)
    found = two.read()
    ages = {key[1:]: int(found.pop(key) // MINUTE) for key in list(found) if "oldest" in key[0]}
    assert found == {
        ("semel_stuck", "payments", "http", "true"): 1,
        ("semel_stuck", "payments", "http", "false"): 0,
        ("semel_stuck", "orders", "http", "true"): 0,
        ("semel_stuck", "orders", "http", "false"): 2,
        ("semel_store_up", "payments"): 1,
        ("semel_store_up", "orders"): 1,
    }
    assert ages == {("payments", "http"): 10, ("orders", "http"): 1}
    check_with_promtool(generate_latest(two.registry).decode())


def test_of_several_stores_one_may_be_down(two, clock, caplog):
    two.payments.store.inject("stuck", Refuse())
    two.orders.abandon("http", "a", age=MINUTE)
    with caplog.at_level(logging.WARNING, "semel.observe"):
        found = two.read()
    assert found["semel_store_up", "payments"] == 0
    assert found["semel_store_up", "orders"] == 1
    assert found["semel_stuck", "orders", "http", "false"] == 1
    [warning] = caplog.records
    assert warning.getMessage().startswith("the store payments could not list")
    clock.ahead += 15
    assert two.read()["semel_store_up", "payments"] == 1


def test_each_of_several_stores_is_asked_at_most_every_fifteen_seconds(two, clock):
    for _ in range(3):
        two.read()
        clock.ahead += 8
    asked = ["stuck", "stuck"]
    assert (two.payments.asked(), two.orders.asked()) == (asked, asked)


def test_one_store_with_a_name_has_the_label_too():
    with Idempotency("memory://") as idem:
        registry = CollectorRegistry()
        StuckCollector({"payments": idem}, registry=registry)
        assert samples(generate_latest(registry).decode()) == {("semel_store_up", "payments"): 1}


async def test_a_program_may_have_stores_for_threads_beside_those_for_asyncio(sqlite_url):
    registry = CollectorRegistry()
    async with AsyncIdempotency("memory://") as web:
        with (
            Idempotency(sqlite_url) as payments,
            contextlib.closing(open_store(NOWHERE, timeout=0.2)) as down,
        ):
            stores = {"web": web, "payments": payments, "down": down}
            stuck = AsyncStuckCollector(stores, registry=registry)
            await stuck.update()
            assert samples(generate_latest(registry).decode()) == {
                ("semel_store_up", "web"): 1,
                ("semel_store_up", "payments"): 1,
                ("semel_store_up", "down"): 0,
            }


@pytest.mark.parametrize("kind", ["threads"])
def test_a_store_that_hangs_does_not_hide_the_others(two, monkeypatch):
    gate = Gate()
    two.payments.store.before["stuck"] = gate
    two.orders.abandon("http", "a", age=MINUTE)
    monkeypatch.setattr(prometheus, "LONGEST_WAIT", 0.01)
    two.read()
    gate.wait()
    wait_until(lambda: two.read().get(("semel_stuck", "orders", "http", "false")) == 1)
    found = two.read()
    gate.open()
    assert found["semel_store_up", "payments"] == 0
    assert found["semel_store_up", "orders"] == 1


async def test_a_store_for_threads_that_hangs_keeps_no_task_waiting(monkeypatch):
    gate, registry = Gate(), CollectorRegistry()
    with Idempotency("memory://") as payments:
        store = payments.internals.store
        answer = store.stuck
        monkeypatch.setattr(store, "stuck", lambda limit: gate() or answer(limit=limit))
        monkeypatch.setattr(prometheus, "LONGEST_WAIT", 0.01)
        stuck = AsyncStuckCollector({"payments": payments}, registry=registry)
        await stuck.update()
        assert samples(generate_latest(registry).decode()) == {("semel_store_up", "payments"): 0}
        await stuck.update()  # nor does anybody ask again
        gate.open()


def test_a_registry_takes_one_collector_and_says_how_it_takes_two_stores(kind):
    with scraping(kind) as scraped:
        made = type(scraped.collector)
        wanted = f'{made.__name__}({{"payments": idem, "orders": other}})'
        with pytest.raises(ConfigError, match=re.escape(wanted)) as told:
            made(scraped.store, registry=scraped.registry)
        assert isinstance(told.value.__cause__, ValueError)
        assert scraped.read() == {("semel_store_up",): 1}


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [StuckCollector, AsyncStuckCollector])
def test_stores_need_names_and_there_must_be_one(made):
    with pytest.raises(ConfigError, match=f"^{made.__name__} needs a store$"):
        made({})
    for name in ("", 7, None):
        with pytest.raises(ConfigError, match=f"the name of a store is a string, not {name!r}"):
            made({"payments": open_store("memory://"), name: open_store("memory://")})


@pytest.mark.parametrize("made", [StuckCollector, AsyncStuckCollector])
def test_what_has_a_name_must_be_a_store(made):
    with pytest.raises(ConfigError, match=r"needs .*, not str"):
        made({"payments": "memory://"})


@pytest.mark.parametrize("given", ["memory://", None, AsyncIdempotency, open_async_store])
def test_a_collector_for_threads_takes_nothing_else(given):
    given = given("memory://") if callable(given) else given
    named = f"StuckCollector needs Idempotency or open_store\\(url\\), not {type(given).__name__}"
    with pytest.raises(ConfigError, match=named):
        StuckCollector(given)


@pytest.mark.parametrize("given", ["memory://", None, Idempotency, open_store])
def test_a_collector_for_asyncio_takes_nothing_else(given):
    given = given("memory://") if callable(given) else given
    with pytest.raises(ConfigError, match=r"AsyncStuckCollector needs AsyncIdempotency or open_"):
        AsyncStuckCollector(given)


@pytest.mark.parametrize("every", [0, -1, "soon"])
def test_a_pause_that_is_none_is_rejected(every):
    with Idempotency("memory://") as idem, pytest.raises(ConfigError, match="every"):
        StuckCollector(idem, every=every)


def test_a_store_that_cannot_tell_what_is_stuck_is_rejected():
    class Silent(type(open_store("memory://"))):
        unsupported = frozenset({StuckRequest})

    with pytest.raises(ConfigError, match="Silent can't list what is stuck"):
        StuckCollector(Silent())
