"""A TCP proxy that breaks connections on purpose, and counts that it did.

with proxy_to(server.port) as proxy:
    proxy.lose_reply(lambda request: b"EVALSHA" in request)   # applied, but never answered
    ...
    assert proxy.lost == 1                                    # the fault really fired
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

HOST = "127.0.0.1"
CHUNK = 1 << 16


class Proxy:
    """Forwards bytes to one server until told otherwise."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        """Where new connections go; those that are open stay where they are."""
        self._listener = socket.create_server((HOST, 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        """How many connections were let through."""
        self.requests = 0
        """How many chunks clients have sent."""
        self.lost = 0
        """How many replies were lost on purpose."""
        self.refused = 0
        self.refusing = False
        """Close every new connection at once."""
        self.delay = 0.0
        """Seconds to hold back every reply."""
        self.rewrite: Callable[[bytes], bytes] = lambda request: request
        """What becomes of a request on its way; its length must stay the same."""
        self._lose: Callable[[bytes], bool] | None = None
        self._skip = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._run(self._accept)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def lose_reply(self, matches: Callable[[bytes], bool], *, skip: int = 0) -> None:
        """Lose one reply: the first request that matches, after `skip` others that did.

        The request reaches the server and is answered; then both connections are closed.
        """
        with self._lock:
            self._lose, self._skip = matches, skip

    def cut_all(self) -> None:
        """Close every connection that is open now."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

    def _run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self.refusing:
                self.refused += 1
                client.close()
            else:
                self.connections += 1
                self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        upstream = (HOST, self._next_upstream())
        with client, contextlib.suppress(OSError), socket.create_connection(upstream) as server:
            with self._lock:
                self._open |= {client, server}
            try:
                self._forward(client, server)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _next_upstream(self) -> int:
        return self.upstream_port

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(server, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in ready.select(0.05):
                    data = key.fileobj.recv(CHUNK)
                    if not data:
                        return
                    if key.fileobj is server:
                        time.sleep(self.delay)
                        client.sendall(data)
                        continue
                    self.requests += 1
                    losing = self._must_lose(data)
                    server.sendall(self.rewrite(data))
                    if losing:
                        server.recv(CHUNK)  # answered, so it was applied
                        self.lost += 1
                        return

    def _must_lose(self, request: bytes) -> bool:
        with self._lock:
            if self._lose is None or not self._lose(request):
                return False
            if self._skip > 0:
                self._skip -= 1
                return False
            self._lose = None
            return True


class Balancer(Proxy):
    """Forwards each connection to the next of several servers, as TCP balancers do."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = itertools.cycle(ports)
        super().__init__(ports[0])

    def _next_upstream(self) -> int:
        with self._lock:
            return next(self._ports)


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """A proxy in front of the server on this loopback port."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


@contextlib.asynccontextmanager
async def answering_for(
    port: int,
    answers: Callable[[bytes, asyncio.StreamWriter], bool],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Stand before a server on the test's own loop, with TLS if there is a context; gives the port.

    `answers` is called with every request; if it answers it (True), the server does not see it.
    """
    serving: set[asyncio.Task[None] | None] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK):
            target.write(data)
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection(HOST, port)
        back = asyncio.ensure_future(copy(from_server, writer))
        with contextlib.suppress(OSError):  # the client refuses what it was sent
            while data := await reader.read(CHUNK):
                if not answers(data, writer):
                    to_server.write(data)
        to_server.close()
        with contextlib.suppress(OSError):
            await to_server.wait_closed()
        await back

    async with await asyncio.start_server(serve, HOST, 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
    if serving:
        await asyncio.wait([task for task in serving if task is not None])
