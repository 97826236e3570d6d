"""What is sent to Redis: the keys of records, the Lua scripts, and a command for each request.

This module writes commands. It sends nothing, so threads and asyncio share all of it. How
the replies are read is in `replies`. Every key that a script touches is named in its command.
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
    AdoptRequest,
    Claim,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    FailRequest,
    ForgetRequest,
    GetRequest,
    Identity,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    State,
    TouchRequest,
)
from semel.errors import ConfigError, StoreError, ValueRejected
from semel.stores.redis.replies import (
    DEFAULT_LIMIT,
    LONGEST_HEADER,
    Large,
    diagnose,
    pack_outcome,
    pack_run_info,
    read_adopted,
    read_claim,
    read_large,
    read_limit,
    read_record,
    read_upload,
)

Answer = TypeVar("Answer")
Argument = bytes | str | int

LONGEST = 100 * 365 * 86400.0
"""No duration is longer: 100 years of microseconds still fit a Lua number exactly."""

SMALLEST_LIMIT = (1 << 20) - (1 << 12)
"""Bytes. None of the `LIMITS` can be set below one megabyte; what is smaller, with room for the
rest of its command, is sent without asking."""

LARGE = 1 << 16
"""Bytes. From this size on, values are sent and read by plain commands: scripts copy them several
times. claim_plain.lua has the same number."""

LIMITS = ("proto-max-bulk-len", "client-query-buffer-limit")
"""Settings of a server that bound a value. It hangs up on a larger one, often without a word."""


def pack(arguments: tuple[Argument, ...]) -> bytes:
    """Write a command the way a server reads it."""
    # Numbers as text: where hiredis writes them, a handler of a signal that raises just then ends
    # the whole process (it does not expect that of `repr`).
    plain = tuple([b"%d" % part if isinstance(part, int) else part for part in arguments])
    packed: bytes = pack_command(plain)  # type: ignore[arg-type]  # its stub says one argument
    return packed


class _Sizes(dict[int, bytes]):
    """What stands before an argument of a length: the end of the line before, and the length."""

    def __missing__(self, length: int) -> bytes:
        return b"\r\n$%d\r\n" % length


_SIZES: Final = _Sizes((length, b"\r\n$%d\r\n" % length) for length in range(512))


@lru_cache(maxsize=256)
def microseconds(seconds: float) -> int:
    """Whole microseconds, never more than `LONGEST`."""
    return round(min(seconds, LONGEST) * 1e6)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, rounded up so that a short time is not none at all."""
    return -(-microseconds(seconds) // 1000)


# --- keys ------------------------------------------------------------------------------------

BUCKETS = 1024
_INDEX_NAME = "~leases"
_UPLOAD_NAME = b"~new:"
_GLOB_CHARACTERS = re.compile(r"([\\*?\[\]^-])")


class KeyLayout:
    """The keys of one store: `prefix{bucket}len(scope):scope:key`.

    The bucket is the identity's CRC-32 mod 1024: it spreads, and nothing more is asked of it.
    Between braces it is what Redis Cluster hashes, so a record and the index of its bucket share a
    slot whatever braces the user's key holds; that is also why the prefix may have none. The index
    is `prefix{bucket}~leases`, and a large outcome on its way into a record is, for a moment,
    `prefix{bucket}~new:owner:` and what follows the brace in the record's key: a record goes on
    with a digit after the brace, so the three can never meet.
    """

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigError(
                f"the prefix {prefix!r} has a brace; Redis Cluster hashes what stands between "
                "braces, and semel needs that place for its own bucket number"
            )
        self.prefix = prefix
        self.indexes = [f"{prefix}{{{bucket}}}{_INDEX_NAME}".encode() for bucket in range(BUCKETS)]
        """The keys of all indexes."""
        self.buckets = [
            (f"{prefix}{{{bucket}}}".encode(), index, _SIZES[len(index)] + index)
            for bucket, index in enumerate(self.indexes)
        ]
        """Of each bucket: how the keys of its records begin, its index, and the index as an
        argument of a command."""

    def record(self, identity: Identity) -> bytes:
        """The key of the record."""
        encoded = identity.encoded
        return self.buckets[crc32(encoded) % BUCKETS][0] + encoded

    def record_and_index(self, identity: Identity) -> tuple[bytes, bytes]:
        """The key of the record, and the key of the index of running leases beside it."""
        encoded = identity.encoded
        beginning, index, _ = self.buckets[crc32(encoded) % BUCKETS]
        return beginning + encoded, index

    def upload(self, identity: Identity, owner: bytes) -> bytes:
        """The key of a large outcome on its way into the record, for this attempt alone."""
        encoded = identity.encoded
        beginning = self.buckets[crc32(encoded) % BUCKETS][0]
        return b"%b%b%b:%b" % (beginning, _UPLOAD_NAME, owner.hex().encode(), encoded)

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
    if rest[scope_length : scope_length + 1] != ":":
        return None
    return Identity(rest[:scope_length], rest[scope_length + 1 :])


def _escaped(text: str) -> str:
    return _GLOB_CHARACTERS.sub(r"\\\1", text)


# --- scripts ---------------------------------------------------------------------------------


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
    return Script(text, sha, b"".join(_SIZES[len(part)] + part for part in parts))


_load = partial(load, "semel.stores.redis", "record")

CLAIM = load("semel.stores.redis", "claim_plain", "record", "claim")
RENEW = _load("renew")
END = load("semel.stores.redis", "end_plain", "record", "end")
END_LARGE = _load("end_large")
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


# --- commands --------------------------------------------------------------------------------


class Command(Struct, Generic[Answer], frozen=True, gc=False):
    """One run of a script: what to send, and how to read the reply."""

    script: Script
    keys: tuple[bytes, ...]
    """The record, and the index of its bucket where the script keeps that in order."""
    args: tuple[Argument, ...]
    read: Callable[[Any], Answer | Large]
    """Reads the reply; what is `Large` is no answer yet: see `next_command`."""
    lease: int | None = None
    """What the index should say of a record that is PROCESSING after this command: how many
    microseconds its lease lasts; None = it ended."""
    written: bytes | None = None
    """The command as it is sent, for those that are sent most, and for plain commands."""
    last_args: tuple[Argument, ...] = ()
    """Arguments after `args`, which all commands of a policy share."""
    asked: Command[Answer] | None = None
    """Set when this reads the large record that was the reply to another command."""

    def packed(self) -> bytes:
        """Write the command that runs the script by its digest."""
        if self.written is None:
            return pack(self.parts(with_text=False))
        return self.written

    def parts(self, *, with_text: bool) -> tuple[Argument, ...]:
        """What to send: the digest, or the whole text for a server that forgot it."""
        head = ("EVAL", self.script.text) if with_text else ("EVALSHA", self.script.sha)
        return (*head, len(self.keys), *self.keys, *self.args, *self.last_args)

    def next_command(self, judged: Large) -> Command[Answer]:
        """Build the command whose reply has the answer: the record, or the same question again.

        If the record has changed since it was judged, it is judged again from the start.
        """
        if self.asked is not None:
            return self.asked
        record = self.keys[:1]
        read = partial(read_large, judged)
        return Command(GET, record, (), read, written=pack(("GET", *record)), asked=self)

    def without_index(self) -> Command[Answer]:
        """The same on the record alone: a slot on the move refuses two keys (TRYAGAIN)."""
        return replace(self, keys=self.keys[:1], written=None)

    def note(self) -> Command[bool]:
        """Writes the index entry of a record that went alone."""
        record, index = self.keys
        lease = "" if self.lease is None else self.lease
        return Command(NOTE, (index,), (record.partition(b"}")[2], lease), bool)


class ScanStep(Struct, frozen=True):
    """One step of SCAN on one server; the answer is the next cursor and the keys."""

    node: str
    cursor: int
    pattern: bytes
    count: int

    def packed(self) -> bytes:
        """Write the command."""
        return pack(("SCAN", self.cursor, "MATCH", self.pattern, "COUNT", self.count))


class Commands:
    """Builds the commands of one store's keys."""

    def __init__(self, keys: KeyLayout) -> None:
        self.keys = keys

    def command(self, request: Request[Answer]) -> Command[Answer] | None:
        """Build the command of a request about one record; None: `listing` answers it."""
        build = _BUILDERS.get(type(request))
        return None if build is None else build(self, request)

    def batch(self, requests: Sequence[Request[Answer]]) -> list[Command[Answer]]:
        """Build the commands of requests about single records."""
        return [_BUILDERS[type(request)](self, request) for request in requests]

    def claim(self, ask: ClaimRequest) -> Command[Claim]:
        """See `Store.claim`."""
        owner, fingerprint = ask.owner, ask.fingerprint
        if len(owner) != OWNER_BYTES:  # asked here, not by a function: every call sends a claim
            _check_size("owner", owner, OWNER_BYTES)
        if fingerprint is None:
            fingerprint = b""
        elif len(fingerprint) != FINGERPRINT_BYTES:
            _check_size("fingerprint", fingerprint, FINGERPRINT_BYTES)
        template = _claim_template(
            ask.lease, ask.ttl, ask.hold, ask.replace, ask.max_attempts, ask.run_info
        )
        return template.command(self.keys, ask.identity, owner, fingerprint, read_claim)

    def renew(self, ask: RenewRequest) -> Command[bool]:
        """See `Store.renew`."""
        lease = microseconds(ask.lease)
        keys = self.keys.record_and_index(ask.identity)
        changed = () if ask.run_info is None else (pack_run_info(ask.run_info),)
        return Command(RENEW, keys, (ask.owner, lease, *changed), bool, lease)

    def complete(self, ask: CompleteRequest) -> Command[bool]:
        """See `Store.complete`."""
        template = _end_template(SUCCEEDED, ask.ttl, False, True, True)
        return template.command(self.keys, ask.identity, ask.owner, pack_outcome(ask.result), bool)

    def upload(self, ask: CompleteRequest) -> tuple[Command[Any], Command[Any]]:
        """See `Store.complete`: with a large result, which no script copies.

        It is sent beside the record first, and then becomes the record. The second answer is None
        where that cannot be: then `without_upload` does it.
        """
        upload = self.keys.upload(ask.identity, ask.owner)
        data = ask.result.data
        codec = pack_outcome(Encoded(ask.result.codec, b""))
        size = _SIZES[LONGEST_HEADER + len(codec) + len(data)]
        # Put together at once: each copy of a megabyte costs as much as a whole small call.
        written = b"".join(
            (_SET, _SIZES[len(upload)], upload, size, _BLANK_HEADER, codec, data, _EXPIRE)
        )
        keys = (*self.keys.record_and_index(ask.identity), upload)
        return (
            Command(END_LARGE, (upload,), (), bool, written=written),
            Command(END_LARGE, keys, (ask.owner, milliseconds(ask.ttl)), read_upload),
        )

    def without_upload(self, ask: CompleteRequest) -> tuple[Command[Any], Command[Any]]:
        """Remove what `upload` has sent, and complete the attempt in the ordinary way."""
        upload = self.keys.upload(ask.identity, ask.owner)
        removal = Command(END_LARGE, (upload,), (), bool, written=pack(("DEL", upload)))
        return removal, self.complete(ask)

    def fail(self, ask: FailRequest) -> Command[bool]:
        """See `Store.fail`."""
        template = _end_template(FAILED, ask.ttl, ask.retryable, ask.keep_fingerprint, ask.ran)
        return template.command(self.keys, ask.identity, ask.owner, pack_outcome(ask.error), bool)

    def get(self, ask: GetRequest) -> Command[Record | None]:
        """See `Store.get`."""
        keys = (self.keys.record(ask.identity),)
        return Command(GET, keys, (), partial(read_record, ask.identity))

    def put(self, ask: PutRequest) -> Command[bool]:
        """See `Store.put`."""
        _check_size("owner", ask.owner, OWNER_BYTES)
        keys = self.keys.record_and_index(ask.identity)
        return Command(
            PUT, keys, (ask.owner, pack_outcome(ask.result), milliseconds(ask.ttl)), bool
        )

    def touch(self, ask: TouchRequest) -> Command[bool]:
        """See `Store.touch`."""
        return Command(TOUCH, (self.keys.record(ask.identity),), (milliseconds(ask.ttl),), bool)

    def forget(self, ask: ForgetRequest) -> Command[bool]:
        """See `Store.forget`."""
        return Command(FORGET, self.keys.record_and_index(ask.identity), (), bool)

    def adopt(self, ask: AdoptRequest) -> Command[Record | None]:
        """See `AdoptRequest`."""
        _check_size("owner", ask.owner, OWNER_BYTES)
        lease = microseconds(ask.lease)
        keys = self.keys.record_and_index(ask.identity)
        return Command(ADOPT, keys, (ask.owner, lease), partial(read_adopted, ask.identity), lease)

    def limits_of(self, asks: Sequence[Any]) -> list[Command[int]]:
        """Ask for what bounds each of the large values among these; mostly there are none."""
        return [
            Command(INFO, (self.keys.record(ask.identity),), (), read_limit, written=written)
            for ask in asks
            if may_be_too_large(ask)
            for written in _GET_LIMITS
        ]

    def diagnose(self) -> Command[list[str]]:
        """See `Store.diagnose`. In a cluster one server speaks for all."""
        return Command(INFO, (self.keys.indexes[0],), (), diagnose)


_BUILDERS: dict[type, Callable[[Commands, Any], Command[Any]]] = {
    ClaimRequest: Commands.claim,
    RenewRequest: Commands.renew,
    CompleteRequest: Commands.complete,
    FailRequest: Commands.fail,
    GetRequest: Commands.get,
    PutRequest: Commands.put,
    TouchRequest: Commands.touch,
    ForgetRequest: Commands.forget,
    AdoptRequest: Commands.adopt,
}
"""What builds the command of each request about one record."""


def is_urgent(ask: Request[Any]) -> bool:
    """Return whether a request goes ahead of others: a lease is renewed, or it ends.

    Parking is a step of a call, as many of them as there are callers: it waits its turn.
    """
    return isinstance(ask, RenewRequest) and ask.lease > 0


def _check_size(what: str, value: bytes, expected: int) -> None:
    if len(value) != expected:
        raise ValueError(f"{what} must be {expected} bytes, got {len(value)}")


# --- large values ----------------------------------------------------------------------------

_WITH_VALUES = (CompleteRequest, PutRequest)

_SET = b"*5\r\n$3\r\nSET"
_BLANK_HEADER = bytes(LONGEST_HEADER)
_EXPIRE = b"\r\n$2\r\nPX\r\n$5\r\n60000\r\n"
"""A value that was sent and never became part of a record is removed after a minute."""


def is_large(ask: Request[Any]) -> bool:
    """Return whether a request has a value that no script should copy."""
    return isinstance(ask, _WITH_VALUES) and len(ask.result.data) >= LARGE


# --- values that are too large ---------------------------------------------------------------

_GET_LIMITS = tuple(pack(("CONFIG", "GET", name)) for name in LIMITS)


def may_be_too_large(ask: Request[Any]) -> bool:
    """Return whether a value may be more than its server takes."""
    return isinstance(ask, _WITH_VALUES) and len(ask.result.data) > SMALLEST_LIMIT


def rejections(
    asks: Sequence[Any], limits: Sequence[int | StoreError], where: str
) -> list[ValueRejected | None]:
    """Return which values their server can never take, from what it answered to `limits_of`."""
    answers = iter(limits)
    return [
        _rejection(len(ask.result.data), [next(answers) for _ in LIMITS], where)
        if may_be_too_large(ask)
        else None
        for ask in asks
    ]


def _rejection(size: int, limits: list[int | StoreError], where: str) -> ValueRejected | None:
    # If CONFIG GET is not permitted, assume the default limits.
    limit = min(DEFAULT_LIMIT if isinstance(each, StoreError) else each for each in limits)
    if size <= limit - (1 << 12):
        return None
    return ValueRejected(
        f"{where} cannot take this: {size} bytes, and it takes at most {limit} at once "
        f"({' and '.join(LIMITS)})"
    )


def with_rejections(
    answers: Iterable[Answer | StoreError], rejected: Sequence[ValueRejected | None]
) -> list[Answer | StoreError]:
    """Put the answers to what was sent beside the errors of what was not."""
    rest = iter(answers)
    return [next(rest) if error is None else error for error in rejected]


# --- templates: an application has few policies, so their part of a command is written once ---


class _Template(Struct, frozen=True):
    """The part of a command that stays the same for all keys of a policy."""

    script: Script
    opening: bytes
    """What comes before the keys, up to the end of its last line."""
    arguments: tuple[Argument, ...]
    """What comes after the owner and the bytes that go with it."""
    packed: bytes
    """The arguments as they are sent."""
    lease: int | None = None

    def command(
        self,
        layout: KeyLayout,
        identity: Identity,
        owner: bytes,
        content: bytes,
        read: Callable[[Any], Answer | Large],
    ) -> Command[Answer]:
        """Write the command about this record, for this owner, with these bytes."""
        encoded = identity.encoded
        beginning, index, packed_index = layout.buckets[crc32(encoded) % BUCKETS]
        record = beginning + encoded
        written = b"".join(
            (
                self.opening,
                _SIZES[len(record)],
                record,
                packed_index,
                _SIZES[len(owner)],
                owner,
                _SIZES[len(content)],
                content,
                self.packed,
            )
        )
        keys, args = (record, index), (owner, content)
        return Command(self.script, keys, args, read, self.lease, written, self.arguments)


@lru_cache(maxsize=256)
def _claim_template(  # noqa: PLR0917 - by name it would take longer to find
    lease: float,
    ttl: float,
    hold: bool,
    replace: bool,
    max_attempts: int | None,
    run_info: bytes,
) -> _Template:
    attempts = "" if max_attempts is None else max_attempts
    info = pack_run_info(run_info) if run_info else b""
    arguments = (microseconds(lease), milliseconds(ttl), int(hold), int(replace), attempts, info)
    return _template(CLAIM, arguments, microseconds(lease))


@lru_cache(maxsize=256)
def _end_template(
    state: State, ttl: float, retryable: bool, keep_fingerprint: bool, ran: bool
) -> _Template:
    arguments = (int(state), milliseconds(ttl), int(retryable), int(keep_fingerprint))
    return _template(END, arguments if ran else (*arguments, 1))


def _template(
    script: Script, arguments: tuple[Argument, ...], lease: int | None = None
) -> _Template:
    parts = len(("EVALSHA", "digest", "2", "record", "index", "owner", "bytes", *arguments))
    texts = (part if isinstance(part, bytes) else str(part).encode() for part in arguments)
    packed = b"".join(_SIZES[len(text)] + text for text in texts) + b"\r\n"
    opening = b"*%d%b" % (parts, script.opening)
    return _Template(script, opening, arguments, packed, lease)
