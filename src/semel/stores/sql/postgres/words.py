"""The fragments that PostgreSQL's statements are made of: values, times, conditions.

Values have names here (`:owner`) and become `$1`, `$2`... once, when the store is made. Each has
its type beside it where PostgreSQL could not tell it from a NULL. Times leave as microseconds,
which is what `rows` reads: no time zone and no last year of Python's calendar comes in between.
`r` is the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from semel.core.records import State
from semel.stores.sql.rows import COLUMNS
from semel.stores.sql.verbs import Statement

NOW: Final = "statement_timestamp()"

TIMES: Final = frozenset({"expire_at", "created_at", "updated_at", "lease_until"})

OURS: Final = frozenset({*COLUMNS, "digest", "prefix", "takeover", "waited_for"})
"""Every column of the table that semel itself writes."""

_PLACEHOLDER = re.compile(r"(?<!:):([a-z_][a-z0-9_]*)")


class Query:
    """A statement with named values."""

    def __init__(self, sql: str, *, writes: bool) -> None:
        names = tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))
        numbers = {name: f"${number}" for number, name in enumerate(names, 1)}
        self._sql = " ".join(_PLACEHOLDER.sub(lambda found: numbers[found[1]], sql).split())
        self._writes = writes
        # Twice the first: of one name alone, it would give the value and no tuple.
        self._pick = itemgetter(names[0], *names)

    def __call__(self, **values: Any) -> Statement:
        """Give each name its value; those that the statement does not know are left out."""
        return self.fill(values)

    def fill(self, values: Mapping[str, Any]) -> Statement:
        """Do the same with a mapping, which is quicker."""
        return Statement(self._sql, self._pick(values)[1:], self._writes)


def micros(moment: str) -> str:
    """Turn a time into microseconds."""
    return f"(extract(epoch FROM {moment}) * 1000000)::bigint"


def after(seconds: str) -> str:
    """Name the moment that is so many seconds from now."""
    return f"{NOW} + :{seconds}::float8 * interval '1 second'"


def moment(name: str) -> str:
    """Turn microseconds into a time."""
    return f"'epoch'::timestamptz + :{name}::bigint * interval '1 microsecond'"


_ROW = ", ".join(micros(f"r.{name}") if name in TIMES else f"r.{name}" for name in COLUMNS)
SEEN = f"{_ROW}, {micros(NOW)}"
"""A row as `verbs` reads it: the columns of `rows`, then the time of the statement."""

CHANNEL: Final = "semel_wakeup"
"""Where wake-ups go. One channel for all keys: a listener needs no statement for each of them."""

CARRIED: Final = 4096
"""The longest result, in bytes, that goes along; a message holds 8,000 at most, as text."""

_OUTCOME = ", ".join(
    f"translate(encode({value}, 'base64'), chr(10), '')" if is_binary else value
    for value, is_binary in {
        "r.owner": True,
        "r.payload_hash": True,
        "r.status": False,
        "r.number": False,
        "r.fence": False,
        f"extract(epoch FROM r.expire_at - {NOW})": False,
        "r.codec": False,
        "r.result_payload": True,
    }.items()
)

WAKE = f"CASE WHEN r.waited_for THEN pg_notify('{CHANNEL}', r.digest::text) END"
"""Tells those who wait that they should ask again."""

WAKE_WITH_OUTCOME = f"""
    CASE WHEN r.waited_for THEN pg_notify('{CHANNEL}', r.digest::text || CASE
        WHEN NOT r.retryable AND octet_length(r.result_payload) <= {CARRIED}
        THEN json_build_array({_OUTCOME})::text ELSE '' END) END
"""
"""Tells those who wait, with the outcome if it is final and small; `wakeups` reads it."""

THIS = "r.digest = :digest AND r.idem_key = :key AND r.biz_type = :scope"
GONE = f"(r.expire_at IS NOT NULL AND r.expire_at <= {NOW})"
RUNNING = f"r.status::integer = {State.PROCESSING:d}"
"""For statements about one record, or some: the cast keeps them from the index of all running ones.
While few run, the planner prefers it to the primary key; and a prepared plan is kept."""
OWN = f"({RUNNING} AND r.owner = :owner)"
LIVE = f"(r.status = {State.PROCESSING:d} AND r.lease_until > {NOW})"
