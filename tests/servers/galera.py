"""A private Galera cluster of three MariaDB nodes: Debian's galera-4 and rsync, stopped by pid.

with galera_cluster() as nodes:
    url = nodes[0].database()      # the same database on every node
    nodes[1].url(...)
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from servers.mariadb import HOST, MariaDBServer, template
from servers.redis import free_port

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")
NODES = 3


def account() -> list[str]:
    """The programs that bring a node up to date refuse to run as root."""
    return ["--user=mysql"] if os.geteuid() == 0 else []


class GaleraNode(MariaDBServer):
    """One node."""

    account = staticmethod(account)

    def is_ready(self) -> bool:
        """Whether it is in the primary component, and takes statements."""
        return self.execute("SHOW STATUS LIKE 'wsrep_ready'") == [("wsrep_ready", "ON")]

    def isolate(self, *, apart: bool) -> None:
        """Cut it off from the others, or let it come back."""
        self.execute(f"SET GLOBAL wsrep_provider_options = 'gmcast.isolate={apart:d}'")


@contextlib.contextmanager
def galera_cluster() -> Iterator[list[GaleraNode]]:
    """Three nodes, each with a copy of everything."""
    if not PROVIDER.exists() or shutil.which("rsync") is None:
        pytest.fail("galera-4 or rsync is missing: run make test-galera")
    ports = [free_port() for _ in range(NODES)]
    members = ",".join(f"{HOST}:{port}" for port in ports)
    with (
        tempfile.TemporaryDirectory(prefix="semel-galera-", ignore_cleanup_errors=True) as base,
        contextlib.ExitStack() as running,
    ):
        Path(base).chmod(0o755)
        nodes = []
        for number, port in enumerate(ports):
            folder = Path(base, f"node{number}")
            shutil.copytree(template(), folder / "data")
            node = GaleraNode(folder, *_options(port, members if nodes else ""))
            _give_away(folder)
            running.callback(node.stop)
            node.start()
            nodes.append(node)
        yield nodes


def _options(port: int, members: str) -> tuple[str, ...]:
    moves = free_port()
    provider = {
        "gcache.size": "32M",
        "base_port": port,
        "gmcast.listen_addr": f"tcp://{HOST}:{port}",
        "ist.recv_addr": f"{HOST}:{moves}",
        "ist.recv_bind": f"{HOST}:{moves}",
    }
    return (
        "--binlog-format=ROW",
        "--innodb-autoinc-lock-mode=2",
        "--wsrep-on=ON",
        f"--wsrep-provider={PROVIDER}",
        "--wsrep-cluster-name=semel",
        f"--wsrep-cluster-address=gcomm://{members}",
        f"--wsrep-node-address={HOST}:{port}",
        "--wsrep-sst-method=rsync",
        f"--wsrep-sst-receive-address={HOST}:{free_port()}",
        "--wsrep-provider-options="
        + ";".join(f"{name}={value}" for name, value in provider.items()),
    )


def _give_away(folder: Path) -> None:
    if os.geteuid() == 0:
        owner = pwd.getpwnam("mysql")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid)
