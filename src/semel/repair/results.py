"""Results as a person or a resolver gives them, and stored results as a person reads them.

A result is written as the codec of its record reads it; a kind that this codec does not read is
rejected before anything is stored. Reading shows something whatever is stored. Neither needs a
framework or a class of the application, and neither imports anything. What is shown of the result
of a function is its tree, with the tags of `codec_types`, and can be given in the same form: later
callers then get a value of the same type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from semel.core.codec import (
    BY_STORED_NAME,
    JSON_WRITERS,
    MSGPACK_WRITERS,
    Codec,
    Reader,
    StoredResult,
    Writer,
    decode_failure,
    encode_result,
    is_encrypted,
    omission_reason,
)
from semel.core.codec_types import (
    CUSTOM,
    EXTRA,
    FIELDS_SET,
    FORMATS,
    PRIVATE,
    TAG,
    TAGGED,
    TYPE,
    VALUE,
    Format,
    ReadTree,
    Tree,
    Unsupported,
    WriteTree,
)
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
from semel.http.requests import HEADER_NAME, HEADER_VALUE
from semel.http.storing import NEVER, has_body, kept_lines

# --- answers -------------------------------------------------------------------------------------


class HttpAnswer(Struct, frozen=True):
    """The response to an HTTP request: later requests with its key get exactly this.

    Header lines stay in their order, with names in lower case, as ASGI servers need them. Lines
    that are never stored, such as `Set-Cookie`, raise `ConfigError`.

    Examples:
        >>> created = HttpAnswer(201, {"Location": "/orders/7"}, b'{"id": 7}')
        >>> settle(idem, "order:7", Succeeded(created), scope="http") is None
        True
    """

    status: int
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    body: bytes | None = b""
    """The body; None in a stored response that was too large to keep."""

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The header lines as pairs."""
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
    """The serialized protobuf message; None in a stored error, or one that was too large."""
    code: str = "OK"
    """The status code: OK, or another one in a stored response."""
    details: str = ""


_COMPLETE: Final = range(200, 600)
_MARKER: Final = frozenset({b"idempotent-replayed"})


def _pack_http(answer: HttpAnswer) -> bytes:
    status, body = answer.status, answer.body
    if isinstance(status, bool) or not isinstance(status, int) or status not in _COMPLETE:
        raise ConfigError(f"status must be that of a complete response, 200 to 599; got {status!r}")
    if status in NEVER:
        raise ConfigError(
            f"a response with status {status} is never stored: it says something about the caller "
            "or the moment, not about the operation, and every retry would get it"
        )
    if not isinstance(body, bytes):
        raise ConfigError(f"body must be bytes, not {type(body).__name__}; encode a string first")
    if body and not has_body(status):
        raise ConfigError(f"a response with status {status} has no body: leave it out")
    return pack_answer(StoredAnswer(status, _checked_lines(answer), body))


def _checked_lines(answer: HttpAnswer) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(answer.headers, Mapping | Sequence) or not all(map(_is_pair, answer.lines)):
        raise ConfigError('headers must be pairs of strings, such as {"Location": "/orders/7"}')
    lines = tuple(_line(name, value) for name, value in answer.lines)
    kept = kept_lines(lines, _MARKER)
    for line in lines:
        if line not in kept:
            raise ConfigError(
                f"the header {line[0].decode()} is never stored: it is secret, belongs to one "
                "connection, or is written anew for every response. Leave it out"
            )
    return kept


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple | list) and list(map(type, given)) == [str, str]


def _line(name: str, value: str) -> tuple[bytes, bytes]:
    if HEADER_NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not the name of a header")
    if HEADER_VALUE.fullmatch(value) is None:
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

    `rules` and `codecs` are those of the engine that decides. If its codec encrypts, a plain one
    that the record names writes nothing. A kind that the codec does not read, and a codec that is
    not known, raise `ConfigError`.
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
    if is_encrypted(rules.codec) and not is_encrypted(codec):
        codec = rules.codec  # The attempt began before encryption, or its record was changed.
    # The limit of answers is an option of their integration, which is not known here.
    limit = rules.max_result_bytes if kind is VALUE_KIND else sys.maxsize
    if isinstance(value, ShownValue):
        codec = _WITHOUT_CLASSES.get(codec.name, codec)
        return encode_result(value.value, codec, identity, None, limit)
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
    """The result of a function as plain data: strings, numbers, lists, and dicts.

    Anything else is a dict with a tag under `$`. A decimal number is
    `{"$": "decimal", "v": "9.90"}`, and an object has its class under `t` and its fields under `v`.
    `semel resolve --succeeded` takes the same form.
    """

    value: object


class NotKept(Struct, frozen=True):
    """A success whose result was not kept."""

    reason: str


class StoredFailure(Struct, frozen=True):
    """A stored failure."""

    type_name: str
    message: str


