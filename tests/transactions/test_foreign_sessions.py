"""Sessions that semel did not set up: no setting of theirs changes what a record says."""

from __future__ import annotations

import contextlib
import sqlite3
from datetime import UTC, datetime

import pymysql
import pytest

from semel import ConfigError, Idempotency, Policy, StoreUnavailable
from semel.stores.sql.mysql import MySQLStore
from semel.stores.sql.sqlite import SQLiteStore
from semel.stores.sql.verbs import Reply
from semel.transactions import records_of
from transactions.kinds import KINDS, mysql_login, path_of

on_mysql = pytest.mark.parametrize(
    "world",
    [kind for kind in KINDS if kind.dialect == "mysql"],
    ids=lambda kind: kind.name,
    indirect=True,
)

NO_BACKSLASHES = "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES'"
ESCAPES = (
    "x', result_payload = 0x22494e4a454354454422, codec = 0x6a736f6e2f31, status = 1, "
    "lease_until = NULL, expire_at = UTC_TIMESTAMP(6) + INTERVAL 1 DAY -- "
)
"""Ends its literal, if a driver quotes it with backslashes and the server knows none: every record
would then have the result INJECTED."""
NASTY = [ESCAPES, "'", "\\", "\\'", '"', 'Ann\'s "\\" \n\0\x1a %s %% {}', "", "\N{PARTY POPPER}"]


@on_mysql
async def test_no_result_or_key_becomes_sql_without_backslash_escapes(world):
    async with world.engine() as idem:
        await world.done(idem.execute("victim", _coroutine(world, "untouched")))
        for round_ in range(2):
            for number, nasty in enumerate(NASTY):
                async with world.work() as work:
                    await work.run(NO_BACKSLASHES)
                    key = f"{number}{nasty.translate(PRINTABLE)}"
                    async with world.once(idem, work, key) as attempt:
                        if not attempt.replayed:
                            attempt.result = {"text": nasty, "bytes": nasty.encode()}
                assert attempt.replayed is (round_ == 1), nasty
                assert attempt.result == {"text": nasty, "bytes": nasty.encode()}
        assert await world.done(idem.execute("victim", _coroutine(world, "ran"))) == "untouched"
        (count,) = world.query("SELECT COUNT(*) FROM idempotent_record")
        assert count == (1 + len(NASTY),)


PRINTABLE = {ord(character): "." for character in " \n\0\x1a"}
"""No key may hold these."""


def _coroutine(world, result):
    async def awaited():
        return result

    return awaited if world.kind.asynchronous else lambda: result


@on_mysql
@pytest.mark.parametrize("charset", ["utf8mb3", "latin1"])
async def test_no_character_set_of_a_session_garbles_a_key_or_a_result(world, charset):
    key = text = "\N{PARTY POPPER}\N{CYRILLIC SMALL LETTER ZHE}\N{LATIN SMALL LETTER E WITH ACUTE}"
    async with world.engine() as idem:
        with pytest.raises(ZeroDivisionError):  # so that the next attempt has to read the record
            await world.done(idem.execute(key, _failing(world)))
        for replayed in (False, True):
            async with world.work() as work:
                await work.run(f"SET NAMES {charset}")
                async with world.once(idem, work, key) as attempt:
                    assert attempt.replayed is replayed
                    if not replayed:
                        assert attempt.number == 2
                        attempt.result = text
            assert attempt.result == text
        assert (await world.done(idem.peek(key))).key == key


def _failing(world):
    async def awaited():
        raise ZeroDivisionError

    def plain():
        raise ZeroDivisionError

    return awaited if world.kind.asynchronous else plain


@pytest.mark.parametrize("charset", ["utf8", "latin1"])
def test_a_driver_that_writes_another_character_set_does_not_garble_a_key(mysql_url, charset):
    key = "\N{PARTY POPPER}"
    connection = pymysql.connect(**mysql_login(mysql_url), charset=charset)
    with Idempotency(mysql_url) as idem, contextlib.closing(connection):
        idem.peek("any")
        connection.begin()
        with idem.transaction(connection, key) as attempt:
            attempt.result = key
        connection.commit()
        assert idem.execute(key, lambda: "ran") == key


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (ESCAPES, ESCAPES),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02 03:04:05"),
        (1.5, "1.5"),
        (None, None),
    ],
)
def test_a_column_of_the_applications_own_keeps_its_value(mysql_url, value, stored):
    with own_column(mysql_url, value) as (idem, connection):
        with idem.transaction(connection, "k") as attempt:
            attempt.result = 1
        with connection.cursor() as cursor:
            cursor.execute("SELECT own FROM idempotent_record")
            assert cursor.fetchall() == ((stored,),)


