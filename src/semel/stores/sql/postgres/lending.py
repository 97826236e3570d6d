"""What both kinds of sources check before they lend a connection."""

from __future__ import annotations

import os
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from semel.errors import StoreError, StoreUnavailable

_left_alone: list[object] = []


def leave_alone(pool: object) -> None:
    """Keep the parent's pool for ever: to clean it up here could hang, or close its sockets."""
    _left_alone.append(pool)


def check_process(opened_by: int) -> None:
    """Refuse a connection of another process: two programs would speak through one socket."""
    if os.getpid() != opened_by:
        raise StoreUnavailable(
            "the given connection or pool is from before the fork; open another one in this process"
        )


def check_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Refuse while the application's own transaction is open: ours would become part of it."""
    if connection.info.transaction_status in {
        TransactionStatus.INTRANS,
        TransactionStatus.INERROR,
    }:
        raise StoreError(
            "the given connection has an open transaction; commit it or roll it back first, or "
            "give the store a connection of its own"
        )
