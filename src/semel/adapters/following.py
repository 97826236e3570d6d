"""Answers on their way out of a server for threads, which closes what it has sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Self

from semel.adapters.door import Exchange
from semel.http.requests import HeaderLine


def close(chunks: object) -> None:
    """Close what an application gave, if it can be closed."""
    closing = getattr(chunks, "close", None)
    if closing is not None:
        closing()


def up_to(limit: int, chunks: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """Read the chunks of an answer: what was read, and whether that is all of it."""
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        limit -= len(chunk)
        if limit < 0:
            return held, False
    return held, True


class Sent:
    """An answer on its way out; what the application gave is closed after it."""

    def __init__(self, chunks: Iterable[bytes], source: object) -> None:
        self._chunks, self._source = chunks, source

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        """Close what the application gave."""
        close(self._source)


class Following:
    """An answer too large to be kept, sent as it comes; its end is recorded before the last of it.

    A client who goes away does not end it: `close`, which every server calls, reads on to the end.
    So does its own end, for one that never reaches a server: a function of Flask's `after_request`
    may put another answer in its place, and a key that nobody ends would be held for ever.
    """

    def __init__(
        self,
        exchange: Exchange,
        status: int,
        lines: list[HeaderLine],
        chunks: Iterator[bytes],
        source: object,
    ) -> None:
        self._exchange, self._status, self._lines = exchange, status, lines
        self._chunks, self._source = chunks, source
        self._ahead: bytes | None = None
        self._ahead = self._next()

    def __del__(self) -> None:
        if self._ahead is not None:
            with suppress(Exception):  # it is recorded, and nobody is left to be told
                self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        chunk = self._ahead
        if chunk is None:
            raise StopIteration
        self._ahead = self._next()
        return chunk

    def close(self) -> None:
        """Read what is left, and close what the application gave."""
        try:
            while self._ahead is not None:
                self._ahead = self._next()
        finally:
            close(self._source)

    def _next(self) -> bytes | None:
        try:
            chunk = next(self._chunks, None)
        except BaseException as error:
            self._ahead = None
            self._exchange.raised(error)
            raise
        if chunk is None:
            self._exchange.answered(self._status, self._lines, None)
        return chunk
