"""Semel's own answers: `application/problem+json` (RFC 9457), each with a stable code.

This module is a table. A problem never tells what the client sent, nor what went wrong inside: logs
and events do. An application changes status, title, detail and type of any of them by its code. The
`instance` of a problem about a record has the record's key digest, so that a client's report leads
to it: `semel find` takes the whole `instance`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple, NotRequired, TypedDict

import msgspec

from semel.errors import (
    ConcurrentRequest,
    ConfigError,
    DuplicateRequest,
    IdempotencyError,
    InvalidKey,
    StoreFull,
    StoreUnavailable,
)
from semel.events import logger
from semel.http.requests import HeaderLine
from semel.http.storing import Answer


class Wording(TypedDict):
    """Your words for a problem."""

    status: NotRequired[int]
    title: NotRequired[str]
    detail: NotRequired[str]
    type: NotRequired[str]


class Problem(msgspec.Struct, frozen=True):
    """One kind of answer that semel itself gives."""

    status: int
    title: str
    detail: str
    retry: bool = False
    """The same request may succeed later: the answer says when."""


PROBLEMS: Final[Mapping[str, Problem]] = {
    "key_missing": Problem(
        400, "Idempotency key missing", "This request needs an idempotency key."
    ),
    "invalid_key": Problem(400, "Idempotency key invalid", "The idempotency key cannot be used."),
    "identity_missing": Problem(401, "Caller unknown", "The caller could not be identified."),
    "body_too_large": Problem(
        413, "Body too large", "The body is larger than this server accepts."
    ),
    "body_incomplete": Problem(400, "Body unreadable", "The body does not match its headers."),
    "unsupported_media_type": Problem(
        415, "Content type not supported", "This content type is not supported here."
    ),
    "invalid_path": Problem(400, "Path invalid", "The path has control characters."),
    "concurrent_request": Problem(
        409, "Request in progress", "A request with this key is being processed.", retry=True
    ),
    "wait_timeout": Problem(
        409, "Request in progress", "A request with this key is still being processed.", retry=True
    ),
    "duplicate_request": Problem(409, "Duplicate request", "This request was processed before."),
    "payload_mismatch": Problem(
        422, "Idempotency key reused", "This key was used before, with another request."
    ),
    "outcome_unknown": Problem(
        409,
        "Outcome unknown",
        "An earlier request with this key may have taken effect.",
    ),
    "previous_failure": Problem(
        409, "Request failed before", "An earlier request with this key failed for good."
    ),
    "attempts_exhausted": Problem(
        409, "Too many attempts", "This request has used all of its attempts."
    ),
    "lease_lost": Problem(
        409, "Request replaced", "Another request with this key took over.", retry=True
    ),
    "result_unavailable": Problem(
        409, "Result unavailable", "This request was processed; its response is not available."
    ),
    "result_omitted": Problem(
        200, "Result omitted", "This request was processed; its response was too large to keep."
    ),
    "store_error": Problem(
        503, "Temporarily unavailable", "Requests with a key cannot be processed now.", retry=True
    ),
    "retry_transaction": Problem(
        503, "Temporarily unavailable", "The database asked to repeat this request.", retry=True
    ),
    "record_unreadable": Problem(
        503, "Temporarily unavailable", "The record of this key cannot be read."
    ),
    "value_rejected": Problem(
        500, "Internal error", "The outcome of this request cannot be stored."
    ),
    "idempotency_error": Problem(
        500, "Internal error", "The request could not be processed under its key."
    ),
}

_FIRST_SERVER_ERROR: Final = 500
_TYPE: Final = "urn:semel:problem:"
INSTANCE: Final = "urn:semel:key:"
"""Stands before a key digest. A URN: there is no address at which a client could look."""

_FIELDS: Final = ("status", "title", "detail", "type")

_encode = msgspec.json.Encoder().encode


def checked_wordings(wordings: Mapping[str, Wording]) -> dict[str, Wording]:
    """Reject codes and words that do not exist, when the integration is made."""
    if not isinstance(wordings, Mapping) or not all(
        isinstance(words, Mapping) for words in wordings.values()
    ):
        raise ConfigError(
            'problems must be a mapping from codes to words: {"concurrent_request": {"title": ...}}'
        )
    for code, words in wordings.items():
        if code not in PROBLEMS:
            raise ConfigError(f"no problem has the code {code!r}; known: {', '.join(PROBLEMS)}")
        for name, value in words.items():
            kind = int if name == "status" else str
            if name not in _FIELDS or not isinstance(value, kind):
                raise ConfigError(
                    f"problem {code!r}: {name}={value!r} is not one of status (a number), "
                    "title, detail, type (strings)"
                )
    return dict(wordings)


def problem_of(error: IdempotencyError) -> tuple[str, str | None]:
    """Return the code of the problem that an error is, and what the client may know of it."""
    kinds = (kind.code for kind in type(error).__mro__ if issubclass(kind, IdempotencyError))
    code = next(code for code in kinds if code in PROBLEMS)
    return code, error.text if _says_itself(error) else None


def _says_itself(error: IdempotencyError) -> bool:
    """Return whether a message is the application's own, or tells only what is wrong with a key."""
    if isinstance(error, ConcurrentRequest | DuplicateRequest):
        return error.text != type(error)().text  # the policy's message, in place of ours
    return isinstance(error, InvalidKey) and error.code == InvalidKey.code


