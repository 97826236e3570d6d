"""The proxy's connections to the upstream, driven by hand: what no client could bring about at will."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import AsyncIterator, Callable

import h11
import pytest

from semel.server import proxy
from semel.server.proxy import Connection, Upstream, UpstreamBroken, UpstreamUnreached

GET = h11.Request(method="GET", target="/", headers=[("Host", "shop")])
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """The upstream's end of each connection."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )
        self.upstream: Upstream

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.accepted.put((reader, writer))


@pytest.fixture
async def server(monkeypatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(proxy, "IDLE", 60.0)
    made = Server()
    async with await asyncio.start_server(made.accept, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        made.upstream = Upstream(f"http://{host}:{port}")
        yield made
        made.upstream.close()
        while not made.accepted.empty():
            made.accepted.get_nowait()[1].close()


async def exchange(
    connection: Connection, writer: asyncio.StreamWriter, answer: bytes = OK
) -> None:
    """One request and its answer."""
    connection.put(GET)
    connection.put(h11.EndOfMessage())
    writer.write(answer)
    while type(await connection.event()) is not h11.EndOfMessage:
        pass


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)


async def test_a_connection_is_used_again_unless_a_fresh_one_is_asked_for(server):
    first = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    await exchange(first, writer)
    server.upstream.give_back(first)
    other = await server.upstream.connect(fresh=True)
    assert other is not first
    assert await server.upstream.connect(fresh=False) is first
    await exchange(first, writer)
    for each in (first, other):
        server.upstream.give_back(each)
    writer.close()


async def test_bytes_beyond_an_answer_end_the_connection(server):
    connection = await server.upstream.connect(fresh=False)
    reader, writer = await server.accepted.get()
    await exchange(connection, writer, OK + b"HTTP/1.1 408 late")
    server.upstream.give_back(connection)
    assert await server.upstream.connect(fresh=False) is not connection
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1000):
            pass
    writer.close()


async def test_bytes_that_come_while_nothing_is_asked_end_the_connection(server):
    connection = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    await exchange(connection, writer)
    server.upstream.give_back(connection)
    writer.write(b"HTTP/1.1 408 late")
    await eventually(lambda: connection._ended)
    assert await server.upstream.connect(fresh=False) is not connection
    writer.close()


async def test_a_connection_that_the_upstream_has_closed_is_not_used_again(server):
    connection = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    await exchange(connection, writer)
    server.upstream.give_back(connection)
    writer.close()
    await eventually(lambda: connection._ended)
    assert await server.upstream.connect(fresh=False) is not connection


async def test_an_idle_connection_ends_by_itself(server, monkeypatch):
    monkeypatch.setattr(proxy, "IDLE", 0.01)
    connection = await server.upstream.connect(fresh=False)
    reader, writer = await server.accepted.get()
    await exchange(connection, writer)
    server.upstream.give_back(connection)
    while await reader.read(1000):
        pass
    assert server.upstream._idle == []
    writer.close()


async def test_an_answer_that_came_before_the_connection_broke_is_read(server):
    connection = await server.upstream.connect(fresh=False)
    connection.put(GET)
    connection.data_received(OK[:-1])
    connection.connection_lost(ConnectionResetError())
    assert type(await connection.event()) is h11.Response
    assert type(await connection.event()) is h11.Data
    with pytest.raises(UpstreamBroken, match="broke off"):
        await connection.event()
    connection.abort()


async def test_an_answer_that_was_not_read_when_the_connection_broke_is_read(server):
    """An upstream responds before it has read the request, and closes: writing fails."""
    connection = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    connection.put(GET)
    connection._transport.pause_reading()
    writer.write(OK)
    select.select([connection._transport.get_extra_info("socket")], [], [])
    connection.connection_lost(BrokenPipeError())
    assert type(await connection.event()) is h11.Response
    assert (await connection.event()).data == b"ok"
    assert type(await connection.event()) is h11.EndOfMessage
    connection.abort()
    writer.close()


async def test_an_answer_that_is_broken_off_here_is_not_whole(server):
    connection = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    connection.put(GET)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the end of the connection")
    assert type(await connection.event()) is h11.Response
    assert type(await connection.event()) is h11.Data
    server.upstream.break_off()
    with pytest.raises(UpstreamBroken, match="broke off"):
        await connection.event()
    server.upstream.give_back(connection)
    writer.close()


async def test_what_an_upstream_does_not_take_is_waited_for(server):
    connection = await server.upstream.connect(fresh=False)
    await connection.writable()
    connection.pause_writing()
    waiting = asyncio.ensure_future(connection.writable())
    await asyncio.sleep(0)
    assert not waiting.done()
    connection.resume_writing()
    await waiting
    connection.abort()


async def test_what_nobody_reads_is_not_taken_without_end(server):
    connection = await server.upstream.connect(fresh=False)
    _, writer = await server.accepted.get()
    connection.put(GET)
    connection.put(h11.EndOfMessage())
    size = 64 << 20
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    await eventually(lambda: not connection._transport.is_reading())
    assert len(connection._arrived) < 1 << 20
    got = 0
    assert type(await connection.event()) is h11.Response
    while type(part := await connection.event()) is h11.Data:
        got += len(part.data)
    assert got == size
    connection.abort()
    writer.close()


async def test_a_connection_that_takes_too_long_is_not_reached(server, monkeypatch):
    async def forever(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(proxy, "CONNECT_WITHIN", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", forever)
    with pytest.raises(UpstreamUnreached, match="TimeoutError"):
        await server.upstream.connect(fresh=False)
