"""The digest that tells one request from another.

Method, path, query, content type and body, each with its length before it. The order of JSON's keys
does not count, and neither does the boundary of a multipart body, which differs on each try. Every
other byte of such a body counts: parsers disagree about which of them are content.
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
_PARAMETERS: Final = rb'((?:\s*;\s*[\w-]+=(?:[^\s;,"]+|"[^"\\]*"))*)'
_BOUNDARY: Final = rb'\s*;\s*boundary=(?:"([!#-\[\]-~]+)"|([!#-+\--:<-\[\]-~]+))'
"""Visible characters without quotes and backslashes; without quotes around it, no separators."""
_MULTIPART: Final = re.compile(
    rb'(multipart/[^\s;,"]+)' + _PARAMETERS + _BOUNDARY + _PARAMETERS + rb"\s*", re.IGNORECASE
)
_NEW_LINE: Final = b"\r\n"
_LAST: Final = (b"--", b"--\r\n")
"""How a multipart body ends as a rule."""


def fingerprint(request: Request, body: bytes, secret: bytes | None = None) -> bytes:
    """Digest a request to 16 bytes; with a secret, nobody else can compute or guess it."""
    types = request.headers.values(b"content-type")
    content_type = b", ".join(types)  # a second one may be the one that the application reads
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
    if media_type.startswith(b"multipart/"):
        return _multipart(content_type.strip(), body)
    return [content_type.strip().lower(), body]


def as_written(number: str) -> msgspec.Raw:
    """Keep a fraction as its text: 0.1 and 0.10000000000000001 may be two amounts."""
    return msgspec.Raw(number.encode())


_decode = msgspec.json.Decoder(float_hook=as_written).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def _multipart(content_type: bytes, body: bytes) -> list[bytes]:
    """Split a multipart body at its boundary, if all parsers find the same one at the same places.

    If not, only the same bytes with the same content type are the same.
    """
    written = _MULTIPART.fullmatch(content_type)
    pieces = None if written is None else _pieces(body, written[3] or written[4])
    if written is None or pieces is None or b"boundary" in (written[2] + written[5]).lower():
        # The mark tells it from a body of one part, which begins with a new line.
        return [content_type, b"raw", body] if body.startswith(_NEW_LINE) else [content_type, body]
    kind = written[1].lower() + written[2] + written[5]
    before, *parts, after = pieces
    if before or after not in _LAST or kind != written[1].lower():
        return [kind + b"; boundary", *pieces]
    return [kind, *parts]


def _pieces(body: bytes, boundary: bytes) -> list[bytes] | None:
    """Split a body, headers of its parts included; None = it has no parts, or not clearly so."""
    pieces = (_NEW_LINE + body).split(b"\r\n--" + boundary)
    parts, after = pieces[1:-1], pieces[-1]
    if not parts or not all(part.startswith(_NEW_LINE) for part in parts):
        return None
    if after != b"--" and not after.startswith(b"--\r\n"):
        return None
    # Lenient parsers accept other line ends: they would split such a piece again.
    return None if any(b"--" + boundary in piece for piece in pieces) else pieces
