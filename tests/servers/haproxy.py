"""A private HAProxy in front of several HTTP servers, on a free loopback port, stopped by its pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from servers.redis import HOST, free_port, wait_until

CONFIGURATION = """\
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    option redispatch
frontend clients
    bind {host}:{port}
    default_backend services
backend services
    balance roundrobin
    option httpchk GET /ready
    http-check send hdr Host localhost
{servers}
"""


def binary() -> str:
    """The program, from PATH or from where Debian puts it."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is not None:
        return found
    message = "no haproxy: `make servers` installs it from Debian"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@contextlib.contextmanager
def haproxy(
    folder: Path, ports: Sequence[int], *, check: str = "check inter 100ms"
) -> Iterator[int]:
    """Balance over the servers on these ports; its own port."""
    program, port = binary(), free_port()
    servers = "\n".join(f"    server s{each} {HOST}:{each} {check}" for each in ports)
    file, log = folder / "haproxy.cfg", folder / "haproxy.log"
    file.write_text(CONFIGURATION.format(host=HOST, port=port, servers=servers))
    with log.open("ab") as output:
        process = subprocess.Popen([program, "-db", "-f", str(file)], stdout=output, stderr=output)

    def listens() -> bool:
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-2000:])
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return True
        return False

    try:
        wait_until(listens, "HAProxy to listen")
        yield port
    finally:
        process.terminate()
        process.wait()
