"""What a remote store and the service send to each other: MessagePack, in version 1.

    POST /v1/send     {"version": 1, "remaining": 4.5, "requests": [["claim", {...}], ...]}
                      {"version": 1, "answers": [["claimed", {...}], ["answer", true], ...]}
    POST /v1/watch    {"version": 1, "identity": {"scope": ..., "key": ...}, "seconds": 5.0}
                      {"version": 1, "changed": true}

A request is a pair of its verb and its struct (`semel.core.records`). The answer to a claim is a
pair of its kind and its struct; any other one is "answer" and its value; the error of one request
is "error", its code and its text. `remaining` is how many seconds the client still waits: the
service gives up before. A watch asks for a level and not for an edge: is the record without a live
attempt? So a message between two watches is never missed.

A service refuses a field that it does not know: dropped, it could be the one that matters. It
judges every request of a batch before it sends the first one. A client reads answers with further
fields.

This module reads and writes. It sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from semel.core.records import (
    LISTINGS,
    VERBS,
    Abandoned,
    AdoptRequest,
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Counts,
    Exhausted,
    FailRequest,
    Finished,
    ForgetRequest,
    GetRequest,
    Identity,
    Mismatch,
    Page,
    PurgeRequest,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    ScanRequest,
    StuckRequest,
    TouchRequest,
    checked_run_info,
)
from semel.errors import (
    ConfigError,
    InvalidKey,
    RecordUnreadable,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    ValueRejected,
)

VERSION: Final = 1
SEND: Final = "/v1/send"
WATCH: Final = "/v1/watch"
CONTENT_TYPE: Final = "application/msgpack"

MOST_REQUESTS: Final = 1000
MOST_BYTES: Final = 4 * 1024 * 1024
"""The most of one batch."""

MOST_SECONDS: Final = 25.0
"""The longest watch."""

MOST_REMAINING: Final = 3600.0
"""The most seconds that a service is told to have; a client may wait longer."""

STORE_SHARE: Final = 0.8
"""For which part of the client's remaining time the service waits for its store."""


class Malformed(ValueError):
    """A body that is not of this version; `field` is where in the body."""

    code = "invalid_request"

    def __init__(self, text: str, field: str) -> None:
        super().__init__(text)
        self.field = field


class _Batch(Struct, forbid_unknown_fields=True):
    version: int
    remaining: Annotated[float, Meta(gt=0, le=MOST_REMAINING)]
    requests: Annotated[list[tuple[str, Raw]], Meta(max_length=MOST_REQUESTS)]


class Watched(Struct, forbid_unknown_fields=True):
    """The body of a watch."""

    version: int
    identity: Identity
    seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class _Failure(Struct):
    code: str
    detail: str


class _Answers(Struct):
    answers: list[tuple[str, Raw]]


class _Changed(Struct):
    changed: bool


class _Problem(Struct):
    code: str = ""
    detail: str = ""
    error: str = ""
    """The code of the store's error, where `code` says no more than store_error."""


_encode = msgspec.msgpack.Encoder().encode
_read_batch = msgspec.msgpack.Decoder(_Batch).decode
_read_watch = msgspec.msgpack.Decoder(Watched).decode
_read_answers = msgspec.msgpack.Decoder(_Answers).decode
_read_changed = msgspec.msgpack.Decoder(_Changed).decode
_read_failure = msgspec.msgpack.Decoder(_Failure).decode
_read_problem = msgspec.json.Decoder(_Problem).decode

_REQUESTS: Final = {verb: msgspec.msgpack.Decoder(kind) for kind, verb in VERBS.items()}

_CLAIMS: Final = {
    kind.__name__.lower(): msgspec.msgpack.Decoder(kind)
    for kind in (Claimed, Finished, Busy, Mismatch, Abandoned, Exhausted)
}
_VALUES: Final[dict[type[Request[Any]], msgspec.msgpack.Decoder[Any]]] = {
    **dict.fromkeys(
        (
            *(RenewRequest, CompleteRequest, FailRequest, PutRequest, TouchRequest),
            ForgetRequest,
        ),
        msgspec.msgpack.Decoder(bool),
    ),
    **dict.fromkeys((GetRequest, AdoptRequest), msgspec.msgpack.Decoder(Record | None)),
    ScanRequest: msgspec.msgpack.Decoder(Page),
    StuckRequest: msgspec.msgpack.Decoder(list[Record]),
    PurgeRequest: msgspec.msgpack.Decoder(int),
    CountRequest: msgspec.msgpack.Decoder(Counts),
}
"""What is answered with a value, by the kind of request."""

