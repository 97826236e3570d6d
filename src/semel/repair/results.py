"""Results as a person or a resolver gives them, and stored results as a person reads them.

A result is written as the codec of its record reads it; a kind that this codec does not read is
rejected before anything is stored. Reading shows something whatever is stored. Neither needs a
framework or a class of the application, and neither imports anything.
"""

from __future__ import annotations

import binascii
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct

from semel.core.codec import (
    BY_STORED_NAME,
    Codec,
    StoredResult,
    decode_failure,
    encode_result,
    omission_reason,
)
from semel.core.codec_types import CLASS_FORMATS, CUSTOM, EXTRA, PRIVATE, TAG, TYPE, VALUE, Tree
from semel.core.policy import Rules
from semel.core.records import FAILURE, OMITTED, Encoded, Identity
from semel.core.run_info import RunInfo
from semel.core.stored_answers import (
    GRPC,
    HTTP,
    STATUS_CODES,
    AnswerCodec,
    MessageCodec,
    StoredAnswer,
    StoredMessage,
    pack_answer,
    pack_message,
    unpack_answer,
    unpack_message,
)
from semel.errors import ConfigError
from semel.http.storing import NEVER, has_body, kept_lines

# --- answers -------------------------------------------------------------------------------------


class HttpAnswer(Struct, frozen=True):
    """The answer to an HTTP request: later requests with its key get exactly this.

    Header lines are kept in their order, with names in lower case, as servers for asyncio need
    them. Lines that are never stored, such as `Set-Cookie`, are rejected.

    Examples:
        >>> created = HttpAnswer(201, {"Location": "/orders/7"}, b'{"id": 7}')
        >>> settle(idem, "order:7", Succeeded(created), scope="http") is None
        True
    """

    status: int
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    body: bytes | None = b""
    """None in a stored answer: it was too large to be kept."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The header lines as pairs, however they were given."""
        given = self.headers
        return tuple(given.items() if isinstance(given, Mapping) else given)


class GrpcAnswer(Struct, frozen=True):
    """The response to a gRPC call: later calls with its key get exactly this.

    Examples:
        >>> empty = GrpcAnswer(b"")  # order.SerializeToString()
        >>> settle(idem, "order:7", Succeeded(empty), scope="grpc") is None
        True
    """

    message: bytes | None
    """The protobuf message, serialized; None in a stored answer: it is an error, or too large."""
    code: str = "OK"
    """Only OK can be given; a stored answer may have another one."""
    details: str = ""


_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_COMPLETE: Final = range(200, 600)
_MARKER: Final = frozenset({b"idempotent-replayed"})


def _pack_http(answer: HttpAnswer) -> bytes:
    status, body = answer.status, answer.body
    if isinstance(status, bool) or not isinstance(status, int) or status not in _COMPLETE:
        raise ConfigError(f"status must be that of a complete answer, 200 to 599; got {status!r}")
    if status in NEVER:
        raise ConfigError(
            f"an answer with status {status} is never stored: it says something about the caller "
            "or the moment, not about the operation, and every retry would get it"
        )
    if not isinstance(body, bytes):
        raise ConfigError(f"body must be bytes, not {type(body).__name__}; encode a text first")
    if body and not has_body(status):
        raise ConfigError(f"an answer with status {status} has no body: leave it out")
    return pack_answer(StoredAnswer(status, _checked_lines(answer), body))


def _checked_lines(answer: HttpAnswer) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(answer.headers, Mapping | Sequence) or not all(map(_is_pair, answer.lines)):
        raise ConfigError('headers must be pairs of texts, such as {"Location": "/orders/7"}')
    lines = tuple(_line(name, value) for name, value in answer.lines)
    kept = kept_lines(lines, _MARKER)
    for line in lines:
        if line not in kept:
            raise ConfigError(
                f"the header {line[0].decode()} is never stored: it is secret, belongs to one "
                "connection, or is written anew for every answer. Leave it out"
            )
    return kept


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and list(map(type, given)) == [str, str]


def _line(name: str, value: str) -> tuple[bytes, bytes]:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not the name of a header")
    if _VALUE.fullmatch(value) is None:
        raise ConfigError(
            f"the header {name} must be one line of printable characters of Latin-1; got {value!r}"
        )
    return name.lower().encode(), value.strip().encode("latin-1")


