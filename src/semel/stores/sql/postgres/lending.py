"""What both kinds of sources check before they lend a connection."""

from __future__ import annotations

import os
import time
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.sql.postgres.aio_sessions import OwnAsyncSession
from semel.stores.sql.postgres.connections import MOMENT, MOST_IDLE
from semel.stores.sql.postgres.sessions import OwnSession
from semel.stores.sql.postgres.settings import Settings
from semel.stores.sql.rows import WITH_UTF8, texts_as_bytes

_left_alone: list[object] = []


def leave_alone(connections: object) -> None:
    """Keep the parent's connections for ever: they are not ours to close."""
    _left_alone.append(connections)


def exhausted(settings: Settings) -> StoreUnavailable:
    """Tell that all connections stayed in use."""
    return StoreUnavailable(
        f"all {settings.max_size} connections to {settings.place} stayed in use; nothing was sent. "
        "Raise max_size, or look for what holds them"
    )


def is_old(session: OwnSession | OwnAsyncSession) -> bool:
    """Whether nobody needed the connection for long."""
    return time.monotonic() - session.idle_since > MOST_IDLE


def just_used(session: OwnSession | OwnAsyncSession) -> bool:
    """Whether it answered a moment ago; if it died since, the statement is sent again."""
    return time.monotonic() - session.idle_since < MOMENT


def check_process(opened_by: int) -> None:
    """Refuse a connection of another process: two programs would speak through one socket."""
    if os.getpid() != opened_by:
        raise StoreUnavailable(
            "the given connection or pool is from before the fork; open another one in this process"
        )


def check_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Refuse while the application's own transaction is open: ours would become part of it."""
    check_answers(connection)
    if connection.info.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }:
        raise open_transaction()


def check_answers(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Refuse a connection whose answers come later, or are not what we ask for."""
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise ConfigError(
            "the connection is in pipeline mode, in which answers come later than semel needs "
            "them; use it outside the block of connection.pipeline()"
        )
    if connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise texts_as_bytes(WITH_UTF8)


def open_transaction() -> StoreError:
    """Tell that the application is in the middle of something."""
    return StoreError(
        "the given connection has an open transaction; commit it or roll it back first, or "
        "give the store a connection of its own"
    )
