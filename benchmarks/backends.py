"""Private servers for the benchmarks, durable as in production, and the URLs of their stores.

On free loopback ports, with their data in temporary folders; the starters are those of the tests.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from servers.mariadb import mariadb_server as _mariadb_server
from servers.postgres import postgres_server as _postgres_server
from servers.rabbitmq import rabbitmq_server as _rabbitmq_server
from servers.redis import redis_server as _redis_server

MEMORY = "/dev/shm"  # noqa: S108 - a folder of our own is made in it


@contextmanager
def redis_server() -> Iterator[Any]:
    """A Redis without persistence; `.url` opens a store on it."""
    with _redis_server() as server:
        yield server


@contextmanager
def postgres_server(*, durable: bool = True) -> Iterator[Any]:
    """A PostgreSQL with fsync; `.fresh_database()` gives a URL."""
    settings = ("max_connections=300", "shared_buffers=128MB", "max_wal_size=2GB")
    with _postgres_server(*settings, durable=durable) as server:
        yield server


@contextmanager
def mariadb_server(*, durable: bool = True) -> Iterator[Any]:
    """A MariaDB that flushes each commit; `.database()` gives a URL."""
    settings = [
        f"--innodb-flush-log-at-trx-commit={int(durable)}",
        "--innodb-buffer-pool-size=128M",
        # Its default. With that of the tests, a tenth, it writes its pages all the time to make
        # room in the log, and more so the more is committed.
        "--innodb-log-file-size=96M",
    ]
    if durable:
        settings.append("--innodb-flush-method=O_DIRECT")  # the server of the tests does not sync
    with _mariadb_server(*settings) as server:
        yield server


@contextmanager
def rabbitmq_server() -> Iterator[Any]:
    """A RabbitMQ; `.virtual_host()` gives one with a URL."""
    with _rabbitmq_server() as server:
        yield server


@contextmanager
def in_memory() -> Iterator[None]:
    """Let temporary folders be in memory, where there is room: a disk has moments of its own."""
    before, tempfile.tempdir = tempfile.tempdir, MEMORY if Path(MEMORY).is_dir() else None
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def pinned(*pids: int) -> Iterator[None]:
    """Keep this process and these servers on one core, where a round trip is steadiest.

    What a server starts later stays there too.
    """
    if not hasattr(os, "sched_setaffinity"):  # only Linux has it
        yield
        return
    before = os.sched_getaffinity(0)
    core = {max(before)}
    for pid in (os.getpid(), *pids):
        pin(pid, core)
    try:
        yield
    finally:
        pin(os.getpid(), before)


def pin(pid: int, cores: set[int]) -> None:
    """Keep a process on these cores: every thread, those that run already too."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), cores)


# --- the same, as URLs -------------------------------------------------------------------


@contextmanager
def sqlite() -> Iterator[str]:
    """The URL of a database in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        yield f"sqlite:///{folder}/bench.db"


@contextmanager
def redis() -> Iterator[str]:
    """The URL of a Redis."""
    with redis_server() as server:
        yield server.url


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    with postgres_server() as server:
        yield server.fresh_database()


@contextmanager
def mariadb() -> Iterator[str]:
    """The URL of an empty MariaDB database."""
    with mariadb_server() as server:
        yield server.database()


BACKENDS = {"sqlite": sqlite, "redis": redis, "postgresql": postgres, "mariadb": mariadb}
