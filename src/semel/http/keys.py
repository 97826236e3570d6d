"""Where a request's key comes from, what it may look like, and whose it is.

A key is an RFC 9651 String (`"k"`) or the same text raw (`k`). The parameters of a String
(`"k";a=1`) are no part of the key; in a raw key a semicolon is one of its characters. Functions
here never repeat a value in an error: it may be a secret, and it may be a megabyte long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs, quote

from semel.core.keys import MAX_KEY_LENGTH
from semel.errors import InvalidKey
from semel.http.messages import Request, key_in_field
from semel.http.options import Choices

_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_PARAMETERS: Final = rf"(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:%?{_STRING}|[!#-+\x2d-:<-~]+))?)*"
"""They are ignored, so what a value says does not count, only where it ends."""
_QUOTED: Final = re.compile(f"({_STRING}){_PARAMETERS}")
"""An RFC 9651 String: printable ASCII, with quotes and backslashes escaped; then parameters."""
_RAW: Final = re.compile(r"[!#-+\--~]+")
"""Printable ASCII without the space, the quote and the comma: those belong to other forms."""
_PRINTABLE: Final = re.compile(r"[ -~]+")
_ESCAPED: Final = re.compile(r"\\(.)")
_UNCHANGED: Final = re.compile(r"[!-$&-.0-~]{1,255}")
"""What a stored key may be as it came: neither the space, nor `%` and `/`, which are ours."""

_QUOTED_LINE: Final = r'"(?:[ !#-\[\]-~]|\\["\\]){1,255}"' + _PARAMETERS
_RAW_LINE: Final = "[!#-+\\x2d-~]{1,255}"
_PLAIN: Final = re.compile(_RAW_LINE)

_LONGEST_LINE: Final = 2 * MAX_KEY_LENGTH + 2 + 512
"""Quotes, every character escaped, and parameters."""


class KeyMissing(InvalidKey):
    """The request has no idempotency key, and needs one."""

    code = "key_missing"


def parse_key(header: str | Iterable[str] | None, *, strict: bool = False) -> str:
    """Read the key out of the value of an `Idempotency-Key` header, as the integrations do.

    `header` is the value of the header, or all of its values if it came several times. The quoted
    form of RFC 9651 and the raw form are the same key; `strict=True` takes only the quoted one. A
    missing header is a `KeyMissing`, anything that is not exactly one key an `InvalidKey`. Neither
    repeats what the client sent.

    Examples:
        >>> parse_key('"order-1"'), parse_key("order-1"), parse_key(['"order-1";v=2'])
        ('order-1', 'order-1', 'order-1')
    """
    several = isinstance(header, Iterable) and not isinstance(header, str | bytes)
    lines: list[Any] = [] if header is None else [*header] if several else [header]
    for line in lines:
        if not isinstance(line, str):
            raise InvalidKey(f"the key's header must be a text, not {type(line).__name__}")
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
        return checked(_ESCAPED.sub(r"\1", text) if "\\" in text else text)
    if strict:
        raise InvalidKey('the key must be a quoted string, as in "k" (RFC 9651)')
    if line and _RAW.fullmatch(line) is None:
        raise InvalidKey(
            "the key is neither a quoted string (RFC 9651) nor one plain word of ASCII: "
            'put one with spaces or commas in double quotes, as in "my key"'
        )
    return checked(line)


def line_of_key(key: str) -> str:
    """Write a key as the value of a header, in the form of RFC 9651.

    >>> line_of_key("order-1")
    '"order-1"'
    """
    escaped = checked(key).replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def line_pattern(*, strict: bool = False) -> str:
    """Say how the header may look, as OpenAPI understands it."""
    return f"^{_QUOTED_LINE}$" if strict else f"^(?:{_RAW_LINE}|{_QUOTED_LINE})$"


def key_pattern() -> str:
    """Say how a key may look that comes without a header, as OpenAPI understands it."""
    return f"^[ -~]{{1,{MAX_KEY_LENGTH}}}$"


def checked(key: object) -> str:
    """Return a key that may be used: 1 to 255 printable ASCII characters."""
    if not isinstance(key, str):
        raise InvalidKey(f"the key must be a text, not {type(key).__name__}")
    if not key:
        raise InvalidKey("the key is empty")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidKey(f"the key is longer than {MAX_KEY_LENGTH} characters")
    if _PRINTABLE.fullmatch(key) is None:
        raise InvalidKey("the key has characters that are not printable ASCII")
    return key


def check_form(key: str, pattern: re.Pattern[str] | None) -> None:
    """Refuse a key that does not have the form which the engine's settings ask for."""
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
    parts.append(quote(key, safe="!\"#$&'()*+,:;<=>?@[\\]^`{|}~"))
    text = "/".join(parts)
    if len(text) <= MAX_KEY_LENGTH:
        return text
    return f"%~{hashlib.sha256(text.encode()).hexdigest()}"


def _escaped(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")  # a path need not be Unicode


# --- where a key comes from ----------------------------------------------------------------------


def sources_of(choices: Choices) -> tuple[tuple[bool, Callable[[Request, Any], str | None]], ...]:
    """Return the sources of a key: whether each reads the body, and how it finds the key."""
    header, query, field, function = choices.header, choices.query, choices.field, choices.key
    sources: dict[str, tuple[bool, Callable[[Request, Any], str | None]]] = {}
    if header is not None:
        sources["header"] = False, partial(_from_header, header.lower().encode(), choices.strict)
    if query is not None:
        sources["query"] = False, partial(_from_query, query)
    if field is not None:
        sources["field"] = True, partial(_from_field, field)
    if function is not None:
        sources["function"] = True, partial(_from_function, function)
    return tuple(sources[name] for name in choices.order if name in sources)


def _from_header(name: bytes, strict: bool, request: Request, _: object) -> str | None:
    lines = [line.decode("latin-1") for line in request.headers.values(name)]
    return key_of_lines(lines, strict=strict)


def _from_query(name: str, request: Request, _: object) -> str | None:
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
    return checked(values[0])


def _from_field(path: str, request: Request, body: bytes) -> str | None:
    return checked(key_in_field(request, body, path))


def _from_function(
    function: Callable[[Request, bytes], object], request: Request, body: bytes
) -> str | None:
    key = function(request, body)
    return None if key is None else checked(key)
