"""The body of a request that FastAPI may have read already, as bytes or as a form."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from starlette.requests import ClientDisconnect

from semel.http import messages
from semel.http.rulebook import Refusal


class Body:
    """A request for the rules, and its body; more of it than the limit is refused."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request, self._limit = request, limit
        self._form: Any = request._form
        scope = request.scope
        self.request = messages.Request(
            scope["method"],
            scope["path"],
            scope.get("query_string", b""),
            messages.Headers(self._lines()),
            request,
        )

    def _lines(self) -> list[messages.HeaderLine]:
        lines: list[messages.HeaderLine] = self._request.scope["headers"]
        if self._form is None:
            return lines
        # The boundary is another one on each try, and the form has none any more.
        return [
            (name, value.partition(b";")[0] if name.lower() == b"content-type" else value)
            for name, value in lines
        ]

    async def read(self) -> bytes:
        """Give the body; one that nobody has read yet is kept for the endpoint."""
        if self._form is not None:
            return await self._form_bytes()
        if not hasattr(self._request, "_body"):
            self._request._body = await self._streamed()
        body = await self._request.body()
        if len(body) > self._limit:
            raise Refusal("body_too_large")
        return body

    async def _streamed(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in self._request.stream():
                size += len(chunk)
                if size > self._limit:
                    raise Refusal("body_too_large")
                chunks.append(chunk)
        except ClientDisconnect:
            raise Refusal("body_incomplete") from None
        return b"".join(chunks)

    async def _form_bytes(self) -> bytes:
        """Give bytes that stand for a form: its fields, and its files with all that is known."""
        items = self._form.multi_items()
        if sum(_size(value) for _, value in items) > self._limit:
            raise Refusal("body_too_large")
        if all(isinstance(value, str) for _, value in items):
            return urlencode(items).encode()
        return b"".join([piece for item in items for piece in await _pieces(*item)])


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else value.size or 0


async def _pieces(name: str, value: Any) -> list[bytes]:
    """Give a part of a form, each piece of it with its length before it."""
    if isinstance(value, str):
        pieces = [name.encode(), value.encode()]
    else:
        about = (name, value.filename or "", value.content_type or "")
        await value.seek(0)
        pieces = [*(each.encode() for each in about), await value.read()]
        await value.seek(0)
    return [b"%d:" % len(pieces), *(b"%d:%b" % (len(piece), piece) for piece in pieces)]
