"""A form that was parsed before us, as bytes again: equal forms give equal bytes.

What checks a form's token, as Flask-WTF and Django's CSRF middleware do, has read the body before a
view runs. Its boundary is gone with it, so the content type is told without its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlencode

from semel.http.messages import HeaderLine


class Upload(NamedTuple):
    """A file of a form."""

    name: str
    filename: str
    content_type: str
    content: bytes


_CONTENT_TYPE: Final = b"content-type"


def form_bytes(fields: Iterable[tuple[str, str]], uploads: Sequence[Upload]) -> bytes:
    """Write fields as a form does, so that keys are found in them; with files, by their lengths."""
    if not uploads:
        return urlencode([*fields], errors="surrogatepass").encode()
    texts = [_piece(text) for field in fields for text in field]
    files = [piece for upload in uploads for piece in (*map(_piece, upload[:3]), upload.content)]
    # The number of fields first: any text between them and the files could be a field's, too.
    pieces = [b"%d" % len(texts), *texts, *files]
    return b"".join(b"%d:%b" % (len(piece), piece) for piece in pieces)


def _piece(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def without_boundary(lines: Iterable[HeaderLine]) -> list[HeaderLine]:
    """Leave out the parameters of the content type: a boundary is another one on each try."""
    return [
        (name, value.partition(b";")[0] if name.lower() == _CONTENT_TYPE else value)
        for name, value in lines
    ]
