"""The audit trail in the store: an entry before each action, and no action without one."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from msgspec.structs import replace

from engines.facade import World, never
from repair.conftest import Repairs
from semel import ConfigError, InvalidKey, StoreFull, StoreRefused, ValueRejected, open_store
from semel.core.audit import KEYS
from semel.core.records import AUDIT_SCOPE, LISTINGS, Encoded, Identity, State
from semel.errors import StoreError
from semel.repair import (
    AsyncAuditTrail,
    AuditTrail,
    Failed,
    Succeeded,
    Unknown,
    audit,
    forget,
    forget_async,
    purge,
    purge_async,
    settle,
    settle_async,
)
from semel.repair._sync import audit as audit_for_threads
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing import Refuse

PLACE = f"{socket.gethostname()}:{os.getpid()}"
REFUSED = "the entry in the audit trail could not be written, so nothing was done: "


class Actions:
    """Everything that writes an entry, by plain calls, for either kind of engine."""

    def __init__(self, repairs: Repairs) -> None:
        self.repairs = repairs
        self._threads = repairs.world.name == "threads"

    def settle(self, key: str = "a", resolution: Any = None, **options: Any) -> Any:
        resolution = Succeeded("found out") if resolution is None else resolution
        return self._do(settle, settle_async, key, resolution, scope="orders", **options)

    def forget(self, key: str = "a", **options: Any) -> Any:
        return self._do(forget, forget_async, key, scope="orders", **options)

    def purge(self, **options: Any) -> Any:
        return self._do(purge, purge_async, **options)

    def reconcile(self, resolver: Any = None, **options: Any) -> Any:
        resolver = (lambda _: Succeeded("found out")) if resolver is None else resolver
        return self.repairs.run(self.repairs.reconciler({"orders": resolver}, **options))

    def write(self, *given: Any, name: str | None = None, **options: Any) -> Any:
        return self.repairs.do(self.trail(name=name).write, *given, **options)

    def read(self, **options: Any) -> Any:
        return self.repairs.do(self.trail().read, **options)

    def trail(self, place: Any = None, **options: Any) -> Any:
        kind = AuditTrail if self._threads else AsyncAuditTrail
        return kind(self.repairs.engine.engine if place is None else place, **options)

    def _do(self, plain: Any, awaited: Any, *given: Any, **options: Any) -> Any:
        function = plain if self._threads else awaited
        return self.repairs.do(function, self.repairs.engine.engine, *given, **options)


@pytest.fixture
def actions(repairs) -> Actions:
    """Both kinds in turn, on each store in turn."""
    return Actions(repairs)


@pytest.fixture
def on_memory(memory_workshop) -> Actions:
    """Both kinds in turn, for what has nothing to do with the kind of store."""
    return Actions(memory_workshop)


def told(entry: Any) -> tuple[Any, ...]:
    return entry.action, entry.details, entry.scope, entry.key_digest, entry.by, entry.reason


# --- what is recorded ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resolution", "verdict"),
    [
        (Succeeded(1), "succeeded"),
        (Failed("declined", False), "failed"),
        (Failed("never sent", True), "retryable"),
    ],
)
def test_a_decision_has_an_entry(actions, resolution, verdict):
    identity = actions.repairs.abandon("a")
    before = actions.repairs.record(identity).now
    actions.settle("a", resolution, name="anna", reason="ticket 7")
    (entry,) = actions.read()
    digest = identity.key_digest
    assert told(entry) == ("resolve", verdict, "orders", digest, f"anna@{PLACE}", "ticket 7")
    assert before - 0.001 <= entry.at <= actions.repairs.record(identity).now


def test_what_there_is_not_to_decide_or_forget_has_no_entry(actions):
    assert actions.settle("a") is None
    assert actions.forget("a") is False
    actions.repairs.engine.execute("b", lambda: 1, scope="orders")
    assert actions.settle("b") is None
    assert actions.read() == []


def test_a_record_that_is_removed_has_an_entry_with_its_state(actions):
    held = actions.repairs.abandon("a")
    actions.repairs.engine.execute("b", lambda: 1, scope="orders")
    assert actions.forget("a", name="anna", reason="sent twice") is True
    assert actions.forget("b") is True
    assert actions.repairs.record(held) is None
    done, abandoned = actions.read()
    digest = held.key_digest
    assert told(abandoned)[:4] == ("forget", "abandoned", "orders", digest)
    assert (abandoned.by, abandoned.reason) == (f"anna@{PLACE}", "sent twice")
    assert (done.details, done.by, done.reason) == ("succeeded", PLACE, None)


@pytest.mark.parametrize(
    ("options", "details"),
    [({}, "expired"), ({"abandoned_after": 3600}, "expired, and abandoned for 3600 s")],
)
def test_a_purge_has_an_entry(actions, options, details):
    assert actions.purge(name="cron", reason="nightly", **options) == 0
    (entry,) = actions.read()
    assert told(entry) == ("purge", details, None, None, f"cron@{PLACE}", "nightly")


def test_a_run_of_a_reconciler_has_an_entry_and_each_of_its_decisions(actions):
    identities = [actions.repairs.abandon(key) for key in ("a", "b", "c")]

    def resolver(record):
        return Unknown() if record.key == "c" else Failed("not there", record.key == "b")

    assert actions.reconcile(resolver, name="night", reason="outage 3").resolved == 2
    *decided, run = actions.read()
    assert told(run) == ("reconcile", "3 records", None, None, f"night@{PLACE}", "outage 3")
    assert {(entry.key_digest, entry.action, entry.details) for entry in decided} == {
        (identities[0].key_digest, "resolve", "failed"),
        (identities[1].key_digest, "resolve", "retryable"),
    }


def test_a_run_that_finds_nothing_to_look_into_has_no_entry(actions):
    actions.repairs.abandon("a", scope="parcels")  # has no resolver
    actions.reconcile()
    assert actions.read() == []


def test_a_program_may_write_entries_of_its_own(actions):
    seen = [Identity("orders", key) for key in ("a", "b")]
    actions.write("view", seen, name="anna", details="admin page", reason="ticket 7")
    entries = actions.read()
    assert {entry.key_digest for entry in entries} == {each.key_digest for each in seen}
    assert {(each.action, each.details, each.reason) for each in entries} == {
        ("view", "admin page", "ticket 7")
    }


def test_the_name_of_the_process_is_the_one_of_the_environment(on_memory, monkeypatch):
    monkeypatch.setenv("SEMEL_NAME", "worker-3")
    on_memory.write("view", name="anna")
    on_memory.write("view")
    assert [entry.by for entry in on_memory.read()] == ["worker-3", "anna@worker-3"]


def test_a_decision_that_comes_too_late_has_an_entry_all_the_same(actions):
    """It says what somebody was about to do; the record says what was done."""
    identity = actions.repairs.abandon("a")

    def overtake():
        actions.repairs.store("adopt", identity, bytes(12), 60.0)

    actions.repairs.engine.store.before["adopt"] = overtake
    assert actions.settle("a") is None
    assert [entry.action for entry in actions.read()] == ["resolve"]
    assert actions.repairs.record(identity).owner == bytes(12)


def test_an_entry_has_neither_key_nor_result(on_memory):
    on_memory.repairs.abandon("a-secret-key")
    on_memory.settle("a-secret-key", Succeeded("a secret result"))
    (record,) = on_memory.repairs.store("scan", scope=AUDIT_SCOPE).records
    assert b"secret" not in record.outcome.data
    assert "secret" not in record.key


def test_an_entry_is_kept_for_400_days(actions):
    actions.write("view")
    (record,) = actions.repairs.store("scan", scope=AUDIT_SCOPE).records
    assert 400 * 86400 - 60 < record.remaining <= 400 * 86400
    assert record.state is State.SUCCEEDED


def test_the_keys_of_entries_sort_by_time():
    keys = [audit.request_for({}).identity.key for _ in range(100)]
    assert keys == sorted(set(keys))
    assert all(key.startswith(audit.KEY_PREFIX) for key in keys)


# --- reading it ----------------------------------------------------------------------------


def test_the_newest_entries_come_first(actions, monkeypatch):
    for module in (audit, audit_for_threads):
        monkeypatch.setattr(module, "PAGE", 2)
    for number in range(5):
        actions.write(f"step-{number}")
    assert [entry.action for entry in actions.read()] == [f"step-{n}" for n in (4, 3, 2, 1, 0)]
    assert [entry.action for entry in actions.read(limit=2)] == ["step-4", "step-3"]


def test_entries_are_found_by_scope_key_and_age(actions):
    mine, other = Identity("orders", "a"), Identity("parcels", "a")
    actions.write("view", [mine, other])
    actions.write("purge")
    assert [entry.scope for entry in actions.read(scope="orders")] == ["orders"]
    assert [entry.scope for entry in actions.read(key_digest=other.key_digest)] == ["parcels"]
    assert len(actions.read(since=3600)) == 3
    time.sleep(0.02)
    assert actions.read(since=0.01) == []


def test_an_entry_that_cannot_be_read_hides_no_other(on_memory, caplog):
    actions, store = on_memory, on_memory.repairs.store
    actions.write("view")
    damaged = [
        Encoded("audit/2", b'{"by":"x","action":"y"}'),
        Encoded("audit/1", b"{"),
        Encoded("audit/1", b"{}"),
        Encoded("audit/1", b'{"by":"\xff","action":"y"}'),
        Encoded("audit/1", b'{"by":' + b"[" * 10_000),
    ]
    for number, stored in enumerate(damaged):
        store("put", Identity(AUDIT_SCOPE, f"audit-{number}"), stored, 60.0, owner=bytes(12))
    assert [entry.action for entry in actions.read()] == ["view"]
    assert caplog.text.count("left out: audit-") == len(damaged)


def test_the_trail_of_a_store_object_is_the_same(on_memory):
    on_memory.write("view")
    store = on_memory.repairs.engine.store
    assert len(on_memory.repairs.do(on_memory.trail(store).read)) == 1


@pytest.mark.parametrize("place", ["sqlite:///semel.db", None, "the other kind"])
def test_the_trail_needs_an_engine_or_a_store_of_its_kind(on_memory, kind, place):
    if place == "the other kind":
        place = AsyncMemoryStore() if kind == "threads" else MemoryStore()
    trail = AuditTrail if kind == "threads" else AsyncAuditTrail
    with pytest.raises(
        ConfigError, match=f"an engine or a store for {kind}; got {type(place).__name__}"
    ):
        trail(place)


def test_a_store_that_cannot_list_cannot_read_the_trail(on_memory, monkeypatch):
    monkeypatch.setattr(on_memory.repairs.engine.store, "unsupported", LISTINGS)
    with pytest.raises(ConfigError, match="cannot list its records"):
        on_memory.read()


@pytest.mark.parametrize("text", ["", "  ", 7, "two\nlines", "x" * 501])
@pytest.mark.parametrize("what", ["name", "reason"])
def test_a_name_or_a_reason_that_fits_no_line_is_refused_before_anything_happens(
    on_memory, what, text
):
    identity = on_memory.repairs.abandon("a")
    before = on_memory.repairs.record(identity)
    for action in (on_memory.settle, on_memory.forget, on_memory.purge, on_memory.reconcile):
        with pytest.raises(ConfigError, match=f"^{what} "):
            action(**{what: text})
    assert replace(on_memory.repairs.record(identity), now=before.now) == before
    assert on_memory.read() == []


@pytest.mark.parametrize("said", [{"action": ""}, {"action": "a\nb"}, {"details": "a\nb"}])
def test_an_entry_of_a_program_is_one_line(on_memory, said):
    with pytest.raises(ConfigError, match=next(iter(said))):
        on_memory.write(**{"action": "view", **said})
    assert on_memory.read() == []


# --- nobody else uses the scope ---------------------------------------------------------------


def test_no_call_of_an_engine_may_use_the_scope(on_memory):
    on_memory.write("view")
    (entry,) = on_memory.repairs.store("scan", scope=AUDIT_SCOPE).records
    engine, do = on_memory.repairs.engine, on_memory.repairs.do
    marks = engine.engine.marks
    named = {"scope": AUDIT_SCOPE}
    calls: list[Callable[[], Any]] = [
        lambda: engine.execute(entry.key, never, **named),
        lambda: engine.consume(entry.key, never, **named),
        lambda: engine.peek(entry.key, **named),
        lambda: engine.forget(entry.key, **named),
        lambda: do(marks.delete, entry.key, **named),
        lambda: do(marks.delete_many, [entry.key], **named),
        lambda: do(marks.set, "new", **named),
        lambda: do(marks.refresh, entry.key, ttl=1, **named),
        lambda: do(marks.clear, "", **named),
        lambda: on_memory._do(settle, settle_async, entry.key, Succeeded(1), **named),
        lambda: on_memory._do(forget, forget_async, entry.key, **named),
        lambda: on_memory.repairs.store("forget", entry.identity),
        lambda: on_memory.repairs.store("forget_many", [entry.identity]),
        lambda: on_memory.repairs.store("touch", entry.identity, 0.0),
    ]
    for call in calls:
        with pytest.raises(InvalidKey, match="reserved for the audit trail"):
            call()
    assert len(on_memory.read()) == 1


def test_lists_counts_and_purges_leave_the_trail_out(actions):
    actions.repairs.engine.execute("a", lambda: 1, scope="orders")
    actions.write("view")
    assert [each.key for each in actions.repairs.store("scan").records] == ["a"]
    assert actions.repairs.store("counts").succeeded == 1
    assert actions.purge(abandoned_after=0.001) == 0
    assert len(actions.read()) == 2


# --- no entry, no action -----------------------------------------------------------------------

TRIGGERS = {
    "sqlite": "CREATE TRIGGER no_entries BEFORE INSERT ON idempotent_record "
    f"WHEN NEW.biz_type = '{AUDIT_SCOPE}' BEGIN SELECT RAISE(ABORT, 'no entries'); END",
    "mysql": "CREATE TRIGGER no_entries BEFORE INSERT ON idempotent_record FOR EACH ROW "
    f"IF NEW.biz_type = '{AUDIT_SCOPE}' THEN "
    "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no entries'; END IF",
    "postgres": "CREATE FUNCTION no_entries() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "RAISE check_violation USING MESSAGE = 'no entries'; END $$;"
    "CREATE TRIGGER no_entries BEFORE INSERT ON idempotent_record FOR EACH ROW "
    f"WHEN (NEW.biz_type = '{AUDIT_SCOPE}') EXECUTE FUNCTION no_entries()",
}


class Refusing(Actions):
    """A store that takes everything but entries, once `refuse` was called."""

    def __init__(self, repairs: Repairs, refuse: Callable[[], object], error: type) -> None:
        super().__init__(repairs)
        self.refuse = refuse
        self.error = error


@contextlib.contextmanager
def refusing_redis(server: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """A user whose keys are at first all, and then those of scopes with a name below 10 letters."""
    user = "operator"
    with contextlib.closing(server.client()) as client:

        def may(*keys: str) -> None:
            client.acl_setuser(
                user,
                enabled=True,
                passwords=["+pw"],
                commands=["+@all"],
                keys=keys,
                reset_keys=True,
            )

        may("*")
        url = f"redis://{user}:pw@127.0.0.1:{server.port}/0"
        yield url, lambda: may("idem:{*}[0-9]:*", "idem:{*}~*")
        client.acl_deluser(user)


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "mysql", "tiers"])
def refusing(request, kind) -> Iterator[Refusing]:
    """Both kinds in turn, on each store in turn, which refuse an entry and nothing else."""
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        error: type = ValueRejected
        if request.param == "memory":
            url, error = "memory://?max_records=1", StoreFull
            refuse: Callable[[], object] = lambda: None  # noqa: E731 - it is full
        elif request.param == "redis":
            server = request.getfixturevalue("redis_of_this_worker")
            request.getfixturevalue("redis_url")
            url, refuse = stack.enter_context(refusing_redis(server))
            error = StoreRefused
        else:
            place = "sqlite" if request.param == "tiers" else request.param
            url = behind = request.getfixturevalue(f"{place}_url")
            if request.param == "tiers":
                url, options = request.getfixturevalue("redis_url"), {"behind": behind}
            with contextlib.closing(open_store(behind)) as store:
                store.migrate()

            def refuse() -> None:
                run_sql(request, place, behind, TRIGGERS[place])

        world = stack.enter_context(World(kind, url, **options))
        yield Refusing(Repairs(world), refuse, error)


def run_sql(request: Any, place: str, url: str, sql: str) -> None:
    if place == "sqlite":
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
            database.execute(sql)
    elif place == "postgres":
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql)
    else:
        server = request.getfixturevalue("mariadb_of_this_worker")
        server.execute(sql, database=urlsplit(url).path[1:], user="root", password="")


@pytest.mark.parametrize("action", ["settle", "forget", "reconcile"])
def test_nothing_changes_where_the_entry_cannot_be_written(refusing, action):
    identity = refusing.repairs.abandon("a")
    refusing.refuse()
    before = refusing.repairs.record(identity)
    with pytest.raises(refusing.error, match=f"^{REFUSED}") as refused:
        getattr(refusing, action)()
    assert refused.value.retry_helps is refusing.error.retry_helps
    assert isinstance(refused.value.__cause__, refusing.error)
    assert replace(refusing.repairs.record(identity), now=before.now) == before
    assert refusing.read() == []


def test_nothing_is_purged_where_the_entry_cannot_be_written(refusing):
    identity = refusing.repairs.abandon("a", hold=False)
    refusing.refuse()
    with pytest.raises(refusing.error, match=f"^{REFUSED}"):
        refusing.purge(abandoned_after=0.0001)
    assert refusing.repairs.record(identity).abandoned


def test_a_decision_without_its_entry_is_given_back_with_its_age(memory_workshop):
    """The run had its entry, but then the store takes no more of them."""
    actions = Actions(memory_workshop)
    identity = memory_workshop.abandon("a")
    memory_workshop.store("renew", identity, b"\x00the owner\xff\x00", -3600.0)
    asked = []

    def resolver(record):
        asked.append(record)
        if len(asked) > 1:
            return Succeeded("found out")
        memory_workshop.engine.store.inject("put_many", Refuse(StoreFull("no room")))
        return Succeeded("found out")

    reconciler = memory_workshop.reconciler({"orders": resolver})
    report = memory_workshop.run(reconciler)
    assert (report.resolved, report.errors, len(asked)) == (0, 1, 1)
    record = memory_workshop.record(identity)
    assert record.abandoned
    assert record.now - record.lease_until >= 3600
    assert [entry.action for entry in actions.read()] == ["reconcile"]
    assert memory_workshop.engine.store.fired("put_many") == 1
    report = memory_workshop.run(reconciler)
    assert (report.resolved, report.errors) == (1, 0)


def test_a_key_that_is_taken_is_no_entry(on_memory, monkeypatch):
    identity = on_memory.repairs.abandon("a")
    before = on_memory.repairs.record(identity)
    monkeypatch.setattr(type(KEYS), "new", lambda _: "audit-1")
    on_memory.write("view")
    with pytest.raises(StoreError, match=f"^{REFUSED}its key is taken"):
        on_memory.forget()
    assert replace(on_memory.repairs.record(identity), now=before.now) == before


def test_a_damaged_record_is_forgotten_with_an_entry(kind, sqlite_url):
    with World(kind, sqlite_url) as world:
        actions = Actions(Repairs(world))
        identity = actions.repairs.abandon("a")
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as database:
            database.execute("UPDATE idempotent_record SET format = 99")
            database.commit()
        assert actions.forget() is True
        (entry,) = actions.read()
        assert told(entry)[:4] == ("forget", "unreadable", "orders", identity.key_digest)
        assert actions.repairs.record(identity) is None
