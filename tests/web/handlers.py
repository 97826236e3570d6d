"""The business behind every stack: paths and what they answer, without any framework.

Each run writes one line into a ledger that all worker processes share: effects are counted there, not
in answers. A request names its line by the header `X-Run`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from semel.core.attempts import current_attempt

Line = tuple[str, str]

CORS_ORIGIN = "https://shop.example"
SECRETS = ("c00kie-of-ann", "bearer-of-ann", "csrf-of-ann", "nonce-of-ann")
CHUNKS = tuple(b"chunk %d of an answer\n" % number for number in range(5))
LONG = 1.3
"""Seconds of a handler that runs longer than the lease of the profile `short-lease`."""
FIRST_EVENT, SECOND_EVENT = b"data: 1\n\n", b"data: 2\n\n"
PATIENCE = 30.0


class Broken(Exception):
    """What the handler of /raise raises."""


class Asked(Struct, frozen=True):
    """A request, as the framework gave it."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Reply(Struct, frozen=True):
    """What a handler answers."""

    status: int
    lines: list[Line]
    chunks: Iterable[bytes]
    streamed: bool = False
    """Many chunks: the framework must not join them."""
    after: Callable[[], None] | None = None
    """To be run when the answer is out."""


class Folder:
    """What the tests and all workers share: the ledger, gates, revoked users, stores by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ledger = root / "ledger"

    def write(self, run: str) -> None:
        with self._ledger.open("a") as ledger:
            ledger.write(f"{run}\n")

    def runs(self, run: str) -> int:
        """How many times a handler ran for requests that named this line."""
        if not self._ledger.exists():
            return 0
        return self._ledger.read_text().splitlines().count(run)

    def open_gate(self, name: str) -> None:
        (self.root / f"gate-{name}").touch()

    def pass_gate(self, name: str) -> None:
        """Wait until the gate is open."""
        end = time.monotonic() + PATIENCE
        while not (self.root / f"gate-{name}").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"nobody opened the gate {name}")
            time.sleep(0.01)

    def revoke(self, user: str) -> None:
        (self.root / f"revoked-{user}").touch()

    def is_revoked(self, user: str) -> bool:
        return (self.root / f"revoked-{user}").exists()

    def add_store(self, name: str, url: str) -> None:
        (self.root / f"store-{name}").write_text(url)

    def store(self, name: str) -> str:
        return (self.root / f"store-{name}").read_text()


class Business:
    """The handlers: called with a request, gives the reply or raises."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def admits(self, headers: dict[str, str]) -> bool:
        """Authorization, which every stack places before the integration: has this user been revoked?"""
        return not self.folder.is_revoked(headers.get("x-user", ""))

    def __call__(self, asked: Asked) -> Reply:
        self.folder.write(asked.headers.get("x-run", "-"))
        _, name, *rest = asked.path.split("/")
        handler: Callable[..., Reply] = getattr(self, f"on_{name}", _not_found)
        return handler(asked, *rest)

    def on_pay(self, asked: Asked, *_: str) -> Reply:
        """A fresh number on each run: equal numbers prove a replay."""
        return _json(201, {"number": uuid.uuid4().hex, "said": len(asked.body)})

    on_login = on_refund = on_private = on_pay

    def on_status(self, _: Asked, code: str) -> Reply:
        if code in {"204", "304"}:
            return Reply(int(code), [("X-Number", uuid.uuid4().hex)], [])
        return _json(int(code), {"number": uuid.uuid4().hex})

    def on_raise(self, _: Asked) -> Reply:
        raise Broken("the handler broke")

    on_raise_page = on_raise

    def on_raise_once(self, asked: Asked) -> Reply:
        """Fails on the first run."""
        if self.folder.runs(asked.headers["x-run"]) == 1:
            raise Broken("the handler broke")
        return self.on_pay(asked)

    def on_wait(self, asked: Asked, gate: str) -> Reply:
        """Blocks until a test opens the gate."""
        self.folder.pass_gate(gate)
        return self.on_pay(asked)

    def on_long(self, asked: Asked) -> Reply:
        time.sleep(LONG)
        return self.on_pay(asked)

    def on_large(self, _: Asked, size: str) -> Reply:
        return Reply(200, [("Content-Type", "text/plain")], [b"x" * int(size)])

    def on_chunks(self, _: Asked) -> Reply:
        lines = [("Content-Type", "text/plain"), ("X-Number", uuid.uuid4().hex)]
        return Reply(200, lines, iter(CHUNKS), streamed=True)

    def on_large_chunks(self, _: Asked, count: str) -> Reply:
        chunks = (b"y" * 1024 for _ in range(int(count)))
        return Reply(200, [("Content-Type", "text/plain")], chunks, streamed=True)

    def on_broken_chunks(self, _: Asked) -> Reply:
        """Raises in the middle of its answer."""

        def chunks() -> Iterator[bytes]:
            yield b"so far "
            raise Broken("the stream broke")

        return Reply(200, [("Content-Type", "text/plain")], chunks(), streamed=True)

    def on_events(self, _: Asked, gate: str) -> Reply:
        """An event, and another one when the gate is open."""

        def events() -> Iterator[bytes]:
            yield FIRST_EVENT
            self.folder.pass_gate(gate)
            yield SECOND_EVENT

        return Reply(200, [("Content-Type", "text/event-stream")], events(), streamed=True)

    def on_secret(self, _: Asked) -> Reply:
        """Header lines of every kind that may not be stored, and some that must be."""
        cookie, bearer, csrf, nonce = SECRETS
        lines = [
            ("Content-Type", "application/json"),
            ("X-First", "1"),
            ("Set-Cookie", f"session={cookie}; Path=/"),
            ("Authorization", f"Bearer {bearer}"),
            ("WWW-Authenticate", f'Digest nonce="{nonce}"'),
            ("Proxy-Authentication-Info", f'nextnonce="{nonce}"'),
            ("X-Csrf-Token", csrf),
            ("X-CSRFToken", csrf),
            ("Token", bearer),
            ("Refresh_Token", bearer),
            ("Authentication-Info", f'nextnonce="{nonce}"'),
            ("Date", "Mon, 16 Nov 2026 03:00:00 GMT"),
            ("Access-Control-Allow-Origin", CORS_ORIGIN),
            ("Access-Control-Allow-Credentials", "true"),
            ("Idempotent-Replayed", "true"),
            ("X-Second", "2"),
        ]
        return Reply(201, lines, [b'{"secret": false}'])

    def on_hop(self, asked: Asked) -> Reply:
        """Header lines that belong to one connection, which is that of the first caller."""
        reply = self.on_pay(asked)
        hop = [("Connection", "close, X-Hop"), ("Keep-Alive", "timeout=5"), ("X-Hop", "1")]
        return Reply(reply.status, [*reply.lines, *hop], reply.chunks)

    def on_repeated(self, _: Asked) -> Reply:
        """Equal names, equal lines, in an order that must be kept."""
        lines = [
            ("Content-Type", "text/plain"),
            ("Link", "</a>; rel=next, </b>; rel=prev"),
            ("X-Between", "yes"),
            ("Link", "</c>; rel=last"),
            ("Link", "</c>; rel=last"),
        ]
        return Reply(200, lines, [b"repeated"])

    def on_empty(self, _: Asked) -> Reply:
        return Reply(204, [("X-Number", uuid.uuid4().hex)], [])

    def on_echo(self, asked: Asked) -> Reply:
        """The very bytes that came: what the integration read, the application reads again."""
        return Reply(200, [("Content-Type", "application/octet-stream")], [asked.body])

    def on_after(self, asked: Asked, gate: str) -> Reply:
        """Work that begins when the answer is out, and takes until the gate opens."""
        reply = self.on_pay(asked)

        def after() -> None:
            self.folder.pass_gate(gate)
            self.folder.write(f"after-{asked.headers['x-run']}")

        return Reply(reply.status, reply.lines, reply.chunks, after=after)

    def on_attempt(self, _: Asked) -> Reply:
        """What the running attempt is to the handler."""
        attempt = current_attempt()
        told = None if attempt is None else {"key": attempt.key, "derived": attempt.derive("bank")}
        return _json(200, told)


def _json(status: int, value: object) -> Reply:
    return Reply(status, [("Content-Type", "application/json")], [json.dumps(value).encode()])


def _not_found(_: Asked, *__: str) -> Reply:
    return _json(404, {"found": False})
