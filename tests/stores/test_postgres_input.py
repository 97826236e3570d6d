"""What a store on PostgreSQL is given: URLs, options, values that no database can hold."""

from __future__ import annotations

import ast
import inspect
import time

import psycopg
import pytest
from psycopg import errors as sql

from semel.core.records import Claimed, Identity, State
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.errors import MOST_REPEATS, Deadline
from semel.stores.sql.postgres import AsyncPostgresStore, PostgresStore, threads
from semel.stores.sql.postgres.errors import TimeIsUp, repeat_after
from semel.stores.sql.postgres.settings import part, settings
from semel.stores.sql.verbs import ROUNDS
from semel.stores.urls import open_async_store, open_store
from stores.postgres_given import driven, rows
from stores.sqlite_helpers import RESULT, ask, finish, identity

kinds = pytest.mark.parametrize("kind", ["threads", "asyncio"])
NOWHERE = "postgresql://user:s3cret@127.0.0.1:1/shop"


# --- URLs and options --------------------------------------------------------------------


def test_our_options_are_taken_out_of_the_url_and_libpqs_are_left():
    address, ours = part(
        "postgresql://u:p%40ss@h1:1,h2:2/db?table=t&sslmode=disable&max_size=3&password=a+b&"
    )
    assert ours == {"table": "t", "max_size": "3"}
    read = settings(address, {"max_size": ours["max_size"]}, 5.0)
    parameters = psycopg.conninfo.conninfo_to_dict(read.conninfo)
    assert parameters["host"] == "h1,h2"
    assert parameters["sslmode"] == "disable"
    assert parameters["password"] == "a+b"
    assert (read.min_size, read.max_size, read.prepare) == (0, 3, True)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_both_schemes_are_known(postgres_url, scheme):
    store = open_store(postgres_url.replace("postgresql", scheme), timeout=20)
    assert isinstance(store.claim(ask("k")), Claimed)
    store.close()


async def test_options_may_be_given_by_name_too(postgres_url):
    store = open_async_store(postgres_url, table="named", application_name="shop", min_size=1)
    await store.claim(ask("k"))
    assert rows(postgres_url, "SELECT count(*) FROM named") == [(1,)]
    active = "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'shop'"
    assert rows(postgres_url, active) == [(True,)]
    await store.close()


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("max_size=0", "max_size"),
        ("max_size=two", "max_size"),
        ("min_size=-1", "min_size"),
        ("min_size=9&max_size=3", "above max_size"),
        ("prepare=perhaps", "prepare"),
        ("timeout=0", "timeout"),
        ("timeout=soon", "timeout"),
        ("table=a&table=b", "table twice"),
        ("columns=tenant_id", "by name"),
        ("colour=red", "no option colour"),
    ],
)
def test_a_bad_option_is_named_and_nothing_is_opened(query, named):
    with pytest.raises(ConfigError, match=named) as wrong:
        open_store(f"{NOWHERE}?{query}")
    assert "s3cret" not in str(wrong.value)


def test_a_mistyped_option_is_answered_with_those_that_there_are():
    with pytest.raises(ConfigError) as wrong:
        open_store(f"{NOWHERE}?max_sise=3")
    assert "no option max_sise; known: autocreate, batching" in str(wrong.value)
    assert "max_size" in str(wrong.value)
    assert "cannot be read" not in str(wrong.value)


def test_an_option_in_the_url_and_by_name_is_refused():
    with pytest.raises(ConfigError, match="table"):
        open_store(f"{NOWHERE}?table=a", table="b")


def test_an_unknown_option_by_name_is_refused():
    with pytest.raises(ConfigError, match="no option colour"):
        open_store(NOWHERE, colour="red")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:s3%zzcret@h/db",
        "postgresql://user:s3/s3cret:x@h/db",
        "postgresql://user:s3cret@[::1/db",
        "postgresql://user:s3cret@h:port/db",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url):
    with pytest.raises(ConfigError) as wrong:
        open_store(url)
    assert "s3" not in str(wrong.value)
    assert wrong.value.__cause__ is None
    assert wrong.value.__context__ is None or wrong.value.__suppress_context__


def test_settings_do_not_show_the_password():
    assert "s3cret" not in repr(settings(NOWHERE, {}, 5.0))
    assert "shop" in repr(settings(NOWHERE, {}, 5.0))


