"""Every statement of a SQLAlchemy engine tells the operation that runs it."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from semel import Idempotency
from semel.observe.sqlalchemy import comment_sql


def statements(engine):
    """What reaches the driver, after all hooks."""
    seen = []

    def note(*told):
        seen.append(told[2])

    sa.event.listen(engine, "after_cursor_execute", note)
    return seen


def test_statements_inside_an_attempt_are_commented():
    engine = sa.create_engine("sqlite://")
    seen = statements(engine)
    comment_sql(engine)
    comment_sql(engine)  # once is enough
    with engine.connect() as connection, Idempotency("memory://") as idem:
        connection.execute(sa.text("SELECT 'outside'"))

        def effect():
            query = sa.text("SELECT :word WHERE 1 = :one")
            return connection.execute(query, {"word": "100%", "one": 1}).scalar()

        assert idem.execute("*/:word", effect, scope="orders") == "100%"
    assert seen == [
        "SELECT 'outside'",
        "SELECT /* semel scope=orders key=~2a~2f~3aword attempt=1 */ ? WHERE 1 = ?",
    ]
    engine.dispose()


def test_text_with_the_comment_in_it_has_no_parameter_too_many():
    from semel.observe import commented

    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection, Idempotency("memory://") as idem:

        def effect():
            return connection.execute(sa.text(commented("SELECT 1"))).scalar()

        for key in (":word", "a:word", "a-:word", "a::word", "::word"):
            assert idem.execute(key, effect) == 1
    engine.dispose()


async def test_an_async_engine_is_commented_too():
    engine = create_async_engine("sqlite+aiosqlite://")
    comment_sql(engine)
    seen = statements(engine.sync_engine)
    with Idempotency("memory://") as idem:
        async with engine.connect() as connection:
            with idem.attempt("order:42", scope="orders"):
                await connection.execute(sa.text("SELECT 1"))
    await engine.dispose()
    assert seen == ["SELECT /* semel scope=orders key=order:42 attempt=1 */ 1"]
