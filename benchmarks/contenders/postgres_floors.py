"""What lies under semel on PostgreSQL: the same statements, sent by the drivers alone.

Unbatched: each statement is its own commit, as it is usually written, with connections enough.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from pathlib import Path

import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.contenders.commands import (
    make_table,
    postgres_statements,
)
from benchmarks.measuring import (
    AsyncGo,
    Contender,
    Go,
    Kind,
    Place,
    TaskContender,
    ThreadContender,
)
from semel.stores.sql.verbs import Statement

CONNECTIONS = 16
"""Of 4, 8, 16 and 32 about the best for the unbatched designs, on two cores."""


@contextmanager
def _psycopg(place: Place) -> Iterator[Go]:
    make_table(place.url)
    with psycopg.connect(place.url, autocommit=True) as connection:

        def execute(statement: Statement) -> None:
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
                if cursor.description is not None:
                    cursor.fetchall()

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers
            pairs = postgres_statements(keys, place.work.result, "bare:")
            sent = list(chain.from_iterable(pairs) if kind == "first" else (c for c, _ in pairs))
            start = time.perf_counter()
            for statement in sent:
                execute(statement)
            return time.perf_counter() - start

        yield go


PSYCOPG: ThreadContender = Contender(
    "psycopg execute of the same statements", "floor", _psycopg, works=False
)


@contextmanager
def _select_one(place: Place) -> Iterator[Go]:
    with psycopg.connect(place.url, autocommit=True) as connection:

        def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del callers, kind
            start = time.perf_counter()
            for _ in keys:
                connection.execute("SELECT 1").fetchone()
            return time.perf_counter() - start

        yield go


SELECT_ONE: ThreadContender = Contender(
    "psycopg SELECT 1: one bare round trip", "usual", _select_one, works=False
)


@asynccontextmanager
async def _unbatched_psycopg(place: Place) -> AsyncIterator[AsyncGo]:
    make_table(place.url)
    pool = AsyncConnectionPool(
        place.url,
        min_size=CONNECTIONS,
        max_size=CONNECTIONS,
        open=False,
        kwargs={"autocommit": True},
    )

    async def execute(statement: Statement) -> None:
        async with pool.connection() as connection:
            cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
            await cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
            if cursor.description is not None:
                await cursor.fetchall()

    async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
        rest = iter(postgres_statements(keys, place.work.result, "unbatched:"))

        async def caller() -> None:
            for claim, complete in rest:
                await execute(claim)
                if kind == "first":
                    await execute(complete)

        start = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        return time.perf_counter() - start

    async with pool:
        await pool.wait()
        yield go


UNBATCHED_PSYCOPG: TaskContender = Contender(
    "unbatched psycopg, the same statements", "usual", _unbatched_psycopg, works=False
)

PGBENCH_SCRIPT = r"""
\set id random(1, 9000000000000000000)
INSERT INTO pgbench_floor VALUES (:id, 0, NULL) ON CONFLICT DO NOTHING;
UPDATE pgbench_floor SET status = 1, result = 'RESULT' WHERE id = :id;
"""


@asynccontextmanager
async def _pgbench(place: Place) -> AsyncIterator[AsyncGo]:
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS pgbench_floor "
            "(id bigint PRIMARY KEY, status smallint NOT NULL, result text)"
        )
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        script = Path(folder) / "script.sql"
        script.write_text(PGBENCH_SCRIPT.replace("RESULT", place.work.result))

        async def go(keys: Sequence[str], callers: int, kind: Kind) -> float:
            del kind
            clients = min(callers, CONNECTIONS)
            each = max(1, len(keys) // clients)
            ran = await asyncio.create_subprocess_exec(
                *("pgbench", "--no-vacuum", "--protocol=prepared", f"--file={script}"),
                *(f"--client={clients}", f"--jobs={min(2, clients)}"),
                *(f"--transactions={each}", place.url),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output = (await ran.communicate())[0].decode()
            rate = next(line for line in output.splitlines() if line.startswith("tps = "))
            return len(keys) / float(rate.split()[2])

        yield go


PGBENCH: TaskContender = Contender(
    "pgbench, insert then update", "floor", _pgbench, kinds=("first",), works=False
)


def pgbench_is_here() -> bool:
    """Whether the program was found."""
    return shutil.which("pgbench") is not None
