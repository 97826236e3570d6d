"""The three clients under one set of names, so that one suite tells of all of them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import httpx
import requests
from requests.auth import HTTPDigestAuth
from requests.exceptions import ChunkedEncodingError

from semel.adapters.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.adapters.requests import IdempotentAdapter

PATIENCE = 60.0
"""Seconds; only a failure ever waits that long."""


class Told(NamedTuple):
    """What the caller got."""

    status: int
    body: bytes


class OnHttpx:
    """`httpx.Client`."""

    Error = httpx.TransportError
    Broken = httpx.RemoteProtocolError
    Silence = httpx.ReadTimeout
    Digest = httpx.DigestAuth

    def __init__(self, only: str | None = None, **options: Any) -> None:
        self.waits: list[float] = []
        transport = IdempotentTransport(sleep=self.waits.append, **options)
        place = {"transport": transport} if only is None else {"mounts": {only: transport}}
        self._client = httpx.Client(
            timeout=PATIENCE, follow_redirects=True, trust_env=False, **place
        )

    def call(self, url: str, method: str = "POST", body: Any = b"{}", **given: Any) -> Told:
        return self._told(self._client.request(method, url, content=body, **given))

    def answered(self, url: str) -> Any:
        """The answer as the client gives it."""
        return self._client.post(url)

    def request(self, url: str) -> Any:
        """A request that can be sent several times."""
        return self._client.build_request("POST", url, content=b"{}")

    def send(self, request: Any) -> Told:
        return self._told(self._client.send(request))

    def first_chunk(self, url: str, then: Callable[[], None]) -> tuple[bytes, bytes]:
        """The answer as it comes: what came first, and (after `then`) the rest."""
        with self._client.stream("POST", url) as response:
            chunks = response.iter_raw()
            first = next(chunks)
            then()
            return first, b"".join(chunks)

    def chunks(self) -> Any:
        """A body that can be read once only."""

        def read() -> Iterator[bytes]:
            yield b"one"
            yield b"two"

        return read()

    def close(self) -> None:
        self._client.close()

    @staticmethod
    def _told(response: httpx.Response) -> Told:
        return Told(response.status_code, response.content)


class OnAsyncHttpx:
    """`httpx.AsyncClient`."""

    Error = httpx.TransportError
    Broken = httpx.RemoteProtocolError
    Silence = httpx.ReadTimeout
    Digest = httpx.DigestAuth

    def __init__(self, only: str | None = None, **options: Any) -> None:
        self.waits: list[float] = []
        self._runner = asyncio.Runner()
        transport = AsyncIdempotentTransport(sleep=self._sleep, **options)
        place = {"transport": transport} if only is None else {"mounts": {only: transport}}
        self._client = httpx.AsyncClient(
            timeout=PATIENCE, follow_redirects=True, trust_env=False, **place
        )

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def _run(self, coroutine: Any) -> Any:
        # In the caller's context: the running attempt is known by it.
        return self._runner.run(coroutine, context=contextvars.copy_context())

    def call(self, url: str, method: str = "POST", body: Any = b"{}", **given: Any) -> Told:
        return self._told(self._run(self._client.request(method, url, content=body, **given)))

    def answered(self, url: str) -> Any:
        return self._run(self._client.post(url))

    def request(self, url: str) -> Any:
        return self._client.build_request("POST", url, content=b"{}")

    def send(self, request: Any) -> Told:
        return self._told(self._run(self._client.send(request)))

    def first_chunk(self, url: str, then: Callable[[], None]) -> tuple[bytes, bytes]:
        async def read() -> tuple[bytes, bytes]:
            async with self._client.stream("POST", url) as response:
                chunks = response.aiter_raw()
                first = await anext(chunks)
                then()
                return first, b"".join([chunk async for chunk in chunks])

        return self._run(read())

    def chunks(self) -> Any:
        async def read() -> AsyncIterator[bytes]:
            yield b"one"
            yield b"two"

        return read()

    def close(self) -> None:
        self._run(self._client.aclose())
        self._runner.close()

    @staticmethod
    def _told(response: httpx.Response) -> Told:
        return Told(response.status_code, response.content)


class OnRequests:
    """`requests.Session`."""

    Error = requests.ConnectionError
    Broken = ChunkedEncodingError
    Silence = requests.ReadTimeout
    Digest = HTTPDigestAuth

    def __init__(self, only: str | None = None, **options: Any) -> None:
        self.waits: list[float] = []
        self._session = requests.Session()
        self._session.trust_env = False
        for place in ["http://", "https://"] if only is None else [only]:
            self._session.mount(place, IdempotentAdapter(sleep=self.waits.append, **options))

    def call(self, url: str, method: str = "POST", body: Any = b"{}", **given: Any) -> Told:
        given.setdefault("timeout", PATIENCE)
        answered = self._session.request(method, url, data=body, **given)
        return Told(answered.status_code, answered.content)

    def answered(self, url: str) -> Any:
        return self._session.post(url, timeout=PATIENCE)

    def request(self, url: str) -> Any:
        return self._session.prepare_request(requests.Request("POST", url, data=b"{}"))

    def send(self, request: Any) -> Told:
        answered = self._session.send(request, timeout=PATIENCE)
        return Told(answered.status_code, answered.content)

    def first_chunk(self, url: str, then: Callable[[], None]) -> tuple[bytes, bytes]:
        with self._session.post(url, stream=True, timeout=PATIENCE) as response:
            first = response.raw.read(3)
            then()
            return first, response.raw.read()

    def chunks(self) -> Any:
        def read() -> Iterator[bytes]:
            yield b"one"
            yield b"two"

        return read()

    def close(self) -> None:
        self._session.close()


KINDS = {"httpx": OnHttpx, "httpx-async": OnAsyncHttpx, "requests": OnRequests}
