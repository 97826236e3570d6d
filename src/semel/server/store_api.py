"""The service as a store: `POST /v1/send` and `POST /v1/watch`, behind `semel+http://`.

Engines with this service for a store send what any store answers, in batches. Every request of a
batch is checked before the first one is sent: rights, keys, owners, and the bounds of scopes hold
here as they do for the verbs. What is written names the token: records of who runs them, and
entries of the audit trail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from semel.core import audit, run_info
from semel.core.codec import LONGEST_NAME
from semel.core.records import (
    AUDIT_SCOPE,
    FINGERPRINT_BYTES,
    LONGEST,
    OWNER_BYTES,
    PROCESSING,
    AdoptRequest,
    ClaimRequest,
    CompleteRequest,
    CountRequest,
    Encoded,
    FailRequest,
    Finished,
    ForgetRequest,
    GetRequest,
    Identity,
    Page,
    PurgeRequest,
    PutRequest,
    Record,
    RenewRequest,
    Request,
    ScanRequest,
    StuckRequest,
    TouchRequest,
    check_text,
    checked_run_info,
)
from semel.errors import (
    ConfigError,
    InvalidKey,
    RecordUnreadable,
    StoreError,
    StoreUnavailable,
)
from semel.server.bodies import Authenticate, client_left, read_request
from semel.server.problems import Problem
from semel.server.service import Service
from semel.server.tokens import Caller
from semel.server.wire import LONGEST_LEASE, MSGPACK, SHORTEST_LEASE
from semel.stores.base import AsyncStore
from semel.stores.remote import wire

RIGHTS: Final[dict[type[Request[Any]], str]] = {
    **dict.fromkeys((ClaimRequest, RenewRequest, CompleteRequest, FailRequest), "store"),
    **dict.fromkeys((GetRequest, ScanRequest, StuckRequest, CountRequest), "view"),
    **dict.fromkeys(
        (PutRequest, TouchRequest, ForgetRequest, AdoptRequest, PurgeRequest), "operate"
    ),
}
"""What a token needs for each kind of request; for the audit trail it is always `operate`."""

MOST_RECORDS: Final = 1_000_000_000
"""The largest limit of a listing; databases take no number without a limit."""

MOST_ANSWERED: Final = 16 * 1024 * 1024
"""Bytes of results in the answers of one batch; a request alone is answered whatever it is."""
AT_ONCE: Final = 64
"""How many requests of a batch that may answer with results are sent to the store at a time."""
MOST_LISTED: Final = 100
"""Records of a page."""

GAP: Final = 0.02
"""The least seconds between two looks at a record that is watched: anyone may send wake-ups."""
PAUSE: Final = 0.5
"""Seconds between two looks where the store should send wake-ups, and does not."""


def routes(service: Service, authenticate: Authenticate) -> list[Route]:
    """Return the routes of the store."""

    async def body(request: HttpRequest) -> tuple[Caller, bytes]:
        caller, media_type, sent = await read_request(request, authenticate)
        if media_type != MSGPACK:
            raise Problem("unsupported_media_type", f"{request.url.path} takes {MSGPACK}")
        return caller, sent

    async def send(request: HttpRequest) -> Response:
        caller, sent = await body(request)
        return _packed(await _send(service, caller, sent))

    async def watch(request: HttpRequest) -> Response:
        caller, sent = await body(request)
        gone = asyncio.ensure_future(client_left(request))
        try:
            return _packed(await _watch(service, caller, sent, gone))
        finally:
            gone.cancel()

    return [
        Route(wire.SEND, send, methods=["POST"]),
        Route(wire.WATCH, watch, methods=["POST"]),
    ]


def _packed(body: bytes) -> Response:
    return Response(body, headers={"Cache-Control": "no-store"}, media_type=MSGPACK)


# --- requests ------------------------------------------------------------------------------------


async def _send(service: Service, caller: Caller, body: bytes) -> bytes:
    try:
        remaining, sent = wire.read_batch(body)
    except wire.Malformed as error:
        raise _malformed(error) from None
    requests: list[Any] = [
        _accepted(service, caller, request, f"requests[{index}]")
        for index, request in enumerate(sent)
    ]
    claims = sum(type(request) is ClaimRequest for request in requests)
    if claims:
        caller.count(claims)
    try:
        answers = await _within(remaining * wire.STORE_SHARE, _answers(service.store, requests))
    except StoreError as error:
        problem = service.store_problem(error, caller)
        problem.extra["error"] = error.code
        raise problem from error
    except ConfigError as error:
        raise _invalid("requests", error.text) from error
    finally:
        # Whatever is known of it: it may have been done.
        for request in requests:
            if _ends(request):
                service.wake(request.identity)
    return wire.write_answers([_shown(service, caller, answer) for answer in answers])


def _ends(request: Any) -> bool:
    """Whether this may end or park an attempt, so that its waiters should ask again."""
    parks = isinstance(request, RenewRequest) and request.lease <= 0
    return parks or isinstance(request, CompleteRequest | FailRequest | ForgetRequest)


async def _answers(store: AsyncStore, requests: Sequence[Request[Any]]) -> list[Any]:
    """Answer a batch; raise `body_too_large` if its results are too many to be sent at once.

    Clients send its halves then: every request is safe to send twice.
    """
    if len(requests) > 1:
        answers: list[Any] = []
        large = any(isinstance(each, ClaimRequest | GetRequest) for each in requests)
        step = AT_ONCE if large else len(requests)
        for start in range(0, len(requests), step):
            answers += await store.send(requests[start : start + step])
            if sum(map(_size, answers)) > MOST_ANSWERED:
                most = MOST_ANSWERED >> 20
                detail = f"The results that were asked for have more than {most} MB together."
                raise Problem("body_too_large", detail)
        return answers
    try:
        return [await store.ask(requests[0])]
    except StoreUnavailable:
        raise
    except StoreError as error:
        return [error]


def _size(answer: Any) -> int:
    """Return the bytes of a result in an answer; all else of a record is small."""
    outcome = answer.outcome if isinstance(answer, Finished | Record) else None
    return 0 if outcome is None else len(outcome.data)


async def _within(seconds: float, work: Awaitable[list[Any]]) -> list[Any]:
    """Give up before the client does. What was sent is never canceled: it may be a claim."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if done:
        return task.result()
    _left_behind.add(task)
    task.add_done_callback(_forgotten)
    raise StoreUnavailable(f"the store of the service did not answer within {seconds:.3g} s")


