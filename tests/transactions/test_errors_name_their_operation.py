"""Errors of transactional mode say which operation they are about."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from semel import (
    ConfigError,
    NestedCall,
    OutcomeUnknown,
    PayloadMismatch,
    RetryTransaction,
    StoreUnavailable,
)
from semel.core.records import Identity
from transactions.kinds import KINDS

pytestmark = pytest.mark.parametrize(
    "world",
    [kind for kind in KINDS if kind.name in {"sqlite3", "aiosqlite"}],
    ids=lambda kind: kind.name,
    indirect=True,
)

DIGEST = Identity("default", "order-1").digest.hex()
SAID = f"[scope=default key_digest={DIGEST}]"


def assert_named(raised):
    error = raised.value
    assert (error.scope, error.key_digest) == ("default", DIGEST)
    assert str(error).endswith(SAID)
    assert "order-1" not in str(error)


async def test_a_connection_without_a_transaction(world):
    async with world.engine() as idem, world.idle() as work:
        with pytest.raises(ConfigError) as raised:
            async with world.once(idem, work):
                pytest.fail("it ran")
    assert_named(raised)


async def test_what_is_no_connection(world):
    async with world.engine() as idem:
        with pytest.raises(ConfigError) as raised:
            async with world.entered(idem.transaction(42, "order-1")):
                pytest.fail("it ran")
    assert_named(raised)


async def test_another_payload(world):
    async with world.engine() as idem:
        await world.pay(idem, payload=1)
        with pytest.raises(PayloadMismatch) as raised:
            await world.pay(idem, payload=2)
    assert_named(raised)


async def test_the_running_block_asks_for_its_own_key(world):
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(NestedCall) as raised:
            async with world.once(idem, work), world.once(idem, work):
                pytest.fail("it ran")
    assert_named(raised)


async def test_a_closed_engine(world):
    async with world.engine() as idem, world.work() as work:
        await world.done(idem.close())
        with pytest.raises(StoreUnavailable) as raised:
            async with world.once(idem, work):
                pytest.fail("it ran")
    assert_named(raised)


async def test_a_commit_inside_the_block_names_the_command_that_decides(world):
    async with world.engine() as idem:
        with contextlib.suppress(Exception):  # the transaction is gone
            async with world.work() as work:
                with pytest.raises(OutcomeUnknown) as raised:
                    async with world.once(idem, work) as attempt:
                        await work.run("COMMIT")
                        attempt.result = "paid"
    assert_named(raised)
    command = f"semel resolve --digest default {DIGEST} --succeeded JSON"
    assert f"`{command}`" in str(raised.value)


def locked():
    """What SQLite says of a file that another connection has locked."""
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname = "SQLITE_BUSY"
    return error


async def test_a_block_that_the_database_gave_up(world):
    async with world.engine() as idem:
        with pytest.raises(RetryTransaction) as raised:
            async with world.work() as work, world.once(idem, work):
                raise locked()
    assert_named(raised)
    assert isinstance(raised.value.__cause__, sqlite3.OperationalError)


async def test_a_unit_of_work_that_was_repeated_too_often(world):
    def begin():
        raise locked()

    async with world.engine() as idem:
        with pytest.raises(RetryTransaction) as raised:
            await world.done(idem.run_transaction(begin, "order-1", lambda _: 1, retries=0))
    assert_named(raised)


async def test_a_number_of_retries_that_cannot_be_meant(world):
    async with world.engine() as idem:
        with pytest.raises(ConfigError) as raised:
            await world.done(idem.run_transaction(world.work, "order-1", lambda _: 1, retries=-1))
    assert_named(raised)


async def test_an_error_of_the_block_reaches_the_caller_as_it_is(world):
    own = StoreUnavailable("of another system")
    async with world.engine() as idem, world.work() as work:
        with pytest.raises(StoreUnavailable) as raised:
            async with world.once(idem, work):
                raise own
    assert raised.value is own
    assert own.key_digest is None
