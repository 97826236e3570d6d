"""A server between a client and the service, which loses or makes answers as it is told.

`rule(verb, nth)` is asked about each request, where `nth` counts the requests of that verb from 1:

- None: the request is passed on, and the answer passed back.
- "lose the answer": it is passed on, and the connection is closed instead of an answer.
- "hang": it is passed on, and no answer comes until the client closes the connection.
- "lose": the connection is closed, and the service sees nothing.
- a `Made`: that is the answer, and the service sees nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Made(NamedTuple):
    """An answer that does not come from the service."""

    status: int
    body: bytes = b"<html>"
    headers: Mapping[str, str] = {}


Rule = Callable[[str, int], "str | Made | None"]


class Between:
    """Where it listens, and what came."""

    def __init__(self, port: int, rule: Rule) -> None:
        self.port = port
        self.rule = rule
        self.came: list[tuple[str, dict[str, Any]]] = []
        """Verb and body of each request; {} if the body is no JSON."""
        self.headers: list[Mapping[str, str]] = []
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.url = ""

    def verbs(self) -> list[str]:
        """The verbs that came, without renewals: how many of them depends on time."""
        return [verb for verb, _ in self.came if verb != "renew"]

    def note(self, verb: str, body: bytes, headers: Mapping[str, str]) -> str | Made | None:
        fields = {}
        with contextlib.suppress(ValueError):
            fields = json.loads(body)
        with self._lock:
            self._count[verb] += 1
            self.came.append((verb, fields))
            self.headers.append(headers)
            return self.rule(verb, self._count[verb])


@contextlib.contextmanager
def between(port: int, rule: Rule = lambda _verb, _nth: None) -> Iterator[Between]:
    """Listen on a port of this machine while the block lasts."""
    place = Between(port, rule)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            verb = self.path.removeprefix("/v1/")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told = place.note(verb, body, dict(self.headers))
            if told != "lose" and not isinstance(told, Made):
                answer = self.passed(body)
                told = told or answer
            if told == "hang":
                self.connection.recv(1)
            if isinstance(told, Made):
                self.send_response(told.status)
                for name, value in told.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(told.body)))
                self.end_headers()
                self.wfile.write(told.body)
            else:
                self.close_connection = True

        def passed(self, body: bytes) -> Made:
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
            ) as connection:
                connection.request("POST", self.path, body, dict(self.headers))
                answer = connection.getresponse()
                names = ("Content-Type", "Retry-After")
                headers = {name: answer.headers[name] for name in names if name in answer.headers}
                return Made(answer.status, answer.read(), headers)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    place.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield place
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
