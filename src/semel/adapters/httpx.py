"""httpx: transports that give every call a key, and repeat it under that key.

    client = httpx.Client(transport=IdempotentTransport())
    client = httpx.AsyncClient(transport=AsyncIdempotentTransport())

What is repeated, and how often, is said in `semel.http.client`. A body is sent again only if it
is all there: `content=` with bytes or text, `json=`, `data=`. A stream is sent once, with its key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, Unpack

from semel.core.attempts import current_attempt
from semel.core.optional import Needed
from semel.errors import ConfigError
from semel.http.client import ClientOptions, ClientRules, Sending, Target, chosen

with Needed("semel[httpx]", by=__name__):
    import httpx

import anyio  # comes with httpx

_RETRIED: Final = (
    httpx.TimeoutException,
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
)
_CALL: Final = "semel.call"
"""The extension that ties requests together: a redirect makes a new request with the old ones."""

_SHORT: Final = 1024 * 1024
_LENGTH: Final = re.compile("[0-9]{1,9}")
"""A length that may be short; Python refuses to read one of thousands of digits."""

_FOR_TASKS: Final = "an httpx.AsyncClient takes an AsyncIdempotentTransport, not this one"
_FOR_THREADS: Final = "an httpx.Client takes an IdempotentTransport, not an async one"


class IdempotentTransport(httpx.BaseTransport):
    """Sends requests with a key through another transport, and repeats them until a response.

    `wrapped` is that transport; the default is httpx's own. Its proxies, certificates, and limits
    count, not those of the client. `sleep` waits between two tries.

    Examples:
        >>> client = httpx.Client(transport=IdempotentTransport(retries=5))
    """

    def __init__(
        self,
        wrapped: httpx.BaseTransport | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        **options: Unpack[ClientOptions],
    ) -> None:
        if wrapped is not None and not isinstance(wrapped, httpx.BaseTransport):
            raise ConfigError(f"a transport of httpx is needed, not {type(wrapped).__name__}")
        self._rules = chosen(options)
        self._wrapped = httpx.HTTPTransport() if wrapped is None else wrapped
        self._sleep = sleep

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as the options allow."""
        sending = _begun(self._rules, request)
        if sending is None:
            return self._wrapped.handle_request(request)
        while True:
            try:
                response = self._wrapped.handle_request(request)
                _read(response)
            except _RETRIED as error:
                pause = sending.after_error(error, time.monotonic())
                if pause is None:
                    raise
            else:
                pause = _after(sending, request, response)
                if pause is None:
                    return response
                response.close()
            self._sleep(pause)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._wrapped.close()

    async def __aenter__(self) -> NoReturn:
        raise ConfigError(_FOR_TASKS)

    async def handle_async_request(self, _: httpx.Request) -> NoReturn:
        """Raise `ConfigError`: the other client takes another transport."""
        raise ConfigError(_FOR_TASKS)


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """An `IdempotentTransport` for `httpx.AsyncClient`: `wrapped` and `sleep` are async."""

    def __init__(
        self,
        wrapped: httpx.AsyncBaseTransport | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        **options: Unpack[ClientOptions],
    ) -> None:
        if wrapped is not None and not isinstance(wrapped, httpx.AsyncBaseTransport):
            raise ConfigError(
                f"an async transport of httpx is needed, not {type(wrapped).__name__}"
            )
        self._rules = chosen(options)
        self._wrapped = httpx.AsyncHTTPTransport() if wrapped is None else wrapped
        self._sleep = sleep

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and repeat it as the options allow."""
        sending = _begun(self._rules, request)
        if sending is None:
            return await self._wrapped.handle_async_request(request)
        while True:
            try:
                response = await self._wrapped.handle_async_request(request)
                await _aread(response)
            except _RETRIED as error:
                pause = sending.after_error(error, time.monotonic())
                if pause is None:
                    raise
            else:
                pause = _after(sending, request, response)
                if pause is None:
                    return response
                await response.aclose()
            await self._sleep(pause)

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._wrapped.aclose()

    def __enter__(self) -> NoReturn:
        raise ConfigError(_FOR_THREADS)

    def handle_request(self, _: httpx.Request) -> NoReturn:
        """Raise `ConfigError`: the other client takes another transport."""
        raise ConfigError(_FOR_THREADS)


def _begun(rules: ClientRules, request: httpx.Request) -> Sending | None:
    """Put the key of its call on the request, if it goes out with one, and say how it is sent."""
    sending = rules.sending(
        Target.of(request.method, str(request.url)),
        known=request.extensions.get(_CALL),
        headers=request.headers,
        attempt=current_attempt(),
        repeatable=isinstance(request.stream, httpx.ByteStream),
        now=time.monotonic(),
    )
    if sending is not None:
        # A new dictionary: the caller may give the same one to many requests.
        request.extensions = {**request.extensions, _CALL: sending.call}
    return sending


def _after(sending: Sending, request: httpx.Request, response: httpx.Response) -> float | None:
    if response.has_redirect_location:
        sending.redirected(request.headers)
    return sending.after_answer(
        response.status_code, response.headers.get("retry-after"), time.monotonic(), time.time()
    )


def _read(response: httpx.Response) -> None:
    """Read a short answer here, so that a connection cut within it is an error that is retried."""
    stream = response.stream
    if _is_short(response) and isinstance(stream, httpx.SyncByteStream):
        try:
            response.stream = httpx.ByteStream(b"".join(stream))
        finally:
            stream.close()


async def _aread(response: httpx.Response) -> None:
    stream = response.stream
    if _is_short(response) and isinstance(stream, httpx.AsyncByteStream):
        try:
            response.stream = httpx.ByteStream(b"".join([chunk async for chunk in stream]))
        finally:
            await stream.aclose()


def _is_short(response: httpx.Response) -> bool:
    """Return whether the response says its length, and a small one: it is no awaited stream."""
    length = response.headers.get("content-length", "")
    return bool(_LENGTH.fullmatch(length)) and int(length) <= _SHORT
