"""What a request says: its key, its fingerprint, the fields of its body.

This module reads values. It decides nothing and touches no socket.

A key is an RFC 9651 String (`"k"`) or the same text raw (`k`). The parameters of a String
(`"k";a=1`) are no part of the key; in a raw key a semicolon is one of its characters. No error here
repeats a value: it may be a secret, and it may be a megabyte long.

A fingerprint is a digest of method, path, query, content type and body, each with its length before
it. The order of JSON's keys does not count, and neither does the boundary of a multipart body,
which differs on each try. Every other byte of such a body counts: parsers disagree about which of
them are content. A change of this format makes every stored fingerprint a mismatch: golden tests
hold it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, overload
from urllib.parse import parse_qs, quote, urlencode

import msgspec
from msgspec import Struct

from semel.core.records import FINGERPRINT_BYTES, MAX_KEY_LENGTH
from semel.errors import InvalidKey

HeaderLine: TypeAlias = tuple[bytes, bytes]
BodyFormat: TypeAlias = Literal["json", "form"]
"""In what fields are looked for: JSON, or a urlencoded form."""
Default = TypeVar("Default")


HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
"""What a header line may have: no line ends, and no other control characters but the tab."""


class Headers:
    """The header lines of a message, in order and unsplit; the case of names doesn't matter.

    Examples:
        >>> Headers([(b"Accept", b"text/html")]).get("accept")
        'text/html'
    """

    __slots__ = ("_lines", "_names")

    def __init__(self, lines: Iterable[HeaderLine]) -> None:
        self._lines = tuple(lines)
        self._names = [name.lower() for name, _ in self._lines]

    @property
    def lines(self) -> tuple[HeaderLine, ...]:
        """The lines as sent."""
        return self._lines

    @overload
    def get(self, name: str) -> str | None: ...

    @overload
    def get(self, name: str, default: Default) -> str | Default: ...

    def get(self, name: str, default: Default | None = None) -> str | Default | None:
        """Return the value of the first line with this name, or `default`."""
        found = self.values(name.lower().encode("latin-1"))
        return found[0].decode("latin-1") if found else default

    def get_all(self, name: str) -> list[str]:
        """Return the values of all lines with this name."""
        return [value.decode("latin-1") for value in self.values(name.lower().encode("latin-1"))]

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of all lines with this name, in lower case, as they were sent."""
        count = self._names.count(name)
        if count <= 1:  # the usual case: two searches of a list in C
            return [self._lines[self._names.index(name)][1]] if count else []
        lines = zip(self._names, self._lines, strict=True)
        return [value for lower, (_, value) in lines if lower == name]


class Request(Struct, frozen=True):
    """A request before its body is read, as your functions get it."""

    method: str
    """In upper case, whatever the client wrote."""
    path: str
    query: bytes
    """As it was sent, without the question mark."""
    headers: Headers
    raw: Any
    """The framework's own: an ASGI scope, a WSGI environ, a request object."""


# --- keys ----------------------------------------------------------------------------------------

_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_PARAMETERS: Final = rf"(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:%?{_STRING}|[!#-+\x2d-:<-~]+))?)*"
"""They are ignored, so what a value says does not count, only where it ends."""
_QUOTED: Final = re.compile(f"({_STRING}){_PARAMETERS}")
"""An RFC 9651 String: printable ASCII, with quotes and backslashes escaped; then parameters."""
_RAW: Final = re.compile(r"[!#-+\--~]+")
"""Printable ASCII without the space, the quote and the comma: those belong to other forms."""
_PRINTABLE: Final = re.compile(r"[ -~]+")
_ESCAPED: Final = re.compile(r"\\(.)")
KEY_DIGEST: Final = "%~"
"""The beginning of a stored key that is a digest; escaping never writes it."""
_UNCHANGED: Final = re.compile(r"[!-$&-.0-~]{1,255}")
"""A key that is stored unchanged: without the space, `%` and `/`, which `stored_key` uses."""

