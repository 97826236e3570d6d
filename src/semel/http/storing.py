"""What of an answer is stored, and what a replay is made of.

`StoredRule.decide` says what becomes of a key after an answer. 2xx is stored by default; a 5xx is a
failure, for the policy to judge; everything else runs again. `stored=` adds statuses, or decides by
a function. Never stored, whatever a function says: answers about the client rather than the
operation (`NEVER`), and header lines that are secret, that belong to one connection, or that the
layers around us write anew (`_FORBIDDEN`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import msgspec

from semel.errors import ConfigError
from semel.events import logger
from semel.http.requests import HEADER_NAME, HEADER_VALUE, HeaderLine, Headers

Decision: TypeAlias = Literal["store", "forget", "unknown", "failure"]
"""What becomes of the key: stored, free again, parked, or what the policy says of failures."""

StoredChoice: TypeAlias = bool | Literal["unknown"]
"""Whether an answer is stored; "unknown" parks the key."""

StoredStatuses: TypeAlias = (
    int | Collection[int] | Callable[[int], StoredChoice] | Callable[[int, Headers], StoredChoice]
)
"""What is stored: statuses beside 2xx, or a function of the status, or of status and headers."""

NEVER: Final = frozenset({401, 403, 408, 425, 429})
"""Statuses that tell of the client's rights or of the moment, not of the operation."""

_FORBIDDEN: Final = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"set-cookie",
        b"set-cookie2",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"www-authenticate",
    }
)
_FORBIDDEN_BEGINNINGS: Final = (b"proxy-", b"access-control-")
_FORBIDDEN_PARTS: Final = (b"token", b"csrf", b"authentication-info")

_EVENT_STREAM: Final = b"text/event-stream"
UNPROTECTED: Final[HeaderLine] = (b"idempotent-unprotected", b"stream")
"""Marks a live stream: a retry of it runs again."""

SUCCESSES: Final = range(200, 300)
REDIRECTS: Final = frozenset(range(300, 400)) - {304}
SEE_OTHER: Final = 303
"""The one redirect that means "done, and here is the result": a POST is never repeated by it."""
_ERRORS: Final = range(400, 600)
_FIRST_SERVER_ERROR: Final = 500

_NEITHER: Final = (
    "stored must be statuses that are stored beside 2xx, such as [303], or a function of the "
    "status, or of status and headers; got {!r}"
)


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A whole response: status, header lines in order, body."""

    status: int
    headers: tuple[HeaderLine, ...]
    body: bytes


class StoredRule(msgspec.Struct, frozen=True):
    """What `stored=` says: the statuses that it names beside 2xx, or what its function decides."""

    statuses: frozenset[int]
    function: Any = None
    sees_headers: bool = False
    """The function takes the headers, too: it has seen where a redirect leads."""

    @classmethod
    def of(cls, given: StoredStatuses | None) -> StoredRule:
        """Check the option; an unusable value raises `ConfigError`."""
        if callable(given):
            check_function("stored", given)
            return cls(frozenset(), given, _sees_headers(given))
        named = (given,) if isinstance(given, int) else () if given is None else given
        if isinstance(named, str | bytes) or not isinstance(named, Iterable):
            raise ConfigError(_NEITHER.format(given))
        return cls(frozenset(map(_nameable, named)))

    def decide(self, status: int, lines: Iterable[HeaderLine] = ()) -> Decision:
        """Say what becomes of the key after an answer with this status and these header lines.

        >>> rule = StoredRule.of([303])
        >>> rule.decide(201), rule.decide(303), rule.decide(404), rule.decide(500)
        ('store', 'store', 'forget', 'failure')
        """
        if status in NEVER:
            return "forget"
        choice: StoredChoice = status in SUCCESSES or status in self.statuses
        if self.function is not None:
            try:
                choice = self._chosen(status, lines)
            except Exception:  # noqa: BLE001 - the effect is done, and its answer must go out
                logger.exception("the function stored= raised for status %d", status)
        if choice == "unknown":
            return "unknown"
        if choice:
            return "store"
        return "forget" if status < _FIRST_SERVER_ERROR else "failure"

    def _chosen(self, status: int, lines: Iterable[HeaderLine]) -> StoredChoice:
        decided: StoredChoice = (
            self.function(status, Headers(lines)) if self.sees_headers else self.function(status)
        )
        if decided != "unknown" and isinstance(decided, str | Awaitable):
            # Both would count as true, and store a redirect to a login page, or a failure.
            raise TypeError(f"stored must return True, False or 'unknown', not {decided!r}")
        return decided


def check_function(name: str, value: Any) -> Any:
    """Reject what cannot be called, and coroutines where they would not be awaited."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function; got {type(value).__name__}")
    if name != "tenant" and any(
        map(inspect.iscoroutinefunction, (value, getattr(value, "__call__", None)))  # noqa: B004 - it is asked what it is
    ):
        raise ConfigError(f"{name} must be a plain function: only tenant may be async")
    return value


