"""The verbs as calls of scripts: arguments in, answers out.

This module builds calls and reads replies. It never sends anything, so the sync and the async
store share every line of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, Final, Generic, TypeVar
from zlib import crc32

from hiredis import pack_command
from msgspec import Struct
from msgspec.structs import replace

from semel.core.records import (
    FAILED,
    FINGERPRINT_BYTES,
    OWNER_BYTES,
    SUCCEEDED,
    Abandoned,
    AdoptRequest,
    Busy,
    Claim,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Exhausted,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    Mismatch,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
    TouchRequest,
)
from semel.errors import ConfigError, StoreError, ValueRejected
from semel.stores.redis.replies import dangers, pack_outcome, unpack_finished, unpack_record

# --- The Lua scripts and what a call of one looks like ------------------------------------
#
# This module holds text and values. It sends nothing: a transport takes a `Call`, and its `read`
# turns the reply into the answer. Every key that a script touches is named in the call.


Answer = TypeVar("Answer")
Argument = bytes | str | int


def packed(arguments: tuple[Argument, ...]) -> bytes:
    """Write a command the way a server reads it."""
    # Numbers as text: where hiredis writes them, a handler of a signal that raises just then ends
    # the whole process (it does not expect that of `repr`).
    plain = tuple([b"%d" % part if isinstance(part, int) else part for part in arguments])
    wire: bytes = pack_command(plain)  # type: ignore[arg-type]  # its stub says one argument
    return wire


def size(length: int) -> bytes:
    """Write what stands before an argument of this length: the end of the line before, its size."""
    return _SIZES[length] if length < len(_SIZES) else b"\r\n$%d\r\n" % length


_SIZES: Final = tuple(b"\r\n$%d\r\n" % length for length in range(512))


class Script(Struct, frozen=True):
    """One Lua script and the digest by which a server remembers it."""

    text: str
    sha: str
    opening: bytes
    """How a command that runs it by its digest goes on after the number of its parts, when it is
    about a record and its index."""


def load(package: str, *names: str) -> Script:
    """Make one script of the files of these names in a package's folder `lua`."""
    folder = files(package).joinpath("lua")
    return script("\n".join(folder.joinpath(f"{name}.lua").read_text("utf-8") for name in names))


def script(text: str) -> Script:
    """Name a script by its digest."""
    # Redis names a script by its SHA-1; nothing here is a secret.
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    parts = (b"EVALSHA", sha.encode(), b"2")
    return Script(text, sha, b"".join(size(len(part)) + part for part in parts))


_load = partial(load, "semel.stores.redis", "record")

CLAIM = load("semel.stores.redis", "claim_plain", "record", "claim")
RENEW = _load("renew")
END = load("semel.stores.redis", "end_plain", "record", "end")
PUT = _load("put")
GET = _load("get")
TOUCH = _load("touch")
FORGET = _load("forget")
ADOPT = _load("adopt")
DUE = _load("due")
CHECK = _load("check")
PURGE = _load("purge")
NOTE = _load("note")
STATE = _load("state")
INFO = _load("info")


class Call(Struct, Generic[Answer], frozen=True, gc=False):
    """One run of a script: what to send, and how to read the reply."""

    script: Script
    keys: tuple[bytes, ...]
    """The record, and the index of its bucket where the script keeps that in order."""
    args: tuple[Argument, ...]
    read: Callable[[Any], Answer]
    lease: int | None = None
    """What the index should say of a record that is PROCESSING after this call: how many
    microseconds its lease lasts; None = it ended."""
    written: bytes | None = None
    """The command as it is sent, for the calls that are made most."""

    def wire(self) -> bytes:
        """Write the command that runs the script by its digest."""
        if self.written is None:
            return packed(self.command(with_text=False))
        return self.written

    def command(self, *, with_text: bool) -> tuple[Argument, ...]:
        """The command to send: by digest, or with the whole text for a server that forgot it."""
        head = ("EVAL", self.script.text) if with_text else ("EVALSHA", self.script.sha)
        return (*head, len(self.keys), *self.keys, *self.args)

    def without_index(self) -> Call[Answer]:
        """The same call on the record alone: a slot on the move refuses two keys (TRYAGAIN)."""
        return replace(self, keys=self.keys[:1], written=None)

    def note(self) -> Call[bool]:
        """Writes the index entry of a record that went alone."""
        record, index = self.keys
        lease = "" if self.lease is None else self.lease
        return Call(NOTE, (index,), (record.partition(b"}")[2], lease), bool)


# --- Where records live: `prefix{bucket}len(scope):scope:key` -----------------------------
#
# This module names keys. It touches no server.
#
# The bucket is the identity's CRC-32 mod 1024: it spreads, and nothing more is asked of it. Between
# braces it is what Redis Cluster hashes, so a record and the index of its bucket share a slot
# whatever braces the user's key holds; that is also why the prefix may have none. The index is
# `prefix{bucket}~leases`: a record goes on with a digit after the brace, so the two can never meet.


