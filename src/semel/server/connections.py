"""Connections of clients: how many there may be, and how long one may take to say what it asks.

uvicorn waits forever for the head of a request, and some of its parsers take one of any length. So
any client that can connect could take all descriptors, and the service could neither answer `/live`
nor reach its store; asyncio would log each connection that it cannot take.

Where no room is left, the connection that has been idle for longest is closed for a new one. One
with a request that runs is never closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import uvicorn

from semel.server.bodies import MOST_BYTES

HEAD_WITHIN: Final = 10.0
"""Seconds for the head of a request."""
MOST_HEAD: Final = 1 << 16
"""Bytes of it."""
MOST_BODY: Final = 8 * MOST_BYTES
"""Bytes of a request in all: what frames a body may be longer than the body."""
AT_ONCE: Final = 16
"""How many connections are taken before the next look at how many there are."""


def bound(config: uvicorn.Config, most: float, most_body: float = MOST_BODY) -> None:
    """Bound the connections of a server: how many there may be, and the bytes of a request."""
    bounded: Any = Connections(config.http_protocol_class, most, most_body)
    config.http_protocol_class = bounded


class Connections:
    """The connections of one server."""

    def __init__(self, kind: Any, most: float, most_body: float = MOST_BODY) -> None:
        """`kind` is uvicorn's protocol."""
        self._kind = kind
        self._most = most
        self.most_body = most_body
        self._open: dict[Connection, None] = {}
        """In the order in which they were last used."""

    def __call__(self, **told: Any) -> Connection:
        """Make one, as uvicorn makes its own."""
        return Connection(self._kind(**told), self)

    def add(self, connection: Connection) -> None:
        """Make room for one more."""
        if len(self._open) >= self._most:
            idle = next((each for each in self._open if not each.busy), None)
            if idle is not None:
                self.remove(idle)
                idle.abort()
        self._open[connection] = None

    def used(self, connection: Connection) -> None:
        """Note that something came on this one."""
        if self._open.pop(connection, self) is None:
            self._open[connection] = None

    def remove(self, connection: Connection) -> None:
        """It has ended."""
        self._open.pop(connection, None)


class Connection(asyncio.Protocol):
    """One connection; uvicorn's own protocol does all else."""

    def __init__(self, http: Any, all_of_them: Connections) -> None:
        self._http = http
        self._all = all_of_them
        self._transport: asyncio.Transport
        self._waiting: asyncio.TimerHandle | None = None
        """Ends it, unless the head of a request is complete by then."""
        self._came = 0
        """Bytes of this request."""

    @property
    def busy(self) -> bool:
        """Whether a request runs."""
        cycle = self._http.cycle
        return cycle is not None and not cycle.response_complete

    def abort(self) -> None:
        """Close it at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        self._transport = cast("asyncio.Transport", transport)
        self._all.add(self)
        self._http.connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Pass it on, unless it takes too long, or too much of it comes."""
        self._all.used(self)
        between = not self.busy
        if between and self._waiting is None:
            self._came = 0
        self._came += len(data)
        self._http.data_received(data)
        if self.busy:
            self._done()
        elif between and self._waiting is None:
            self._wait()
        if self._came > (self._all.most_body if self._has_body else MOST_HEAD):
            self.abort()

    @property
    def _has_body(self) -> bool:
        """Whether this may be of the body of a request, which may have its answer already."""
        cycle = self._http.cycle
        return cycle is not None and (cycle.more_body or not cycle.response_complete)

    def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(HEAD_WITHIN, self.abort)

    def _done(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def eof_received(self) -> bool | None:
        """Pass it on."""
        ends: bool | None = self._http.eof_received()
        return ends

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._done()
        self._all.remove(self)
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._http.resume_writing()
