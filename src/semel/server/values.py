"""Stored results as plain data, for languages that know no tags.

This module reads. Types that plain data cannot hold lose their tags: decimals, dates, and integers
beyond 2^53 - 1 become text, tuples and sets lists, bytes base64, and objects their fields. What has
lost something is `lossy`. No class is looked up, and nothing is imported.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from semel.core.codec import omission_reason
from semel.core.codec_types import CUSTOM, EXTRA, TAG, TYPE, VALUE, Tree
from semel.core.records import OMITTED, Encoded
from semel.core.stored_answers import HTTP, unpack_answer
from semel.errors import ResultUnavailable, SerializationError
from semel.http.storing import kept_lines
from semel.server.wire import SAFE_INTEGER, Answered


class Plain(NamedTuple):
    """A stored result as plain data."""

    value: Any
    lossy: bool


def plain(stored: Encoded | None) -> Plain | Answered:
    """Read a stored success; raise `ResultUnavailable` where it cannot be given."""
    if stored is None:
        raise ResultUnavailable("none is stored")
    if stored.codec == OMITTED:
        raise ResultUnavailable(omission_reason(stored))
    if stored.codec == HTTP:
        return _response(stored.data)
    unpack = _UNPACK.get(stored.codec)
    if unpack is None:
        raise ResultUnavailable(f"its codec is {stored.codec}, which only its own program reads")
    reading = _Reading()
    try:
        value = reading.value(unpack(stored.data))
    except Exception:  # noqa: BLE001 - a stored record may have anything
        raise ResultUnavailable("what is stored cannot be read") from None
    return Plain(value, reading.lossy)


def _response(data: bytes) -> Answered:
    try:
        stored = unpack_answer(data)
    except SerializationError:
        raise ResultUnavailable("what is stored cannot be read") from None
    if stored.body is None:
        raise ResultUnavailable("the response was too large to be kept")
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in kept_lines(stored.headers, frozenset())
    ]
    try:
        return Answered(stored.status, headers, body=stored.body.decode())
    except UnicodeDecodeError:
        return Answered(stored.status, headers, base64=_base64(stored.body))


_UNPACK: Final[Mapping[str, Callable[[bytes], Tree]]] = {
    "json/1": msgspec.json.decode,
    "msgpack/1": msgspec.msgpack.decode,
}
"""How the codecs that write plain trees are read, by their stored names."""


_LEAVES: Final = (type(None), bool, float, str)


class _Reading:
    """Reads one tree, and notes whether a type was lost."""

    def __init__(self) -> None:
        self.lossy = False

    def value(self, tree: Tree) -> Any:
        if type(tree) is list:
            return [self.value(each) for each in tree]
        if type(tree) is dict:
            return self._tagged(tree) if TAG in tree else self._fields(tree)
        if type(tree) is int:
            return self._integer(tree)
        if type(tree) is bytes:
            return self._lost(_base64(tree))
        if type(tree) is float and tree - tree != 0.0:  # infinite, or not a number
            return self._lost(repr(tree))
        if type(tree) not in _LEAVES:  # an extension of MessagePack
            raise TypeError
        return tree

    def _fields(self, trees: Mapping[str, Tree]) -> dict[str, Any]:
        if not all(type(name) is str for name in trees):  # MessagePack's maps may have any keys
            raise TypeError
        return {name: self.value(each) for name, each in trees.items()}

    def _integer(self, number: int) -> int | str:
        return number if abs(number) <= SAFE_INTEGER else self._lost(str(number))

    def _lost(self, value: Any) -> Any:
        self.lossy = True
        return value

    def _tagged(self, tree: Mapping[str, Tree]) -> Any:
        tag, body = tree[TAG], tree[VALUE]
        if tag == "dict":
            return self._pairs(body)
        self.lossy = True
        if tag in _MAPPINGS:
            return self._pairs(_MAPPINGS[tag](body))
        if tag in _TEXTS:
            return _TEXTS[tag](body)
        if tag in _LISTS:
            return self.value(_LISTS[tag](body))
        if tag == CUSTOM:
            return self.value(body)
        if TYPE not in tree:  # a tag that this version does not know
            raise KeyError(tag)
        if type(body) is not dict:  # an enumeration
            return self.value(body)
        return {**self._fields(body), **self._fields(tree.get(EXTRA) or {})}

    def _pairs(self, pairs: Tree) -> Any:
        """Read a mapping with any keys: as an object if its keys are plain, else as pairs."""
        read = [(self.value(key), self.value(each)) for key, each in pairs]
        names = [key if type(key) is str else _key(key) for key, _ in read]
        self.lossy |= any(type(key) is not str for key, _ in read)
        if None in names or len(set(names)) < len(names):
            return self._lost([list(pair) for pair in read])
        return {name: each for name, (_, each) in zip(names, read, strict=True)}


def _key(key: Any) -> str | None:
    """Write a plain key as text; None = it is a list or an object."""
    return None if isinstance(key, list | dict) else msgspec.json.encode(key).decode()


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _clock(body: Tree) -> str:
    if type(body) is str:
        return body
    text, _, zone = body
    return text if zone is None else f"{text}[{zone}]"  # RFC 9557


def _days(body: Tree) -> str:
    days, seconds, microseconds = body
    return f"{days * 86400 + seconds + microseconds / 1e6:.6f}".rstrip("0").rstrip(".")


_TEXTS: Final[Mapping[str, Callable[[Tree], str | None]]] = {
    "int": lambda body: str(int(body, 16)),
    "float": str,
    "complex": lambda body: str(complex(*body)),
    "bytes": str,
    "bytearray": str,
    "decimal": str,
    "uuid": lambda body: f"{body[:8]}-{body[8:12]}-{body[12:16]}-{body[16:20]}-{body[20:]}",
    "datetime": _clock,
    "time": _clock,
    "date": str,
    "timedelta": _days,
    "unset": lambda _: None,
}
"""Tags of `codec_types.FORMATS` that become text (or null); a duration is in seconds."""

_LISTS: Final[Mapping[str, Callable[[Tree], Tree]]] = {
    "tuple": lambda body: body,
    "set": lambda body: body,
    "frozenset": lambda body: body,
    "deque": lambda body: body[1],
}
_MAPPINGS: Final[Mapping[str, Callable[[Tree], Tree]]] = {
    "ordereddict": lambda body: body,
    "defaultdict": lambda body: body[1],
}