BUCKETS = 1024
_INDEX_NAME = "~leases"
_GLOB_CHARACTERS = re.compile(r"([\\*?\[\]^-])")


class KeyLayout:
    """The keys of one store."""

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigError(
                f"the prefix {prefix!r} has a brace; Redis Cluster hashes what stands between "
                "braces, and semel needs that place for its own bucket number"
            )
        self.prefix = prefix
        self._indexes = [f"{prefix}{{{bucket}}}{_INDEX_NAME}".encode() for bucket in range(BUCKETS)]
        self._records = [f"{prefix}{{{bucket}}}".encode() for bucket in range(BUCKETS)]
        self.written_indexes = {index: size(len(index)) + index for index in self._indexes}
        """The keys of all indexes, each as an argument of a command."""

    def record(self, identity: Identity) -> bytes:
        """The key of the record."""
        encoded = identity.encoded
        return self._records[crc32(encoded) % BUCKETS] + encoded

    def record_and_index(self, identity: Identity) -> tuple[bytes, bytes]:
        """The key of the record, and the key of the index of running leases beside it."""
        encoded = identity.encoded
        bucket = crc32(encoded) % BUCKETS
        return self._records[bucket] + encoded, self._indexes[bucket]

    def indexes(self) -> list[bytes]:
        """The keys of all indexes."""
        return self._indexes

    def pattern(self, scope: str | None, key_prefix: str) -> bytes:
        """A glob for SCAN that finds the records asked for, and perhaps a few more."""
        glob = _escaped(self.prefix) + "{*}"
        if scope is None:
            glob += "[0-9]*:" if not key_prefix else f"[0-9]*:*:{_escaped(key_prefix)}"
        else:
            glob += _escaped(f"{len(scope)}:{scope}:{key_prefix}")
        return (glob + "*").encode()

    def identity(self, key: bytes) -> Identity | None:
        """The identity that a key stands for; None when the key is not one of ours."""
        _, brace, encoded = key.partition(b"}")
        found = member_identity(encoded) if brace else None
        return found if found is not None and self.record(found) == key else None


def member_identity(encoded: bytes) -> Identity | None:
    """Read `len(scope):scope:key`, which is also how the index names a record."""
    try:
        length, _, rest = encoded.decode().partition(":")
        scope_length = int(length)
    except ValueError:
        return None
    scope, colon, key = rest[:scope_length], rest[scope_length : scope_length + 1], rest
    if colon != ":":
        return None
    return Identity(scope, key[scope_length + 1 :])


def _escaped(text: str) -> str:
    return _GLOB_CHARACTERS.sub(r"\\\1", text)


LONGEST = 100 * 365 * 86400.0
"""No duration is longer: 100 years of microseconds still fit a Lua number exactly."""


SMALLEST_LIMIT = (1 << 20) - (1 << 12)
"""Bytes. None of the `LIMITS` can be set below one megabyte; what is smaller, with room for the
rest of its command, is sent without asking."""

LIMITS = ("proto-max-bulk-len", "client-query-buffer-limit")
"""Settings of a server that bound a value. It hangs up on a larger one, often without a word."""

_DEFAULT_LIMIT = 512 << 20