_QUOTED_LINE: Final = r'"(?:[ !#-\[\]-~]|\\["\\]){1,255}"' + _PARAMETERS
_RAW_LINE: Final = "[!#-+\\x2d-~]{1,255}"
_PLAIN: Final = re.compile(_RAW_LINE)

_LONGEST_LINE: Final = 2 * MAX_KEY_LENGTH + 2 + 512
"""Quotes, every character escaped, and parameters."""


class KeyMissing(InvalidKey):
    """The request has no idempotency key, and needs one."""

    code = "key_missing"


def parse_key(header: str | Iterable[str] | None, *, strict: bool = False) -> str:
    """Return the key in the value of an `Idempotency-Key` header, as the integrations read it.

    `header` is the value of the header, or all of its values if it came several times. The quoted
    form of RFC 9651 and the raw form are the same key; `strict=True` takes only the quoted one. A
    missing header raises `KeyMissing`, and anything but exactly one key raises `InvalidKey`.
    Neither repeats what the client sent.

    Examples:
        >>> parse_key('"order-1"'), parse_key("order-1"), parse_key(['"order-1";v=2'])
        ('order-1', 'order-1', 'order-1')
    """
    several = isinstance(header, Iterable) and not isinstance(header, str | bytes)
    lines: list[Any] = [] if header is None else [*header] if several else [header]
    for line in lines:
        if not isinstance(line, str):
            raise InvalidKey(f"the key's header must be a string, not {type(line).__name__}")
    key = key_of_lines(lines, strict=strict)
    if key is None:
        raise KeyMissing("This request needs an idempotency key.")
    return key


def key_of_lines(lines: Sequence[str], *, strict: bool = False) -> str | None:
    """Read the key from the header's lines; None = there is no such header.

    >>> key_of_lines(['"order-1";v=2']), key_of_lines(["order-1"]), key_of_lines([])
    ('order-1', 'order-1', None)
    """
    if not lines:
        return None
    if len(lines) > 1:
        raise InvalidKey("the key's header may come once only")
    line = lines[0].strip(" \t")
    if not strict and _PLAIN.fullmatch(line) is not None:
        return line  # as most keys are
    if len(line) > _LONGEST_LINE:
        raise InvalidKey(f"the key is longer than {MAX_KEY_LENGTH} characters")
    quoted = _QUOTED.fullmatch(line)
    if quoted is not None:
        text = quoted[1][1:-1]
        return check_key(_ESCAPED.sub(r"\1", text) if "\\" in text else text)
    if strict:
        raise InvalidKey('the key must be a quoted string, as in "k" (RFC 9651)')
    if line and _RAW.fullmatch(line) is None:
        raise InvalidKey(
            "the key is neither a quoted string (RFC 9651) nor one plain word of ASCII: "
            'put one with spaces or commas in double quotes, as in "my key"'
        )
    return check_key(line)


def line_of_key(key: str) -> str:
    """Write a key as the value of a header, in the form of RFC 9651.

    >>> line_of_key("order-1")
    '"order-1"'
    """
    escaped = check_key(key).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def line_pattern(*, strict: bool = False) -> str:
    """Say how the header may look, as OpenAPI understands it."""
    return f"^{_QUOTED_LINE}$" if strict else f"^(?:{_RAW_LINE}|{_QUOTED_LINE})$"


def key_pattern() -> str:
    """Say how a key may look that comes without a header, as OpenAPI understands it."""
    return f"^[ -~]{{1,{MAX_KEY_LENGTH}}}$"


def check_key(key: object) -> str:
    """Return a key that may be used: 1 to 255 printable ASCII characters."""
    if not isinstance(key, str):
        raise InvalidKey(f"the key must be a string, not {type(key).__name__}")
    if not key:
        raise InvalidKey("the key is empty")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidKey(f"the key is longer than {MAX_KEY_LENGTH} characters")
    if _PRINTABLE.fullmatch(key) is None:
        raise InvalidKey("the key has characters that are not printable ASCII")
    return key


