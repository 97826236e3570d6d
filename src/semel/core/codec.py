"""Results as bytes: safe, self-describing, equal in value and type when they are read back.

A codec turns a value into a tree, and the tree into bytes. A tree holds only what JSON and
MessagePack tell apart by themselves; everything else is tagged, `{"$": tag, "v": ...}`, as
`codec_types` says. A dict of the user's that has a `$` key is tagged too, so that no value can pass
for a tag.

The first caller, too, gets what the codec reads back: what duplicates will get. Where that fails
the effect is already done, so the record is kept without a value. Nothing is pickled, and stored
content never causes an import. Every failure raises `SerializationError`.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, NoneType, SimpleNamespace
from typing import Any, ClassVar, Final, Generic, NoReturn, Protocol, TypeVar, cast
from weakref import ReferenceType, ref

import msgspec
from msgspec import UNSET, Struct

from semel.core.codec_types import (
    READERS,
    REGISTERED_CLASSES,
    REGISTERED_NAMES,
    TAG,
    TAGGED,
    ReadTree,
    Registered,
    Tree,
    Unsupported,
    WriteTree,
    class_format_of,
    full_name,
    hint_inside,
    outlined,
    type_name,
    write_object,
)
from semel.core.records import FAILURE, OMITTED, Encoded, Identity
from semel.core.run_info import LARGEST_MOST
from semel.errors import ConfigError, ResultUnavailable, SerializationError, about


class Codec(Protocol):
    """Encodes results as bytes and decodes them; `name` is stored with the bytes."""

    @property
    def name(self) -> str:
        """The name and version of the format, such as `json/1`."""
        ...

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:
        """Encode the result `value`.

        `context` is scope and key as bytes, the same when the result is read back, so a codec that
        encrypts or signs can bind the result to it. `hint` is the type that the call or its
        function's annotation names, or None.
        """
        ...

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:
        """Decode a result from its `data`, equal in value and type.

        `context` and `hint` are those of `encode`.
        """
        ...


UNBOUND: Final[set[type]] = set()
"""Classes of codecs that have no use for the context, and get none: it is made for each call."""


C = TypeVar("C", bound=type)


def unbound(codec: C) -> C:
    """Say that a class has no use for the context. That is not inherited: a subclass may have."""
    UNBOUND.add(codec)
    return codec


# --- results and failures -----------------------------------------------------------------


T = TypeVar("T")


class StoredResult(Struct, Generic[T], frozen=True):
    """What is stored, what the caller gets, and why the value is missing if it is."""

    encoded: Encoded
    value: T
    problem: str | None = None
    interruption: BaseException | None = None
    """An exception that came while the codec worked, and was not the codec's."""


def encode_result(
    value: T,
    codec: Codec,
    identity: Identity,
    hint: object,
    limit: int,
    *,
    first: BaseException | None = None,
) -> StoredResult[T]:
    """Encode a value and read it back.

    What fails is tried a second time (`first` is the first error): an exception that a signal
    handler raises inside the codec, such as a worker's time limit, does not come again.
    """
    context = b"" if type(codec) in UNBOUND else identity.encoded
    step = "encoding"
    try:
        data = codec.encode(value, context, hint)
        if not isinstance(data, bytes):
            reason = f"the codec {codec.name} encoded it as {type(data).__name__}, not as bytes"
            return StoredResult(omitted(reason), value, reason, first)
        if len(data) > limit:
            reason = f"it has {len(data)} bytes, the policy keeps at most {limit}"
            return StoredResult(omitted(reason), value, reason, first)
        step = "reading back"
        back = cast("T", codec.decode(data, context, hint))
    except Exception as error:  # noqa: BLE001 - a user's type may do anything; the effect is done
        if first is None:
            return encode_result(value, codec, identity, hint, limit, first=origin(error))
        kind = type(value).__name__
        unsaid = f"{type(error).__name__} while {step} {kind} with the codec {codec.name}"
        reason = _reason(error, codec, unsaid)
        return StoredResult(omitted(reason), value, reason)
    return StoredResult(Encoded(codec.name, data), back, None, first)


