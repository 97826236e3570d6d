"""`semel proxy`: the web rules of `semel.http` in front of a service in any language.

    Gateway         rejects what cannot be forwarded, and answers for an upstream that does not
    the middleware  of `semel.adapters.asgi`: keys, replays, and what becomes of a failure
    Forwarder       sends a request to the upstream, and its answer back, both as streams
    Upstream        opens connections, and keeps those that are idle for a moment

No request is sent twice. If no connection could be made, nothing ran, and the key is free. Once a
byte may have been sent, an upstream that breaks off is a failure, which the policy judges.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import socket
import ssl
import struct
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from typing import Any, Final, Unpack, cast
from urllib.parse import urlsplit

from msgspec import UNSET
from msgspec.structs import replace

from semel.adapters.asgi import (
    App,
    IdempotencyMiddleware,
    Message,
    Receive,
    Scope,
    Send,
    send_answer,
)
from semel.adapters.check_decorators import PROTECTED
from semel.aio import AsyncIdempotency
from semel.core.decide import NothingRan
from semel.core.optional import Needed
from semel.core.policy import Policy, Rules
from semel.errors import ConfigError
from semel.events import logger
from semel.http.options import MiddlewareOptions, check_header_name
from semel.http.problems import PROBLEMS, Problem, problem
from semel.http.requests import HeaderLine, Headers, Request

with Needed("semel[server]", by=__name__):
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from semel.server.connections import AT_ONCE, bound
    from semel.server.running import Server, listen, most_connections

SCOPE: Final = "http"
"""The scope of the keys, as in every web integration."""

KEEP_ALIVE: Final = 130
"""Seconds an idle client stays connected. Gateways drop theirs sooner (nginx 60, Caddy 120), so
that none sends a request into a connection that is being closed here."""

IDLE: Final = 1.0
"""Seconds an idle connection to the upstream is kept; servers close theirs after 2 or more."""
CONNECT_WITHIN: Final = 10.0
_LARGEST_HEAD: Final = 64 * 1024
"""Bytes of the status line and the headers of an answer."""
_UNREAD: Final = 256 * 1024
"""Bytes of an answer that may arrive before a slow client takes them."""

_PROBES: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_PROBED: Final = [
    (getattr(socket, name), value) for name, value in _PROBES.items() if hasattr(socket, name)
]
"""Finds an upstream host that died; there is no limit to how long it may work."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REBUILT: Final = _HOP_BY_HOP | {b"content-length", b"expect", b"forwarded", b"host"}
"""Header lines of a request that are not passed on as they came, nor with underscores: servers that
hand over variables, as CGI does, take `Content_Length` for the length.
"""
_FORWARDED: Final = b"x-forwarded-"

_LAST_STATUS: Final = 599

