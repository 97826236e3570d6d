"""Private servers for the benchmarks, durable as in production, and the URLs of their stores."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.mariadb import mariadb_server
from servers.postgres import postgres_server
from servers.redis import redis_server


@contextmanager
def sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        yield f"sqlite:///{folder}/bench.db"


@contextmanager
def redis() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@contextmanager
def postgres() -> Iterator[str]:
    with postgres_server(durable=True) as server:
        yield server.fresh_database()


@contextmanager
def mariadb() -> Iterator[str]:
    with mariadb_server("--innodb-flush-log-at-trx-commit=1") as server:
        yield server.database()


BACKENDS = {"sqlite": sqlite, "redis": redis, "postgresql": postgres, "mariadb": mariadb}
