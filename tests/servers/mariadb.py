"""A private MariaDB for tests: a free loopback port, a temporary folder, stopped by pid.

with mariadb_server() as server:
    url = server.database()        # an empty database of its own
    server.kill(); server.start()  # a crash, and the recovery
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

from servers.redis import free_port

HOST = "127.0.0.1"
PATIENCE = 60.0
"""For what takes a moment, on a machine whose cores and disk others may keep busy."""
PASSWORD = "only for tests"

SMALL = (
    "--innodb-log-file-size=10M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-data-file-path=ibdata1:8M:autoextend",
    "--innodb-temp-data-file-path=ibtmp1:4M:autoextend",
    "--aria-log-file-size=8M",
)
"""Every server is copied, started and removed within seconds."""

UNSAFE_BUT_QUICK = ("--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync")
"""What is committed outlives a crash of the server, though not one of the machine: no test waits
for a disk that others keep busy."""

PORTS = 5
"""How many ports are tried: the one that was free a moment ago may be somebody's connection."""

_names = itertools.count(1)


def binary(name: str = "mariadbd") -> str:
    """The server's program, which Debian keeps out of the PATH of ordinary users."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/libexec")
    if found is not None:
        return found
    message = f"MariaDB is missing ({name} is not on PATH): run make servers"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def user() -> list[str]:
    """The server refuses to run as root unless told so."""
    return ["--user=root"] if os.geteuid() == 0 else []


def own_tmpdir(folder: Path) -> str:
    """The option that keeps servers apart: each removes, at its start, temporary tables that others
    are using in the same folder, and a fresh installation beside it fails."""
    (folder / "tmp").mkdir(exist_ok=True)
    return f"--tmpdir={folder / 'tmp'}"


class MariaDBServer:
    """One server, with its data in a folder."""

    account = staticmethod(user)

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.socket_path = str(folder / "sock")
        self._command = [
            binary(),
            "--no-defaults",
            *self.account(),
            f"--datadir={folder / 'data'}",
            own_tmpdir(folder),
            f"--socket={self.socket_path}",
            f"--pid-file={folder / 'pid'}",
            f"--bind-address={HOST}",
            f"--port={self.port}",
            "--skip-networking=0",
            "--skip-name-resolve",
            "--max-connections=200",
            *SMALL,
            *UNSAFE_BUT_QUICK,
            *args,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE
        while True:
            if self.process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text()[-3000:])
            with contextlib.suppress(pymysql.Error):
                # Another server may have got the port first, and would answer in its place.
                if self.execute("SELECT @@socket") == [(self.socket_path,)]:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError("the server did not answer")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop politely; a stopped (paused) server is woken to hear it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """The same server, on the same port, with its data."""
        self.stop()
        self.start()

    def client(self, **settings: Any) -> pymysql.connections.Connection:
        """A plain connection of the test's own, as root; the caller closes it."""
        given = {"autocommit": True, "read_timeout": PATIENCE, "connect_timeout": PATIENCE}
        login = {"host": HOST, "port": self.port, "user": "root", "ssl_disabled": True}
        return pymysql.connect(**(login | given | settings))

    def execute(self, sql: str, *parameters: Any, **settings: Any) -> list[tuple[Any, ...]]:
        """Run one statement as root."""
        with contextlib.closing(self.client(**settings)) as client, client.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall())

    def database(self) -> str:
        """Make an empty database, and a user that may do everything in it; returns its URL."""
        if self.process is not None and self.process.poll() is not None:
            self.start()  # it crashed: that is the failure of one test, not of all that follow
        name = f"semel_{os.getpid()}_{next(_names)}"
        self.execute(f"CREATE DATABASE {name} CHARACTER SET latin1")
        self.execute(f"CREATE USER {name}@'%%' IDENTIFIED BY %s", PASSWORD)
        self.execute(f"GRANT ALL ON {name}.* TO {name}@'%'")
        return self.url(name)

    def url(self, database: str, user: str | None = None, password: str = PASSWORD) -> str:
        secret = password.replace(" ", "%20")
        return f"mysql://{user or database}:{secret}@{HOST}:{self.port}/{database}"


@contextlib.contextmanager
def mariadb_server(*args: str) -> Iterator[MariaDBServer]:
    """A server of one's own, stopped and removed in the end."""
    with tempfile.TemporaryDirectory(prefix="semel-mariadb-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(template(), Path(folder) / "data")
        server = _started(Path(folder), *args)
        try:
            yield server
        finally:
            server.stop()


def _started(folder: Path, *args: str) -> MariaDBServer:
    for left in range(PORTS, 0, -1):
        server = MariaDBServer(folder, *args)
        try:
            server.start()
        except BaseException as error:
            server.stop()
            if left == 1 or "already in use" not in str(error):
                raise
        else:
            break
    return server


@functools.cache
def template() -> Path:
    """Data of a fresh installation, made once per process and copied for each server."""
    # On a busy machine the installer now and then stumbles over its own temporary tables.
    for _ in range(3):
        folder = Path(tempfile.mkdtemp(prefix="semel-mariadb-template-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        made = _install(folder)
        if made.returncode == 0:
            return folder / "data"
    raise RuntimeError(f"mariadb-install-db: {made.stdout[-2000:]}{made.stderr[-2000:]}")


def _install(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            binary("mariadb-install-db"),
            "--no-defaults",
            *user(),
            f"--datadir={folder / 'data'}",
            own_tmpdir(folder),
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            *SMALL,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