class Verbs:
    """Builds the calls of one store's keys."""

    def __init__(self, keys: KeyLayout) -> None:
        self._keys = keys

    def takes(self, request: Request[Any]) -> bool:
        """Tell whether a request is about one record; else `listing` answers it."""
        return type(request) in _CALLS

    def call(self, request: Request[Answer]) -> Call[Answer]:
        """Build the call of a request about one record."""
        return _CALLS[type(request)](self, request)

    def claim(self, ask: ClaimRequest) -> Call[Claim]:
        """See `Store.claim`."""
        owner, fingerprint = ask.owner, ask.fingerprint
        _check_size("owner", owner, OWNER_BYTES)
        if fingerprint is None:
            fingerprint = b""
        else:
            _check_size("fingerprint", fingerprint, FINGERPRINT_BYTES)
        terms = _terms(ask.lease, ask.ttl, ask.hold, ask.replace, ask.max_attempts)
        return terms.call(self._keys, ask.identity, owner, fingerprint, _read_claim)

    def renew(self, ask: RenewRequest) -> Call[bool]:
        """See `Store.renew`."""
        lease = microseconds(ask.lease)
        return Call(
            RENEW,
            self._keys.record_and_index(ask.identity),
            (ask.owner, lease),
            bool,
            lease,
        )

    def complete(self, ask: CompleteRequest) -> Call[bool]:
        """See `Store.complete`."""
        terms = _end_terms(SUCCEEDED, ask.ttl, False, True, True)
        return terms.call(self._keys, ask.identity, ask.owner, pack_outcome(ask.result), bool)

    def fail(self, ask: FailRequest) -> Call[bool]:
        """See `Store.fail`."""
        terms = _end_terms(FAILED, ask.ttl, ask.retryable, ask.keep_fingerprint, ask.ran)
        return terms.call(self._keys, ask.identity, ask.owner, pack_outcome(ask.error), bool)

    def get(self, ask: GetRequest) -> Call[Record | None]:
        """See `Store.get`."""
        keys = (self._keys.record(ask.identity),)
        return Call(GET, keys, (), record_reader(ask.identity))

    def put(self, ask: PutRequest) -> Call[bool]:
        """See `Store.put`."""
        _check_size("owner", ask.owner, OWNER_BYTES)
        return Call(
            PUT,
            self._keys.record_and_index(ask.identity),
            (
                ask.owner,
                pack_outcome(ask.result),
                milliseconds(ask.ttl),
            ),
            bool,
        )

    def touch(self, ask: TouchRequest) -> Call[bool]:
        """See `Store.touch`."""
        keys = (self._keys.record(ask.identity),)
        return Call(TOUCH, keys, (milliseconds(ask.ttl),), bool)

    def forget(self, ask: ForgetRequest) -> Call[bool]:
        """See `Store.forget`."""
        return Call(FORGET, self._keys.record_and_index(ask.identity), (), bool)

    def adopt(self, ask: AdoptRequest) -> Call[Record | None]:
        """See `Repairing.adopt`."""
        _check_size("owner", ask.owner, OWNER_BYTES)
        lease = microseconds(ask.lease)
        read = record_reader(ask.identity)
        return Call(
            ADOPT,
            self._keys.record_and_index(ask.identity),
            (ask.owner, lease),
            lambda reply: read(None if reply is None else reply[1:]),
            lease,
        )

    def limit(self, name: str, identity: Identity) -> Call[int]:
        """Ask the server of a record for one of its `LIMITS`."""
        command = packed(("CONFIG", "GET", name))
        return Call(INFO, (self._keys.record(identity),), (), _read_limit, written=command)

    def limits_of(self, asks: Sequence[Request[Any]]) -> list[Call[int]]:
        """Ask for what bounds each of the large values among these; mostly there are none."""
        return [
            self.limit(name, ask.identity)
            for ask in asks
            if isinstance(ask, CompleteRequest | PutRequest) and may_be_too_large(ask)
            for name in LIMITS
        ]

    def diagnose(self) -> Call[list[str]]:
        """See `Diagnosing.diagnose`. In a cluster one server speaks for all."""
        return Call(INFO, (self._keys.indexes()[0],), (), dangers)


_CALLS: dict[type, Callable[[Verbs, Any], Call[Any]]] = {
    ClaimRequest: Verbs.claim,
    RenewRequest: Verbs.renew,
    CompleteRequest: Verbs.complete,
    FailRequest: Verbs.fail,
    GetRequest: Verbs.get,
    PutRequest: Verbs.put,
    TouchRequest: Verbs.touch,
    ForgetRequest: Verbs.forget,
    AdoptRequest: Verbs.adopt,
}
"""What builds the call of each request about one record."""


def is_urgent(ask: Request[Any]) -> bool:
    """Tell whether a request goes ahead of others: a lease is renewed, or it ends.

    Parking is a step of a call, as many of them as there are callers: it waits its turn.
    """
    return isinstance(ask, RenewRequest) and ask.lease > 0


def may_be_too_large(ask: Request[Any]) -> bool:
    """Tell whether a value may be more than its server takes."""
    return _size_of_value(ask) > SMALLEST_LIMIT


def _size_of_value(ask: Request[Any]) -> int:
    return len(ask.result.data) if isinstance(ask, CompleteRequest | PutRequest) else 0


def rejections(
    asks: Sequence[Request[Any]], limits: Sequence[int | StoreError], where: str
) -> list[ValueRejected | None]:
    """Tell which values their server can never take, from what it answered to `limits_of`."""
    answers = iter(limits)
    found: list[ValueRejected | None] = []
    for ask in asks:
        rejected = None
        if may_be_too_large(ask):
            size = _size_of_value(ask)
            # If CONFIG GET is not permitted, assume the default limits.
            told = [next(answers) for _ in LIMITS]
            limit = min(_DEFAULT_LIMIT if isinstance(each, StoreError) else each for each in told)
            if size > limit - (1 << 12):
                rejected = ValueRejected(
                    f"{where} cannot take this: {size} bytes, and it takes at most {limit} at once "
                    f"({' and '.join(LIMITS)})"
                )
        found.append(rejected)
    return found


