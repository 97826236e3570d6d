"""From a function's value to stored bytes and back, so that first result and replay are equal.

This module is pure. The first caller, too, gets what the codec reads back: what duplicates will
get. Where that fails the effect is already done, so the record is kept without a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, cast

from msgspec import Struct

from semel.core.codec import UNBOUND, decoder_for, omission_reason, omitted
from semel.core.records import OMITTED, Encoded, Identity
from semel.errors import ResultUnavailable, SerializationError, about

if TYPE_CHECKING:
    from collections.abc import Mapping

    from semel.core.codec import Codec

T = TypeVar("T")


class Kept(Struct, Generic[T], frozen=True):
    """What is stored, what the caller gets, and why the value is missing if it is."""

    encoded: Encoded
    value: T
    problem: str | None = None
    interruption: BaseException | None = None
    """An exception that came while the codec worked, and was not the codec's."""


def keep(
    value: T,
    codec: Codec,
    identity: Identity,
    hint: object,
    limit: int,
    *,
    first: BaseException | None = None,
) -> Kept[T]:
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
            return Kept(omitted(reason), value, reason, first)
        if len(data) > limit:
            reason = f"it has {len(data)} bytes, the policy keeps at most {limit}"
            return Kept(omitted(reason), value, reason, first)
        step = "reading back"
        back = cast("T", codec.decode(data, context, hint))
    except Exception as error:  # noqa: BLE001 - a user's type may do anything; the effect is done
        if first is None:
            return keep(value, codec, identity, hint, limit, first=origin(error))
        if isinstance(error, SerializationError):
            reason = str(error)
        else:
            # Its text stays untold: it may quote the value, which was perhaps to be encrypted.
            kind = type(value).__name__
            reason = f"{type(error).__name__} while {step} {kind} with the codec {codec.name}"
        return Kept(omitted(reason), value, reason)
    return Kept(Encoded(codec.name, data), back, None, first)


def origin(error: Exception) -> BaseException:
    """Give the exception that a codec turned into its own."""
    cause = error.__cause__
    return error if cause is None or not isinstance(error, SerializationError) else cause


def read(
    stored: Encoded | None,
    identity: Identity,
    hint: object,
    codec: Codec,
    others: Mapping[str, Codec],
    *,
    again: bool = False,
) -> object:
    """Read a stored result, or raise ResultUnavailable: never a reason to run again.

    What fails is tried a second time, as in `keep`.
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
        context = b"" if type(decoding) in UNBOUND else identity.encoded
        return decoding.decode(stored.data, context, hint)
    except Exception as error:
        if not again:
            read(stored, identity, hint, codec, others, again=True)
            raise origin(error) from None  # It was not the codec's: a signal handler raised it.
        reason = f"{type(error).__name__} while reading it back"
        if isinstance(error, SerializationError):
            reason = error.text
        raise about(ResultUnavailable(reason), identity) from error