def check_form(key: str, pattern: re.Pattern[str] | None) -> None:
    """Reject a key that does not have the form which the engine's settings ask for."""
    if pattern is not None and pattern.fullmatch(key) is None:
        raise InvalidKey("the key does not have the form that this application asks for")


def stored_key(key: str, tenant: str | None = None, route: str | None = None) -> str:
    """Put whose key it is, and of which route, into the key that is stored.

    Different triples give different texts: `%`, `/` and the space inside a part are escaped, a
    tenant ends with `/`, a route begins with `@`, and only a digest begins with `%~`.

    >>> stored_key("k"), stored_key("k", "ann"), stored_key("k", "a/b", "POST /pay")
    ('k', 'ann/k', 'a%2Fb/@POST%20%2Fpay/k')
    """
    if tenant is None and route is None and _UNCHANGED.fullmatch(key):
        return key
    parts = [] if tenant is None else [_escaped(tenant)]
    if route is not None:
        parts.append(f"@{_escaped(route)}")
    parts.append(_escaped_key(key))
    text = "/".join(parts)
    if len(text) <= MAX_KEY_LENGTH:
        return text
    return f"{KEY_DIGEST}{hashlib.sha256(text.encode()).hexdigest()}"


class StoredKeys:
    """Finds the stored keys of a client's key: of one tenant and route, or of any not named.

    A key that is stored as a digest is found only with all that it was made of.

    >>> found = StoredKeys("k", tenant="ann")
    >>> [found.match(stored) for stored in ("ann/k", "ann/@POST%20%2Fpay/k", "bob/k", "k")]
    [True, True, False, False]
    """

    def __init__(self, key: str, tenant: str | None = None, route: str | None = None) -> None:
        self.whole = stored_key(key, tenant, route)
        self._key = _escaped_key(key)
        self._tenant = None if tenant is None else _escaped(tenant)
        self._route = None if route is None else f"@{_escaped(route)}"

    def match(self, stored: str) -> bool:
        """Return whether a stored key is one of them."""
        before, _, key = stored.rpartition("/")
        if key != self._key:
            return stored == self.whole
        tenant, _, last = before.rpartition("/")
        route = last if last.startswith("@") else None
        if route is None:
            tenant = before  # of a key that no integration wrote, all that stands before its end
        return self._tenant in {None, tenant} and self._route in {None, route}


def _escaped_key(key: str) -> str:
    return quote(key, safe="!\"#$&'()*+,:;<=>?@[\\]^`{|}~")


