"""The service inside: rules, waiting, and the five verbs over one store.

It drives the store and `decide`, not an engine: an engine would renew for clients that are dead.
What it claims for a client is the client's: nothing is ever given back here, because a resend with
the same owner may be running.
"""

from __future__ import annotations

import asyncio
import math
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from semel.core.attempts import RENEWALS_PER_LEASE, OwnerIds
from semel.core.codec import encode_result, failure_of, omitted
from semel.core.decide import Reject, Step, Wait, decide, waited_too_long
from semel.core.fingerprint import fingerprint
from semel.core.keys import KeyGenerator
from semel.core.policy import Rules
from semel.core.records import (
    Claim,
    Claimed,
    ClaimRequest,
    Encoded,
    Finished,
    Identity,
    Mismatch,
)
from semel.core.run_info import build, process_name
from semel.core.stored_answers import HTTP, StoredAnswer, pack_answer
from semel.engine.outcomes import as_first_told, came_late, known_digest, pauses
from semel.engine.setup import Call, Digests, Setup
from semel.errors import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    IdempotencyError,
    InvalidKey,
    LeaseLost,
    PreviousFailure,
    SerializationError,
    StoreError,
    ValueRejected,
    WaitTimeout,
    about,
)
from semel.events import logger
from semel.http.problems import log_failure
from semel.http.requests import HeaderLine
from semel.http.storing import NEVER, has_body, kept_lines
from semel.server.problems import Problem, problem_of
from semel.server.tokens import Caller
from semel.server.values import plain
from semel.server.waiting import Waiting
from semel.server.wire import (
    LONGEST_LEASE,
    SHORTEST_LEASE,
    Answered,
    DoneResponse,
    DoneResult,
    Fail,
    Finish,
    Keys,
    NewKeys,
    Recorded,
    Renew,
    Renewed,
    Response,
    Run,
    Start,
    Stored,
    integer,
    wrong,
)
from semel.stores.base import AsyncStore

T = TypeVar("T")

Leaving: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

PROBE: Final = Identity("semel.service", "ready")
"""Read to see whether the store answers; no such record is ever written."""
READY_FOR: Final = 1.0
"""Seconds for which an answer about the store counts."""


