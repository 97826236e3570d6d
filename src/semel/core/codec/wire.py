"""The codecs: a value becomes a tree, the tree becomes bytes, and all of it back.

First result and replay are equal in value and type, without a hint. Nothing is pickled, and stored
content never causes an import. Every failure is a `SerializationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NoReturn, Protocol, TypeVar

import msgspec

from semel.core.codec import formats, kinds
from semel.core.codec.walk import Reader, ReadTree, Tree, Writer, WriteTree
from semel.core.refusal import Refused
from semel.errors import ConfigError, SerializationError


class Codec(Protocol):
    """Turns results into bytes and back; `name` is stored with the bytes and includes a version."""

    @property
    def name(self) -> str:
        """Name and version of the format, like `json/1`."""
        ...

    def encode(self, value: object, context: bytes, hint: object = None) -> bytes:
        """Encode a result, `value`.

        `context` is scope and key as bytes, the same when the result is read back: what encrypts or
        signs can bind the result to it. `hint` is the type that the call or the annotation of its
        function names, None if neither does.
        """
        ...

    def decode(self, data: bytes, context: bytes, hint: object = None) -> object:
        """Read a result back from its `data`, equal in value and type.

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
                return self._pack(value)  # what many functions give is its own tree
            return self._pack(Writer(self._writers, hint).tree(value))
        except Refused as refused:
            raise refused.as_error("result") from None
        except Exception as error:  # the user's classes and encoders run here: any error may come
            # Its text stays untold, here and below: it may quote the value, and what is told of a
            # result that cannot be stored is stored as it is, also where results are encrypted.
            told = f"the result cannot be stored: {type(error).__name__} while it was encoded"
            raise SerializationError(told) from error

    def decode(self, data: bytes, context: bytes, hint: object = None) -> Any:
        """Read a result back, or say why it cannot be read."""
        del context
        try:
            tree = self._unpack(data)
            if self._tag not in data:
                return tree
            return Reader(_READERS, hint).value(tree)
        except Refused as refused:
            raise SerializationError(f"the stored result cannot be read: {refused}") from None
        except Exception as error:  # damaged bytes, and classes that have changed: any may come
            told = f"the stored result cannot be read: {type(error).__name__} while it was decoded"
            raise SerializationError(told) from error


def _refuse_extension(code: int, _: memoryview) -> NoReturn:
    raise Refused(f"MessagePack extension {code} was not written by semel")


_READERS: Final[Mapping[str, ReadTree]] = formats.READERS | kinds.READERS


@unbound
class JsonCodec(_TreeCodec):
    """JSON that other tools can read; the default."""

    name = "json/1"
    _writers = formats.JSON_WRITERS | {object: kinds.write_object}
    _pack = msgspec.json.Encoder().encode
    _unpack = msgspec.json.Decoder().decode
    _tag = b'"$"'


@unbound
class MsgpackCodec(_TreeCodec):
    """MessagePack: smaller, and bytes as they are."""

    name = "msgpack/1"
    _writers = formats.MSGPACK_WRITERS | {object: kinds.write_object}
    _pack = msgspec.msgpack.Encoder().encode
    _unpack = msgspec.msgpack.Decoder(ext_hook=_refuse_extension).decode
    _tag = b"\xa1$"


_BY_SHORT_NAME: Final[Mapping[str, Codec]] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}
BY_STORED_NAME: Final[Mapping[str, Codec]] = {
    codec.name: codec for codec in _BY_SHORT_NAME.values()
}


def codec_named(name: str) -> Codec:
    """Give the codec that a policy names: `json` or `msgpack`."""
    codec = _BY_SHORT_NAME.get(name)
    if codec is None:
        known = ", ".join(_BY_SHORT_NAME)
        raise ConfigError(f"no codec is called {name!r}; known: {known}, or pass a codec object")
    return codec


def decoder_for(stored_name: str, extra: Mapping[str, Codec]) -> Codec:
    """Give the codec that wrote a result, by its stored name; `extra` are the caller's own."""
    codec = extra.get(stored_name, BY_STORED_NAME.get(stored_name))
    if codec is None:
        raise SerializationError(
            f"the stored result was written by the codec {stored_name!r}, which is not known here"
        )
    return codec