def decode_result(
    stored: Encoded | None,
    identity: Identity,
    hint: object,
    codec: Codec,
    others: Mapping[str, Codec],
    *,
    again: bool = False,
) -> object:
    """Read a stored result, or raise ResultUnavailable: never a reason to run again.

    What fails is tried a second time, as in `encode_result`.
    The rules' own codec comes first, as another one may have the same name.
    """
    if stored is None:
        raise about(ResultUnavailable("none is stored"), identity)
    if stored.codec == OMITTED:
        raise about(ResultUnavailable(omission_reason(stored)), identity)
    decoding = codec
    try:
        if stored.codec != codec.name:
            decoding = decoder_for(stored.codec, others)
            check_accepted(decoding, codec)
        context = b"" if type(decoding) in UNBOUND else identity.encoded
        return decoding.decode(stored.data, context, hint)
    except Exception as error:  # noqa: BLE001 - a codec may raise anything; it becomes ours
        if not again:
            decode_result(stored, identity, hint, codec, others, again=True)
            raise origin(error) from None  # It was not the codec's: a signal handler raised it.
        reason = _reason(error, decoding, f"{type(error).__name__} while reading it back")
        unavailable = about(ResultUnavailable(reason), identity)
        # A traceback shows the cause, and its text may quote the value.
        raise unavailable from None if is_encrypted(decoding) else error


def is_encrypted(codec: Codec) -> bool:
    """Return whether no text about this codec's results may show a part of them."""
    return getattr(codec, "encrypted", False) is True


def check_accepted(written_by: Codec, codec: Codec) -> None:
    """Raise `SerializationError` for a result that a policy with `codec` must not read.

    A process that writes to the store chooses the name of the codec that reads its bytes. Only the
    policy can say that a plain one must not be among them.
    """
    if getattr(codec, "strict", False) is True and not is_encrypted(written_by):
        raise outlined(
            f"the stored result is plain ({written_by.name}), and the policy reads only encrypted "
            "ones; if it was stored before you switched encryption on, read it with "
            "EncryptedCodec(..., strict=False)"
        )


def _reason(error: Exception, codec: Codec, unsaid: str) -> str:
    """Say why a result cannot be stored or read; `unsaid` where the error's text may quote it."""
    if not isinstance(error, SerializationError):
        return unsaid
    if is_encrypted(codec):
        return unsaid if error.outline is None else error.outline
    return error.text


def origin(error: Exception) -> BaseException:
    """Return the exception that a codec turned into its own."""
    cause = error.__cause__
    return error if cause is None or not isinstance(error, SerializationError) else cause


MESSAGE_LIMIT: Final = 1000
"""Characters of a failure's message that are kept."""


class _Failure(msgspec.Struct, array_like=True, frozen=True, gc=False):
    type_name: str
    message: str
    most: int | None = None


_failure_decoder = msgspec.json.Decoder(_Failure)


def encode_failure(error: BaseException, most: int | None = None) -> Encoded:
    """Keep the type name and the message of an exception.

    `most` is the `max_attempts` of its policy, if the next attempt may run.
    """
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure itself
        message = "(its message could not be read)"
    return failure_of(type(error).__name__, message, most)


def failure_of(type_name: str, message: str, most: int | None = None) -> Encoded:
    """Encode a failure by its type name and its message, with the bound of its attempts."""
    kept: tuple[str | int, ...] = (_clean(type_name), _clean(message))
    if most is not None and most <= LARGEST_MOST:
        kept += (most,)
    return Encoded(FAILURE, msgspec.json.encode(kept))


def decode_failure(stored: Encoded) -> tuple[str, str]:
    """Read the type name and the message of a stored failure."""
    failure = _read_failure(stored)
    return failure.type_name, failure.message