def _pack_grpc(answer: GrpcAnswer) -> bytes:
    if answer.code != STATUS_CODES[0] or answer.details:
        raise ConfigError(
            "only a message with code OK can be given; for a call that failed decide Failed(...)"
        )
    if not isinstance(answer.message, bytes):
        raise ConfigError(
            f"message must be bytes, not {type(answer.message).__name__}; serialize it first: "
            "message.SerializeToString()"
        )
    return pack_message(StoredMessage(0, message=answer.message))


# --- writing -------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """One kind of result: which records have it, how it is given, and how it is packed."""

    of: str
    given: str
    codec: Codec | None = None
    """Writes it where the application has no codec of its own; None: that of the policy."""
    pack: Callable[[Any], object] = lambda value: value


VALUE_KIND: Final = Kind("a call of a function", "--succeeded JSON (in Python, Succeeded(value))")
HTTP_KIND: Final = Kind(
    "an HTTP request",
    "--status, --header and --body (in Python, Succeeded(HttpAnswer(status, headers, body)))",
    AnswerCodec(),
    _pack_http,
)
GRPC_KIND: Final = Kind(
    "a gRPC call",
    "--message @FILE (in Python, Succeeded(GrpcAnswer(message)))",
    MessageCodec(),
    _pack_grpc,
)

_KIND_OF: Final[dict[type, Kind]] = {HttpAnswer: HTTP_KIND, GrpcAnswer: GRPC_KIND}
_READ_BY: Final[dict[str, Kind]] = {
    HTTP: HTTP_KIND,
    GRPC: GRPC_KIND,
    **dict.fromkeys(BY_STORED_NAME, VALUE_KIND),
}
"""The one kind that each codec of semel reads; a codec of the application may read any."""


def encode_for(
    value: object,
    info: RunInfo | None,
    rules: Rules,
    codecs: Mapping[str, Codec],
    identity: Identity,
) -> StoredResult[object]:
    """Encode a result as the codec reads it that the running record names in its `info`.

    `rules` and `codecs` are those of the engine that decides. A kind that the codec does not read,
    and a codec that is not known, are a ConfigError.
    """
    named = None if info is None else info.codec
    kind = _KIND_OF.get(type(value), VALUE_KIND)
    expected = kind if named is None else _READ_BY.get(named, kind)
    if kind is not expected:
        raise ConfigError(
            f"this is the record of {expected.of} (its codec is {named}): give the result by "
            f"{expected.given}"
        )
    codec = _codec_for(kind, named, rules.codec, codecs)
    # The limit of answers is an option of their integration, which is not known here.
    limit = rules.max_result_bytes if kind is VALUE_KIND else sys.maxsize
    return encode_result(kind.pack(value), codec, identity, None, limit)


def _codec_for(kind: Kind, named: str | None, usual: Codec, codecs: Mapping[str, Codec]) -> Codec:
    is_own = usual.name not in BY_STORED_NAME
    # A name that was too long for the record is none of ours: the scope's own codec may have it.
    if named is None or named == usual.name or (named == "" and is_own):
        return usual if kind.codec is None or is_own else kind.codec
    if kind.codec is not None and named == kind.codec.name:
        return kind.codec
    codec = codecs.get(named, BY_STORED_NAME.get(named))
    if codec is None:
        which = f"the codec {named!r}" if named else "a codec whose name is too long for the record"
        raise ConfigError(
            f"a result of this record is written by {which}, which is not known here. "
            "Decide in a program whose engine has the codec (codecs=[...]), and its keys if it "
            "encrypts: semel.repair.settle(engine, key, Succeeded(...), scope=...). A failure "
            "needs no codec: --failed TEXT (in Python, Failed(error, retryable))"
        )
    return codec


# --- reading -------------------------------------------------------------------------------------


class PlainValue(Struct, frozen=True):
    """The result of a function: texts, numbers, lists and dicts, and bytes.

    Objects are shown by their fields, with the name of their class under `$`; a decimal number,
    a time or a UUID is its text.
    """

    value: object


class NotKept(Struct, frozen=True):
    """It succeeded, but its result was not kept."""

    reason: str


class StoredFailure(Struct, frozen=True):
    """It failed."""

    type_name: str
    message: str


class Unreadable(Struct, frozen=True):
    """Bytes that cannot be read here: encrypted, damaged, or of an unknown codec."""

    codec: str
    data: bytes


ReadableResult: TypeAlias = (
    HttpAnswer | GrpcAnswer | PlainValue | NotKept | StoredFailure | Unreadable
)


