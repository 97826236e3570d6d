"""Results as bytes: safe, self-describing, equal in value and type when they are read back.

wire         the codecs: bytes <-> tree
walk         tree <-> value
formats      built-in types          temporal   dates and times
kinds        classes with fields     names      which class a stored name means
hints        classes in annotations  registering   types of the user's own
checking     codecs of the user's own
outcomes     failures, and successes without a value
"""

from semel.core.codec.checking import check_codec
from semel.core.codec.hints import returned_by
from semel.core.codec.outcomes import decode_failure, encode_failure, omission_reason, omitted
from semel.core.codec.registering import register_type
from semel.core.codec.wire import (
    UNBOUND,
    Codec,
    JsonCodec,
    MsgpackCodec,
    codec_named,
    decoder_for,
    unbound,
)

__all__ = [
    "UNBOUND",
    "Codec",
    "JsonCodec",
    "MsgpackCodec",
    "check_codec",
    "codec_named",
    "decode_failure",
    "decoder_for",
    "encode_failure",
    "omission_reason",
    "omitted",
    "register_type",
    "returned_by",
    "unbound",
]
