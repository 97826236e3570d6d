"""The digest that tells one payload from another.

Two payloads are the same when their canonical JSON is the same: keys sorted, a tuple like a list,
a data class like the dict of its fields, a date like its ISO text. 1, 1.0 and true are three
payloads. Raw bytes are hashed as they are, apart from everything JSON. Nothing here is ever read
back, but a change of this format makes every stored fingerprint a mismatch: golden tests hold it.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import hmac
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, cast

import msgspec

from semel.core.codec import check_text
from semel.core.codec_types import Unsupported, type_name
from semel.core.optional import dataclass_fields, is_dataclass, is_pydantic_model
from semel.core.records import FINGERPRINT_BYTES, Identity
from semel.errors import ConfigError, SerializationError

_RAW = b"raw\0"
_RAW_TYPES = (bytes, bytearray, memoryview)
_JSON = b"json\0"

_MARK = "\0semel"
"""Key of the objects that stand for what JSON has no form for."""

_ATOMS = frozenset(
    {
        type(None),
        bool,
        bytes,
        bytearray,
        memoryview,
        decimal.Decimal,
        uuid.UUID,
        dt.datetime,
        dt.date,
        dt.time,
        dt.timedelta,
    }
)
"""Types that msgspec writes by itself, each in one way."""

_ATOMS_OR_ERRORS = _ATOMS | {int, str}
"""Those too that it writes in one way or not at all."""

_DECIMAL_BITS = 2048
"""Python may decline to write longer integers in decimal; hexadecimal has no such limit."""


def fingerprint(payload: object, secret: bytes | None = None) -> bytes:
    """Digest a payload to 16 bytes; without the secret, a reader can't compute or guess it."""
    if isinstance(payload, _RAW_TYPES):
        return _digest(_RAW + bytes(payload), secret)
    return _digest(_JSON + _canonical_json(payload), secret)


def keyed(digest: bytes, identity: Identity, secret: bytes) -> bytes:
    """Key the digest of a payload: without the secret, a reader can neither guess nor compare it.

    The identity is part of it, so that equal payloads of two operations have two digests.
    """
    return _digest(identity.encoded + digest, secret)


def check_secrets(value: object) -> tuple[bytes, ...]:
    """Return the secrets of fingerprints, each as bytes; the first one writes.

    Raises `ConfigError`, which never shows one.
    """
    given = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    encoded = [each.encode() if isinstance(each, str) else each for each in given]
    secrets = tuple(each for each in encoded if isinstance(each, bytes))
    if not secrets or len(secrets) < len(encoded) or len(min(secrets, key=len)) < SHORTEST_SECRET:
        raise ConfigError(
            f"must be a secret of at least {SHORTEST_SECRET} bytes, or several for a rotation: the "
            "first one writes, all are compared"
        )
    return secrets


SHORTEST_SECRET: Final = 16
"""Bytes. A shorter secret is found by trying."""


def _digest(message: bytes, secret: bytes | None) -> bytes:
    if secret is None:
        return hashlib.sha256(message).digest()[:FINGERPRINT_BYTES]
    return hmac.digest(secret, message, "sha256")[:FINGERPRINT_BYTES]


def _canonical_json(payload: object) -> bytes:
    try:
        text = _JSON_ENCODER.encode(payload)
    except Exception:  # noqa: BLE001 - whatever it is, the careful way finds and names it
        return _careful_json(payload)
    # It is written, so it does not contain itself.
    return text if _has_one_form(payload) else _careful_json(payload)


def _has_one_form(payload: object) -> bool:
    """Whether msgspec alone tells this payload from every other one.

    It writes nan and inf as null, sorts sets of sets by inclusion, and leaves out the private names
    of attrs classes and the defaults of some Structs.
    """
    todo = [payload]
    for value in todo:  # it grows on the way
        kind = type(value)
        if kind is dict:
            todo.extend(cast("dict[str, object]", value).values())
        elif kind is list or kind is tuple:
            todo.extend(cast("list[object]", value))
        elif kind is float:
            if not math.isfinite(cast("float", value)):
                return False
        elif kind not in _ATOMS_OR_ERRORS:
            return False
    return True