_left_behind: Final[set[asyncio.Future[Any]]] = set()
"""Without a reference here, the event loop might lose them."""


def _forgotten(task: asyncio.Future[Any]) -> None:
    _left_behind.discard(task)
    _ = task.cancelled() or task.exception()  # its caller has had another answer


def _shown(service: Service, caller: Caller, answer: Any) -> Any:
    """Return an answer as this caller may see it."""
    match answer:
        case Record():
            shown = caller.may("store", answer.scope)
            return answer if shown else replace(answer, owner=b"")
        case Page():
            return replace(
                answer, records=tuple(_shown(service, caller, each) for each in answer.records)
            )
        case list():
            return [_shown(service, caller, each) for each in answer]
        case StoreError():
            problem = service.store_problem(answer, caller)
            shown = caller.may_operate or isinstance(answer, RecordUnreadable)
            return answer if shown else type(answer)(problem.detail)
    return answer


# --- what is accepted ----------------------------------------------------------------------------


def _accepted(service: Service, caller: Caller, request: Request[Any], place: str) -> Request[Any]:
    """Check a request, and return it as it is sent."""
    _check_right(caller, request, place)
    try:
        identity = getattr(request, "identity", None)
        if identity is not None:
            _check_identity(service, request, identity)
        _check_fields(service, request)
    except Problem as problem:
        problem.field = f"{place}.{problem.field}"
        raise
    except InvalidKey as error:
        raise Problem("invalid_key", error.text, field=place) from None
    except ConfigError as error:
        raise _invalid(place, error.text) from None
    if isinstance(request, ScanRequest):
        return replace(request, limit=min(request.limit, MOST_LISTED))
    return request if caller.name is None else _named(request, caller.name)


def _check_right(caller: Caller, request: Any, place: str) -> None:
    identity = getattr(request, "identity", None)
    scope = getattr(request, "scope", None) if identity is None else identity.scope
    if scope != AUDIT_SCOPE:
        caller.require(RIGHTS[type(request)], scope)
    elif isinstance(request, PutRequest) and caller.name is not None:
        # An entry is about records of a scope: who may operate there may write it.
        caller.require("operate", _entry(request.result, place).get("scope"))
    else:
        caller.require("operate", None)


def _check_identity(service: Service, request: Request[Any], identity: Identity) -> None:
    if identity.scope == AUDIT_SCOPE and isinstance(request, GetRequest | PutRequest):
        check_text("key", identity.key)
    elif isinstance(request, ClaimRequest):
        service.identity(identity.scope, identity.key)
    else:  # records that are there may have keys of an earlier pattern
        service.setup.key_rules.check_scope(identity.scope)
        check_text("key", identity.key)


