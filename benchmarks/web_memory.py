"""Two hundred requests of a megabyte at once, answered with a megabyte: how much memory is that?

The handlers wait until all requests are in, so that every body, and then every answer, is held at
the same time. Told is the growth of the server's memory at its highest, as a ratio to what the caps
of the middleware allow: so many times `max_body` and `max_response`. Exits non-zero above 1.

    python -m benchmarks.web_memory [--requests 200]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.backends import redis
from benchmarks.stalls import before_others

MIB = 1024 * 1024
SMALL = 2


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Wait until as many requests are in as were announced, then answer with as much as came."""
    if scope["type"] != "http":
        return
    message = await receive()
    size = len(message["body"])
    del message
    gate = GATES.setdefault(scope["path"], asyncio.Barrier(int(scope["path"][1:])))
    await gate.wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": os.urandom(size)})


GATES: dict[str, asyncio.Barrier] = {}


def serve(url: str) -> None:
    import socket

    import uvicorn

    from semel.adapters.asgi import IdempotencyMiddleware

    app = IdempotencyMiddleware(application, url, max_body=MIB, max_response=MIB)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


def highest(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


async def ask(port: int, requests: int, size: int) -> None:
    """Send so many requests at once, and read every answer to its end."""

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /{requests} HTTP/1.1\r\nhost: x\r\nidempotency-key: {size}-{number}\r\n"
            f"content-length: {size}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + bytes(size))
        got = await reader.read(12)
        while await reader.read(MIB):
            pass
        writer.close()
        if got != b"HTTP/1.1 200":
            raise AssertionError(got)

    await asyncio.gather(*(one(number) for number in range(requests)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    before_others()
    with redis() as url:
        command = [sys.executable, "-m", "benchmarks.web_memory", "--serve", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                port = int(server.stdout.readline())
                asyncio.run(ask(port, SMALL, 100))
                before = highest(server.pid)
                asyncio.run(ask(port, options.requests, MIB))
                growth = highest(server.pid) - before
            finally:
                server.terminate()
    caps = options.requests * 2 * MIB
    print(
        f"{options.requests} requests of 1 MiB at once: {growth / MIB:.0f} MiB more than before; "
        f"the caps allow {caps / MIB:.0f} MiB: ratio {growth / caps:.2f} (at most 1)"
    )
    return int(growth > caps)


if __name__ == "__main__":
    sys.exit(main())
