"""Input that was built against a parser of ours.

| fault | expected |
|---|---|
| 60 input built against a regular expression or a parser | time grows linearly |

No test here takes a time. Half a megabyte of each kind takes milliseconds if time grows linearly,
and minutes if it grows with the square; a client waits for less than that. `make bench-linear`
compares the times themselves, and `tests/project/test_patterns.py` reads every regular expression.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from web.client import HOST, PATIENCE, Answer, Connection, head

fault = pytest.mark.fault

WORKERS = Path(__file__).parent / "workers"
SERVERS = ("uvicorn-h11", "uvicorn-httptools", "hypercorn", "gunicorn", "waitress")
SIZE = 500_000


def long(text: str, end: str = "", begin: str = "") -> str:
    return begin + text * (SIZE // len(text)) + end


TYPES = {
    "boundaries": long("; boundary=x", '"', "multipart/form-data"),
    "parameters": long("; a=b", ",", "multipart/form-data; boundary=x"),
    "spaces": long(" ", "x", "multipart/form-data;"),
    "quotes": long('; a="', "", "multipart/form-data"),
}
KEYS = {
    "escapes": long("\\\\", "", '"'),
    "parameters": long(";a=1", ",", '"k"'),
    "spaces": long("; ", "", '"k"'),
}


@contextlib.contextmanager
def serving(name: str) -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listening:
        port, fd = listening.getsockname()[1], listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "header_server.py", name, str(fd)],
            cwd=WORKERS,
            env={**os.environ, "PYTHONPATH": str(WORKERS)},
            pass_fds=[fd],
        )
        try:
            yield port
        finally:
            process.kill()
            process.wait(PATIENCE)


@pytest.fixture(scope="module", params=SERVERS)
def port(request) -> Iterator[int]:
    with serving(request.param) as port:
        yield port


def asked(port: int, target: str = "/pay", **lines: str) -> Answer:
    named = [(name.replace("_", "-"), value) for name, value in lines.items()]
    always = [("Host", HOST), ("Connection", "close"), ("Content-Length", "3")]
    connection = Connection(port).send(head("POST", target, [*always, *named]) + b"abc")
    try:
        return connection.answer()
    finally:
        connection.close()


@fault(60)
@pytest.mark.parametrize("kind", TYPES)
def test_a_content_type_built_against_its_parser_stops_no_server(port, kind):
    key = f"type-{kind}"
    assert asked(port, Idempotency_Key=key, Content_Type=TYPES[kind]).status == 201
    again = asked(port, Idempotency_Key=key, Content_Type=TYPES[kind])
    assert (again.status, again.replayed) == (201, True)
    assert asked(port).status == 201


@fault(60)
@pytest.mark.parametrize("kind", KEYS)
def test_a_key_built_against_its_parser_stops_no_server(port, kind):
    answer = asked(port, Idempotency_Key=KEYS[kind])
    assert (answer.status, answer.code) == (400, "invalid_key")
    assert asked(port).status == 201


@fault(60)
def test_a_path_and_a_query_built_against_their_parsers_stop_no_server(port):
    """A server may have a limit of its own: what counts is that it answers the next request."""
    for target in (long("/a"), "/pay?" + long("&key")):
        with contextlib.suppress(OSError, AssertionError):
            asked(port, target)
    assert asked(port, Idempotency_Key="innocent").status == 201