@pytest.mark.parametrize("kind", [PostgresStore, AsyncPostgresStore])
def test_there_is_one_way_to_the_database(kind):
    with pytest.raises(ConfigError, match="one of them"):
        kind()
    with pytest.raises(ConfigError, match="one of them"):
        kind(NOWHERE, pool=object())
    with pytest.raises(ConfigError, match="max_size goes with a URL"):
        kind(pool=object(), max_size=3)


# --- values ------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("key", ["a\x00b", "\ud800"])
def test_a_key_that_no_database_can_hold_is_refused(postgres_url, kind, key):
    with driven(kind, postgres_url) as store:
        with pytest.raises(StoreError, match="cannot take this"):
            store.claim(ask(key))
        finish(store, "k")


@kinds
def test_a_bad_member_of_a_batch_fails_alone(postgres_url, kind):
    with driven(kind, postgres_url) as store:
        good, nul, surrogate, also_good = store.send(
            [ask("a"), ask("\x00"), ask("\ud800"), ask("b")]
        )
        assert isinstance(good, Claimed)
        assert isinstance(also_good, Claimed)
        assert isinstance(nul, StoreError)
        assert isinstance(surrogate, StoreError)
        assert store.counts().processing == 2


@kinds
def test_a_locked_member_of_a_batch_fails_alone(postgres_url, kind):
    with driven(kind, postgres_url, timeout=3) as store:
        store.send([ask(key) for key in "abc"])
        with psycopg.connect(postgres_url) as holder:
            holder.execute("SELECT * FROM idempotent_record WHERE idem_key = 'b' FOR UPDATE")
            from semel.core.records import RenewRequest

            renewals = [RenewRequest(identity(key), b"owner-------", 30.0) for key in "abc"]
            first, locked, last = store.send(renewals)
            assert (first, last) == (True, True)
            assert isinstance(locked, StoreUnavailable)


@pytest.mark.parametrize("ttl", [1e300, float("inf"), float("nan")])
def test_a_time_that_no_calendar_has_is_refused(postgres_url, ttl):
    store = PostgresStore(postgres_url)
    store.claim(ask("k"))
    with pytest.raises(StoreError, match="cannot take this"):
        store.complete(identity("k"), b"owner-------", RESULT, ttl)
    assert store.complete(identity("k"), b"owner-------", RESULT, 1e10), "300 years are fine"
    assert store.get(identity("k")).remaining > 9e9
    store.close()


def test_a_large_result_is_kept(postgres_url):
    from semel.core.records import Encoded

    store = PostgresStore(postgres_url)
    large = Encoded("raw", bytes(range(256)) * 40_000)
    finish(store, "k", result=large)
    assert store.get(identity("k")).outcome == large
    store.close()


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
def test_the_time_zone_of_the_session_does_not_matter(postgres_url, zone):
    store = PostgresStore(postgres_url, options=f"-c timezone={zone}")
    store.claim(ask("k"))
    assert store.get(identity("k")).now == pytest.approx(time.time(), abs=60)
    store.close()


def test_a_row_of_a_newer_format_is_not_guessed_at(postgres_url):
    store = PostgresStore(postgres_url)
    finish(store, "k")
    rows(postgres_url, "UPDATE idempotent_record SET format = 99")
    with pytest.raises(StoreError, match="newer version"):
        store.claim(ask("k", b"other-------"))
    store.close()


def test_a_digest_that_another_identity_has_is_an_error_and_changes_nothing(postgres_url):
    store = PostgresStore(postgres_url)
    finish(store, "k")
    rows(postgres_url, "UPDATE idempotent_record SET idem_key = 'another'")
    for call in (
        lambda: store.claim(ask("k", b"other-------")),
        lambda: store.get(identity("k")),
    ):
        with pytest.raises(StoreError, match="is taken by"):
            call()
    assert not store.forget(identity("k"))
    assert not store.touch(identity("k"), 60.0)
    assert store.counts().succeeded == 1
    store.close()


def test_a_row_with_the_same_key_that_semel_did_not_write_is_named(postgres_url):
    store = PostgresStore(postgres_url)
    finish(store, "k")
    rows(postgres_url, "UPDATE idempotent_record SET digest = gen_random_uuid()")
    with pytest.raises(StoreError, match="semel did not write"):
        store.claim(ask("k"))
    store.close()


@pytest.mark.parametrize("limit", [0, -1, "ten"])
def test_a_page_has_a_limit(postgres_url, limit):
    store = PostgresStore(postgres_url)
    with pytest.raises(ConfigError, match="limit"):
        store.scan(limit=limit)
    with pytest.raises(ConfigError, match="cursor"):
        store.scan(cursor="nonsense")
    store.close()