class Shown:
    """Of a type that a driver writes as a text, with backslashes whatever the session says."""

    def __str__(self):
        return ESCAPES


def test_a_value_that_a_driver_cannot_quote_on_this_session_is_refused(mysql_url):
    with (
        own_column(mysql_url, Shown()) as (idem, connection),
        pytest.raises(ConfigError, match=r"column own .* Shown, .* NO_BACKSLASH_ESCAPES"),
        idem.transaction(connection, "k"),
    ):
        pytest.fail("it ran")


@contextlib.contextmanager
def own_column(url, value):
    """An engine whose records have a column of the application's, and an open transaction."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            contextlib.closing(MySQLStore(url, columns={"own": lambda _: value}))
        )
        store.migrate(columns={"own": "TEXT"})
        connection = stack.enter_context(contextlib.closing(pymysql.connect(**mysql_login(url))))
        with connection.cursor() as cursor:
            cursor.execute(NO_BACKSLASHES)
        connection.begin()
        yield stack.enter_context(Idempotency(store)), connection


# --- no setting changes what a record says ---------------------------------------------------

SQL_MODES = (
    "",
    "EMPTY_STRING_IS_NULL",
    "PIPES_AS_CONCAT",
    "ANSI",
    "NO_BACKSLASH_ESCAPES",
    "ORACLE",
    "ORACLE,EMPTY_STRING_IS_NULL",
    "PAD_CHAR_TO_FULL_LENGTH",
    "IGNORE_SPACE",
    "HIGH_NOT_PRECEDENCE",
    "TRADITIONAL",
    "TIME_ROUND_FRACTIONAL",
    "SIMULTANEOUS_ASSIGNMENT",
    "NO_UNSIGNED_SUBTRACTION",
)
"""Those of MariaDB are more than those of MySQL."""

HARMLESS = {
    "mysql": [
        *(f"SET sql_mode = '{mode}'" for mode in SQL_MODES),
        *(f"SET time_zone = '{zone}'" for zone in ("+05:00", "-11:30")),
        *(f"SET collation_connection = {name}" for name in ("latin1_bin", "ucs2_general_ci")),
        *(f"SET character_set_results = {name}" for name in ("NULL", "latin1")),
        *(f"SET sql_select_limit = {limit}" for limit in (0, 1)),
        *(f"SET autocommit = {mode}" for mode in (0, 1)),
        *(
            f"SET SESSION TRANSACTION ISOLATION LEVEL {level}"
            for level in ("READ UNCOMMITTED", "READ COMMITTED", "SERIALIZABLE")
        ),
        "SET sql_safe_updates = 1",
        "SET sql_auto_is_null = 1",
        "SET foreign_key_checks = 0",
        "SET unique_checks = 0",
        "SET max_error_count = 0",
        "SET sql_notes = 0",
        "SET div_precision_increment = 0",
        "SET group_concat_max_len = 4",
        "SET max_sort_length = 8",
        "SET sql_big_selects = 0",
        "SET last_insert_id = 5",
        "SET insert_id = 77",
    ],
    "postgresql": [
        "SET search_path = pg_catalog, public",
        "SET standard_conforming_strings = off",
        *(f"SET backslash_quote = {mode}" for mode in ("off", "on")),
        "SET bytea_output = 'escape'",
        *(f"SET DateStyle = '{style}'" for style in ("SQL, DMY", "German", "Postgres, MDY")),
        *(f"SET IntervalStyle = '{style}'" for style in ("sql_standard", "iso_8601")),
        *(f"SET TimeZone = '{zone}'" for zone in ("Asia/Kathmandu", "America/St_Johns")),
        "SET client_encoding = 'UTF8'",
        "SET extra_float_digits = -15",
        "SET transform_null_equals = on",
        "SET array_nulls = off",
        "SET lc_numeric = 'C'",
        "SET row_security = off",
        "SET enable_seqscan = off",
        "SET enable_indexscan = off",
        "SET plan_cache_mode = force_generic_plan",
        "SET synchronous_commit = off",
        "SET default_transaction_isolation = 'serializable'",
        "SET statement_timeout = '60s'",
        "SET session_replication_role = replica",
        "SET quote_all_identifiers = on",
    ],
    "sqlite": [
        *(
            f"PRAGMA {name} = {value}"
            for name, value in {
                "case_sensitive_like": 1,
                "foreign_keys": 1,
                "recursive_triggers": 1,
                "reverse_unordered_selects": 1,
                "full_column_names": 1,
                "short_column_names": 0,
                "count_changes": 1,
                "empty_result_callbacks": 1,
                "ignore_check_constraints": 1,
                "trusted_schema": 0,
                "defer_foreign_keys": 1,
                "automatic_index": 0,
                "cell_size_check": 1,
                "synchronous": 0,
                "temp_store": 2,
                "legacy_alter_table": 1,
            }.items()
        ),
    ],
}
REFUSED = {
    "mysql": {
        "SET timestamp = 1000000000": (ConfigError, "SET timestamp = DEFAULT"),
        "SET timestamp = 2000000000": (ConfigError, "SET timestamp = DEFAULT"),
        "SET character_set_results = binary": (ConfigError, "strings as bytes"),
        "SET collation_connection = binary": (ConfigError, "strings as bytes"),
        "SET SESSION TRANSACTION READ ONLY": (StoreUnavailable, "READ ONLY"),
    },
    "postgresql": {
        "SET search_path = pg_catalog": (ConfigError, "the table of records is missing"),
        "SET default_transaction_read_only = on": (StoreUnavailable, "read-only"),
    },
    "sqlite": {"PRAGMA query_only = 1": (StoreUnavailable, "readonly")},
}

BEGINS = {"sqlite": "BEGIN", "postgresql": "BEGIN", "mysql": "START TRANSACTION"}
EVERYTHING = {
    "sqlite": "SELECT {}, expire_at - updated_at, updated_at / 1000000, created_at / 1000000, "
    "CAST(strftime('%s') AS INTEGER) FROM idempotent_record",
    "postgresql": "SELECT {}, expire_at - updated_at, extract(epoch FROM updated_at)::bigint, "
    "extract(epoch FROM created_at)::bigint, extract(epoch FROM now())::bigint "
    "FROM idempotent_record",
    "mysql": "SELECT {}, TIMESTAMPDIFF(SECOND, updated_at, expire_at), "
    "TIMESTAMPDIFF(SECOND, '1970-01-01', updated_at), "
    "TIMESTAMPDIFF(SECOND, '1970-01-01', created_at), "
    "TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP()) FROM idempotent_record",
}
ASKED = (
    "idem_key, biz_type, prefix, payload_hash, status, result_payload, codec, retryable, number, "
    "hold, lease_until, superseded, format"
)


def stored(world):
    """All records, as another session sees them, and whether their times are near now; removes them."""
    rows = []
    for *row, updated, created, now in world.query(EVERYTHING[world.kind.dialect].format(ASKED)):
        rows.append((*row, abs(now - updated) < 3600, abs(now - created) < 3600))
    world.query("DELETE FROM idempotent_record")
    return sorted(rows, key=repr)


async def changed(world, work, setting):
    """Change a session; psycopg begins a transaction for that, which some settings do not reach."""
    await work.run(setting)
    if world.kind.dialect == "postgresql":
        await work.run("COMMIT")


async def used(world, idem, setting):
    """Let a session with this setting claim a new key and a failed one, and replay both."""
    with pytest.raises(ZeroDivisionError):
        await world.done(idem.execute("failed", _failing(world), policy=RETRYABLE, payload="p"))
    async with world.idle() as work:
        if setting is not None:
            await changed(world, work, setting)
        for key in ("new", "failed"):
            for replayed in (False, True):
                await work.run(BEGINS[world.kind.dialect])
                async with world.once(idem, work, key, payload="p", policy=KEPT) as attempt:
                    assert attempt.replayed is replayed, (setting, key)
                    if not replayed:
                        attempt.result = {"text": "", "more": "it's \\ \N{PARTY POPPER}"}
                await work.run("COMMIT")
                assert attempt.number == 1 + (key == "failed"), (setting, key)
    return stored(world)


RETRYABLE = Policy(failure="retryable")
KEPT = Policy(ttl=86400)

PLAIN = {"sqlite3", "aiosqlite", "psycopg", "asyncpg", "pymysql", "asyncmy"}
on_each = pytest.mark.parametrize(
    "world",
    [kind for kind in KINDS if kind.name in PLAIN],
    ids=lambda kind: kind.name,
    indirect=True,
)


@on_each
@pytest.mark.more(one_of=2)
async def test_no_setting_of_a_session_changes_what_a_record_says(world):
    async with world.engine(prefix="") as idem:
        plain = await used(world, idem, None)
        assert [row[-2:] for row in plain] == [(True, True)] * 2
        for setting in HARMLESS[world.kind.dialect]:
            assert await used(world, idem, setting) == plain, setting


@on_each
async def test_a_setting_under_which_no_record_would_be_right_is_refused_before_anything_is_stored(
    world,
):
    async with world.engine() as idem:
        for setting, (error, words) in REFUSED[world.kind.dialect].items():
            async with world.idle() as work:
                await changed(world, work, setting)
                await work.run(BEGINS[world.kind.dialect])
                with pytest.raises(error, match=words):
                    async with world.once(idem, work, "new"):
                        pytest.fail(f"it ran: {setting}")
                await work.run("ROLLBACK")
            assert stored(world) == [], setting


@pytest.mark.parametrize(
    "setting",
    [
        "SET timestamp = 1000000000",
        "SET sql_select_limit = 0",
        "SET sql_mode = 'EMPTY_STRING_IS_NULL'",
    ],
)
def test_a_store_sets_the_sessions_right_that_an_application_opens_for_it(mysql_url, setting):
    def connect():
        return pymysql.connect(**mysql_login(mysql_url), init_command=setting)

    with (
        contextlib.closing(MySQLStore(connect=connect)) as store,
        Idempotency(store) as idem,
        Idempotency(mysql_url) as plain,
    ):
        assert idem.execute("k", lambda: "ran") == plain.execute("k", pytest.fail) == "ran"
        kept = plain.peek("k")
        assert abs(kept.now - kept.updated_at) < 3600
        assert idem.execute("k", pytest.fail) == "ran"


@pytest.mark.parametrize("kept", [1000000000.0, 1000000000.5])
def test_only_a_clock_that_stands_still_was_set(mysql_url, kept):
    with Idempotency(mysql_url) as idem:
        asking = records_of(idem.internals.store, "mysql", None).prepare(2.5, wait=False)
        next(asking)
        database = mysql_login(mysql_url)["database"]
        session = (50, database, "11.4.2-MariaDB", 1 << 24, 0, "", 0, 1000000000.0, 7)
        assert "timestamp" in asking.send(Reply([session], 1)).sql
        if kept == session[-2]:
            with pytest.raises(ConfigError, match="7 seconds"):
                asking.send(Reply([(kept,)], 1))
        else:
            assert asking.send(Reply([(kept,)], 1)).parameters == (0,)


def test_no_converter_of_an_application_reads_a_record(sqlite_url):
    def convert(value):
        return f"converted {value}"

    declared = ("BLOB", "TEXT", "INTEGER")
    with contextlib.ExitStack() as stack:
        for name in declared:
            sqlite3.register_converter(name, convert)
            stack.callback(sqlite3.converters.pop, name)
        connection = stack.enter_context(
            contextlib.closing(
                sqlite3.connect(
                    path_of(sqlite_url), detect_types=sqlite3.PARSE_DECLTYPES, isolation_level=None
                )
            )
        )
        idem = stack.enter_context(Idempotency(sqlite_url))
        with pytest.raises(ZeroDivisionError):
            idem.execute("k", lambda: 1 / 0, policy=RETRYABLE)
        for replayed in (False, True):
            connection.execute("BEGIN IMMEDIATE")
            with idem.transaction(connection, "k") as attempt:
                assert (attempt.number, attempt.replayed) == (2, replayed)
                if not replayed:
                    attempt.result = "done"
            connection.execute("COMMIT")
        assert attempt.result == idem.execute("k", pytest.fail) == "done"
        given = stack.enter_context(contextlib.closing(SQLiteStore(connection=connection)))
        assert Idempotency(given).execute("k", pytest.fail) == "done"