_REJECTED_METHODS: Final = frozenset({"CONNECT", "TRACE"})
_HARMLESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that pass whatever their path is."""
_UNCLEAR: Final = re.compile(r"[/\\](?:\.\.?(?:[/\\;]|$)|[/\\])")
"""Parts of a path that mean another one to some servers: `.` and `..`, also before a `;`, and empty
ones.
"""

_PROBLEMS: Final[Mapping[str, Problem]] = {
    "body_incomplete": PROBLEMS["body_incomplete"],
    "invalid_target": Problem(
        400,
        "Target invalid",
        "The target must be a path: it begins with / and has no #, and no ., .. or empty part.",
    ),
    "invalid_tenant": Problem(
        400,
        "Tenant unclear",
        "Send the tenant's header once, with hyphens in its name, and not in Connection.",
    ),
    "not_implemented": Problem(
        501, "Not implemented", "The proxy doesn't forward CONNECT, TRACE, or WebSockets."
    ),
    "upstream_unreached": Problem(
        502, "Upstream unreachable", "The service could not be reached. Nothing ran.", retry=True
    ),
    "upstream_broken": Problem(
        502,
        "Upstream broken",
        "The request was sent, but no complete response came back. It may have taken effect.",
    ),
}
"""What the proxy says beside the problems of `semel.http`."""


class UpstreamUnreached(NothingRan):
    """No connection could be made: the upstream has not seen the request."""

    code = "upstream_unreached"


class UpstreamBroken(Exception):
    """The answer did not come, or not all of it, or is not HTTP: the request may have run."""

    code = "upstream_broken"


def create_proxy(
    idempotency: AsyncIdempotency,
    upstream: Upstream,
    *,
    tenant_header: str | None = None,
    **options: Unpack[MiddlewareOptions],
) -> App:
    """Return the ASGI application that forwards to `upstream`.

    `tenant_header` names the header that says whose key it is; `options` are the middleware's.
    """
    tenant = None if tenant_header is None else _tenant_header(tenant_header)
    if tenant is not None:
        options["tenant"] = partial(_tenant_of, tenant)
    rules = idempotency.internals.setup.rules(options.get("scope", SCOPE), options.get("policy"))
    protected = Protecting(Forwarder(upstream, fresh=_lasts(rules)), idempotency, **options)
    strict = options.get("include") is not None or bool(options.get("exclude"))
    return Gateway(protected, tenant, strict=strict)


def _lasts(rules: Rules) -> bool:
    """Return whether a failure may stop the next attempt."""
    runs_again = rules.failure in (None, "forget", "retryable")
    return rules.hold or not runs_again or rules.max_attempts is not None


def _tenant_header(name: str) -> bytes:
    if "_" in check_header_name("the tenant header", name):
        raise ConfigError(
            f"the tenant header must have no underscore, got {name!r}: many servers take it for a -"
        )
    return name.lower().encode()


def _tenant_of(header: bytes, request: Request) -> str | None:
    return next((value.decode("latin-1") for value in request.headers.values(header)), None)


class Protecting(IdempotencyMiddleware):
    """The middleware, for an application that sees the path as it was sent."""

    def _request_of(self, scope: Scope) -> Request:
        """Compare the path as it was sent: `/a%2Fb` is not `/a/b` to every upstream."""
        return replace(super()._request_of(scope), path=scope["raw_path"].decode("latin-1"))


# --- what is rejected, and what is said of errors -------------------------------------------------


class Gateway:
    """Answers what must not be forwarded, and what the upstream did not answer."""

    def __init__(self, app: App, tenant: bytes | None, *, strict: bool) -> None:
        self._app = app
        self._tenant = tenant
        self._strict = strict
        """Some paths are treated differently: each must mean the same here and at the upstream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def dated(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if not any(name == b"date" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], _date()]
            await send(message)

        code, lines = self._rejected(scope), _CLOSE
        if code is None:
            try:
                await self._app(scope, receive, dated)
            except (UpstreamUnreached, UpstreamBroken) as error:
                code, lines = error.code, ()
                end = "the response is cut off" if begun else "the client gets 502"
                logger.warning("upstream %s; %s", error, end)
                if begun and scope["http_version"] == "1.0":
                    scope.get("state", {}).get(_RESET, _nothing)()
        if code is not None and not begun:  # else uvicorn closes the connection before its end
            await send_answer(dated, problem(code, {}, lines=lines, among=_PROBLEMS))

    def _rejected(self, scope: Scope) -> str | None:
        """Return the code of the problem that a request is; None = it may be forwarded."""
        headers = Headers(scope["headers"])
        upgrades = b",".join(headers.values(b"upgrade")).lower()
        method = scope["method"].upper()
        if method in _REJECTED_METHODS or b"websocket" in upgrades:
            return "not_implemented"
        path = scope["raw_path"]
        if not path.startswith(b"/") or b"#" in path:
            return "invalid_target"  # to some servers it names another host, or ends at the #
        if self._strict and method not in _HARMLESS and _UNCLEAR.search(scope["path"]) is not None:
            return "invalid_target"
        if headers.values(b"transfer-encoding") and (
            headers.values(b"content-length") or scope["http_version"] == "1.0"
        ):
            return "body_incomplete"  # a gateway may have seen another end of it
        if self._tenant is not None:
            tenant = self._tenant
            names = [name for name, _ in headers.lines if name.replace(b"_", b"-") == tenant]
            if names not in ([], [tenant]) or tenant in _named(headers.lines):
                return "invalid_tenant"
        return None


_CLOSE: Final[tuple[HeaderLine, ...]] = ((b"connection", b"close"),)