def test_pages_follow_the_order_of_code_points(postgres_url):
    store = PostgresStore(postgres_url)
    keys = ["A", "B", "a", "b", "ä", "日本", "😀", "a:1", "a:2", "A "]
    store.send([ask(key) for key in keys])
    seen, cursor = [], None
    while True:
        page = store.scan(limit=3, cursor=cursor, state=State.PROCESSING, scope="orders")
        seen += [record.identity.key for record in page.records]
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == sorted(keys)
    assert [r.identity.key for r in store.scan(prefix="a").records] == ["a", "a:1", "a:2"]
    store.close()


# --- what is repeated, and how often -----------------------------------------------------


@pytest.mark.parametrize(
    "error", [sql.SerializationFailure(), sql.DeadlockDetected(), sql.UniqueViolation()]
)
def test_what_was_undone_is_repeated_but_not_for_ever(error):
    deadline = Deadline(3600.0)
    pauses = [deadline.pause_after(error, repeat_after(error)) for _ in range(MOST_REPEATS + 1)]
    assert pauses[-1] is None
    assert all(pause is not None and pause < 1 for pause in pauses[:-1])


@pytest.mark.parametrize("error", [sql.AdminShutdown(), psycopg.OperationalError("gone")])
def test_a_server_that_is_gone_is_looked_for_as_long_as_there_is_time(error):
    deadline = Deadline(3600.0)
    assert all(deadline.pause_after(error, repeat_after(error)) is not None for _ in range(100))
    assert Deadline(0.0).pause_after(error, repeat_after(error)) is None


@pytest.mark.parametrize("error", [sql.DiskFull(), sql.LockNotAvailable(), psycopg.DataError()])
def test_what_would_fail_again_is_not_repeated(error):
    assert Deadline(60.0).pause_after(error, repeat_after(error)) is None


async def test_a_repeated_call_that_runs_out_of_time_tells_why_it_was_repeated():
    late, first = TimeIsUp("late"), psycopg.OperationalError("gone")
    deadline = Deadline(60.0)
    unreachable = "postgresql://u@127.0.0.1:1/db"
    threads, tasks = PostgresStore(unreachable), AsyncPostgresStore(unreachable)
    assert threads._calls.reason(late, deadline) is late
    deadline.pause_after(first, repeat_after(first))
    assert threads._calls.reason(late, deadline) is first
    assert await tasks._calls.reason(late, deadline) is first


@pytest.mark.parametrize("verb", ["claim", "put"])
def test_a_row_that_never_stands_still_ends_in_an_error(postgres_url, verb):
    from semel.core.records import PutRequest
    from semel.stores.sql.postgres.verbs import PostgresVerbs
    from semel.stores.sql.verbs import Reply

    verbs = PostgresVerbs("t", "p:", {})
    ours = PutRequest(Identity("s", "k"), b"owner-------", RESULT, 60.0)
    steps = getattr(verbs, verb)(ask("k") if verb == "claim" else ours).start()
    next(steps)
    for _ in range(ROUNDS - 1):
        steps.send(Reply([], 0))
    with pytest.raises(StoreUnavailable, match="changed by others"):
        steps.send(Reply([], 0))


# --- twins -------------------------------------------------------------------------------


class Plain(ast.NodeTransformer):
    """Forgets async and await, and the word Async."""

    def visit_AsyncFunctionDef(self, node):
        return self.visit(ast.FunctionDef(**vars(node)))

    def visit_AsyncWith(self, node):
        return self.visit(ast.With(**vars(node)))

    def visit_Await(self, node):
        return self.visit(node.value)


def plain(module, name):
    tree = ast.parse(inspect.getsource(module))
    found = next(node for node in tree.body if getattr(node, "name", None) == name)
    body = found.body[1:]  # what it says of itself may differ
    text = "\n".join(ast.unparse(Plain().visit(node)) for node in body)
    return text.replace("Async", "").replace("async_", "")


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        ("AsyncPsycopgSession", "PsycopgSession"),
        ("OwnAsyncPsycopgSession", "OwnPsycopgSession"),
        # Not connecting: psycopg has its limits in whole seconds for threads, asyncio has its own.
        ("async_execute", "execute"),
    ],
)
def test_the_sessions_read_alike(twin, name):
    assert plain(threads, twin) == plain(threads, name)
