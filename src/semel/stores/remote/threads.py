"""http.client: the connections of a remote store for threads. `tasks` has the same names.

A caller has a connection for itself, and gives it back when its answer is read whole. The last one
given back is the next one taken.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import suppress
from time import monotonic
from typing import Final

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.errors import StoreRefused, StoreUnavailable
from semel.stores.remote.addresses import IDLE, Address, Unreachable
from semel.stores.remote.wire import WATCH, Reply
from semel.stores.urls import tls_error

PIECE: Final = 1 << 16
"""Bytes of an answer that are read at a time, so that a slow one ends with the caller's time."""

SOON: Final = 0.001
"""The least seconds that a socket waits; 0 would mean that it never does."""


class Connection:
    """One connection; it is used by one thread at a time."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, seconds: float) -> None:
        self.since = 0.0
        """When it was given back."""
        if tls is None:
            plain = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
            self.http: http.client.HTTPConnection = plain
        else:
            self.http = http.client.HTTPSConnection(
                address.host, address.port, timeout=seconds, context=tls
            )
        self.http.connect()

    def post(self, path: str, headers: dict[str, str], body: bytes, end: float) -> Reply:
        """Send a request, and read its answer until `end`."""
        self._until(end)
        self.http.request("POST", path, body, headers)
        self._until(end)
        pieces = []
        with self.http.getresponse() as response:
            while piece := response.read1(PIECE):
                pieces.append(piece)
                self._until(end)
            if response.length:
                raise http.client.IncompleteRead(b"".join(pieces), response.length)
        content_type = response.headers.get_content_type()
        return Reply(response.status, content_type, b"".join(pieces))

    def _until(self, end: float) -> None:
        if self.http.sock is not None:  # else the service closed it, and all of its answer is here
            self.http.sock.settimeout(max(end - monotonic(), SOON))

    @property
    def usable(self) -> bool:
        """Whether the service has left it open."""
        return self.http.sock is not None

    def interrupt(self) -> None:
        """Let the thread that reads from it get an error."""
        sock = self.http.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self.http.close()


class Transport(ForkAware):
    """The connections to a service."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._path = address.path
        self._headers = address.headers
        self._tls = address.tls()
        self._closed = False
        self._idle: list[Connection] = []
        self._watching: set[Connection] = set()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Start with no connection: these are the parent's."""
        leave_alone((self._idle, self._watching))
        self._idle, self._watching = [], set()

    def post(self, path: str, body: bytes, seconds: float) -> Reply:
        """Send a request once; raise `Unreachable` where nothing came back in this time."""
        notice_fork()
        if self._closed:
            raise StoreUnavailable(f"the store at {self.address.url} was closed")
        end = monotonic() + seconds
        taken: Connection | None = None
        try:
            taken = self._take(seconds)
            if path == WATCH:
                self._watching.add(taken)
            reply = taken.post(self._path + path, self._headers, body, end)
        except BaseException as error:
            # Half an answer may be on its way: no other call must read the rest.
            self._drop(taken)
            if isinstance(error, TimeoutError):
                raise Unreachable(f"no answer within {seconds:.3g} s") from None
            if not isinstance(error, OSError | http.client.HTTPException):
                raise
            lasting = tls_error(error, connecting=taken is None)
            if lasting is not None:
                raise StoreRefused(f"no TLS with {self.address.where}: {lasting}") from error
            raise Unreachable(str(error) or type(error).__name__) from error
        self._give_back(taken)
        return reply

    def _take(self, seconds: float) -> Connection:
        now = monotonic()
        with suppress(IndexError):  # none is idle
            while True:
                idle = self._idle.pop()
                if now - idle.since < IDLE:
                    return idle
                idle.close()
        # Half of the time, so that the address that answers may be the second one of a name.
        return Connection(self.address, self._tls, max(seconds / 2, SOON))

    def _give_back(self, taken: Connection) -> None:
        self._watching.discard(taken)
        if not taken.usable:
            return
        taken.since = monotonic()
        self._idle.append(taken)
        if self._closed:
            self.close()

    def _drop(self, broken: Connection | None = None) -> None:
        """Close this connection and those that are idle: what broke one may have broken all."""
        if broken is not None:
            self._watching.discard(broken)
            broken.close()
        with suppress(IndexError):  # none is left
            while True:
                self._idle.pop().close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back; end the watches."""
        self._closed = True
        self._drop()
        for watching in tuple(self._watching):
            watching.interrupt()