def _date() -> HeaderLine:
    return b"date", formatdate(usegmt=True).encode()


# --- one request, on its way there and back ------------------------------------------------------


class Forwarder:
    """Forwards requests to the upstream; `fresh` gives each request with a key its own connection.

    A kept connection may have been closed a moment ago. The error looks as if the upstream had
    broken off while it ran the request. Where the policy holds such a failure, makes it final, or
    counts attempts, the key would be lost although nothing ran.
    """

    def __init__(self, upstream: Upstream, *, fresh: bool) -> None:
        self._upstream = upstream
        self._fresh = fresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request, and send what the upstream answers."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        upstream, head = self._upstream, self._head(scope)
        connection = await upstream.connect(fresh=self._fresh and PROTECTED in scope)
        connection.put(head)
        sending = asyncio.ensure_future(_send_body(connection, receive))
        try:
            await _send_answer(connection, send)
        except UpstreamBroken:
            if not connection.left:
                raise
            return
        finally:
            sending.cancel()
            upstream.give_back(connection)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self, scope: Scope) -> h11.Request:
        """Return the request line and the header lines that the upstream gets."""
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = Headers(scope["headers"])
        host = (*headers.values(b"host"), self._upstream.authority)[0]
        client = (scope["client"] or ("unknown", 0))[0]
        framing = [
            (name, value)
            for name in (b"content-length", b"transfer-encoding")
            for value in headers.values(name)
        ]
        kept = [
            (name, value)
            for name, value in _end_to_end(headers.lines, _REBUILT)
            if (alike := name.replace(b"_", b"-")) not in _REBUILT
            and not alike.startswith(_FORWARDED)
        ]
        return h11.Request(
            method=scope["method"],
            target=target,
            headers=[
                (b"host", host),
                *kept,
                (_FORWARDED + b"for", client.encode()),
                (_FORWARDED + b"host", host),
                (_FORWARDED + b"proto", scope["scheme"].encode()),
                *framing,
            ],
        )

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._upstream.close()
        await send({"type": "lifespan.shutdown.complete"})


