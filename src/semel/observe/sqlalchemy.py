"""Puts the running operation into every statement of a SQLAlchemy engine, as a comment."""

from __future__ import annotations

from typing import Any

from semel.core.optional import Needed
from semel.observe import commented

with Needed("semel[sqlalchemy]", by=__name__):
    from sqlalchemy import event


def comment_sql(engine: Any) -> None:
    """Add the running attempt as a comment to each statement of an `engine`, async or not."""
    # An AsyncEngine has its events on the engine inside.
    target = getattr(engine, "sync_engine", engine)
    if not event.contains(target, "before_cursor_execute", _comment):
        event.listen(target, "before_cursor_execute", _comment, retval=True)


def _comment(
    _connection: Any,
    _cursor: Any,
    statement: str,
    parameters: Any,
    _context: Any,
    _many: bool,
) -> tuple[str, Any]:
    return commented(statement), parameters
