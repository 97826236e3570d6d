"""Requests and answers as values, the same for every door.

This module holds values. It decides nothing and touches no socket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, TypeVar, overload

from msgspec import Struct

HeaderLine: TypeAlias = tuple[bytes, bytes]
Default = TypeVar("Default")


class Headers:
    """The header lines of a message, in order, unsplit; names are compared without their case.

    Examples:
        >>> Headers([(b"Accept", b"text/html")]).get("accept")
        'text/html'
    """

    __slots__ = ("lines",)

    def __init__(self, lines: Iterable[HeaderLine]) -> None:
        self.lines = tuple(lines)

    @overload
    def get(self, name: str) -> str | None: ...

    @overload
    def get(self, name: str, default: Default) -> str | Default: ...

    def get(self, name: str, default: Default | None = None) -> str | Default | None:
        """Give the value of the first line with this name, or `default`."""
        found = self.values(name.lower().encode("latin-1"))
        return found[0].decode("latin-1") if found else default

    def get_all(self, name: str) -> list[str]:
        """Give the values of all lines with this name."""
        return [value.decode("latin-1") for value in self.values(name.lower().encode("latin-1"))]

    def values(self, name: bytes) -> list[bytes]:
        """Give the values of all lines with this name, in lower case, as they were sent."""
        size = len(name)
        return [
            value
            for written, value in self.lines
            if len(written) == size and (written == name or written.lower() == name)
        ]


class Request(Struct, frozen=True):
    """What a request shows before its body is read; functions of the application get this."""

    method: str
    """In upper case, whatever the client wrote."""
    path: str
    query: bytes
    """As it was sent, without the question mark."""
    headers: Headers
    raw: object
    """The framework's own: an ASGI scope, a WSGI environ, a request object."""


class Answer(Struct, frozen=True, gc=False):
    """A whole response: status, header lines in order, body."""

    status: int
    headers: tuple[HeaderLine, ...]
    body: bytes
