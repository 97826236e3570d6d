"""The digest that tells one request from another.

Method, path, query, content type and body, each with its length before it. The order of JSON's keys
does not count, and neither does the boundary of a multipart body, which is another one on each try.
A change of this format makes every stored fingerprint a mismatch: golden tests hold it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from semel.core.records import FINGERPRINT_BYTES
from semel.http.messages import Request

_JSON: Final = b"application/json"
_BOUNDARY: Final = re.compile(rb'boundary=(?:"([^"]+)"|([^\s;,]+))', re.IGNORECASE)


def fingerprint(request: Request, body: bytes, secret: bytes | None = None) -> bytes:
    """Digest a request to 16 bytes; with a secret, nobody else can compute or guess it."""
    types = request.headers.values(b"content-type")
    content_type = types[0] if types else b""
    return digest((*place(request), request.query, *content(content_type, body)), secret)


def place(request: Request) -> tuple[bytes, bytes]:
    """Give method and path as bytes; a path need not be Unicode."""
    return (
        request.method.encode("latin-1", "replace"),
        request.path.encode("utf-8", "surrogateescape"),
    )


def digest(parts: Iterable[bytes], secret: bytes | None = None) -> bytes:
    """Digest parts, so that no two lists of them can meet."""
    message = b"".join([piece for part in parts for piece in (b"%d:" % len(part), part)])
    if secret is None:
        return hashlib.sha256(message).digest()[:FINGERPRINT_BYTES]
    return hmac.digest(secret, message, "sha256")[:FINGERPRINT_BYTES]


def content(content_type: bytes, body: bytes) -> list[bytes]:
    """Give the parts that stand for a body: first its kind, then what it says."""
    media_type = content_type
    if content_type != _JSON:  # most are just that, and need no look inside
        media_type = content_type.partition(b";")[0].strip().lower()
    if media_type == _JSON or media_type.endswith(b"+json"):
        try:
            return [media_type, _encode(_decode(body))]
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            # Not JSON, whatever it says: only the very same bytes are the same.
            return [media_type, body]
    boundary = _BOUNDARY.search(content_type) if media_type.startswith(b"multipart/") else None
    parts = None if boundary is None else _multipart(body, boundary[1] or boundary[2])
    if parts is None:
        return [content_type.strip().lower(), body]
    return [media_type, *parts]


def as_written(number: str) -> msgspec.Raw:
    """Keep a fraction as its text: 0.1 and 0.10000000000000001 may be two amounts."""
    return msgspec.Raw(number.encode())


_decode = msgspec.json.Decoder(float_hook=as_written).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def _multipart(body: bytes, boundary: bytes) -> list[bytes] | None:
    """Split a multipart body into its parts, headers included; None = it is not one."""
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):  # noqa: PLR2004 - before, a part, after
        return None
    return pieces[1:-1]