class Service:
    """The service behind the routes; `store` and `setup` may be used by further routes."""

    def __init__(
        self, store: AsyncStore, setup: Setup, *, max_waiting: int = 1000, max_waiting_each: int = 0
    ) -> None:
        """`max_waiting_each` bounds each token; 0 stands for `max_waiting`."""
        self.store = store
        self.setup = setup
        self.waiting = Waiting(store, max_waiting, max_waiting_each or max_waiting)
        self.stopping = False
        self._owners = OwnerIds()
        self._name = process_name()
        self._ready: tuple[float, StoreError | None] = (-math.inf, None)
        self._asking = asyncio.Lock()

    # --- what every route needs ----------------------------------------------------------

    def identity(self, scope: str, key: str) -> Identity:
        """Check a scope and a key; raise an `invalid_key` problem for any other."""
        for field, check, text in (
            ("scope", self.setup.key_rules.check_scope, scope),
            ("key", self.setup.key_rules.check, key),
        ):
            try:
                check(text)
            except InvalidKey as error:
                raise Problem("invalid_key", error.text, field=field) from None
        return Identity(scope, key)

    def rules(self, scope: str) -> Rules:
        """Return the rules of a scope, as semel.toml has them."""
        return self.setup.rules(scope)

    def lease(self, scope: str, asked: float | None) -> float:
        """Return the lease that a client gets; raise `invalid_request` outside of the bounds."""
        if asked is None:
            return self.rules(scope).lease
        least, most = SHORTEST_LEASE, LONGEST_LEASE
        for name in self.setup.names(scope):
            if "lease" in self.setup.bounds.get(name, {}):
                least, most = self.setup.bounds[name]["lease"]
                break
        if not least <= asked <= most:
            raise wrong("lease", Start, f"lease must be {least:g} to {most:g} seconds here")
        return asked

    def run_info(
        self, caller: Caller, rules: Rules, by: str | None, why: str | None = None
    ) -> bytes:
        """Return what the record says of who runs it: the client's `by` and the token's name."""
        who = by or (self._name if caller.name is None else "")
        if caller.name is not None:
            who = f"{who}@{caller.name}" if who else caller.name
        return build(who, rules.ttl, rules.codec.name, why, rules.max_attempts)

    def wake(self, identity: Identity) -> None:
        """Let the starts of this instance that wait for a key ask again."""
        self.waiting.wake(identity)

    def problem(self, error: IdempotencyError, caller: Caller) -> Problem:
        """Return the problem that an error is for this caller."""
        if isinstance(error, StoreError):
            return self.store_problem(error, caller)
        found = problem_of(error, shown=caller.may_operate or isinstance(error, _SHOWN))
        if found.code == "idempotency_error":
            log_failure("a request was not answered", error)
        return found

    def store_problem(self, error: StoreError, caller: Caller) -> Problem:
        """Return the problem of a store that failed; only an operator sees its host and path."""
        log_failure("a request was not answered", error)
        return problem_of(error, shown=caller.may_operate)

    # --- the verbs -----------------------------------------------------------------------

    async def start(
        self, caller: Caller, asked: Start, arrived: float, leaving: Leaving
    ) -> Run | DoneResult | DoneResponse:
        """Claim the key, or get its result; `arrived` is when the request came.

        `leaving` returns when the client has left.
        """
        identity = self.identity(asked.scope, asked.key)
        rules = self.rules(asked.scope)
        said = self._fingerprint(asked, rules)
        lease = self.lease(asked.scope, given(asked.lease))
        owner = self._owners.next() if asked.owner is UNSET else bytes.fromhex(asked.owner)
        request = ClaimRequest(
            identity,
            owner,
            None,
            lease,
            rules.ttl,
            rules.hold,
            rules.replace,
            rules.max_attempts,
            self.run_info(caller, rules, given(asked.by)),
        )
        claiming = _Claiming(self, Call(identity, said, rules), request)
        caller.count()
        try:
            step = await claiming.claim()
            if isinstance(step, Wait):
                step = await self._wait(
                    claiming, step, asked.wait, caller=caller, arrived=arrived, leaving=leaving
                )
            if isinstance(step, Reject):
                raise step.error
            if isinstance(step, Finished):
                return _done(step)
        except IdempotencyError as error:
            raise self.problem(about(error, identity), caller) from error
        return Run(
            owner=owner.hex(),
            attempt=step.number,
            fence=integer(step.fence),
            takeover=step.takeover,
            lease=lease,
            renew_every=lease / RENEWALS_PER_LEASE,
            waited=max(0.0, claiming.sent - arrived),
        )

    def _fingerprint(self, asked: Start, rules: Rules) -> bytes | None:
        if asked.fingerprint is not UNSET:
            if asked.payload is not UNSET:
                raise wrong("fingerprint", Start, "send a payload or a fingerprint, not both")
            return bytes.fromhex(asked.fingerprint)
        if asked.payload is not UNSET:
            return fingerprint(asked.payload)
        if rules.payload_required:
            raise wrong("payload", Start, "this scope compares payloads: send payload")
        return None

    async def _wait(
        self,
        claiming: _Claiming,
        busy: Wait,
        wait: float,
        *,
        caller: Caller,
        arrived: float,
        leaving: Leaving,
    ) -> Claimed | Finished | Reject:
        """Ask again when something may have changed, until there is an answer."""
        rules, identity = claiming.call.rules, claiming.call.identity
        limit = wait if rules.wait_timeout is None else min(wait, rules.wait_timeout)
        if limit <= 0:
            raise ConcurrentRequest(rules.message or "", retry_after=busy.retry_after)
        end = arrived + limit
        waits = pauses(rules)
        held_until = -math.inf
        with self.waiting.place(identity, caller) as place, _beside(leaving) as gone:
            gone.add_done_callback(place.wake)
            while True:
                self._check(gone, caller)
                left = end - monotonic()
                if left <= 0:
                    raise waited_too_long(rules, busy.retry_after)
                planned = min(place.pause(next(waits)), busy.retry_after, left)
                ask_at = monotonic() + planned
                if await place.wait(planned):
                    # Any number of messages cost one question per `wait_interval`.
                    held = min(held_until, ask_at) - monotonic()
                    if held > 0:
                        await asyncio.sleep(held)
                    held_until = monotonic() + rules.wait_interval
                self._check(gone, caller)
                step = await claiming.claim()
                if not isinstance(step, Wait):
                    return step
                busy = step

    def _check(self, gone: asyncio.Task[None], caller: Caller) -> None:
        if gone.done():
            raise Gone
        if caller.replaced:  # a start that is sent again learns what holds now
            raise Problem("concurrent_request", retry_after=1.0)
        if self.stopping:
            raise Problem("concurrent_request", retry_after=1.0, close=True)

    async def renew(self, caller: Caller, asked: Renew) -> Renewed:
        """Extend a lease."""
        identity = self.identity(asked.scope, asked.key)
        lease = self.lease(asked.scope, given(asked.lease))
        renewing = self.store.renew(identity, bytes.fromhex(asked.owner), lease)
        await self._owned(renewing, identity, caller)
        return Renewed(lease, lease / RENEWALS_PER_LEASE)

    async def finish(self, caller: Caller, asked: Finish) -> Stored:
        """Store a success; a stale owner's is refused."""
        identity = self.identity(asked.scope, asked.key)
        rules = self.rules(asked.scope)
        encoded, reason = self._outcome(identity, asked, rules)
        owner = bytes.fromhex(asked.owner)
        try:
            stored = await self.store.complete(identity, owner, encoded, rules.ttl)
        except ValueRejected:
            reason = "the store cannot take this value"
            completing = self.store.complete(identity, owner, omitted(reason), rules.ttl)
            await self._owned(completing, identity, caller)
        except StoreError as error:
            raise self.store_problem(about(error, identity), caller) from error
        else:
            self._must_own(identity, stored=stored)
        self.wake(identity)
        return Stored(omitted=reason or UNSET)

    def _outcome(
        self, identity: Identity, asked: Finish, rules: Rules
    ) -> tuple[Encoded, str | None]:
        if (asked.result is UNSET) is (asked.response is UNSET):
            raise wrong("result", Finish, "send exactly one of result and response")
        if asked.response is UNSET:
            kept = encode_result(asked.result, rules.codec, identity, None, rules.max_result_bytes)
            return kept.encoded, kept.problem
        status, lines, body = _parts(asked.response)
        packed = pack_answer(StoredAnswer(status, lines, body))
        if len(packed) <= rules.max_result_bytes:
            return Encoded(HTTP, packed), None
        reason = f"it has {len(packed)} bytes, the policy keeps at most {rules.max_result_bytes}"
        return omitted(reason), reason

    async def fail(self, caller: Caller, asked: Fail) -> Recorded:
        """Record a failure."""
        identity = self.identity(asked.scope, asked.key)
        rules = self.rules(asked.scope)
        outcome = self._decided(asked, rules)
        owner = bytes.fromhex(asked.owner)
        if outcome == "unknown":
            info = self.run_info(caller, rules, None, asked.error.type)
            await self._owned(self.store.renew(identity, owner, 0.0, info), identity, caller)
        else:
            final = outcome == "final"
            failing = self.store.fail(
                identity,
                owner,
                failure_of(
                    asked.error.type, asked.error.message, None if final else rules.max_attempts
                ),
                retryable=not final,
                keep_fingerprint=outcome != "forget",
                ttl=rules.ttl if final else rules.failed_ttl,
                ran=asked.ran,
            )
            await self._owned(failing, identity, caller)
        self.wake(identity)
        return Recorded(outcome)

    def _decided(self, asked: Fail, rules: Rules) -> Any:
        """Return what is recorded: what the client says, else what the policy says of failures."""
        if asked.outcome is UNSET:
            if not asked.ran:
                return "forget"
            return rules.failure or ("unknown" if rules.hold else "forget")
        if asked.outcome == "unknown" and not asked.ran:
            raise wrong("outcome", Fail, "an attempt that did not run has no unknown outcome")
        return asked.outcome

    async def keys(self, caller: Caller, asked: Keys) -> NewKeys:
        """Make keys."""
        del caller
        try:
            generator = KeyGenerator(given(asked.app))
        except InvalidKey as error:
            raise wrong("app", Keys, error.text) from None
        return NewKeys([generator.new() for _ in range(asked.count)])

    async def _owned(self, writing: Awaitable[bool], identity: Identity, caller: Caller) -> None:
        """Await a write that only the owner may do."""
        try:
            stored = await writing
        except StoreError as error:
            raise self.store_problem(about(error, identity), caller) from error
        self._must_own(identity, stored=stored)

    def _must_own(self, identity: Identity, *, stored: bool) -> None:
        if not stored:
            raise problem_of(about(LeaseLost(), identity), shown=False)

    # --- its life ------------------------------------------------------------------------

    async def ready(self) -> StoreError | None:
        """Ask the store, at most once a second; return the error if it cannot answer."""
        async with self._asking:
            asked, error = self._ready
            if monotonic() - asked > READY_FOR:
                before, error = error, None
                try:
                    await self.store.get(PROBE)
                except StoreError as failed:
                    error = failed
                self._ready = monotonic(), error
                if error is not None and before is None:
                    logger.error("not ready until the store answers: %s", error)
                elif error is None and before is not None:
                    logger.warning("ready again: the store answers")
            return error

    def stop(self) -> None:
        """End the starts that wait; from now on none does."""
        self.stopping = True
        self.waiting.wake_all()

    async def close(self) -> None:
        """End what runs beside the requests, and close the store."""
        await self.waiting.close()
        await self.store.close()