class Unreadable(Struct, frozen=True):
    """Bytes that can't be read here: encrypted, damaged, or of an unknown codec."""

    codec: str
    data: bytes


ReadableResult: TypeAlias = (
    HttpAnswer | GrpcAnswer | PlainValue | NotKept | StoredFailure | Unreadable
)


def read_result(stored: Encoded) -> ReadableResult:
    """Return the result that is `stored` in a record (`record.outcome`), in a readable form.

    It imports nothing, creates no object of your classes, and raises nothing.

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
    """Show a tree as JSON holds it: MessagePack has bytes, and floats that are not finite."""
    if type(tree) is list:
        return [_plain(item) for item in tree]
    if type(tree) is dict:
        return {str(key): _plain(item) for key, item in tree.items()}
    if type(tree) is bytes or (type(tree) is float and not isfinite(tree)):
        return TAGGED[type(tree)](tree, Writer(_JSON, None))
    return tree


class ShownValue(Struct, frozen=True):
    """The result of a function that was given as `PlainValue` shows one."""

    value: object
    """The value, with a `StoredObject` for each object."""


class StoredObject:
    """What a tree says of an object whose class is not known here.

    It is no Struct: another codec would store it as an object of this class.
    """

    __slots__ = ("name", "parts", "tag")

    def __init__(self, tag: str, name: str, parts: dict[str, Any]) -> None:
        self.tag = tag
        self.name = name
        self.parts = parts


def read_shown(tree: Tree) -> ShownValue:
    """Read a result in the form that `PlainValue` has; another one raises `ConfigError`."""
    try:
        return ShownValue(Reader(_TAGS, None).value(tree))
    except Exception as error:
        what = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__} in it"
        raise ConfigError(
            f"the result cannot be read: {what}. {TAG} is the tag of a type that JSON has no form "
            "for: give the result as `semel show --result` shows that of a similar call, or in a "
            "program: semel.repair.settle(engine, key, Succeeded(...), scope=...). A dict that "
            f'itself has the key {TAG} is {{"{TAG}": "dict", "{VALUE}": [["{TAG}", ...], ...]}}'
        ) from error


# --- the form of a result: what a caller of this scope reads ------------------------------------


def unlike(tree: Tree, model: Tree, path: str = "result", tag: str | None = None) -> str | None:
    """Say where a result has another form than that of a similar call; None = it has the same.

    Forms differ where a class, a tagged type, or a kind of JSON differs, or the fields of an
    object. None is a value of any form, and a dict may have any keys.

    >>> unlike({"id": "ch_1"}, {"$": "dataclass", "t": "shop:Receipt", "v": {"id": "ch_2"}})
    'result is object, and that of the similar call shop:Receipt'
    """
    if tree is None or model is None:
        return None
    mine, other = _form(tree), _form(model)
    if mine != other:
        return f"{path} is {mine}, and that of the similar call {other}"
    if isinstance(model, list):
        paired = enumerate(_paired(tree, model, tag))
        items = (unlike(item, each, f"{path}[{at}]") for at, (item, each) in paired)
        return next((found for found in items if found is not None), None)
    if not isinstance(model, dict):
        return None
    if TAG in model:
        fields, others = tree[VALUE], model[VALUE]
        if model[TAG] in _WITH_FIELDS and fields.keys() != others.keys():
            names = ", ".join(sorted(fields.keys() ^ others.keys()))
            return f"{path} and that of the similar call don't have the same fields: {names}"
        return unlike(fields, others, path, model[TAG])
    shared = (unlike(tree[key], model[key], f"{path}.{key}") for key in tree if key in model)
    return next((found for found in shared if found is not None), None)


def in_form_of(tree: Tree, model: Tree, tag: str | None = None) -> Tree:
    """Write a result of plain JSON in the form of that of a similar call.

    >>> in_form_of({"id": "ch_1"}, {"$": "dataclass", "t": "shop:Receipt", "v": {"id": "ch_2"}})
    {'$': 'dataclass', 't': 'shop:Receipt', 'v': {'id': 'ch_1'}}
    """
    if tree is None or (isinstance(tree, dict) and TAG in tree):
        return tree
    if isinstance(model, dict) and TAG in model:
        body = in_form_of(tree, model[VALUE], model[TAG])
        made = {name: model[name] for name in (TAG, TYPE) if name in model} | {VALUE: body}
        if FIELDS_SET in model and isinstance(body, dict):
            made[FIELDS_SET] = sorted(body)
        return made
    if isinstance(model, list) and isinstance(tree, list) and model:
        return [in_form_of(item, each) for item, each in _paired(tree, model, tag)]
    if isinstance(model, dict) and isinstance(tree, dict):
        return {key: in_form_of(item, model.get(key)) for key, item in tree.items()}
    return tree


def _paired(items: list[Tree], model: list[Tree], tag: str | None) -> Iterable[tuple[Tree, Tree]]:
    """Pair each item with that of the similar call whose form it has: a tuple's by its position."""
    if tag == _TUPLE and len(items) == len(model):
        return zip(items, model, strict=True)
    return ((item, model[0]) for item in items if model)


