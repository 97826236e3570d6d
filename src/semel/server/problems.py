"""Errors of the service: `application/problem+json` (RFC 9457), each with a stable code.

This module is a table, and answers. A problem repeats no key, payload, result, or token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response

from semel.errors import IdempotencyError
from semel.http.problems import instance_of


class Kind(NamedTuple):
    """One code: its status, its title, and what is said where nothing more is known."""

    status: int
    title: str
    detail: str
    retry: bool = False
    """The same request may succeed later: the answer says when."""


CODES: Final[Mapping[str, Kind]] = {
    "invalid_request": Kind(400, "Request invalid", "The request is not valid."),
    "invalid_key": Kind(400, "Key invalid", "The scope or the key cannot be used."),
    "unauthorized": Kind(401, "Token needed", "Send a valid token: Authorization: Bearer TOKEN."),
    "forbidden": Kind(403, "Not permitted", "This token does not permit the request."),
    "not_found": Kind(404, "Not found", "There is nothing at this path; see /openapi.json."),
    "method_not_allowed": Kind(405, "Method not allowed", "This path has another method."),
    "concurrent_request": Kind(
        409, "In progress", "Another attempt of this key is running.", retry=True
    ),
    "wait_timeout": Kind(
        409, "Still in progress", "The running attempt did not end within `wait`.", retry=True
    ),
    "duplicate_request": Kind(409, "Duplicate", "This operation was done before."),
    "outcome_unknown": Kind(
        409, "Outcome unknown", "An attempt may have taken effect; its record is held."
    ),
    "previous_failure": Kind(409, "Failed before", "This operation failed for good."),
    "attempts_exhausted": Kind(
        409, "Too many attempts", "This operation was tried as often as its policy allows."
    ),
    "result_unavailable": Kind(
        409, "Result unavailable", "The operation is done; its result cannot be given."
    ),
    "lease_lost": Kind(
        409, "Lease lost", "This owner's attempt was replaced or has ended; nothing was stored."
    ),
    "body_too_large": Kind(413, "Body too large", "The body is larger than 4 MB."),
    "unsupported_media_type": Kind(
        415,
        "Content type not supported",
        "Send application/json or application/msgpack, without a content encoding.",
    ),
    "payload_mismatch": Kind(422, "Key reused", "This key was used with another payload."),
    "rate_limited": Kind(
        429, "Too many requests", "This token's rate is used up; try again later.", retry=True
    ),
    "idempotency_error": Kind(
        500, "Internal error", "The service could not answer; its log says why."
    ),
    "store_error": Kind(503, "Store unavailable", "The store cannot answer now.", retry=True),
    "too_many_waiting": Kind(
        503, "Too many waiting", "Too many starts wait already; try again later.", retry=True
    ),
}
"""By code."""

_TYPE: Final = "urn:semel:problem:"

_encode = msgspec.json.Encoder().encode


class Problem(Exception):
    """Ends a request with an error of this code; `field` names what is wrong in the body.

    `extra` are further members of the answer, and `close` ends the connection. A `retry_after` that
    is given is told whatever the code says.
    """

    def __init__(
        self,
        code: str,
        detail: str | None = None,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        retry: bool = True,
        close: bool = False,
    ) -> None:
        kind = CODES[code]
        super().__init__(code)
        self.code = code
        self.status = kind.status
        self.detail = kind.detail if detail is None else detail
        self.field = field
        self.retry_after = 1.0 if retry_after is None and kind.retry and retry else retry_after
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})
        self.close = close


def problem_response(problem: Problem) -> Response:
    """Return the answer that a problem is."""
    told: dict[str, Any] = {
        "type": _TYPE + problem.code.replace("_", "-"),
        "title": CODES[problem.code].title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
    }
    if problem.field is not None:
        told["field"] = problem.field
    headers = {"Cache-Control": "no-store", **problem.headers}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after)))
    if problem.close:
        headers["Connection"] = "close"
    return Response(
        _encode({**told, **problem.extra}),
        problem.status,
        headers,
        media_type="application/problem+json",
    )


def problem_of(error: IdempotencyError, *, shown: bool = True) -> Problem:
    """Return the problem that an error about a record is; `shown` says whether its text may be."""
    named = (kind.code for kind in type(error).__mro__ if issubclass(kind, IdempotencyError))
    code = next(code for code in named if code in CODES)
    extra: dict[str, Any] = {"instance": instance_of(str(error.key_digest))}
    for name, member in _EXTRA.get(code, {}).items():
        extra[name] = member(error)
    return Problem(
        code,
        error.text if shown else None,
        retry_after=getattr(error, "retry_after", None),
        retry=error.retry_helps,
        extra=extra,
    )


_EXTRA: Final[Mapping[str, Mapping[str, Any]]] = {
    "payload_mismatch": {"superseded": lambda error: error.superseded},
    "previous_failure": {
        "error": lambda error: {"type": error.type_name, "message": error.message}
    },
}
"""Further members of some answers, each read from its error."""