def _sees_headers(function: Callable[..., Any]) -> bool:
    """Return whether a function wants the headers: it names them, or needs a second argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions that are written in C have none
        return False
    ways: list[tuple[object, ...]] = [(200,), (200, Headers(()))]
    if "headers" in signature.parameters:
        ways.reverse()
    for arguments in ways:
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) > 1
    raise ConfigError("stored must be a function of the status, or of status and headers")


def _nameable(status: object) -> int:
    """Reject statuses that cannot be named, each with its reason."""
    if isinstance(status, bool) or not isinstance(status, int):
        raise ConfigError(_NEITHER.format(status))
    if status in SUCCESSES:
        raise ConfigError(
            f"stored={status}: every 2xx is stored, so name only what is stored beside it; "
            "to store fewer, pass a function of the status"
        )
    if status in NEVER:
        raise ConfigError(
            f"stored={status}: this status is never stored, as it says something about the caller "
            "or the moment, not about the operation"
        )
    if status in REDIRECTS and status != SEE_OTHER:
        raise ConfigError(
            f"stored={status}: of the redirects only 303 can be named. With {status} the redirect "
            "to a login page would be stored like the one that means done, and every retry would "
            "get it. Answer with 303 (See Other) where the operation is done, or pass a function "
            "that looks where the redirect leads: stored=lambda status, headers: "
            f"status < 300 or (status == {status} and headers.get('location') == '/thanks')"
        )
    if status != SEE_OTHER and status not in _ERRORS:
        raise ConfigError(f"stored={status}: this is not the status of a complete response")
    return int(status)


def is_event_stream(lines: Iterable[HeaderLine]) -> bool:
    """Return whether an answer is a stream of events, which has no end that could be waited for."""
    for name, value in lines:
        if name.lower() == b"content-type" and value.lower().startswith(_EVENT_STREAM):
            return True
    return False


def kept_lines(
    lines: Iterable[HeaderLine], also_forbidden: frozenset[bytes]
) -> tuple[HeaderLine, ...]:
    """Leave out the header lines that may neither be stored nor replayed."""
    kept: list[HeaderLine] = []
    of_connection: set[bytes] = set()
    for line in lines:
        name = line[0].lower()
        if name == b"connection":  # it names others, which belong to the connection as well
            of_connection |= {each.strip().lower() for each in line[1].split(b",")}
        elif name not in also_forbidden and not _is_forbidden(name) and _is_value(line[1]):
            kept.append(line)
    if of_connection:
        kept = [line for line in kept if line[0].lower() not in of_connection]
    return tuple(kept)


def location_of(lines: Iterable[HeaderLine]) -> list[HeaderLine]:
    """Return the header line that says where the result is, if there is one."""
    return [line for line in lines if line[0].lower() == b"location"]


@lru_cache(maxsize=1024)
def _is_forbidden(name: bytes) -> bool:
    name = name.replace(b"_", b"-")  # some applications write them so
    return (
        HEADER_NAME.fullmatch(name.decode("latin-1")) is None
        or name in _FORBIDDEN
        or name.startswith(_FORBIDDEN_BEGINNINGS)
        or any(part in name for part in _FORBIDDEN_PARTS)
    )


def _is_value(value: bytes) -> bool:
    return HEADER_VALUE.fullmatch(value.decode("latin-1")) is not None


def replay(stored: Answer, marker: bytes) -> Answer:
    """Make the answer that a duplicate gets, of what was stored and may be sent."""
    mark = (marker, b"true")
    if not has_body(stored.status):
        return Answer(stored.status, (*stored.headers, mark), stored.body)
    length = (b"content-length", b"%d" % len(stored.body))
    return Answer(stored.status, (*stored.headers, length, mark), stored.body)


def has_body(status: int) -> bool:
    """Return whether an answer with this status may have a body."""
    return status not in {204, 304} and status >= SUCCESSES.start
