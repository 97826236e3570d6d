"""A client that says exactly the bytes it is told, and shows exactly those that came back."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Self

from msgspec import Struct

HOST = "127.0.0.1"
PATIENCE = 30.0
HeaderLine = tuple[str | bytes, str | bytes]


class Answer(Struct, frozen=True):
    """An answer; header lines in the order and spelling of the wire."""

    status: int
    lines: tuple[tuple[bytes, bytes], ...]
    body: bytes
    rest: bytes = b""
    """Bytes beyond the end that the head promised: there should be none."""

    def all(self, name: str) -> list[str]:
        wanted = name.lower().encode()
        return [value.decode("latin-1") for key, value in self.lines if key.lower() == wanted]

    def header(self, name: str) -> str | None:
        found = self.all(name)
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The code of a problem; None = the answer is none."""
        if self.header("content-type") != "application/problem+json":
            return None
        return str(self.json["code"])

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"


def head(method: str, target: str, lines: Iterable[HeaderLine]) -> bytes:
    """The bytes of a request up to its body."""
    written = [f"{method} {target} HTTP/1.1".encode("latin-1")]
    written += [_bytes(name) + b": " + _bytes(value) for name, value in lines]
    return b"\r\n".join(written) + b"\r\n\r\n"


def chunked(chunks: Iterable[bytes]) -> bytes:
    """A body in chunks, with its end."""
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


class Connection:
    """One connection, which is closed after its one answer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=PATIENCE)
        self._got = b""

    def send(self, data: bytes) -> Self:
        self._socket.sendall(data)
        return self

    def more(self) -> bytes:
        """What comes next; nothing = the server has closed."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self._got += data
        return data

    def has_answer(self) -> bool:
        """Whether something has come that was not read yet."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def until(self, mark: bytes) -> bytes:
        """Read on until these bytes have come."""
        while mark not in self._got:
            if not self.more():
                raise EOFError(f"closed before {mark!r}; came: {self._got[-300:]!r}")
        return self._got

    def hurried(self) -> bytes:
        """All bytes up to the end; a server that has answered need not close soon."""
        try:
            if self.more():
                self._socket.settimeout(0.5)
                return self.raw()
        except TimeoutError:
            if not self._got:
                raise
        self.close()
        return self._got

    def raw(self) -> bytes:
        """All bytes up to the end."""
        try:
            while self.more():
                pass
        finally:
            self.close()
        return self._got

    def status(self) -> int | None:
        """The status of the answer; None = the server only closed."""
        try:
            return int(self.until(b"\r\n\r\n").split(b" ", 2)[1])
        except EOFError:
            return None

    def answer(self) -> Answer:
        """The answer, read to the end of the connection."""
        return parsed(self.raw())

    def end(self) -> Self:
        """Say that no more comes."""
        self._socket.shutdown(socket.SHUT_WR)
        return self

    def leave(self) -> None:
        """Go away at once, as a client that crashes: the server sees a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.close()

    def close(self) -> None:
        self._socket.close()


def parsed(raw: bytes) -> Answer:
    """Read the bytes of one answer; one that is not whole is an EOFError."""
    before, end, content = raw.partition(b"\r\n\r\n")
    if not end:
        raise EOFError(f"no answer: {raw[:200]!r}")
    first, *written = before.split(b"\r\n")
    status = int(first.split(b" ", 2)[1])
    if 100 <= status < 200:
        return parsed(content)
    pairs = (line.partition(b":") for line in written)
    lines = tuple((name, value.strip()) for name, _, value in pairs)
    body, rest = _body(status, {name.lower(): value for name, value in lines}, content)
    return Answer(status, lines, body, rest)


def _body(status: int, headers: dict[bytes, bytes], content: bytes) -> tuple[bytes, bytes]:
    if status in {204, 304}:
        return b"", content
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return _dechunked(content)
    if b"content-length" not in headers:
        return content, b""
    length = int(headers[b"content-length"])
    if len(content) < length:
        raise EOFError(f"{length} bytes were promised, {len(content)} came")
    return content[:length], content[length:]


def _dechunked(content: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, end, content = content.partition(b"\r\n")
        if not end:
            raise EOFError("the last chunk is missing")
        length = int(size.partition(b";")[0], 16)
        if length == 0:
            return body, content.partition(b"\r\n")[2]
        if len(content) < length + 2:
            raise EOFError("a chunk is shorter than it was said to be")
        body, content = body + content[:length], content[length + 2 :]


class Client:
    """Speaks to one worker, with one profile on one store."""

    def __init__(self, port: int, profile: str, store: str = "sqlite") -> None:
        self.port = port
        self.host = f"{profile}.{store}"

    def open(
        self,
        method: str,
        target: str,
        *,
        key: str | bytes | None = None,
        body: bytes = b"",
        content_type: str | None = "application/json",
        lines: Sequence[HeaderLine] = (),
        run: str = "-",
        chunks: Iterable[bytes] | None = None,
    ) -> Connection:
        """Send a request; its answer can be read later."""
        headers: list[HeaderLine] = [("Host", self.host), ("Connection", "close"), ("X-Run", run)]
        if key is not None:
            headers.append(("Idempotency-Key", key))
        if content_type is not None:
            headers.append(("Content-Type", content_type))
        headers += lines
        if chunks is None:
            headers.append(("Content-Length", str(len(body))))
            sent = body
        else:
            headers.append(("Transfer-Encoding", "chunked"))
            sent = chunked(chunks)
        return Connection(self.port).send(head(method, target, headers) + sent)

    def ask(self, method: str, target: str, **told: Any) -> Answer:
        return self.open(method, target, **told).answer()

    def post(self, target: str, **told: Any) -> Answer:
        return self.ask("POST", target, **told)


def over_http_2(port: int, target: str, lines: Sequence[tuple[str, str]], host: str) -> Answer:
    """Ask the same over HTTP/2, whose client refuses an answer with header lines of HTTP/1."""
    from h2.connection import H2Connection
    from h2.events import DataReceived, ResponseReceived, StreamEnded

    speaking = H2Connection()
    speaking.initiate_connection()
    begin = [(":method", "POST"), (":path", target), (":scheme", "http"), (":authority", host)]
    speaking.send_headers(1, [*begin, *lines], end_stream=True)
    connection = Connection(port).send(speaking.data_to_send())
    headers: list[tuple[bytes, bytes]] = []
    body, ended = b"", False
    while not ended:
        for event in speaking.receive_data(connection.more()):
            match event:
                case ResponseReceived():
                    headers = list(event.headers)
                case DataReceived():
                    body += event.data
                case StreamEnded():
                    ended = True
        connection.send(speaking.data_to_send())
    connection.close()
    return Answer(int(headers[0][1]), tuple(headers[1:]), body)