class Gone(Exception):
    """The client has left: there is no one to answer."""


_SHOWN: Final = (ConcurrentRequest, DuplicateRequest, AttemptsExhausted, WaitTimeout)
"""Errors whose text has nothing of a record; that of others may quote a result."""


class _Claiming:
    """One claim, which may be sent again with the same owner."""

    def __init__(self, service: Service, call: Call, request: ClaimRequest) -> None:
        self._service = service
        self._request = request
        self.call = call
        self.sent = 0.0
        """When the claim that counts was sent."""

    async def claim(self) -> Step:
        """Ask the store once what to do."""
        digest, *others = await self._digests()
        request = replace(self._request, fingerprint=digest)
        late: tuple[Claimed, ...] = ()
        while True:
            self.sent = monotonic()
            answer = await self._service.store.claim(request)
            if others and isinstance(answer, Mismatch):
                request = replace(request, fingerprint=others.pop(0))
                continue
            if not isinstance(answer, Claimed):
                return _decided(answer, self.call.rules)
            spent = monotonic() - self.sent
            if spent > request.lease / RENEWALS_PER_LEASE and came_late(request, late, spent):
                late += (answer,)
                continue
            return as_first_told(answer, late) if late else answer

    async def _digests(self) -> Digests:
        """Return the fingerprints to claim with, one after the other, while secrets are rotated."""
        service, call = self._service, self.call
        digests = service.setup.digests(call)
        if len(digests) == 1 or not call.rules.replace:
            return digests
        return known_digest(digests, await service.store.get(call.identity))


