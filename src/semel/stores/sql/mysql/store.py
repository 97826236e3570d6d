"""The store for threads, on PyMySQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from semel.core.records import Request
from semel.errors import StoreError
from semel.stores.registry import DEFAULT_PREFIX, DEFAULT_TIMEOUT
from semel.stores.sql.members import filled_in, left_open
from semel.stores.sql.mysql import threads
from semel.stores.sql.mysql.many import Together
from semel.stores.sql.mysql.parts import (
    BATCH_CONNECTIONS,
    RENEWAL_CONNECTIONS,
    Options,
    Setup,
    set_up,
)
from semel.stores.sql.store import SQLStore

T = TypeVar("T")


def open_store(url: str, *, prefix: str, timeout: float, **options: Any) -> MySQLStore:
    """Open a store for threads; the first call connects."""
    return MySQLStore(url, prefix=prefix, timeout=timeout, **options)


class MySQLStore(SQLStore):
    """A store for threads, with a small pool of connections.

    It takes a URL, or `connect=`, a function that opens a PyMySQL connection; what it opens is the
    store's own from then on. Stores with different prefixes may share a table and never see each
    other's records.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        connect: threads.Connect | None = None,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[Options],
    ) -> None:
        setup = set_up(url, connect, threads.connector, prefix, timeout, **options)
        pool = threads.Pool(setup.connect, setup.place, setup.timeout, setup.max_size)
        batches = self._hurried(setup, BATCH_CONNECTIONS)
        renewals = self._hurried(setup, RENEWAL_CONNECTIONS)
        # Not those of renewals: nothing else may keep them busy.
        pool.spares, batches.spares, renewals.spares = (batches,), (pool,), (pool, batches)
        self._database = setup.database
        self._schema = setup.schema
        self._mysql = threads.Executor(pool, setup.timeout, setup.schema)
        self._together = Together(
            setup.verbs,
            threads.Executor(batches, setup.timeout, setup.schema),
            threads.Executor(renewals, setup.timeout, setup.schema),
        )
        self._mysql_verbs = setup.verbs
        super().__init__(setup.verbs, self._mysql)

    def _hurried(self, setup: Setup[threads.Connect], size: int) -> threads.Pool:
        return threads.Pool(setup.connect, setup.place, setup.timeout, size, patient=False)

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer requests of one kind in one statement, as far as that goes."""
        told = self._together.send(requests)
        return filled_in(told, super().send(left_open(requests, told)))

    def close(self) -> None:
        """Close the connections."""
        self._together.close()
        super().close()

    def create_nothing(self) -> None:
        """From now on, raise ConfigError where a call would create the table."""
        self._schema.create_nothing()

    def migrate(self, *, columns: Mapping[str, str] | None = None) -> int:
        """Make the table or bring it up to date, and return its version; once is enough.

        `columns` are added with their types: `{"tenant_id": "bigint"}`.
        """
        return self._mysql.migrate({} if columns is None else columns)

    def diagnose(self) -> list[str]:
        """Tell what the server's settings put at risk."""
        return self._run(self._mysql_verbs.diagnose())

    def migration(self) -> str:
        """Write what `migrate` would run on an empty database, for a person to read and run."""
        return self._schema.script()
