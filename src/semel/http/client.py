"""What a client does with keys: which one it sends where, when it tries again, how long it waits.

The law. A call has one key, made before its first try and the same on every further one. The key
goes to the origin that it was made for and to no other. What is sent without a key is sent once.
Requests that a redirect or an authentication made of one another belong to one call; so does the
same request sent again by hand, until it has been answered with success. The request that was sent
has the key in its headers, so that a caller who gives up can read it; a request that is redirected
has not, because clients copy its headers to wherever the redirect leads.

This module decides. It never waits, reads a clock or touches a socket; only the jitter is random.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypedDict
from urllib.parse import quote, urlsplit

from msgspec import Struct

from semel.core.attempts import Attempt
from semel.core.keys import KeyGenerator
from semel.core.policy import Duration, seconds
from semel.errors import ConfigError, InvalidKey
from semel.events import logger
from semel.http.options import Choices, known_options
from semel.http.requests import line_of_key

_CONFLICT, _TOO_MANY, _SERVER_ERROR = 409, 429, 500
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LONGEST_PART: Final = 200
_MOST_RETRIES: Final = 100


class ClientOptions(TypedDict, total=False):
    """The options of a client, by name; what is left out has its default (see `ClientRules`)."""

    header: str
    methods: Sequence[str]
    retries: int
    backoff: Duration
    backoff_max: Duration
    retry_after_max: Duration
    retry_for: Duration
    app: str | None


class ClientRules:
    """The options of a client, complete and checked.

    header           where the key goes
    methods          of requests that get a key
    retries          tries after the first one; 409 with Retry-After ("still running") does not
                     count, but 0 means that nothing is sent twice
    backoff          the first wait; each further one is twice as long, up to `backoff_max`
    retry_after_max  a server that asks for a longer wait is not asked again
    retry_for        no try begins later than this after the first one; longer than the lease of
                     the server, or the key of a server that crashed is still taken at the end
    app              stands in front of new keys
    """

    def __init__(
        self,
        *,
        header: str = "Idempotency-Key",
        methods: Sequence[str] = ("POST", "PATCH"),
        retries: int = 3,
        backoff: Duration = 0.2,
        backoff_max: Duration = 10.0,
        retry_after_max: Duration = 30.0,
        retry_for: Duration = 60.0,
        app: str | None = None,
    ) -> None:
        # Checked as the integrations on the other side do.
        self.header, self.methods = header, Choices(header=header, methods=methods).methods
        self.retries = _count(retries)
        self.backoff = seconds("backoff", backoff)
        self.backoff_max = seconds("backoff_max", backoff_max)
        self.retry_after_max = seconds("retry_after_max", retry_after_max, zero=True)
        self.retry_for = seconds("retry_for", retry_for, zero=True)
        self.new_key = _generator(app).new
        """Makes the key of a call that no attempt makes."""

    def backoff_after(self, made: int) -> float:
        """Seconds to wait after so many tries `made`; with jitter, so that clients come apart."""
        longest = min(self.backoff_max, self.backoff * 2.0 ** min(made, _MOST_RETRIES))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret

    def sending(
        self,
        target: Target,
        *,
        known: Call | None,
        headers: MutableMapping[str, str],
        attempt: Attempt | None,
        repeatable: bool,
        now: float,
    ) -> Sending | None:
        """Say how a request is sent; None = it is not protected.

        `target` is where it goes. `known` is the call that the request brought along, and `attempt`
        the one that runs. The key is put into the `headers` of the request, or taken out of them
        if it must not go there. A body that cannot be sent twice is not `repeatable`. `now` is the
        time.
        """
        given = headers.get(self.header)
        if known is not None and known.made and given == known.line:
            given = None  # not the caller's: we put it there when the request was sent before
        sending = self._sending(target, known, given, attempt, repeatable=repeatable, now=now)
        if sending is None or sending.line is None:
            headers.pop(self.header, None)
        elif sending.line != given:
            headers[self.header] = sending.line
        return sending

    def _sending(
        self,
        target: Target,
        known: Call | None,
        given: str | None,
        attempt: Attempt | None,
        *,
        repeatable: bool,
        now: float,
    ) -> Sending | None:
        call = known
        if call is None or call.done or given not in {None, call.line}:
            if given is None and target.method not in self.methods:
                return None
            line = self._line(target, attempt) if given is None else given
            call = Call(target.origin, line, made=given is None)
        if target.origin != call.origin:
            return Sending(self, call, target, None, 0, now)
        if target.method not in self.methods:  # a redirect made a GET of it, or the caller chose so
            return Sending(self, call, target, given, 0, now)
        retries = self.retries if repeatable else 0
        return Sending(self, call, target, call.line, retries, now)

    def _line(self, target: Target, attempt: Attempt | None) -> str:
        return line_of_key(self.new_key() if attempt is None else attempt.derive_next(target.part))


def chosen(options: Mapping[str, Any]) -> ClientRules:
    """Check options that are given by name."""
    return ClientRules(**known_options(options, ClientOptions.__annotations__))


class Target(Struct, frozen=True):
    """Where a request goes, without its query: that may differ from run to run."""

    method: str
    origin: str
    path: str

    @classmethod
    def of(cls, method: str, url: str) -> Target:
        """Take a URL apart.

        >>> Target.of("POST", "https://Bank.example:443/charges?at=12")
        Target(method='POST', origin='https://bank.example', path='/charges')
        """
        parts = urlsplit(url)
        port = None if parts.port == _DEFAULT_PORTS.get(parts.scheme) else parts.port
        host = parts.hostname or ""
        if ":" in host:  # or the end of an IPv6 address could pass for a port
            host = f"[{host}]"
        host = host if port is None else f"{host}:{port}"
        return cls(method.upper(), f"{parts.scheme}://{host}", parts.path or "/")

    @property
    def part(self) -> str:
        """What the derived key of such a call is named by: printable ASCII, not too long."""
        text = quote(f"{self.method}:{self.origin}{self.path}", safe=string.punctuation)
        if len(text) <= _LONGEST_PART:
            return text
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return f"{text[: _LONGEST_PART - len(digest) - 1]}~{digest}"


def part_of_call(method: str, url: str) -> str:
    """Return the part by which semel's HTTP clients derive the key of a call inside an attempt.

    A resolver asks the next service by that key: `record.derive(part_of_call(method, url))`. The
    query of the URL doesn't count.

    Examples:
        >>> part_of_call("POST", "https://bank.example/charges?at=12")
        'POST:https://bank.example/charges'
    """
    return Target.of(method, url).part


class Call(Struct):
    """What ties the requests of one call together: they carry it along."""

    origin: str
    line: str
    """The value of the key's header."""
    made: bool
    """Whether we made the key; else the caller gave it."""
    done: bool = False