def _check_fields(service: Service, request: Any) -> None:
    for name, fits in _FIELDS_OF[type(request)]:
        if not fits(getattr(request, name)):
            raise _invalid(name, f"{name} is outside of what is accepted")
    if isinstance(request, ClaimRequest):
        checked_run_info(request.run_info)
    if isinstance(request, ClaimRequest) or (
        isinstance(request, RenewRequest) and request.lease > 0
    ):
        service.lease(request.identity.scope, request.lease)
    elif isinstance(request, AdoptRequest) and request.lease < SHORTEST_LEASE:
        raise _invalid("lease", f"lease must be {SHORTEST_LEASE:g} seconds at least")


def _kept(seconds: float) -> bool:
    return 0 <= seconds <= LONGEST  # which NaN is not


def _encoded(value: Encoded) -> bool:
    return 0 < len(value.codec.encode()) <= LONGEST_NAME and value.codec.isprintable()


def _searched(text: str | None) -> bool:
    return text is None or (len(text) <= _LONGEST_SEARCH and "\0" not in text)


_LONGEST_SEARCH: Final = 2000

_FIELDS: Final[dict[str, Callable[[Any], bool]]] = {
    "owner": lambda owner: len(owner) == OWNER_BYTES,
    "fingerprint": lambda value: value is None or len(value) == FINGERPRINT_BYTES,
    "lease": lambda lease: -LONGEST <= lease <= LONGEST_LEASE,
    "ttl": _kept,
    "max_attempts": lambda most: most is None or 0 <= most <= MOST_RECORDS,
    "result": _encoded,
    "error": _encoded,
    "scope": _searched,
    "prefix": _searched,
    "cursor": _searched,
    "limit": lambda limit: 1 <= limit <= MOST_RECORDS,
    "older_than": lambda seconds: -LONGEST <= seconds <= LONGEST,
    "abandoned_after": lambda seconds: seconds is None or _kept(seconds),
}
"""Whether the value of a field is one that stores take, by its name."""

_FIELDS_OF: Final = {
    kind: [(name, _FIELDS[name]) for name in kind.__struct_fields__ if name in _FIELDS]
    for kind in RIGHTS
}


def _invalid(field: str, text: str) -> Problem:
    return Problem("invalid_request", text, field=field)


def _malformed(error: wire.Malformed) -> Problem:
    return Problem(error.code, str(error), field=error.field)


# --- the token's name ----------------------------------------------------------------------------


def _named(request: Request[Any], name: str) -> Request[Any]:
    """Return a request that says by which token it came."""
    match request:
        case ClaimRequest():
            return replace(request, run_info=_run_info(request.run_info, name, request.ttl))
        case RenewRequest(run_info=bytes(said)):
            return replace(request, run_info=_run_info(said, name, LONGEST))
        case PutRequest(identity=Identity(scope=scope)) if scope == AUDIT_SCOPE:
            entry = _entry(request.result, "")
            entry["by"] += f"@{name}"
            return replace(request, result=Encoded(audit.CODEC, msgspec.json.encode(entry)))
    return request


def _run_info(said: bytes, name: str, ttl: float) -> bytes:
    """Add the name to what a record says of who runs it; what cannot be read is replaced."""
    known = run_info.read(said)
    if known is None:
        return run_info.build(name, ttl or LONGEST, "")
    return run_info.build(f"{known.by}@{name}", known.ttl, known.codec, known.why, known.most)


def _entry(outcome: Encoded, place: str) -> dict[str, str]:
    """Read an entry of the audit trail; raise `invalid_request` for anything else."""
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        said = msgspec.json.decode(outcome.data, type=dict[str, str])
        if outcome.codec == audit.CODEC and "by" in said:
            return said
    raise _invalid(f"{place}.result", "this is no entry of the audit trail")


# --- watches -------------------------------------------------------------------------------------


async def _watch(service: Service, caller: Caller, body: bytes, gone: asyncio.Future[Any]) -> bytes:
    """Answer when a record has no live attempt, or after the seconds that the client waits."""
    try:
        watched = wire.read_watch(body)
    except wire.Malformed as error:
        raise _malformed(error) from None
    identity = service.identity(watched.identity.scope, watched.identity.key)
    caller.require("store", identity.scope)
    end = monotonic() + watched.seconds
    with service.waiting.place(identity, caller) as place:
        gone.add_done_callback(place.wake)
        while True:
            looked = monotonic()
            try:
                record = await service.store.get(identity)
            except StoreError as error:
                raise service.store_problem(error, caller) from error
            if record is None or record.state is not PROCESSING or record.abandoned:
                return wire.write_changed(changed=True)
            left = end - monotonic()
            if left <= 0 or service.stopping or gone.done() or caller.replaced:
                return wire.write_changed(changed=False)
            lease = (record.lease_until or record.now) - record.now
            await place.wait(min(place.pause(PAUSE), lease, left))
            await asyncio.sleep(max(0.0, looked + GAP - monotonic()))
