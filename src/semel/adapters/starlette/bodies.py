"""The body of a request that the framework may have read already, as bytes or as a form."""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect, Request

from semel.adapters.asgi import most_empty
from semel.http import requests
from semel.http.requests import Upload, form_bytes, without_boundary
from semel.http.rules import Rejected


class Body:
    """A request for the rules, and its body; more of it than the limit is refused."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request, self._limit = request, limit
        self._form: Any = request._form
        scope = request.scope
        self.request = requests.Request(
            scope["method"].upper(),
            scope["path"],
            scope.get("query_string", b""),
            requests.Headers(self._lines()),
            request,
        )

    def _lines(self) -> list[requests.HeaderLine]:
        lines: list[requests.HeaderLine] = self._request.scope["headers"]
        return lines if self._form is None else without_boundary(lines)

    async def read(self) -> bytes:
        """Give the body; one that nobody has read yet is kept for the endpoint."""
        if self._form is not None:
            return await self._form_bytes()
        if not hasattr(self._request, "_body"):
            self._request._body = await self._streamed()
        body = await self._request.body()
        if len(body) > self._limit:
            raise Rejected("body_too_large")
        return body

    async def _streamed(self) -> bytes:
        content, empty = bytearray(), 0  # not a list: a client may send one byte at a time
        receive = self._request._receive

        async def counted() -> Any:
            """Receive for Starlette's stream, which keeps messages without content to itself."""
            nonlocal empty
            message = await receive()
            if not message.get("body"):
                empty += 1
                if empty > most_empty(len(content)):
                    raise Rejected("body_too_large")
            return message

        self._request._receive = counted
        try:
            async for chunk in self._request.stream():
                content += chunk
                if len(content) > self._limit:
                    raise Rejected("body_too_large")
        except ClientDisconnect:
            raise Rejected("body_incomplete") from None
        finally:
            self._request._receive = receive
        return bytes(content)

    async def _form_bytes(self) -> bytes:
        items = self._form.multi_items()
        if sum(_size(value) for _, value in items) > self._limit:
            raise Rejected("body_too_large")
        fields = [(name, value) for name, value in items if isinstance(value, str)]
        files = [(name, value) for name, value in items if not isinstance(value, str)]
        return form_bytes(fields, [await _upload(name, file) for name, file in files])


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else value.size or 0


async def _upload(name: str, file: Any) -> Upload:
    position = file.file.tell()  # a dependency may have read it, for a checksum
    await file.seek(0)
    content = await file.read()
    await file.seek(position)
    return Upload(name, file.filename or "", file.content_type or "", content)