class Sending(Struct, eq=False):
    """One request on its way: after each try it says whether, and when, the next one follows."""

    _rules: ClientRules
    call: Call
    _target: Target
    line: str | None
    """The header that goes out; None = none may."""
    _retries: int
    _began: float
    _made: int = 0
    _failed: int = 0
    _waited: float = 0.0

    def redirected(self, headers: MutableMapping[str, str]) -> None:
        """Take the key off a request before the client makes another one of its `headers`."""
        if self.call.made:
            headers.pop(self._rules.header, None)

    def after_error(self, error: Exception, now: float) -> float | None:
        """Return the seconds to wait before the next try; None = the error is the outcome."""
        return self._wait(0.0, now, type(error).__name__)

    def after_answer(
        self, status: int, retry_after: str | None, now: float, wall: float
    ) -> float | None:
        """Return the seconds to wait before the next try; None = the answer is the outcome.

        `now` is the time of the monotonic clock, `wall` that of the calendar.
        """
        self.call.done = self.call.done or 200 <= status < 300  # noqa: PLR2004 - success
        asked = None if retry_after is None else seconds_asked(retry_after, wall)
        if not may_succeed_later(status, asked):
            return None
        running = status == _CONFLICT
        return self._wait(0.0 if asked is None else asked, now, str(status), running=running)

    def _wait(
        self, asked: float, now: float, reason: str, *, running: bool = False
    ) -> float | None:
        rules = self._rules
        failed = self._failed + (not running)
        if self._retries == 0 or failed > self._retries or asked > rules.retry_after_max:
            return None
        pause = asked + rules.backoff_after(self._made)  # never sooner than asked
        # What was waited for counts too: the sleep of a test may let no time pass.
        if max(now - self._began, self._waited) + pause > rules.retry_for:
            return None
        self._made += 1
        self._failed = failed
        self._waited += pause
        logger.info(
            "%s %s: %s; try %d follows in %.2f s",
            self._target.method,
            self._target.origin,
            reason,
            self._made + 1,
            pause,
        )
        return pause


def may_succeed_later(status: int, asked: float | None) -> bool:
    """Return whether the same request may get another answer later.

    409 is "still running" only together with a time to come back; else it is final.
    """
    if status == _CONFLICT:
        return asked is not None
    return status == _TOO_MANY or status >= _SERVER_ERROR


def seconds_asked(retry_after: str, wall: float) -> float | None:
    """Read Retry-After, seconds or a date; None = it cannot be read.

    >>> seconds_asked("3", 0.0), seconds_asked("Thu, 01 Jan 1970 00:01:00 GMT", 50.0)
    (3.0, 10.0)
    """
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    # A date without a zone (-0000) is in UTC.
    moment = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    return max(0.0, moment - wall)


def _count(retries: object) -> int:
    if (
        isinstance(retries, bool)
        or not isinstance(retries, int)
        or not 0 <= retries <= _MOST_RETRIES
    ):
        raise ConfigError(f"retries must be a number from 0 to {_MOST_RETRIES}; got {retries!r}")
    return retries


def _generator(app: str | None) -> KeyGenerator:
    try:
        keys = KeyGenerator(app)
        line_of_key(keys.new())
    except InvalidKey as error:
        raise ConfigError(f"app cannot stand in front of keys: {error}") from error
    return keys
