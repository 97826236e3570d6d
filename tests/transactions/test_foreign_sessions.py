"""MySQL sessions that semel did not set up: no setting of theirs changes what a record says."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pymysql
import pytest

from semel import ConfigError, Idempotency
from semel.stores.sql.mysql import MySQLStore
from transactions.kinds import KINDS, mysql_login

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