def _escaped(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")  # a path need not be Unicode


def key_in_header(name: bytes, strict: bool, request: Request, _: object) -> str | None:
    """Read a key from a header; None = there is no such header."""
    lines = [line.decode("latin-1") for line in request.headers.values(name)]
    return key_of_lines(lines, strict=strict)


def key_in_query(name: str, request: Request, _: object) -> str | None:
    """Read a key from a parameter of the query; None = there is no such parameter."""
    try:
        found = parse_qs(
            request.query.decode("ascii"),
            keep_blank_values=True,
            max_num_fields=1000,
            errors="strict",
        )
    except ValueError:
        raise InvalidKey("the query that should have the key cannot be read") from None
    values = found.get(name)
    if values is None:
        return None
    if len(values) > 1:
        raise InvalidKey("the key's parameter may come once only")
    return check_key(values[0])


def key_in_field(path: str, document: object) -> str:
    """Read a key from a field; a body without it is an error, never a silent fallback."""
    value = field_of(document, path)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise InvalidKey(
            f"the key comes from {path!r} of the body, which is no string or whole number there"
        )
    return check_key(value)


def key_by_function(
    function: Callable[[Request, bytes], object], request: Request, body: bytes
) -> str | None:
    """Let a function of the application find the key; None = it finds none."""
    key = function(request, body)
    return None if key is None else check_key(key)


# --- fingerprints --------------------------------------------------------------------------------


_CONTENT_TYPE: Final = b"content-type"
_JSON: Final = b"application/json"
_LONGEST_TYPE: Final = 1024
"""The longest content type that is parsed, in bytes; a longer one is compared as it is."""
_MULTIPART: Final = re.compile(rb'multipart/[^\s;,"]+', re.IGNORECASE)
_MEDIA_PARAMETER: Final = re.compile(rb'\s*;\s*([\w-]+)=("[^"\\]*"|[^\s;,"]+)')
_BOUNDARY: Final = re.compile(rb'"([!#-\[\]-~]+)"|([!#-+\--:<-\[\]-~]+)')
"""Visible characters without quotes and backslashes; without quotes around it, no separators."""
_NEW_LINE: Final = b"\r\n"
_UTF_8: Final = frozenset(
    b"charset=" + written
    for name in (b"utf-8", b"utf8", b"us-ascii")
    for written in (name, b'"%b"' % name)
)
"""The parameters that name the charset in which bodies are read here, or a part of it."""
_LAST: Final = (b"--", b"--\r\n")
"""How a multipart body ends as a rule."""


def fingerprint(request: Request, body: bytes, secret: bytes | None = None) -> bytes:
    """Digest a request to 16 bytes; without the secret, a reader can't compute or guess it."""
    types = request.headers.values(_CONTENT_TYPE)
    content_type = b", ".join(types)  # a second one may be the one that the application reads
    return digest((*method_and_path(request), request.query, *content(content_type, body)), secret)


def method_and_path(request: Request) -> tuple[bytes, bytes]:
    """Return method and path as bytes; a path need not be Unicode."""
    return (
        request.method.encode("latin-1", "replace"),
        request.path.encode("utf-8", "surrogateescape"),
    )


_LENGTHS: Final = tuple(b"%d:" % length for length in range(256))


def digest(parts: Iterable[bytes], secret: bytes | None = None) -> bytes:
    """Digest parts, so that no two lists of them can meet."""
    pieces: list[bytes] = []
    for part in parts:
        size = len(part)
        pieces += (_LENGTHS[size] if size < len(_LENGTHS) else b"%d:" % size), part
    message = b"".join(pieces)
    if secret is None:
        return hashlib.sha256(message).digest()[:FINGERPRINT_BYTES]
    return hmac.digest(secret, message, "sha256")[:FINGERPRINT_BYTES]


def content(content_type: bytes, body: bytes) -> list[bytes]:
    """Return the parts that stand for a body: first its kind, then what it says."""
    media_type, parameters = content_type, b""
    if content_type != _JSON:  # most are just that, and need no look inside
        media_type, _, parameters = content_type.partition(b";")
        media_type = media_type.strip().lower()
    if _is_json(media_type) and _is_utf_8(parameters):
        try:
            return [media_type, _encode(_decode(body))]
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            # Not JSON, whatever it says: only the very same bytes are the same.
            return [media_type, body]
    if media_type.startswith(b"multipart/"):
        return _multipart(content_type.strip(), body)
    return [content_type.strip().lower(), body]


def _is_json(media_type: bytes) -> bool:
    return media_type == _JSON or media_type.endswith(b"+json")


def _is_utf_8(parameters: bytes) -> bool:
    """Return whether all charsets that the parameters of a content type name are UTF-8, or in it.

    What only mentions a charset counts as one: parsers disagree on quotes and on `charset*`.
    """
    return all(
        parameter.strip() in _UTF_8
        for parameter in parameters.lower().split(b";")
        if b"charset" in parameter
    )


def as_written(number: str) -> msgspec.Raw:
    """Keep a fraction as its text: 0.1 and 0.10000000000000001 may be two amounts."""
    return msgspec.Raw(number.encode())


_decode = msgspec.json.Decoder(float_hook=as_written).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def _multipart(content_type: bytes, body: bytes) -> list[bytes]:
    """Split a multipart body at its boundary, if all parsers find the same one at the same places.

    If not, only the same bytes with the same content type are the same.
    """
    kind, boundary = _multipart_type(content_type)
    pieces = None if boundary is None else _pieces(body, boundary)
    if pieces is None:
        # The mark tells it from a body of one part, which begins with a new line.
        return [content_type, b"raw", body] if body.startswith(_NEW_LINE) else [content_type, body]
    before, *parts, after = pieces
    if before or after not in _LAST or b";" in kind:
        return [kind + b"; boundary", *pieces]
    return [kind, *parts]


def _multipart_type(content_type: bytes) -> tuple[bytes, bytes | None]:
    """Return a multipart type without its boundary, and the boundary; None = it has no clear one.

    One parameter after the other, each read once: a pattern over all of them would try every one as
    the boundary, and a client chooses how many there are.
    """
    kind = _MULTIPART.match(content_type)
    if kind is None or len(content_type) > _LONGEST_TYPE:
        return content_type, None
    end, boundaries, others = kind.end(), [], []
    while (parameter := _MEDIA_PARAMETER.match(content_type, end)) is not None:
        end = parameter.end()
        if parameter[1].lower() == b"boundary":
            boundaries.append(_BOUNDARY.fullmatch(parameter[2]))
        else:
            others.append(parameter[0])
    rest = b"".join(others)
    written = boundaries[0] if len(boundaries) == 1 else None
    if written is None or content_type[end:].strip() or b"boundary" in rest.lower():
        return content_type, None
    return kind[0].lower() + rest, written[1] or written[2]


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


# --- fields of a body, by their path: `amount`, `order.id`, `lines.0.sku` ------------------------


MISSING: Final = object()
_FIELDS: Final = 10_000
"""The most fields of a form that are read; a real form has fewer."""
_FORM: Final = b"application/x-www-form-urlencoded"
CONTENT_TYPES: Final[Mapping[BodyFormat, str]] = {"json": _JSON.decode(), "form": _FORM.decode()}
"""What a client sends, by the format in which fields are looked for."""


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


def is_of_format(request: Request, body_format: BodyFormat) -> bool:
    """Return whether a request says, once, that its body has this format, in UTF-8."""
    types = request.headers.values(_CONTENT_TYPE)
    if len(types) != 1:
        return False
    media_type, _, parameters = types[0].partition(b";")
    media_type = media_type.strip().lower()
    named = media_type == _FORM if body_format == "form" else _is_json(media_type)
    return named and _is_utf_8(parameters)


def document_of(body: bytes, body_format: BodyFormat) -> object:
    """Read a body of this format; `MISSING` if it has another one. Fractions stay as written."""
    try:
        return _decode(body) if body_format == "json" else _form(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return MISSING


def _form(body: bytes) -> object:
    if b";" in body:
        return MISSING  # Some parsers end a field there, and no browser sends one unescaped.
    fields = parse_qs(
        body.decode(), keep_blank_values=True, max_num_fields=_FIELDS, errors="strict"
    )
    return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


# --- forms that were parsed before us ------------------------------------------------------------
#
# What checks a form's token, as Flask-WTF and Django's CSRF middleware do, has read the body before
# a view runs. It becomes bytes again: equal forms give equal bytes. The boundary is gone, so the
# content type is compared without its parameters.


FORMS: Final = ("multipart/form-data", _FORM.decode())
"""The types of bodies that frameworks parse as forms; of any other they make an empty one."""


class Upload(NamedTuple):
    """A file of a form."""

    name: str
    filename: str
    content_type: str
    content: bytes


def upload_of(name: str, filename: str | None, content_type: str | None, file: Any) -> Upload:
    """Read a file of a form, which may have been read before us, for a checksum."""
    position = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(position)
    return Upload(name, filename or "", content_type or "", content)


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