def most_attempts(stored: Encoded) -> int | None:
    """Read the `max_attempts` of a stored failure; None = no bound, or one that is not known."""
    return _read_failure(stored).most


def _read_failure(stored: Encoded) -> _Failure:
    try:
        return _failure_decoder.decode(stored.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SerializationError("the stored failure cannot be read") from error


def omitted(reason: str) -> Encoded:
    """Stand for a success whose value is not kept, and say why."""
    return Encoded(OMITTED, _clean(reason).encode())


def omission_reason(stored: Encoded) -> str:
    """Read why the value of a success was not kept."""
    return stored.data.decode(errors="replace")


def _clean(text: str) -> str:
    """Cut a text, and make it one that UTF-8 can hold."""
    return str.encode(text, "utf-8", "replace").decode()[:MESSAGE_LIMIT]


def returned_by(function: Callable[..., object]) -> object:
    """Return the return annotation of a function, resolved; None without one that can be."""
    annotation = getattr(function, "__annotations__", {}).get("return")
    if annotation is None or type(annotation) is type:
        return None if annotation is type(None) else annotation
    plain = getattr(function, "__func__", function)  # a bound method is another one each time
    cacheable = plain.__class__ is FunctionType  # anything else need not be hashable
    known = _resolved.get(ref(plain), UNSET) if cacheable else UNSET
    if known is not UNSET:
        return known
    try:
        resolved = _resolve(annotation, getattr(function, "__globals__", {}))
    except Exception:  # noqa: BLE001 - evaluates the user's text; without a hint we still work
        return None
    if cacheable:
        _resolved[ref(plain, _forget)] = resolved
    return resolved


_resolved: dict[ReferenceType[Any], object] = {}
"""Return annotations, by function. What cannot be resolved yet is tried again by the next call.

No `WeakKeyDictionary`: every call looks here, and that one takes several functions to look."""


def _forget(function: ReferenceType[Any]) -> None:
    _resolved.pop(function, None)


def _resolve(annotation: object, names: dict[str, Any]) -> object:
    # Only this one annotation: a parameter that cannot be resolved must not hide it.
    alone = SimpleNamespace(__annotations__={"return": annotation})
    resolved = typing.get_type_hints(alone, names)["return"]
    return None if resolved is type(None) else resolved


# --- values as trees ----------------------------------------------------------------------


MAX_DEPTH: Final = 100
"""Levels a value may have; what was written shallow in the stack must be readable deep in it."""


class Writer:
    """Makes the tree of one value."""

    __slots__ = ("_depth", "_formats", "hint")

    def __init__(self, formats: Mapping[type, WriteTree], hint: object, depth: int = 0) -> None:
        self.hint = hint
        self._formats = formats
        self._depth = depth

    def inside(self, cls: type) -> Writer:
        """Return the writer for the fields of an object of this class."""
        hint = hint_inside(cls, self.hint)
        return self if hint is self.hint else Writer(self._formats, hint, self._depth)

    def tree(self, value: object) -> Tree:
        """Turn a value of any known type into its tree."""
        if self._depth == MAX_DEPTH:
            raise Unsupported(
                f"the value is nested deeper than {MAX_DEPTH - 1} levels, or contains itself"
            )
        self._depth += 1
        write = self._formats.get(type(value))
        tree = (self._formats[object] if write is None else write)(value, self)
        self._depth -= 1
        return tree

    def items(self, values: Iterable[object]) -> list[Tree]:
        """Turn each value into its tree."""
        trees: list[Tree] = []
        try:
            for value in values:
                trees.append(self.tree(value))  # noqa: PERF401 - its length is where it failed
        except Unsupported as unsupported:
            raise unsupported.inside(f"[{len(trees)}]") from None
        return trees

    def pairs(self, values: Mapping[Any, object]) -> list[Tree]:
        """Turn a mapping with any keys into a list of key and value, in order."""
        trees: list[Tree] = []
        for key, value in values.items():
            try:
                trees.append([self.tree(key), self.tree(value)])
            except Unsupported as unsupported:
                raise unsupported.inside_key(key) from None
        return trees

    def plain_dict(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn a mapping whose keys are all plain strings into a dict of trees."""
        trees: dict[str, Tree] = {}
        for key, value in values.items():
            try:
                check_text(key)
                trees[key] = self.tree(value)
            except Unsupported as unsupported:
                raise unsupported.inside_key(key) from None
        return trees

    def fields(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn the attributes of an object into a dict of trees."""
        trees: dict[str, Tree] = {}
        for name, value in values.items():
            try:
                trees[name] = self.tree(value)
            except Unsupported as unsupported:
                raise unsupported.inside(f".{name}") from None
        return trees


class Reader:
    """Makes the value of one tree."""

    __slots__ = ("_tags", "hint")

    def __init__(self, tags: Mapping[str, ReadTree], hint: object) -> None:
        self.hint = hint
        self._tags = tags

    def inside(self, cls: type) -> Reader:
        """Return the reader for the fields of an object of this class."""
        hint = hint_inside(cls, self.hint)
        return self if hint is self.hint else Reader(self._tags, hint)

    def value(self, tree: Tree) -> Any:
        """Turn a tree back into the value it was made from."""
        if type(tree) is list:
            return [self.value(item) for item in tree]
        if type(tree) is not dict:
            return tree
        if TAG not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        read = self._tags.get(tree[TAG])
        if read is None:
            raise Unsupported(f"the tag {tree[TAG]!r} is not known to this version of semel")
        return read(tree, self)

    def items(self, trees: Tree) -> list[Any]:
        """Turn a list of trees into a list of values."""
        return [self.value(tree) for tree in _expect(list, trees)]

    def pairs(self, trees: Tree) -> list[tuple[Any, Any]]:
        """Turn what `Writer.pairs` made into keys and values."""
        return [(self.value(key), self.value(item)) for key, item in _expect(list, trees)]

    def fields(self, trees: Tree) -> dict[str, Any]:
        """Turn a dict of trees into a dict of values; no key in it is a tag."""
        return {name: self.value(tree) for name, tree in _expect(dict, trees).items()}


def _expect(cls: type, tree: Tree) -> Any:
    if type(tree) is not cls:
        raise Unsupported(f"found {type(tree).__name__} where {cls.__name__} should be")
    return tree


# Types that JSON and MessagePack hold as they are, at least some of their values.


def check_text(text: str) -> None:
    """Raise `Unsupported` for a string that UTF-8 cannot hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unsupported("a string with a lone surrogate is not text") from None


def _as_is(value: object, _: Writer) -> Tree:
    return value


def _write_text(value: str, _: Writer) -> Tree:
    check_text(value)
    return value


def _write_int(value: int, writer: Writer) -> Tree:
    return value if _INT_MIN <= value <= _INT_MAX else TAGGED[int](value, writer)


def _write_json_float(value: float, writer: Writer) -> Tree:
    return value if math.isfinite(value) else TAGGED[float](value, writer)


def _write_list(value: list[object], writer: Writer) -> Tree:
    return writer.items(value)


def _write_dict(value: dict[Any, object], writer: Writer) -> Tree:
    if TAG in value or not _PLAIN_KEYS.issuperset(map(type, value)):
        return TAGGED[dict](value, writer)
    return writer.plain_dict(value)


_PLAIN_KEYS = frozenset({str})


_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
"""What MessagePack holds, and every JSON reader that knows 64-bit integers."""


JSON_WRITERS: dict[type, WriteTree] = {
    **TAGGED,
    NoneType: _as_is,
    bool: _as_is,
    int: _write_int,
    float: _write_json_float,
    str: _write_text,
    list: _write_list,
    dict: _write_dict,
}


MSGPACK_WRITERS: dict[type, WriteTree] = {**JSON_WRITERS, float: _as_is, bytes: _as_is}
"""MessagePack has bytes, and floats that are not finite."""


# --- the codecs ---------------------------------------------------------------------------


class _TreeCodec:
    """What the plain codecs share: all but the bytes of a tree."""

    name: ClassVar[str]
    _writers: ClassVar[Mapping[type, WriteTree]]
    # Functions of msgspec's own: kept in a class, they do not become its methods.
    _pack: Callable[[Tree], bytes]
    _unpack: Callable[[bytes], Tree]
    _tag: ClassVar[bytes]
    """How a tag begins in the data; where it is absent, the tree is the value."""

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:
        """Encode a result, or say which part of it cannot be stored."""
        del context  # plain bytes can be read anywhere
        try:
            if value is None or (type(value) is str and value.isascii()):
                return self._pack(value)  # the result of many functions is its own tree
            return self._pack(Writer(self._writers, hint).tree(value))
        except Unsupported as unsupported:
            raise unsupported.as_error("result") from None
        except Exception as error:  # the user's classes and encoders run here: any error may come
            # Not its text, here and below: it may quote the value, and the reason why a result
            # cannot be stored is stored in plain text, even where results are encrypted.
            reason = f"the result cannot be stored: {type(error).__name__} while it was encoded"
            raise outlined(reason) from error

    def decode(self, data: bytes, context: bytes, hint: object = None) -> Any:
        """Read a result back, or say why it cannot be read."""
        del context
        try:
            tree = self._unpack(data)
            if b"$" not in data or self._tag not in data:  # one byte is found 30 times faster
                return tree
            return Reader(READERS, hint).value(tree)
        except Unsupported as unsupported:
            raise outlined(f"the stored result cannot be read: {unsupported}") from None
        except Exception as error:  # damaged bytes, and classes that have changed: any may come
            reason = (
                f"the stored result cannot be read: {type(error).__name__} while it was decoded"
            )
            raise outlined(reason) from error


def _reject_extension(code: int, _: memoryview) -> NoReturn:
    raise Unsupported(f"MessagePack extension {code} was not written by semel")


@unbound
class JsonCodec(_TreeCodec):
    """JSON that other tools can read; the default."""

    name = "json/1"
    _writers = JSON_WRITERS | {object: write_object}
    _pack = msgspec.json.Encoder().encode
    _unpack = msgspec.json.Decoder().decode
    _tag = b'"$"'


@unbound
class MsgpackCodec(_TreeCodec):
    """MessagePack: smaller, and bytes as they are."""

    name = "msgpack/1"
    _writers = MSGPACK_WRITERS | {object: write_object}
    _pack = msgspec.msgpack.Encoder().encode
    _unpack = msgspec.msgpack.Decoder(ext_hook=_reject_extension).decode
    _tag = b"\xa1$"


_BY_SHORT_NAME: Final[Mapping[str, Codec]] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}


BY_STORED_NAME: Final[Mapping[str, Codec]] = {
    codec.name: codec for codec in _BY_SHORT_NAME.values()
}


def codec_named(name: str) -> Codec:
    """Return the codec that a policy names: `json` or `msgpack`."""
    codec = _BY_SHORT_NAME.get(name)
    if codec is None:
        known = ", ".join(_BY_SHORT_NAME)
        raise ConfigError(f"no codec is called {name!r}; known: {known}, or pass a codec object")
    return codec


def decoder_for(stored_name: str, extra: Mapping[str, Codec]) -> Codec:
    """Return the codec that wrote a result, by its stored name; `extra` are the caller's own."""
    codec = extra.get(stored_name, BY_STORED_NAME.get(stored_name))
    if codec is None:
        raise outlined(
            f"the stored result was written by the codec {stored_name!r}, which is not known here"
        )
    return codec


# --- what users bring: codecs and types ---------------------------------------------------


LONGEST_NAME: Final = 255
"""Bytes of a codec's name that every store can hold."""


RESERVED: Final = frozenset({OMITTED, FAILURE, "http/1", "grpc/1"})
"""Names under which semel stores what is no result, and the responses of its integrations."""


METHODS: Final = {"encode": "value", "decode": "data"}
"""What a codec must do, with the name of the first argument."""


def check_codec(codec: object, where: str) -> None:
    """Raise a ConfigError unless this can be a codec; `where` it was given begins the message.

    Noticed at the first result, it would be too late: the effect is done, its result is lost.
    """
    if isinstance(codec, type):
        name = codec.__name__
        raise ConfigError(f"{where} must be an object, {name}(...), not the class {name} itself")
    kind = type(codec).__name__
    if not all(hasattr(codec, needed) for needed in ("name", *METHODS)):
        expected = "a codec's name or an object with name, encode and decode"
        raise ConfigError(f"{where} must be {expected}; got {kind}")
    for method, first in METHODS.items():
        if not _takes_three(getattr(codec, method)):
            expected = f"a plain method that takes ({first}, context, hint=None)"
            raise ConfigError(f"{where} must be a codec whose {method} is {expected}; got {kind}")
    name = getattr(codec, "name")  # noqa: B009 - its type is not known to have one
    if not isinstance(name, str) or not name.isprintable() or not _fits(name):
        expected = f"a printable text of 1 to {LONGEST_NAME} bytes, such as 'zip/1'"
        raise ConfigError(
            f"{where} must be a codec whose name is {expected}; {kind} has {repr(name)[:80]}"
        )
    taken = BY_STORED_NAME.get(name)
    # By type: a subclass may write something else, and what is stored by now would be read with it.
    if name in RESERVED or (taken is not None and type(codec) is not type(taken)):
        raise ConfigError(
            f"{where} must be a codec with a name of its own; {kind} has {name!r}, under which "
            "semel itself stores something else"
        )


def _fits(name: str) -> bool:
    return 0 < len(name.encode()) <= LONGEST_NAME


def _takes_three(method: object) -> bool:
    """Whether it can be called as the engine calls it, and answers at once."""
    if not callable(method) or inspect.iscoroutinefunction(method):
        return False
    try:
        inspect.signature(method).bind(b"", b"", None)
    except TypeError:
        return False
    except ValueError:  # a function of an extension may not have a signature
        pass
    return True


def register_type(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Register the class `cls`, so that its objects can be stored, and return it.

    `encode` turns an object into storable data, and `decode` turns that back. `name` is the stored
    name of the class; the default is its module and name. Data classes, Structs, pydantic models,
    enumerations, and named tuples need neither function; for them `name` fixes the stored name, so
    that you can move the class. A class can have several names: the last one is written, and all
    are read. It works as a decorator.

    Examples:
        >>> class Money:
        ...     def __init__(self, cents: int) -> None:
        ...         self.cents = cents
        >>> Money = register_type(
        ...     Money, name="shop.Money", encode=lambda money: money.cents, decode=Money
        ... )
    """
    if cls in JSON_WRITERS:
        raise ConfigError(f"{type_name(cls)} has a format already")
    if (encode is None) != (decode is None):
        raise ConfigError("register_type needs encode and decode together, or neither")
    if encode is None and class_format_of(cls) is None:
        raise ConfigError(f"{type_name(cls)} has no fields semel knows of: give encode and decode")
    registered = Registered(full_name(cls) if name is None else name, cls, encode, decode)
    known = REGISTERED_NAMES.get(registered.name)
    # The same full name is the same class after a reload.
    if known is not None and full_name(known.cls) != full_name(cls):
        raise ConfigError(f"the name {registered.name} belongs to {type_name(known.cls)}")
    REGISTERED_NAMES[registered.name] = REGISTERED_CLASSES[cls] = registered
    return cls
