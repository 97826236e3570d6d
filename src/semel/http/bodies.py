"""Fields of a request's body, by their path: `amount`, `order.id`, `lines.0.sku`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from semel.errors import InvalidKey
from semel.http.fingerprints import as_written
from semel.http.messages import Request

MISSING: Final = object()
_FIELDS: Final = 10_000
"""Fields of a form that are looked at; more are nobody's order."""
_FORM: Final = "application/x-www-form-urlencoded"

_decode = msgspec.json.Decoder(float_hook=as_written).decode


def field_of(document: object, path: str) -> object:
    """Read one field of what a body says; `MISSING` if there is none."""
    value: Any = document
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step, MISSING)
        elif isinstance(value, Sequence) and not isinstance(value, str) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else MISSING
        else:
            return MISSING
    return value


def key_in_field(request: Request, body: bytes, path: str) -> str:
    """Read a key from a field; a body without it is an error, never a silent fallback."""
    value = field_of(document_of(request, body), path)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value
    raise InvalidKey(
        f"the key comes from {path!r} of the body, which is no text or whole number there"
    )


def document_of(request: Request, body: bytes) -> object:
    """Read a body of JSON or of a form; `MISSING` if it is neither. Fractions stay as written."""
    media_type = (request.headers.get("content-type") or "").partition(";")[0].strip().lower()
    try:
        if media_type == _FORM:
            fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_FIELDS)
            return {
                name: values[0] if len(values) == 1 else values for name, values in fields.items()
            }
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return MISSING