async def _send_body(connection: Connection, receive: Receive) -> None:
    """Send the body of a request, and end the connection if the client leaves.

    A request with a key runs to its end: the middleware tells nothing of its client before.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            connection.leave()
            return
        if message["body"]:
            connection.put(h11.Data(message["body"]))
            await connection.writable()
        more = message["more_body"]
    connection.put(h11.EndOfMessage())
    await receive()
    connection.leave()


async def _send_answer(connection: Connection, send: Send) -> None:
    """Send an answer but for its end, for which the connection is not needed any more."""
    while isinstance(head := await connection.event(), h11.InformationalResponse):
        pass
    if head.status_code > _LAST_STATUS:
        raise UpstreamBroken(f"answered with the status {head.status_code}")
    lines = head.headers
    names = Headers(lines)
    # Both: the chunks counted, so the length may be wrong.
    cut = {b"content-length"} if names.values(b"transfer-encoding") else frozenset()
    await send(
        {
            "type": "http.response.start",
            "status": head.status_code,
            "headers": _end_to_end(names.lines, _HOP_BY_HOP | cut),
        }
    )
    while isinstance(part := await connection.event(), h11.Data):
        await send({"type": "http.response.body", "body": bytes(part.data), "more_body": True})


def _end_to_end(lines: Iterable[HeaderLine], dropped: frozenset[bytes]) -> list[HeaderLine]:
    """Leave out these header lines, and those that `Connection` names."""
    named = _named(lines)
    return [line for line in lines if line[0] not in dropped and line[0] not in named]


def _named(lines: Iterable[HeaderLine]) -> frozenset[bytes]:
    """Return the names that `Connection` lists."""
    return frozenset(
        each.strip().lower()
        for name, value in lines
        if name == b"connection"
        for each in value.split(b",")
    )


# --- connections ---------------------------------------------------------------------------------


class Upstream:
    """The service behind the proxy: its address, and the connections to it."""

    def __init__(self, url: str) -> None:
        self.host, self.port, self.tls, authority = _address(url)
        self.authority = authority.encode()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def connect(self, *, fresh: bool) -> Connection:
        """Return a connection: the one that was idle last, or a new one."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.wake():
                break
        else:
            connection = await self._opened()
        self._busy.add(connection)
        return connection

    async def _opened(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self.host, self.port, ssl=self.tls
                )
        except OSError as error:
            raise UpstreamUnreached(
                f"unreachable, so nothing ran [upstream={self.authority.decode()} "
                f"error={type(error).__name__}: {error}]"
            ) from error
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or end it if its exchange is not complete."""
        self._busy.discard(connection)
        if connection.rest(self._expire):
            self._idle.append(connection)
        else:
            connection.abort()

    def _expire(self, connection: Connection) -> None:
        self._idle.remove(connection)
        connection.abort()

    def break_off(self) -> None:
        """End the requests that run, as if the upstream had ended them."""
        for connection in self._busy:
            connection.abort()

    def close(self) -> None:
        """End the connections that are idle."""
        while self._idle:
            connection = self._idle.pop()
            connection.wake()
            connection.abort()


def _address(url: str) -> tuple[str, int, ssl.SSLContext | None, str]:
    """Read host, port, TLS and authority of a URL; none of it is repeated, it may have a login."""
    wrong = ConfigError(
        "the upstream must be http://HOST:PORT or https://HOST:PORT, without a login, a path or a "
        "query"
    )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        authority = parts.netloc.encode("ascii").decode()
        (host or "").encode("idna")  # as asyncio does, for each request
    except ValueError:
        raise wrong from None
    if (
        parts.scheme not in _PORTS
        or not host
        or port == 0
        or "@" in authority
        or parts.path not in {"", "/"}
        or parts.query
        or parts.fragment
    ):
        raise wrong
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return host, port or _PORTS[parts.scheme], tls, authority


_PORTS: Final = {"http": 80, "https": 443}


class Connection(asyncio.Protocol):
    """One connection to the upstream; h11 reads and writes what travels on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._http = h11.Connection(h11.CLIENT, _LARGEST_HEAD)
        self._transport: asyncio.Transport
        self._encrypted: bool
        self._arrived = bytearray()
        self._ended = False
        """Nothing more arrives."""
        self._broken = False
        """It ended by an error, or here: what has arrived is not whole."""
        self._news = loop.create_future()
        """Is done when something has arrived, or nothing more can."""
        self._writing = loop.create_future()
        """Is done while the upstream takes what is written."""
        self._writing.set_result(None)
        self._resting: asyncio.TimerHandle | None = None
        self.left = False
        """The client is gone, and the connection was ended for it."""

    # --- for a request -----------------------------------------------------------------------

    def put(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Write a part of a request."""
        self._transport.write(self._http.send(event))

    async def writable(self) -> None:
        """Wait while the upstream is slower than the client."""
        await self._writing

    async def event(self) -> Any:
        """Return the next part of the answer."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._read())
        except h11.RemoteProtocolError:  # its text may repeat what was answered
            how = "ended the connection" if self._ended else "sent what is not HTTP"
            raise UpstreamBroken(f"{how} before its response was complete") from None
        return event

    async def _read(self) -> bytes:
        if not self._arrived and not self._ended:
            self._news = self._loop.create_future()
            await self._news
        if not self._arrived and self._broken:
            raise UpstreamBroken("broke off before its response was complete")
        data = bytes(self._arrived)
        self._arrived.clear()
        self._transport.resume_reading()
        return data

    def leave(self) -> None:
        """End the connection, because the client is gone."""
        self.left = True
        self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        self._ended = self._broken = True
        self._transport.abort()

    # --- between two requests ----------------------------------------------------------------

    def rest(self, expire: Callable[[Connection], None]) -> bool:
        """Wait for another request, until `expire` is called; False = it can take no other one."""
        http = self._http
        complete = http.our_state is h11.DONE and http.their_state is h11.DONE
        if not complete or self._ended or self._arrived or http.trailing_data[0]:
            return False
        http.start_next_cycle()
        self._resting = self._loop.call_later(IDLE, expire, self)
        return True

    def wake(self) -> bool:
        """Begin another request; False = the upstream has ended the connection meanwhile."""
        cast("asyncio.TimerHandle", self._resting).cancel()
        self._resting = None
        return not self._ended

    # --- what asyncio tells ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBED:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """Keep a part of an answer."""
        if self._resting is not None:
            self.abort()  # no request asked for it: such as a 408 before the upstream closes
            return
        self._arrived += data
        if len(self._arrived) > _UNREAD:
            self._transport.pause_reading()
        self._tell()

    def eof_received(self) -> None:
        """Note the end; asyncio closes the connection."""
        self._ended = True
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        if exc is not None and not self._broken and not self._encrypted:
            self._read_the_rest()
        self._ended, self._broken = True, self._broken or exc is not None
        self._tell()
        self.resume_writing()

    def _read_the_rest(self) -> None:
        """Take what came before an error in writing, at which asyncio stops reading.

        An upstream that responds early, such as with 413, and closes resets what is still sent.
        """
        number = self._transport.get_extra_info("socket").fileno()
        with suppress(OSError):
            while len(self._arrived) < _UNREAD and (data := os.read(number, _UNREAD)):
                self._arrived += data

    def pause_writing(self) -> None:
        """Let the client wait."""
        self._writing = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let the client go on."""
        if not self._writing.done():
            self._writing.set_result(None)

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)


# --- the server ----------------------------------------------------------------------------------


class Options(Namespace):
    """The options of `semel proxy`."""

    upstream: str
    url: str | None
    store_prefix: str | None
    engine: Mapping[str, Any]
    host: str
    port: int
    tenant_header: str | None
    include: list[str] | None
    exclude: list[str] | None
    required: bool
    policy: str | None
    max_body: int
    grace: float


_RESET: Final = "semel.reset"


class Protocol(H11Protocol):
    """Lets the application reset a connection.

    In HTTP/1.0 a response may end with its connection, so that only a reset shows that it was cut
    off. nginx speaks HTTP/1.0 to what is behind it, unless it is told otherwise.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, _RESET: partial(_reset, transport)}