_TUPLE: Final = "tuple"


def _form(tree: Tree) -> str:
    if isinstance(tree, dict):
        return str(tree.get(TYPE, tree[TAG])) if TAG in tree else "object"
    if isinstance(tree, list):
        return "list"
    return _JSON_TYPES[type(tree)]


_JSON_TYPES: Final = {str: "text", bool: "true or false", int: "number", float: "number"}


def _exactly(form: Format) -> ReadTree:
    """Read the value of a built-in type, but only as it is written.

    A decimal number whose quotes were forgotten is a float, and another number.
    """

    def read(tree: dict[str, Tree], reader: Reader) -> Any:
        if tree.keys() != {TAG, VALUE}:
            raise Unsupported(f"{form.tag!r} must have {TAG!r} and {VALUE!r}, and nothing else")
        body = tree[VALUE]
        value = form.read(body, reader)
        if type(form.write(value, Writer(_JSON, None))) is not type(body):
            raise Unsupported(f"{form.tag!r} is never written as {type(body).__name__}")
        return value

    return read


Part: TypeAlias = Callable[[Tree, Reader], Any]


def _fields(tree: Tree, reader: Reader) -> Any:
    return reader.fields(tree)


def _any(tree: Tree, reader: Reader) -> Any:
    return reader.value(tree)


def _only(cls: type) -> Part:
    def read(tree: Tree, reader: Reader) -> Any:
        value = reader.value(tree)
        if type(value) is not cls:
            raise Unsupported(f"found {type(value).__name__} where {cls.__name__} should be")
        return value

    return read


def _names(tree: Tree, _: Reader) -> Any:
    return msgspec.convert(tree, list[str])


_OBJECTS: Final[dict[str, dict[str, Part]]] = {
    "flag": {VALUE: _only(int)},
    "enum": {VALUE: _only(str)},
    "struct": {VALUE: _fields},
    "model": {VALUE: _fields, FIELDS_SET: _names, EXTRA: _fields, PRIVATE: _fields},
    "dataclass": {VALUE: _fields, EXTRA: _fields},
    "namedtuple": {VALUE: _fields},
    CUSTOM: {VALUE: _any},
}
"""The parts of an object by its tag, as `CLASS_FORMATS` writes them."""
_OPTIONAL: Final = {EXTRA, PRIVATE}
_WITH_FIELDS: Final = {tag for tag, parts in _OBJECTS.items() if parts[VALUE] is _fields}


def _read_object(tree: dict[str, Tree], reader: Reader) -> StoredObject:
    tag, parts = tree[TAG], _OBJECTS[tree[TAG]]
    needed = {TAG, TYPE, *parts} - _OPTIONAL
    if not needed <= tree.keys() <= needed | parts.keys():
        raise Unsupported(f"{tag!r} must have {', '.join(map(repr, sorted(needed)))}")
    name = _only(str)(tree[TYPE], reader)
    return StoredObject(
        tag, name, {part: read(tree[part], reader) for part, read in parts.items() if part in tree}
    )


def _write_object(value: StoredObject, writer: Writer) -> Tree:
    trees = {
        part: writer.fields(item) if _OBJECTS[value.tag][part] is _fields else writer.tree(item)
        for part, item in value.parts.items()
    }
    return {TAG: value.tag, TYPE: value.name, **trees}


_TAGS: Final[dict[str, ReadTree]] = {
    **{form.tag: _exactly(form) for form in FORMATS},
    **dict.fromkeys(_OBJECTS, _read_object),
}
_JSON: Final[dict[type, WriteTree]] = {**JSON_WRITERS, StoredObject: _write_object}
_MSGPACK: Final[dict[type, WriteTree]] = {**MSGPACK_WRITERS, StoredObject: _write_object}


class _WithoutClasses(NamedTuple):
    """Writes what a codec of semel would have written of the objects themselves."""

    name: str
    writers: Mapping[type, WriteTree]
    pack: Callable[[Tree], bytes]
    unpack: Callable[[bytes], Tree]

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:
        del context, hint
        try:
            return self.pack(Writer(self.writers, None).tree(value))
        except Unsupported as unsupported:
            raise unsupported.as_error("result") from None

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:
        del context, hint
        return Reader(_TAGS, None).value(self.unpack(data))


_WITHOUT_CLASSES: Final[dict[str, Codec]] = {
    "json/1": _WithoutClasses("json/1", _JSON, msgspec.json.encode, msgspec.json.decode),
    "msgpack/1": _WithoutClasses(
        "msgpack/1", _MSGPACK, msgspec.msgpack.encode, msgspec.msgpack.decode
    ),
}
