"""What the five verbs take and answer, as JSON or MessagePack.

These structs are the wire and its OpenAPI schema. A body that is not one of them is an
`invalid_request` whose `field` names the part; nothing of the body is repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from semel.core.records import MAX_KEY_LENGTH
from semel.server.problems import Problem

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

MOST_WAIT: Final = 25.0
"""Seconds. Proxies and balancers end a request after 30 or 60 that brings nothing."""
SHORTEST_LEASE: Final = 0.05
LONGEST_LEASE: Final = 86400.0
"""What a client may ask for where the scope has no bounds."""
MOST_KEYS: Final = 1000
DEEPEST: Final = 64
"""Levels of a payload or a result; semel's codecs keep 100."""
SAFE_INTEGER: Final = 2**53 - 1
"""Beyond it a number of JavaScript is not exact, so integers are text."""

_TEXT: Final = {"minLength": 1, "maxLength": MAX_KEY_LENGTH}

Scope = Annotated[
    str,
    Meta(
        description="the kind of operation, 1 to 255 printable characters without a space",
        extra_json_schema=_TEXT,
    ),
]
Key = Annotated[
    str,
    Meta(
        description="names the operation, 1 to 255 printable characters without a space",
        extra_json_schema=_TEXT,
    ),
]
Owner = Annotated[
    str,
    Meta(
        description="24 hex digits that name the attempt",
        pattern="^[0-9A-Fa-f]*$",
        min_length=24,  # by length: to Python's $ a line may follow
        max_length=24,
    ),
]
Lease = Annotated[
    float,
    Meta(
        description=f"seconds, from {SHORTEST_LEASE:g} to {LONGEST_LEASE:g}, in the scope's bounds",
        ge=SHORTEST_LEASE,
        le=LONGEST_LEASE,
    ),
]
Wait = Annotated[float, Meta(description="seconds, from 0 to 25", ge=0, le=MOST_WAIT)]
Fingerprint = Annotated[
    str,
    Meta(
        description="32 hex digits, instead of a payload",
        pattern="^[0-9A-Fa-f]*$",
        min_length=32,
        max_length=32,
    ),
]
By = Annotated[
    str, Meta(description="who calls, up to 200 characters, for operators", max_length=200)
]
Outcome = Literal["forget", "retryable", "final", "unknown"]
Integer = int | str
"""A number, or its digits beyond `SAFE_INTEGER`."""


class Asked(Struct, forbid_unknown_fields=True, frozen=True):
    """A request of one of the verbs."""


class Named(Asked, frozen=True):
    """A request about one key."""

    scope: Scope
    key: Key


class Start(Named, frozen=True):
    """Ask to run, or for the result of the run that was."""

    payload: Annotated[
        Any, Meta(description="any plain data, up to 64 levels; a retry must send the same")
    ] = UNSET
    fingerprint: Fingerprint | UnsetType = UNSET
    wait: Wait = 0.0
    owner: Owner | UnsetType = UNSET
    lease: Lease | UnsetType = UNSET
    by: By | UnsetType = UNSET


class Renew(Named, frozen=True):
    """Ask for a fresh lease."""

    owner: Owner
    lease: Lease | UnsetType = UNSET


class Response(Asked, frozen=True):
    """An HTTP response that duplicates get."""

    status: Annotated[
        int,
        Meta(
            description="200 to 599, except 401, 403, 408, 425, and 429",
            ge=200,
            le=599,
            extra_json_schema={"not": {"enum": [401, 403, 408, 425, 429]}},
        ),
    ]
    headers: Annotated[
        list[tuple[str, str]], Meta(description="pairs of name and value", max_length=1000)
    ] = []
    body: Annotated[str, Meta(description="text")] | UnsetType = UNSET
    base64: Annotated[str, Meta(description="bytes, as base64, instead of body")] | UnsetType = (
        UNSET
    )


class Finish(Named, frozen=True):
    """Store the success of an attempt: exactly one of `result` and `response`."""

    owner: Owner
    result: Annotated[Any, Meta(description="any plain data, up to 64 levels")] = UNSET
    response: (
        Annotated[
            Response,
            Meta(
                description="an object of status (200 to 599, except 401, 403, 408, 425, and 429), "
                "headers (pairs of name and value), and body or base64"
            ),
        ]
        | UnsetType
    ) = UNSET


class Error(Struct, forbid_unknown_fields=True, frozen=True):
    """What went wrong."""

    type: Annotated[str, Meta(description="up to 200 characters", max_length=200)] = "Error"
    message: Annotated[str, Meta(description="up to 10,000 characters", max_length=10_000)] = ""


class Fail(Named, frozen=True):
    """Record the failure of an attempt."""

    owner: Owner
    error: Annotated[
        Error, Meta(description="an object of type (up to 200 characters) and message (10,000)")
    ] = Error()
    outcome: (
        Annotated[Outcome, Meta(description="forget, retryable, final, or unknown")] | UnsetType
    ) = UNSET
    ran: Annotated[bool, Meta(description="false gives the attempt's number back")] = True


class Keys(Asked, frozen=True):
    """Ask for new keys."""

    count: Annotated[int, Meta(description="a whole number, 1 to 1000", ge=1, le=MOST_KEYS)] = 1
    app: (
        Annotated[
            str,
            Meta(
                description="a name that the keys begin with, printable, without a space",
                min_length=1,
                max_length=200,
            ),
        ]
        | UnsetType
    ) = UNSET


# --- answers -------------------------------------------------------------------------------------


class Run(Struct, frozen=True):
    """This caller runs the operation now, under its lease."""

    owner: str
    attempt: int
    fence: Integer
    takeover: bool
    lease: float
    renew_every: float
    waited: float
    """A client counts its lease from the moment it sent the request, plus this."""
    status: Literal["run"] = "run"