def read_result(stored: Encoded) -> ReadableResult:
    """Read what is `stored` as the result of a record (`record.outcome`), whatever it is.

    Nothing is imported, no object of a class is made, and nothing is raised.

    Examples:
        >>> idem.execute("order:42", lambda: {"charge": "ch_42"})
        {'charge': 'ch_42'}
        >>> read_result(idem.peek("order:42").outcome)
        PlainValue(value={'charge': 'ch_42'})
    """
    try:
        return _READERS[stored.codec](stored)
    except Exception:  # noqa: BLE001 - the bytes may be damaged in any way; something is shown
        return Unreadable(stored.codec, stored.data)


def _read_http(stored: Encoded) -> HttpAnswer:
    answer = unpack_answer(stored.data)
    lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
    return HttpAnswer(answer.status, tuple(lines), answer.body)


def _read_grpc(stored: Encoded) -> GrpcAnswer:
    answer = unpack_message(stored.data)
    return GrpcAnswer(answer.message, STATUS_CODES[answer.number], answer.details)


_READERS: Final[dict[str, Callable[[Encoded], ReadableResult]]] = {
    HTTP: _read_http,
    GRPC: _read_grpc,
    OMITTED: lambda stored: NotKept(omission_reason(stored)),
    FAILURE: lambda stored: StoredFailure(*decode_failure(stored)),
    "json/1": lambda stored: PlainValue(_plain(msgspec.json.decode(stored.data))),
    "msgpack/1": lambda stored: PlainValue(_plain(msgspec.msgpack.decode(stored.data))),
}


# --- trees, without the classes of their objects -------------------------------------------------


def _plain(tree: Tree) -> Tree:
    """Show a tree of `codec_types` as the plain data that it describes."""
    if type(tree) is list:
        return [_plain(item) for item in tree]
    if type(tree) is float and not isfinite(tree):
        return str(tree)
    if type(tree) is not dict:
        return tree
    tag = tree.get(TAG)
    if tag in _SHOWN:
        return _SHOWN[tag](tree[VALUE])
    if tag in _CLASSES:
        return _plain_object(tree)
    return {str(key): _plain(item) for key, item in tree.items()}


def _plain_object(tree: dict[str, Tree]) -> Tree:
    name, body = tree[TYPE].replace(":", "."), _plain(tree[VALUE])
    if type(body) is not dict:
        return {TAG: name, "value": body}
    more = (_plain(tree.get(part, {})) for part in (EXTRA, PRIVATE))
    return {TAG: name, **body, **dict(chain.from_iterable(each.items() for each in more))}


def _plain_pairs(pairs: Tree) -> Tree:
    """Show a mapping as a dict, or as a list of pairs where a key is no text."""
    shown = [[_plain(key), _plain(item)] for key, item in pairs]
    return dict(shown) if all(type(key) is str for key, _ in shown) else shown


def _plain_clock(body: str | list[Any]) -> str:
    text, _, zone = (body, 0, None) if isinstance(body, str) else body
    return text if zone is None else f"{text} {zone}"


def _plain_int(body: str) -> int | str:
    """Show a large number; in its stored, hexadecimal form where Python writes no decimal one."""
    return int(body, 16) if len(body) <= _LONGEST_INT else f"{int(body, 16):#x}"


_LONGEST_INT: Final = 3_500
"""Hexadecimal digits whose decimal form has less than the 4,300 digits that Python writes."""

_SHOWN: Final[dict[Any, Callable[[Any], Tree]]] = {
    "int": _plain_int,
    "float": str,
    "complex": lambda body: str(complex(*body)),
    "bytes": binascii.a2b_base64,
    "bytearray": binascii.a2b_base64,
    "decimal": str,
    "uuid": lambda body: str(UUID(hex=body)),
    "datetime": _plain_clock,
    "time": _plain_clock,
    "date": str,
    "timedelta": lambda body: str(timedelta(*body)),
    "tuple": _plain,
    "set": _plain,
    "frozenset": _plain,
    "deque": lambda body: _plain(body[1]),
    "dict": _plain_pairs,
    "ordereddict": _plain_pairs,
    "defaultdict": lambda body: _plain_pairs(body[1]),
    "unset": lambda _: "UNSET",
}
"""How the body of each tag of a built-in type is shown."""
_CLASSES: Final[frozenset[Any]] = frozenset({CUSTOM, *(form.tag for form in CLASS_FORMATS)})
