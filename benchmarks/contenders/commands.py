"""The very commands that semel's stores send, made before the clock starts.

The floors send them without semel. They are built by the stores' own verbs, so that they stay the
same when those change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from semel import open_store
from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity
from semel.stores.redis.commands import Argument, Commands, KeyLayout
from semel.stores.redis.replies import LONGEST_HEADER, pack_outcome
from semel.stores.sql.mysql.statements import MySQLTable
from semel.stores.sql.postgres.verbs import PostgresVerbs
from semel.stores.sql.sqlite_statements import SQLiteTable, SQLiteVerbs
from semel.stores.sql.verbs import Operation, Reply, Statement

LEASE = 30.0
TTL = 86_400.0
TABLE = "idempotent_record"

Command: TypeAlias = tuple[Argument, ...]


class Asked(NamedTuple):
    """What a first execution asks of a store."""

    claim: ClaimRequest
    complete: CompleteRequest


def asked(key: str, result: str) -> Asked:
    """A claim by a new owner, and its success."""
    identity, owner = Identity("default", key), os.urandom(12)
    stored = Encoded("json/1", msgspec.json.encode(result))
    return Asked(
        ClaimRequest(identity, owner, None, LEASE, TTL),
        CompleteRequest(identity, owner, stored, TTL),
    )


def make_table(url: str) -> None:
    """Let semel make its table, for those who use it without semel."""
    store: Any = open_store(url)
    store.migrate()
    store.close()


def redis_commands(keys: Sequence[str], result: str, prefix: str) -> list[tuple[Command, Command]]:
    """Claim and complete of each key, as EVALSHA."""
    verbs = Commands(KeyLayout(prefix))
    return [
        (
            verbs.claim(ask.claim).parts(with_text=False),
            verbs.complete(ask.complete).parts(with_text=False),
        )
        for ask in (asked(key, result) for key in keys)
    ]


def large_redis_commands(
    keys: Sequence[str], result: str, prefix: str
) -> list[tuple[list[Command], list[Command]]]:
    """What a first execution and a replay of each key send when the result is large."""
    verbs = Commands(KeyLayout(prefix))
    made: list[tuple[list[Command], list[Command]]] = []
    for ask in (asked(key, result) for key in keys):
        claim = verbs.claim(ask.claim)
        upload, end = verbs.upload(ask.complete)
        value = bytes(LONGEST_HEADER) + pack_outcome(ask.complete.result)
        sent: Command = ("SET", *upload.keys, value, "PX", 60_000)
        first = [claim.parts(with_text=False), sent, end.parts(with_text=False)]
        made.append((first, [first[0], ("GET", claim.keys[0])]))
    return made


def postgres_statements(
    keys: Sequence[str], result: str, prefix: str
) -> list[tuple[Statement, Statement]]:
    """Claim and complete of each key: a statement each."""
    verbs = PostgresVerbs(TABLE, prefix, {})
    return [
        (_first(verbs.claim(ask.claim)), _first(verbs.complete(ask.complete)))
        for ask in (asked(key, result) for key in keys)
    ]


def mysql_statements(
    keys: Sequence[str], result: str, prefix: str
) -> list[tuple[Statement, Statement]]:
    """Claim and complete of each key; what the claim reads is its `then`."""
    table = MySQLTable(TABLE, prefix, {})
    return [
        (table.claim(ask.claim), table.complete(ask.complete))
        for ask in (asked(key, result) for key in keys)
    ]


class SQLiteStatements(NamedTuple):
    """Each verb looks at the row, then writes it."""

    look: Statement
    claim: Statement
    complete: Statement


def sqlite_statements(
    keys: Sequence[str], result: str, prefix: str, now: float
) -> list[SQLiteStatements]:
    """Claim and complete of each key."""
    verbs = SQLiteVerbs(SQLiteTable(TABLE, prefix, lambda: now))
    return [_sqlite(verbs, asked(key, result)) for key in keys]


def _sqlite(verbs: SQLiteVerbs, ask: Asked) -> SQLiteStatements:
    judged = verbs.claim(ask.claim).look
    assert judged is not None
    claiming = judged()
    look = next(claiming)
    claim = claiming.send(Reply([], 0))
    completing = verbs.renew(ask.complete).start()  # judges any request
    next(completing)
    row = claim.parameters[2:]  # behind the digest and the prefix, it is what a look would read
    return SQLiteStatements(look, claim, completing.send(Reply([row], 1)))


def _first(operation: Operation[Any]) -> Statement:
    return next(operation.start())