def problem(
    code: str,
    wordings: Mapping[str, Wording],
    *,
    detail: str | None = None,
    status: int | None = None,
    retry_after: float = 1.0,
    lines: tuple[HeaderLine, ...] = (),
    key_digest: str | None = None,
    among: Mapping[str, Problem] = PROBLEMS,
) -> Answer:
    """Make the answer; a wording of the application's goes before everything else.

    `key_digest` is that of the record, if the problem is about one. `among` has the code.
    """
    known, words = among[code], wordings.get(code, {})
    status = words.get("status", known.status if status is None else status)
    told = {
        "type": words.get("type", _TYPE + code.replace("_", "-")),
        "title": words.get("title", known.title),
        "status": status,
        "detail": words.get("detail", known.detail if detail is None else detail),
        "code": code,
    }
    if key_digest is not None:
        told["instance"] = instance_of(key_digest)
    body = _encode(told)
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    if known.retry:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after))))
    return Answer(status, (*headers, *lines), body)


def instance_of(key_digest: str) -> str:
    """Name a record to a client."""
    return INSTANCE + key_digest


class ProblemResponse(NamedTuple):
    """The status, headers, and body of a problem, for any framework."""

    status: int
    headers: dict[str, str]
    body: bytes


def problem_response(
    error: IdempotencyError,
    *,
    problems: Mapping[str, Wording] | None = None,
    retry_after: float = 1.0,
) -> ProblemResponse:
    """Return the response that the integrations would send for a semel `error`.

    It is for endpoints that call the engine themselves. `problems` and `retry_after` are the
    options of the same names. The response doesn't say what is wrong inside, so semel logs an error
    with a 5xx status.

    Examples:
        >>> status, headers, body = problem_response(ConcurrentRequest())
        >>> status, headers["Retry-After"]
        (409, '1')
    """
    if not isinstance(error, IdempotencyError):
        raise TypeError(f"only an IdempotencyError is a problem, not {type(error).__name__}")
    code, detail = problem_of(error)
    wordings = checked_wordings(problems or {})
    answer = problem(
        code, wordings, detail=detail, retry_after=retry_after, key_digest=error.key_digest
    )
    if answer.status >= _FIRST_SERVER_ERROR:
        log_failure("a request with a key was not processed", error)
    headers = {name.decode().title(): value.decode() for name, value in answer.headers}
    del headers["Content-Length"]  # the framework's own to write
    return ProblemResponse(answer.status, headers, answer.body)


def log_failure(what: str, error: Exception) -> None:
    """Log an outage of the store in one line, and any other error with its traceback.

    A store that is down fails every request in the same way, and its error names the reason.
    """
    of_the_store = isinstance(error, StoreUnavailable | StoreFull)
    logger.error("%s: %s", what, error, exc_info=None if of_the_store else error)
