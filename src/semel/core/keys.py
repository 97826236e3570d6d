"""Which keys are acceptable, and how keys and owner ids are made.

The rules and the derivations are pure: the same input gives the same answer for ever, because a
key that is derived differently after an upgrade is a second execution. Only the two makers,
`KeyGenerator` and `OwnerIds`, read the clock and the system's randomness.
An error never repeats the key: it may be a secret, and it may be a megabyte long.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from typing import Literal

from semel.core.records import OWNER_BYTES, Identity
from semel.errors import ConfigError, InvalidKey

MAX_KEY_LENGTH = 255
"""Characters that every store has room for."""

_DIGEST_BYTES = 16


class KeyRules:
    """Says whether a key may be used: printable, without whitespace, not empty, not too long.

    `pattern` is asked as well, for the whole key, after these rules.
    """

    __slots__ = ("max_length", "pattern")

    def __init__(
        self, pattern: str | re.Pattern[str] | None = None, max_length: int = MAX_KEY_LENGTH
    ) -> None:
        if not 1 <= max_length <= MAX_KEY_LENGTH:
            raise ConfigError(
                f"max_length of keys is between 1 and {MAX_KEY_LENGTH}, not {max_length}"
            )
        try:
            self.pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"the key pattern is not a regular expression: {error}") from error
        self.max_length = max_length

    def check(self, key: object) -> None:
        """Raise `InvalidKey` unless `key` may be used."""
        # The same as `_check`, written out: this is asked for every call.
        if not (
            isinstance(key, str)
            and 0 < len(key) <= self.max_length
            and key.isprintable()
            and " " not in key
        ):
            raise InvalidKey(_fault("key", key, self.max_length))
        if self.pattern is not None and self.pattern.fullmatch(key) is None:
            raise InvalidKey(
                f"the key does not match the pattern {self.pattern.pattern!r} of this application"
            )

    def check_scope(self, scope: object) -> None:
        """Raise `InvalidKey` unless `scope` may be used; the pattern is for keys alone."""
        _check("scope", scope, MAX_KEY_LENGTH)


def _check(what: str, text: object, max_length: int) -> None:
    # isprintable() refuses every control character and every whitespace but the plain space.
    if not (
        isinstance(text, str)
        and 0 < len(text) <= max_length
        and text.isprintable()
        and " " not in text
    ):
        raise InvalidKey(_fault(what, text, max_length))


def _fault(what: str, text: object, max_length: int) -> str:
    if not isinstance(text, str):
        return f"the {what} must be a str, not {type(text).__name__}"
    if text == "":
        return f"the {what} is empty"
    if len(text) > max_length:
        return f"the {what} has {len(text)} characters, at most {max_length} are allowed"
    position = first_bad_character(text)
    return (
        f"the {what} ({len(text)} characters) has whitespace or a character that is not printable "
        f"at position {position}"
    )


def first_bad_character(text: str) -> int | None:
    """Position of the first character that no key may hold; None if all are fine."""
    return next((at for at, char in enumerate(text) if char == " " or not char.isprintable()), None)


# --- keys from keys ----------------------------------------------------------------------

_ESCAPED_PART = str.maketrans({"%": "%25", ":": "%3A"})

_DIGEST_MARK = ":%-"
"""Stands before the digest of a shortened key; escaping writes only %25 and %3A, never this."""


def derive_key(key: str, part: str) -> str:
    """Make the key of one `part` of an operation from the `key` of the whole.

    Examples:
        >>> derive_key("req-001", "item-A")
        'req-001:item-A'

    `%` and `:` inside the part are escaped, so that two different pairs never give the same key.
    """
    _check("key", key, MAX_KEY_LENGTH)
    _check("part of a derived key", part, MAX_KEY_LENGTH)
    whole = f"{key}:{part.translate(_ESCAPED_PART)}"
    if len(whole) <= MAX_KEY_LENGTH:
        return whole
    tail = _DIGEST_MARK + _hex_digest(whole.encode())
    return whole[: MAX_KEY_LENGTH - len(tail)] + tail


def derived(identity: Identity, part: str) -> str:
    """Make the key of a downstream call: the same on every attempt, another in every scope."""
    _check("part of a derived key", part, MAX_KEY_LENGTH)
    # The identity's digest has a fixed length, so the part cannot run into it.
    tail = "-" + _hex_digest(identity.digest + part.encode())
    return part[: MAX_KEY_LENGTH - len(tail)] + tail


def _hex_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[: 2 * _DIGEST_BYTES]


# --- new keys ----------------------------------------------------------------------------

KeyStyle = Literal["time", "uuid"]

_UUID_LENGTH = 36
_STEP_BYTES = 7
_RANDOM_BITS = 62


class KeyGenerator:
    """Makes new keys without any store, each with the name `app` in front if given.

    Examples:
        >>> KeyGenerator("shop").new()
        'shop-...'

    The `style` "time" is UUID version 7: it sorts by the time it was made, which spares indexes.
    The style "uuid" is UUID version 4: nothing but random.
    """

    __slots__ = ("_last", "_make", "_prefix")

    def __init__(self, app: str | None = None, style: KeyStyle = "time") -> None:
        if app is not None:
            _check("app name", app, MAX_KEY_LENGTH - _UUID_LENGTH - len("-"))
        makers = {"time": self._time_ordered, "uuid": uuid.uuid4}
        if style not in makers:
            raise ConfigError(f"the style of new keys is one of {', '.join(makers)}, not {style!r}")
        self._make = makers[style]
        self._prefix = "" if app is None else f"{app}-"
        self._last = 0

    def new(self) -> str:
        """Make a key that was never made before."""
        return f"{self._prefix}{self._make()}"

    def _time_ordered(self) -> uuid.UUID:
        # 48 bits of milliseconds and 12 bits of their fraction (RFC 9562, method 3), then random.
        stamp = time.time_ns() * 4096 // 1_000_000
        value = (stamp << _RANDOM_BITS) | (int.from_bytes(os.urandom(8)) >> (64 - _RANDOM_BITS))
        if value <= self._last:
            # The same instant, or the clock went back. A random step keeps the order and keeps
            # threads (there is no lock that a fork could leave closed) and forks apart.
            value = self._last + 1 + int.from_bytes(os.urandom(_STEP_BYTES))
        self._last = value
        milliseconds = value >> (12 + _RANDOM_BITS)
        fraction = (value >> _RANDOM_BITS) & 0xFFF
        random = value & ((1 << _RANDOM_BITS) - 1)
        return uuid.UUID(
            int=(milliseconds << 80) | (7 << 76) | (fraction << 64) | (0b10 << 62) | random
        )


_generator = KeyGenerator()


def new_key(app: str | None = None) -> str:
    """Make a time-ordered key, with the application's name `app` in front if given.

    Examples:
        >>> new_key("shop")
        'shop-...'
    """
    if app is None:
        return _generator.new()
    return KeyGenerator(app).new()


# --- owner ids ---------------------------------------------------------------------------

_IDS_PER_BLOCK = 341
"""About 4 KiB of randomness at once: one system call for 341 attempts instead of one for each."""


class OwnerIds:
    """Hands out the random ids that name attempts; safe for threads without a lock."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: list[bytes] = []

    def next(self) -> bytes:
        """Give an id that nobody else has."""
        try:
            # list.pop is atomic, with and without the GIL: no id is ever given twice.
            return self._ids.pop()
        except IndexError:
            block = os.urandom(_IDS_PER_BLOCK * OWNER_BYTES)
            fresh = [block[at : at + OWNER_BYTES] for at in range(0, len(block), OWNER_BYTES)]
            mine = fresh.pop()
            # Threads that refill together each made a block of their own; one of them is lost.
            self._ids = fresh
            return mine

    def reset(self) -> None:
        """Drop the ids made so far: after a fork the parent gives out the same ones."""
        self._ids = []
