"""From a function's value to stored bytes and back, so that first result and replay are equal.

This module is pure. The first caller, too, gets what the codec reads back: what duplicates will
get. Where that fails the effect is already done, so the record is kept without a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from msgspec import Struct

from semel.core.codec import UNBOUND, decoder_for, omission_reason, omitted
from semel.core.records import OMITTED, Encoded, Identity
from semel.errors import ResultUnavailable, SerializationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from semel.core.codec import Codec

T = TypeVar("T")


class Kept(Struct, Generic[T], frozen=True, gc=False):
    """What is stored, what the caller gets, and why the value is missing if it is."""

    encoded: Encoded
    value: T
    problem: str | None = None


def keep(value: T, codec: Codec, identity: Identity, hint: object, limit: int) -> Kept[T]:
    """Encode a value and read it back."""
    context = b"" if type(codec) in UNBOUND else identity.encoded
    step = "encoding"
    try:
        data = codec.encode(value, context, hint)
        if not isinstance(data, bytes):
            reason = f"the codec {codec.name} encoded it as {type(data).__name__}, not as bytes"
            return Kept(omitted(reason), value, reason)
        if len(data) > limit:
            reason = f"it has {len(data)} bytes, the policy keeps at most {limit}"
            return Kept(omitted(reason), value, reason)
        step = "reading back"
        back = cast("T", codec.decode(data, context, hint))
    except SerializationError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a user's type may do anything; the effect is done
        # Its text stays untold: it may quote the value, which the codec was perhaps to encrypt.
        kind = type(value).__name__
        reason = f"{type(error).__name__} while {step} {kind} with the codec {codec.name}"
    else:
        return Kept(Encoded(codec.name, data), back)
    return Kept(omitted(reason), value, reason)


def read(
    stored: Encoded | None,
    identity: Identity,
    hint: object,
    codec: Codec,
    others: Mapping[str, Codec],
) -> object:
    """Read a stored result, or raise ResultUnavailable: never a reason to run again.

    The rules' own codec comes first, as another one may have the same name.
    """
    if stored is None:
        raise ResultUnavailable("none is stored")
    if stored.codec == OMITTED:
        raise ResultUnavailable(omission_reason(stored))
    try:
        if stored.codec != codec.name:
            codec = decoder_for(stored.codec, others)
        context = b"" if type(codec) in UNBOUND else identity.encoded
        return codec.decode(stored.data, context, hint)
    except SerializationError as error:
        raise ResultUnavailable(str(error)) from error
    except Exception as error:
        raise ResultUnavailable(f"{type(error).__name__} while reading it back") from error