def _nothing() -> None:
    """Stand for a reset where another server runs the proxy."""


def _reset(transport: asyncio.Transport) -> None:
    with suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


class ProxyServer(Server):
    """Lets requests run for `grace` seconds after a signal; then it ends them."""

    def __init__(self, app: App, upstream: Upstream, grace: float) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,  # whatever is installed: it is strict about where a body ends
            ws="none",
            lifespan="on",
            backlog=AT_ONCE,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(grace) + 1,  # for bodies that do not come
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        config.load()
        # A request that runs has two descriptors; a body that is passed on may have any length.
        bound(config, most_connections() / 2, math.inf)
        super().__init__(config)
        self._upstream, self._grace = upstream, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, and wait for those that run, also without their clients."""
        ending = asyncio.get_running_loop().call_later(self._grace, self._upstream.break_off)
        await super().shutdown(sockets)
        ending.cancel()


def serve(options: Options, say: Callable[[str], None]) -> int:
    """Run the proxy until a signal ends it, and return the exit code."""
    if options.tenant_header is None:
        logger.warning(
            "--tenant-header is not set, so all clients share their keys: a client that sends the "
            "key of another gets its response"
        )
    asyncio.run(_serve(options, say))
    return 0


async def _serve(options: Options, say: Callable[[str], None]) -> None:
    prefix = UNSET if options.store_prefix is None else options.store_prefix
    upstream = Upstream(options.upstream)
    engine = AsyncIdempotency(options.url, prefix=prefix, **options.engine)
    try:
        app = create_proxy(
            engine,
            upstream,
            tenant_header=options.tenant_header,
            tenant=None,  # instead of the middleware's warning there is one for the command
            include=options.include,
            exclude=options.exclude or (),
            required=options.required,
            policy=None if options.policy is None else Policy.preset(options.policy),
            max_body=options.max_body,
        )
        server = ProxyServer(app, upstream, options.grace)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, setattr, server, "should_exit", True)
        listener, place = listen(options.host, options.port)
        with listener:
            say(f"semel proxies http://{place} to {options.upstream}")
            await server.serve(sockets=[listener])
    finally:
        await engine.close(timeout=1)  # all has ended, or its time is over
