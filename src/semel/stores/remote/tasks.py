"""aiohttp: the connections of a remote store for asyncio. `threads` has the same names."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Any, Final

import aiohttp
from yarl import URL

from semel.core.process import ForkAware, follow_forks, leave_alone, notice_fork
from semel.errors import StoreRefused, StoreUnavailable
from semel.stores.batching import has_ended, only_loop
from semel.stores.remote.addresses import IDLE, Address, Unreachable
from semel.stores.remote.wire import Reply
from semel.stores.urls import tls_error

LARGE: Final = 1 << 20
"""Bytes; a larger body is sent piece by piece, so that the event loop goes on meanwhile."""


class AsyncTransport(ForkAware):
    """The connections to a service, of one event loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._tls = address.tls()
        self._closed = False
        self._begin()
        follow_forks(self)

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    def after_fork_in_child(self) -> None:
        """Start with no connection: these are the parent's."""
        leave_alone(self._session)
        self._begin()

    def _open(self) -> aiohttp.ClientSession:
        notice_fork()
        if self._closed:
            raise StoreUnavailable(f"the store at {self.address.url} was closed")
        self._loop = only_loop(self._loop, self.address.where)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=IDLE, ssl=self._tls or True
                ),
                headers=self.address.headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept"),
            )
        return self._session

    async def post(self, path: str, body: bytes, seconds: float) -> Reply:
        """Send a request once; raise `Unreachable` where nothing came back in this time."""
        session = self._open()
        url = URL(self.address.url + path, encoded=True)
        limit = aiohttp.ClientTimeout(total=max(seconds, 0.001))
        try:
            async with session.post(
                url,
                data=BytesIO(body) if len(body) > LARGE else body,
                timeout=limit,
                allow_redirects=False,
            ) as response:
                return Reply(response.status, response.content_type, await response.read())
        except TimeoutError:
            raise Unreachable(f"no answer within {seconds:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            connecting = isinstance(error, aiohttp.ClientConnectorError)
            lasting = tls_error(error, connecting=connecting)
            if lasting is not None:
                raise StoreRefused(f"no TLS with {self.address.where}: {lasting}") from error
            raise Unreachable(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the connections; those who wait for an answer get an error."""
        ended = has_ended(self._loop, self.address.where)
        self._closed = True
        session: Any = self._session
        self._session = None
        if session is None:
            return
        if ended:
            leave_alone(session)
        else:
            await session.close()
