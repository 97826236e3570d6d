"""Requests and answers as values, the same for every door.

This module holds values. It decides nothing and touches no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

HeaderLine: TypeAlias = tuple[bytes, bytes]


class Headers:
    """The header lines of a message, in order, unsplit; names are compared without their case.

    >>> Headers([(b"Accept", b"text/html")]).get("accept")
    'text/html'
    """

    __slots__ = ("lines",)

    def __init__(self, lines: Iterable[HeaderLine]) -> None:
        self.lines = tuple(lines)

    def get(self, name: str) -> str | None:
        """Give the value of the first line with this name, or None."""
        return next(self._values(name), None)

    def get_all(self, name: str) -> list[str]:
        """Give the values of all lines with this name."""
        return list(self._values(name))

    def _values(self, name: str) -> Iterator[str]:
        wanted = name.lower().encode("latin-1")
        for written, value in self.lines:
            if len(written) == len(wanted) and written.lower() == wanted:
                yield value.decode("latin-1")


class Request(Struct, frozen=True):
    """What a request shows before its body is read; functions of the application get this."""

    method: str
    path: str
    query: bytes
    """As it was sent, without the question mark."""
    headers: Headers
    raw: object
    """The framework's own: an ASGI scope, a WSGI environ, a request object."""


class Answer(Struct, frozen=True):
    """A whole response: status, header lines in order, body."""

    status: int
    headers: tuple[HeaderLine, ...]
    body: bytes