def _decided(answer: Claim, rules: Rules) -> Step:
    """Decide; a failure that cannot be read is one all the same."""
    try:
        return decide(answer, rules)
    except SerializationError:
        return Reject(PreviousFailure("Unknown", ""))


@contextmanager
def _beside(leaving: Leaving) -> Iterator[asyncio.Task[None]]:
    """Listen for the end of a connection while the `with` block lasts."""
    gone = asyncio.create_task(leaving())
    try:
        yield gone
    finally:
        gone.cancel()


def given(value: T | UnsetType) -> T | None:
    """Return what a client sent, None if it sent nothing."""
    return None if value is UNSET else value


def _done(found: Finished) -> DoneResult | DoneResponse:
    read = plain(found.outcome)
    if isinstance(read, Answered):
        return DoneResponse(found.number, read)
    return DoneResult(found.number, read.value, lossy=read.lossy or UNSET)


def _parts(response: Response) -> tuple[int, tuple[HeaderLine, ...], bytes]:
    """Return status, header lines and body as they are stored."""
    if response.status in NEVER:
        raise wrong("response", Finish, f"a response with status {response.status} is not stored")
    if response.body is not UNSET and response.base64 is not UNSET:
        raise wrong("response", Finish, "send body or base64 of a response, not both")
    try:
        body = (
            ("" if response.body is UNSET else response.body).encode()
            if response.base64 is UNSET
            else b64decode(response.base64, validate=True)
        )
        lines = [
            (name.lower().encode("latin-1"), value.strip().encode("latin-1"))
            for name, value in response.headers
        ]
    except ValueError:
        raise wrong("response", Finish, "base64 or a header of the response is not valid") from None
    if body and not has_body(response.status):
        raise wrong("response", Finish, f"status {response.status} has no body")
    return response.status, kept_lines(lines, _MARKER), body


_MARKER: Final = frozenset({b"idempotent-replayed"})
