"""`semel serve`: reads the settings, runs the application on uvicorn, and ends in order.

SIGHUP reads rules and tokens again; a file with a mistake changes nothing, and the log says why.
SIGTERM ends the starts that wait with an answer, and lets the requests that run finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import uvicorn
from msgspec import UNSET
from starlette.applications import Starlette

from semel.core.observers import Log
from semel.engine.setup import Setup
from semel.errors import ConfigError
from semel.events import logger
from semel.server.app import create_app, is_loopback
from semel.server.connections import AT_ONCE, HEAD_WITHIN, bound
from semel.server.service import Service
from semel.server.tokens import Tokens
from semel.stores.urls import open_async_store

PORT: Final = 8600
GRACE: Final = 30.0
KEEP_ALIVE: Final = 75
"""Seconds for which an idle connection stays open; balancers drop theirs after 60."""

RESERVED: Final = 128
"""Descriptors that stay free of waiting starts: for the store, other requests, and `/live`."""
FOR_THE_STORE: Final = 64
"""Of these, how many no connection of a client takes."""
MOST_WAITING: Final = 1000
BACKLOG: Final = 2048
"""Connections that the system keeps until the service takes them."""


class Options(Namespace):
    """The options of `semel serve`."""

    url: str | None
    store_prefix: str | None
    host: str
    port: int
    tokens: str | None
    max_waiting: int | None
    max_waiting_per_token: int | None
    grace: float
    tls_cert: str | None
    tls_key: str | None
    behind_proxy: bool


def check_address(options: Options) -> None:
    """Raise `ConfigError` for an address at which strangers could listen or ask."""
    if (options.tls_cert is None) is not (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    if is_loopback(options.host):
        return
    if options.tokens is None:
        raise ConfigError(
            f"--host {options.host}: without --tokens the service listens on this machine only, "
            "such as 127.0.0.1; make tokens with `semel token new`"
        )
    if options.tls_cert is None and not options.behind_proxy:
        raise ConfigError(
            f"--host {options.host}: tokens must not travel in plain text: give --tls-cert and "
            "--tls-key, or --behind-proxy if a proxy in front of the service does TLS"
        )


def most_waiting(asked: int | None) -> int:
    """Return how many starts may wait: each has a connection, so the file limit bounds them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MOST_WAITING * 1000 if limit == resource.RLIM_INFINITY else limit - RESERVED
    if asked is None:
        return max(1, min(MOST_WAITING, room))
    if asked > room:
        raise ConfigError(
            f"--max-waiting {asked}: each start that waits has an open connection, and this "
            f"process may open {limit} files, of which {RESERVED} stay free: raise the limit "
            f"(ulimit -n, or LimitNOFILE= of systemd) to {asked + RESERVED}, or give at most "
            f"{max(1, room)}"
        )
    return asked


def most_connections() -> float:
    """Return how many clients may be connected at a time."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return max(FOR_THE_STORE, limit - FOR_THE_STORE)


def setup_of(url: str | None, prefix: str | None) -> Setup:
    """Read the settings as an engine does."""
    setup = Setup(
        url,
        asynchronous=True,
        policy=None,
        scopes=None,
        prefix=UNSET if prefix is None else prefix,
        hooks=(),
        key_pattern=UNSET,
        codecs=(),
        cache=0,
        cache_ttl=1,
        max_waiting=UNSET,
        fingerprint_secret=UNSET,
    )
    if setup.disabled:
        raise ConfigError("disabled: a service cannot run unprotected; remove the setting")
    return setup


class Server(uvicorn.Server):
    """A server whose signals are ours."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        Log("uvicorn.error").logger.addFilter(_is_news)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn raises SIGTERM again, and the exit code would be 143."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. A small `backlog` of uvicorn's lets asyncio take few at once, not wait few."""
        with contextlib.ExitStack() as stack:
            if self.config.ssl is not None:
                stack.enter_context(_handshakes_end())
            await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out that WebSockets are off: Java's client asks for HTTP/2 by an upgrade each time."""
    return "upgrade request" not in str(record.msg) and "WebSocket library" not in str(record.msg)


@contextlib.contextmanager
def _handshakes_end() -> Iterator[None]:
    """Let servers that begin meanwhile wait shorter for TLS; uvicorn has no setting for it."""
    loop = asyncio.get_running_loop()
    created = partial(loop.create_server, ssl_handshake_timeout=HEAD_WITHIN)
    vars(loop)["create_server"] = created
    try:
        yield
    finally:
        del vars(loop)["create_server"]


def serve(options: Options, say: Callable[[str], None]) -> int:
    """Run the service until a signal ends it, and return the exit code."""
    check_address(options)
    most = most_waiting(options.max_waiting)
    each = most if options.max_waiting_per_token is None else options.max_waiting_per_token
    setup = setup_of(options.url, options.store_prefix)
    tokens = None if options.tokens is None else Tokens.load(options.tokens)

    async def main() -> None:
        store = setup.opened(open_async_store, None)
        service = Service(store, setup, max_waiting=most, max_waiting_each=each)
        app = create_app(service, tokens)
        try:
            await run(app, service, options, say, partial(reload, app, service, options))
        finally:
            await service.close()

    asyncio.run(main())
    return 0


async def run(
    app: Starlette,
    service: Service,
    options: Options,
    say: Callable[[str], None],
    on_reload: Callable[[], None],
) -> None:
    """Serve the application until SIGTERM or SIGINT, and end within `grace`."""
    listener, place = listen(options.host, options.port)
    with listener:
        server = Server(_config(app, options))

        def stop() -> None:
            service.stop()
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number, handler in (
            (signal.SIGTERM, stop),
            (signal.SIGINT, stop),
            (signal.SIGHUP, on_reload),
        ):
            loop.add_signal_handler(number, handler)
        scheme = "http" if options.tls_cert is None else "https"
        say(f"semel serves {scheme}://{place}")
        await server.serve(sockets=[listener])


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Return the socket to listen on, and its address as URLs have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    # Connections inherit it: asyncio sets it for its own sockets alone, and without it the body of
    # an answer would wait 40 ms for the client to acknowledge the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    name = f"[{host}]" if ":" in host else host
    return listener, f"{name}:{listener.getsockname()[1]}"


def _config(app: Starlette, options: Options) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        backlog=AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(options.grace),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    try:
        config.load()
    except OSError as error:  # of files, and of TLS
        raise ConfigError(f"--tls-cert, --tls-key: cannot be used: {error}") from error
    bound(config, most_connections())
    return config


def reload(app: Starlette, service: Service, options: Options) -> None:
    """Read rules and tokens again; a mistake in either changes neither."""
    try:
        setup = setup_of(options.url, options.store_prefix)
        before: Tokens | None = app.state.tenants.tokens
        tokens = None if before is None else Tokens.load(str(options.tokens), before)
    except ConfigError as error:
        logger.error("settings not reloaded, the old ones stay: %s", error)
        return
    if setup.opening != service.setup.opening:
        logger.warning("the store's settings changed; restart the service to use them")
    service.setup = setup
    app.state.tenants.tokens = tokens
    if before is not None and tokens is not None:
        tokens.replace(before)
        service.waiting.wake_all()
    logger.warning("settings reloaded: rules%s", "" if tokens is None else " and tokens")