_ERRORS: Final[dict[str, type[StoreError]]] = {
    kind.code: kind
    for kind in (
        *(StoreError, StoreUnavailable, StoreRefused, StoreFull, ValueRejected),
        RecordUnreadable,
    )
}


# --- the client's side -----------------------------------------------------------------------


class Reply(Struct):
    """What came back from the service, or from what stands before it."""

    status: int
    content_type: str
    body: bytes


class NotAnswered(StoreError):
    """A batch that was refused as a whole, with nothing sent to the store.

    `error` is what a single request of it means. With `apart`, the others may be answered.
    """

    def __init__(self, error: Exception, *, apart: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.apart = apart


def check(request: Request[Any]) -> None:
    """Raise a `ConfigError` for what no store takes, before anything is sent."""
    if isinstance(request, ClaimRequest):  # a renewal checks its own
        checked_run_info(request.run_info)


def chunks(requests: Sequence[Request[Any]]) -> Iterator[Sequence[Request[Any]]]:
    """Split requests into batches of the size that a service takes."""
    for start in range(0, len(requests), MOST_REQUESTS):
        yield requests[start : start + MOST_REQUESTS]


def write_batch(requests: Sequence[Request[Any]], remaining: float, where: str) -> bytes:
    """Write a batch for the service that has `remaining` seconds to answer it."""
    pairs = [(VERBS[type(request)], request) for request in requests]
    told = min(max(remaining, 0.001), MOST_REMAINING)
    body = _encode({"version": VERSION, "remaining": told, "requests": pairs})
    if len(body) > MOST_BYTES:
        raise too_large(requests, where)
    return body


def write_watch(identity: Identity, seconds: float) -> bytes:
    """Write the question whether a record is without a live attempt, within these seconds."""
    return _encode(Watched(VERSION, identity, seconds))


def too_large(requests: Sequence[Request[Any]], where: str) -> NotAnswered:
    """Return the error of a batch that is too large for the service."""
    what = VERBS[type(requests[0])]
    error = ValueRejected(f"{where} takes at most 4 MB in one request; this {what} is larger")
    return NotAnswered(error, apart=True)


def read_answers(reply: Reply, requests: Sequence[Request[Any]], where: str) -> list[Any]:
    """Return the answers to these requests, or raise what the reply means."""
    if reply.status == 200 and reply.content_type == CONTENT_TYPE:  # noqa: PLR2004 - HTTP's own
        try:
            pairs = _read_answers(reply.body).answers
            return [
                _answer(request, kind, raw)
                for request, (kind, raw) in zip(requests, pairs, strict=True)
            ]
        except (ValueError, KeyError) as garbled:
            raise StoreUnavailable(
                f"the answer of {where} can't be read ({type(garbled).__name__}): is the service "
                "older than this client?"
            ) from garbled
    if reply.status == 413:  # noqa: PLR2004
        raise too_large(requests, where)
    raise rejection(reply, where)


def read_changed(reply: Reply, where: str) -> bool:
    """Return whether a watched record has no live attempt, or raise what the reply means."""
    if reply.status == 200 and reply.content_type == CONTENT_TYPE:  # noqa: PLR2004
        try:
            return _read_changed(reply.body).changed
        except ValueError as garbled:
            raise StoreUnavailable(f"the answer of {where} can't be read") from garbled
    raise rejection(reply, where)


def _answer(request: Request[Any], kind: str, raw: Raw) -> Any:
    if kind == "error":
        failure = _read_failure(raw)
        return _ERRORS.get(failure.code, StoreError)(failure.detail)
    if isinstance(request, ClaimRequest):
        return _CLAIMS[kind].decode(raw)
    return _VALUES[type(request)].decode(raw)


def passes(reply: Reply) -> bool:
    """Whether the same request may be answered in a moment, by this instance or another one.

    So answers a balancer whose server is gone; what the service itself says has a `code`.
    """
    return reply.status in _PASSING and not _problem(reply).code


_PASSING: Final = {502, 503, 504}


def rejection(reply: Reply, where: str) -> StoreError:
    """Return the error that a reply without answers means."""
    problem, status = _problem(reply), reply.status
    said = problem.detail or f"HTTP status {status}"
    if status == 400 and problem.code:  # noqa: PLR2004
        wrong = InvalidKey if problem.code == "invalid_key" else ConfigError
        return NotAnswered(wrong(f"{where} rejects the request: {said}"), apart=False)
    if status == 401:  # noqa: PLR2004
        return StoreRefused(f"{where} rejects the token: set SEMEL_TOKEN to a valid one")
    if status == 403:  # noqa: PLR2004
        text = f"{where} doesn't permit this with the token of SEMEL_TOKEN: {said}"
        return NotAnswered(StoreRefused(text), apart=True)
    if status == 429 or problem.code == "too_many_waiting":  # noqa: PLR2004
        return StoreUnavailable(f"{where} has too much to do: {said}")
    if problem.code == "store_error":
        return _ERRORS.get(problem.error, StoreUnavailable)(said)
    if status >= 500:  # noqa: PLR2004
        return StoreUnavailable(f"{where} can't answer: {said}")
    return StoreRefused(
        f"{where} doesn't answer as a semel service does ({said}): check the host, the port, and "
        "the path of the URL"
    )


def _problem(reply: Reply) -> _Problem:
    if reply.content_type == "application/problem+json":
        try:
            return _read_problem(reply.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
    return _Problem()


# --- the service's side ----------------------------------------------------------------------


def read_batch(body: bytes) -> tuple[float, list[Request[Any]]]:
    """Return the remaining seconds and the requests of a batch; raise `Malformed`."""
    batch = _checked(_read_batch, body, "")
    requests = []
    for index, (verb, raw) in enumerate(batch.requests):
        place = f"requests[{index}]"
        if verb not in _REQUESTS:
            raise Malformed(f"there is no verb {verb[:20]!r}", place)
        requests.append(_checked(_REQUESTS[verb].decode, raw, place))
    if not requests:
        raise Malformed("a batch has a request at least", "requests")
    if len(requests) > 1 and any(type(each) in LISTINGS for each in requests):
        raise Malformed("scan, stuck, purge, and counts come alone", "requests")
    return batch.remaining, requests


def read_watch(body: bytes) -> Watched:
    """Return what is to be watched; raise `Malformed`."""
    watched: Watched = _checked(_read_watch, body, "")
    return watched


def _checked(decode: Any, data: Any, place: str) -> Any:
    try:
        read = decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # What msgspec says may repeat a value: the field alone is told.
        found = _PATH.search(str(error)) or _NAME.search(str(error))
        field = f"{place}.{found[1]}".removeprefix(".") if found else place or "body"
        malformed = Malformed(f"{field} is not as version {VERSION} of the wire has it", field)
        if isinstance(error.__cause__, InvalidKey):
            malformed.code = InvalidKey.code
        raise malformed from None
    if getattr(read, "version", VERSION) != VERSION:
        raise Malformed(f"this service speaks version {VERSION} of the wire", "version")
    return read


_PATH: Final = re.compile(r" - at `\$\.([a-z_.\[\]0-9]+)`$")
_NAME: Final = re.compile(r"^Object (?:missing required|contains unknown) field `([a-z_]{1,40})`")
"""Where a fault is, in what msgspec says."""


def write_answers(answers: Sequence[Any]) -> bytes:
    """Write the answers of a batch; an error among them is that of its request."""
    return _encode({"version": VERSION, "answers": [_pair(answer) for answer in answers]})


def write_changed(*, changed: bool) -> bytes:
    """Write the answer to a watch."""
    return _encode({"version": VERSION, "changed": changed})


def _pair(answer: Any) -> tuple[str, Any]:
    if isinstance(answer, StoreError):
        return "error", _Failure(answer.code, answer.text)
    kind = type(answer).__name__.lower()
    return (kind if kind in _CLAIMS else "answer"), answer