def _careful_json(payload: object) -> bytes:
    """Take any payload that has a canonical form, or say which part has none."""
    try:
        return _JSON_ENCODER.encode(_plain(payload))
    except Unsupported as unsupported:
        raise unsupported.as_error("payload") from None
    except RecursionError:
        raise SerializationError("the payload is nested too deeply, or contains itself") from None
    except Exception as error:  # the caller's own classes run here: any error may come
        raise SerializationError(f"the payload cannot be read: {error}") from error


_JSON_ENCODER = msgspec.json.Encoder(order="sorted")


# --- the careful way ---------------------------------------------------------------------


def _plain(value: object) -> object:
    """Rebuild a value from what msgspec writes in exactly one way."""
    if type(value) in _ATOMS:
        return value
    for types, rebuild in _RULES:
        if isinstance(value, types):
            return rebuild(value)
    return _object(value)


def _text(value: str) -> str:
    check_text(value)
    return str.__str__(value)


def _integer(value: int) -> object:
    return int(value) if value.bit_length() <= _DECIMAL_BITS else {_MARK: hex(value)}


def _float(value: float) -> object:
    return float(value) if math.isfinite(value) else {_MARK: float.__repr__(value)}


def _iso(value: dt.date | dt.time) -> str:
    """Write a subclass (pendulum, freezegun) as msgspec writes the real one."""
    text = value.isoformat()
    return f"{text[:-6]}Z" if text.endswith("+00:00") else text


def _set(values: AbstractSet[object]) -> list[object]:
    return sorted((_plain(value) for value in values), key=_JSON_ENCODER.encode)


def _items(values: Sequence[object]) -> list[object]:
    plain: list[object] = []
    try:
        for value in values:
            plain.append(_plain(value))  # noqa: PERF401 - its length is the position of a failure
    except Unsupported as unsupported:
        raise unsupported.inside(f"[{len(plain)}]") from None
    return plain


def _mapping(value: Mapping[object, object]) -> object:
    pairs: list[tuple[Any, object]] = []
    for key, item in value.items():
        try:
            pairs.append((_plain(key), _plain(item)))
        except Unsupported as unsupported:
            raise unsupported.inside_key(key) from None
    if all(type(key) is str for key, _ in pairs):
        return dict(pairs)
    return {_MARK: sorted(pairs, key=_JSON_ENCODER.encode)}


def _struct(value: msgspec.Struct) -> object:
    config = value.__struct_config__
    plain = _fields(value, value.__struct_fields__, value.__struct_encode_fields__)
    if config.tag_field is not None:
        plain[config.tag_field] = config.tag
    return plain


def _object(value: Any) -> object:
    cls: Any = type(value)
    if is_dataclass(cls):
        names = [field.name for field in dataclass_fields(cls)]
        return _fields(value, names, names)
    if is_pydantic_model(cls):
        return _model(value)
    if hasattr(cls, "__attrs_attrs__"):
        names = [attribute.name for attribute in cls.__attrs_attrs__]
        return _fields(value, names, names)
    raise Unsupported(f"{type_name(cls)} has no canonical form; pass a payload of plain data")


def _model(value: Any) -> dict[str, object]:
    # No model_dump, which leaves out what a subclass adds and what is excluded from responses.
    names = [name for name in type(value).model_fields if name in value.__dict__]
    plain = _fields(value, names, names)
    if value.__pydantic_extra__:  # apart: an alias lets one have the name of a field
        plain[_MARK] = _plain(value.__pydantic_extra__)
    return plain


def _fields(value: object, names: Sequence[str], keys: Sequence[str]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, key in zip(names, keys, strict=True):
        item = getattr(value, name, msgspec.UNSET)
        if item is msgspec.UNSET:
            continue
        try:
            plain[key] = _plain(item)
        except Unsupported as unsupported:
            raise unsupported.inside(f".{name}") from None
    return plain


_RULES: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (enum.Enum, lambda member: _plain(member.value)),
    (str, _text),
    (int, _integer),
    (float, _float),
    (_RAW_TYPES, bytes),
    (AbstractSet, _set),
    (Mapping, _mapping),
    (Sequence, _items),
    ((dt.date, dt.time), _iso),
    (msgspec.Struct, _struct),
)
"""What the first matching type is rebuilt as; a string is a sequence too, so the order counts."""