def with_rejections(
    answers: Iterable[Answer | StoreError], rejected: Sequence[ValueRejected | None]
) -> list[Answer | StoreError]:
    """Put the answers to what was sent beside the errors of what was not."""
    rest = iter(answers)
    return [next(rest) if error is None else error for error in rejected]


def _read_limit(reply: Any) -> int:
    # A mapping in RESP3, else a list of names and values.
    told = dict(zip(reply[::2], reply[1::2], strict=True)) if isinstance(reply, list) else reply
    return next((int(value) for value in told.values()), _DEFAULT_LIMIT)


def record_reader(identity: Identity) -> Callable[[Any], Record | None]:
    """What reads the reply of `get` and `check`."""

    def read(reply: Any) -> Record | None:
        if reply is None:
            return None
        raw, expires_ms, now_us = reply
        return unpack_record(identity, raw, expires_ms, now_us)

    return read


def granted(reply: Any) -> bool:
    """Whether the script wrote what it was asked to write."""
    return reply == 1 or (isinstance(reply, list) and reply[0] in _GRANTED)


_GRANTED = (b"claimed", b"adopted")


# An application has few policies: what they make of a command is written once for each.


class _Terms(Struct, frozen=True):
    """The part of a command that does not change from call to call."""

    script: Script
    opening: bytes
    """What comes before the keys, up to the end of its last line."""
    arguments: tuple[int | str, ...]
    """What comes after the owner and the bytes that go with it."""
    packed: bytes
    """The arguments as they are sent."""
    lease: int | None = None

    def call(
        self,
        layout: KeyLayout,
        identity: Identity,
        owner: bytes,
        content: bytes,
        read: Callable[[Any], Answer],
    ) -> Call[Answer]:
        """Write the command of one call: about this record, for this owner, with these bytes."""
        keys = record, index = layout.record_and_index(identity)
        written = b"".join(
            (
                self.opening,
                size(len(record)),
                record,
                layout.written_indexes[index],
                size(len(owner)),
                owner,
                size(len(content)),
                content,
                self.packed,
            )
        )
        arguments = (owner, content, *self.arguments)
        return Call(self.script, keys, arguments, read, self.lease, written)


@lru_cache(maxsize=256)
def _terms(
    lease: float,
    ttl: float,
    hold: bool,
    replace: bool,
    max_attempts: int | None,
) -> _Terms:
    """The terms of a claim."""
    attempts = "" if max_attempts is None else max_attempts
    arguments = (microseconds(lease), milliseconds(ttl), int(hold), int(replace), attempts)
    return _terms_of(CLAIM, arguments, microseconds(lease))


@lru_cache(maxsize=256)
def _end_terms(
    state: State, ttl: float, retryable: bool, keep_fingerprint: bool, ran: bool
) -> _Terms:
    """The terms of an end."""
    arguments = (int(state), milliseconds(ttl), int(retryable), int(keep_fingerprint))
    return _terms_of(END, arguments if ran else (*arguments, 1))


def _terms_of(script: Script, arguments: tuple[int | str, ...], lease: int | None = None) -> _Terms:
    parts = len(("EVALSHA", "digest", "2", "record", "index", "owner", "bytes", *arguments))
    texts = (str(argument).encode() for argument in arguments)
    packed = b"".join(size(len(text)) + text for text in texts) + b"\r\n"
    opening = b"*%d%b" % (parts, script.opening)
    return _Terms(script, opening, arguments, packed, lease)


@lru_cache(maxsize=256)
def microseconds(seconds: float) -> int:
    """Whole microseconds, never more than `LONGEST`."""
    return round(min(seconds, LONGEST) * 1e6)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, rounded up so that a short time is not none at all."""
    return -(-microseconds(seconds) // 1000)


def _read_claim(reply: list[Any]) -> Claim:
    word = reply[0]
    if word == b"finished":
        _, raw, pttl = reply
        return unpack_finished(raw, max(0, pttl) / 1e3)
    if word == b"claimed":
        _, number, fence, takeover = reply
        return Claimed(number, fence, takeover == 1)
    return _OTHER_ANSWERS[word](*reply[1:])


_OTHER_ANSWERS: dict[bytes, Callable[..., Claim]] = {
    b"busy": lambda remaining, owner: Busy(remaining / 1e6, owner),
    b"mismatch": lambda superseded: Mismatch(superseded == 1),
    b"abandoned": Abandoned,
    b"exhausted": Exhausted,
}
"""What claim.lua may answer besides, by its first word."""


def _check_size(what: str, value: bytes, expected: int) -> None:
    if len(value) != expected:
        raise ValueError(f"{what} must be {expected} bytes, got {len(value)}")
