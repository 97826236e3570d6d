"""Makes operations visible: in metrics, and where their effects are, in logs, SQL and messages.

`Tally` counts events in this process. `semel.observe.prometheus` and `semel.observe.opentelemetry`
export them; `semel.observe.sqlalchemy` comments every statement of a SQLAlchemy engine.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from semel.core.attempts import current_attempt
from semel.observe.tally import Histogram, Tally, Totals

__all__ = [
    "CommentedCursor",
    "Histogram",
    "KeyFilter",
    "Tally",
    "Totals",
    "commented",
    "message_headers",
    "sql_comment",
]


def message_headers(part: str, header: str = "idempotency-key") -> dict[str, str]:
    """Return the headers for a message that the running attempt sends; none if no attempt runs.

    `header` is the name of the header with the key. `part` names the message within the operation,
    as in `Attempt.derive`: it has the same key on every attempt, so the consumer distinguishes a
    message sent twice from a second message.
    """
    attempt = current_attempt()
    return {} if attempt is None else {header: attempt.derive(part)}


class KeyFilter(logging.Filter):
    """Adds `semel_scope`, `semel_key_digest` and `semel_attempt` to log records.

    Add it to handlers: `handler.addFilter(KeyFilter())`. The raw key may be a secret, so
    `semel_key` is `-` unless you ask for it.
    """

    def __init__(self, *, key: bool = False) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to the record, and keep every record."""
        attempt = current_attempt()
        record.semel_scope = "-" if attempt is None else attempt.scope
        record.semel_key_digest = "-" if attempt is None else attempt.identity.key_digest
        record.semel_attempt = "-" if attempt is None else attempt.number
        record.semel_key = attempt.key if attempt is not None and self._key else "-"
        return True


# --- SQL, with a comment that logs and monitors of the database show ------------------------------
#
#     INSERT /* semel scope=orders.create key=order:42 attempt=2 */ INTO orders ...
#
# A key is the user's: what could end the comment, start another one, or be taken for a parameter by
# a driver is written as `~` and its UTF-8 bytes in hexadecimal.

_ESCAPED = re.compile(
    r"[^A-Za-z0-9_.:@,=+-]"  # above all * and / (comments), % (parameters), ~ (this very escape)
    r"|(?<![\w:]):"  # SQLAlchemy's text() takes ":name" behind anything but a word for a parameter
)
_FIRST_WORD = re.compile(r"\s*[A-Za-z]+(?=\s)")


def sql_comment() -> str:
    """Return the SQL comment of the running attempt, or "" if none runs."""
    attempt = current_attempt()
    if attempt is None:
        return ""
    scope, key = _escaped(attempt.scope), _escaped(attempt.key)
    return f"/* semel scope={scope} key={key} attempt={attempt.number} */"


def commented(sql: str) -> str:
    """Return the statement `sql` with the running attempt's comment behind its first word.

    Drivers look at both ends of a statement (PyMySQL for bulk inserts, sqlite3 for transactions),
    and lists of running statements show only its beginning.
    """
    comment = sql_comment()
    if not comment:
        return sql
    first = _FIRST_WORD.match(sql)
    if first is None:
        return f"{sql} {comment}"
    return f"{first[0]} {comment}{sql[first.end() :]}"


class CommentedCursor:
    """Adds the comment to every statement of a cursor class, mixed in before it.

    class Cursor(CommentedCursor, psycopg.Cursor): ...     # cursor_factory=Cursor
    class Cursor(CommentedCursor, pymysql.cursors.Cursor): ...     # cursorclass=Cursor

    Works for `AsyncCursor` too. Statements that are not text (psycopg.sql) are left as they are.
    """

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the statement `query` with the comment in it."""
        return super().execute(_commented_text(query), *args, **kwargs)  # type: ignore[misc]

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the statement `query`, with the comment in it, for each set of parameters."""
        return super().executemany(_commented_text(query), *args, **kwargs)  # type: ignore[misc]


def _commented_text(query: Any) -> Any:
    # A driver may build executemany on execute: one comment is enough.
    return commented(query) if isinstance(query, str) and "/* semel " not in query else query


def _escaped(text: str) -> str:
    return _ESCAPED.sub(_hexadecimal, text)


def _hexadecimal(found: re.Match[str]) -> str:
    return "".join(f"~{byte:02x}" for byte in found[0].encode())