class Answered(Struct, frozen=True):
    """An HTTP response: its body as text, or else as base64."""

    status: int
    headers: list[tuple[str, str]]
    body: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


class DoneResult(Struct, frozen=True):
    """The operation is done; this is its result."""

    attempt: int
    result: Any
    lossy: bool | UnsetType = UNSET
    """True: the result has types that plain data can't hold, such as decimals; they are text."""
    status: Literal["done"] = "done"


class DoneResponse(Struct, frozen=True):
    """The operation is done; this is its HTTP response."""

    attempt: int
    response: Answered
    status: Literal["done"] = "done"


class Renewed(Struct, frozen=True):
    """The lease counts from this answer's request."""

    lease: float
    renew_every: float
    status: Literal["renewed"] = "renewed"


class Stored(Struct, frozen=True):
    """The success is stored; `omitted` says why its value is not."""

    omitted: str | UnsetType = UNSET
    status: Literal["stored"] = "stored"


class Recorded(Struct, frozen=True):
    """The failure is recorded."""

    outcome: Outcome
    status: Literal["recorded"] = "recorded"


class NewKeys(Struct, frozen=True):
    """Keys that were never made before."""

    keys: list[str]


class Verb(NamedTuple):
    """One of the verbs: what it takes and what it answers."""

    asks: type[Asked]
    answers: tuple[type[Struct], ...]
    summary: str


VERBS: Final[Mapping[str, Verb]] = {
    "start": Verb(Start, (Run, DoneResult, DoneResponse), "Start an operation, or get its result"),
    "renew": Verb(Renew, (Renewed,), "Renew the lease of an attempt"),
    "finish": Verb(Finish, (Stored,), "Store the result of an attempt"),
    "fail": Verb(Fail, (Recorded,), "Record the failure of an attempt"),
    "keys": Verb(Keys, (NewKeys,), "Make new keys"),
}
"""By the last part of their paths."""


# --- reading and writing -------------------------------------------------------------------------

A = TypeVar("A", bound=Asked)

_UNPACK: Final[Mapping[str, Callable[..., Any]]] = {
    JSON: msgspec.json.decode,
    MSGPACK: msgspec.msgpack.decode,
}
PACK: Final[Mapping[str, Callable[[object], bytes]]] = {
    JSON: msgspec.json.Encoder().encode,
    MSGPACK: msgspec.msgpack.Encoder().encode,
}

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `([A-Za-z_]{1,40})`")
_PLACE: Final = re.compile(r" - at `\$\.(\w+)")


def unpack(body: bytes, media_type: str, asks: type[A]) -> A:
    """Read a body; raise `invalid_request` for any other."""
    try:
        asked: A = _UNPACK[media_type](body, type=asks)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), asks) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Problem(
            "invalid_request", f"the body is not valid {media_type}", field="body"
        ) from None
    except RecursionError:
        raise _too_deep("body") from None
    for name in ("payload", "result"):
        check_plain(name, getattr(asked, name, None))
    return asked


def _invalid(said: str, asks: type[Asked]) -> Problem:
    """Say what is wrong by the field alone: the words of msgspec may repeat a value."""
    place = _PLACE.search(said)
    field = None if place is None else place[1]
    if field is None:
        missing, unknown = _MISSING.match(said), _UNKNOWN.match(said)
        if missing is not None:
            return Problem("invalid_request", f"{missing[1]} is missing", field=missing[1])
        if unknown is not None:
            known = ", ".join(asks.__struct_fields__)
            detail = f"{unknown[1]} is not known; known: {known}"
            return Problem("invalid_request", detail, field=unknown[1])
        return Problem("invalid_request", "the body must be an object of this verb", field="body")
    return wrong(field, asks)


def wrong(field: str, asks: type[Asked], detail: str | None = None) -> Problem:
    """Return the problem of a field whose value is not what the verb takes."""
    expected = _descriptions(asks).get(field, "as /openapi.json says")
    return Problem("invalid_request", detail or f"{field} must be {expected}", field=field)


def _descriptions(asks: type[Asked]) -> dict[str, str]:
    """Return what each field of a verb must be."""
    hints = get_type_hints(asks, include_extras=True)
    found: dict[str, str] = {}
    for field, hint in hints.items():
        for each in (hint, *get_args(hint)):
            for meta in getattr(each, "__metadata__", ()):
                found[field] = meta.description
    return found


def _too_deep(field: str) -> Problem:
    return Problem("invalid_request", f"{field} has more than {DEEPEST} levels", field=field)


def check_plain(field: str, value: object) -> None:
    """Reject what JSON and MessagePack don't both have: other map keys, extensions, NaN."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        below: list[object] = []
        for each in level:
            if isinstance(each, list):
                below += each
            elif isinstance(each, dict):
                if not all(type(key) is str for key in each):
                    raise Problem(
                        "invalid_request", f"{field} has a key that is no text", field=field
                    )
                below += each.values()
            elif isinstance(each, float) and not math.isfinite(each):
                raise Problem(
                    "invalid_request", f"{field} has a number that is not finite", field=field
                )
            elif not isinstance(each, _PLAIN):
                raise Problem(
                    "invalid_request", f"{field} has an extension of MessagePack", field=field
                )
        if not below:
            return
        level = below
    raise _too_deep(field)


_PLAIN: Final = (type(None), bool, int, float, str, bytes, UnsetType)


def integer(number: int) -> Integer:
    """Return a number as every language reads it exactly."""
    return number if abs(number) <= SAFE_INTEGER else str(number)
