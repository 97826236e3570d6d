"""Decides what became of one record: adopt it, write the outcome, report the decision.

Stuck records are found by `reconcile`, which decides through this module; `settle` is for a person
who decides by hand. The resolver that decides first becomes the record's owner; another resolver,
or the old owner if it comes back, is rejected.

A running record says how long its policy keeps an outcome, and which codec writes it (`run_info`).
Both count for more than the policies of the engine that decides, which may be another program's.
"""

from __future__ import annotations

from typing import Any

from semel import events
from semel.aio import AsyncIdempotency
from semel.core import run_info
from semel.core.audit import checked_text
from semel.core.codec import StoredResult, encode_failure, omitted
from semel.core.observers import Log, unheard
from semel.core.policy import Duration, seconds
from semel.core.records import AdoptRequest, Identity, Record, ScanRequest
from semel.engine.runs import AsyncRuns
from semel.errors import ConfigError, IdempotencyError, ValueRejected, raise_about
from semel.repair.audit import AsyncAuditTrail
from semel.repair.decisions import (
    Audit,
    Decision,
    Failed,
    Overtaken,
    Resolved,
    ResolvedFailure,
    Succeeded,
    Verdict,
    entry,
    log_audit,
)
from semel.repair.results import encode_for

logger = Log("semel.repair")

LEASE = 60.0
"""Seconds that a resolver has; after that the record counts as abandoned again."""


class AsyncDecider:
    """Decides on the records of one engine, under one name."""

    def __init__(
        self,
        engine: AsyncIdempotency,
        *,
        name: str | None = None,
        lease: Duration = LEASE,
        ttl: Duration | None = None,
        audit: Audit | None = None,
        reason: str | None = None,
    ) -> None:
        store = engine.internals.store
        if {AdoptRequest, ScanRequest} & store.unsupported:
            raise ConfigError(f"{type(store).__name__} cannot list and adopt abandoned records")
        self._engine = engine
        self._trail = AsyncAuditTrail(engine, name=name)
        self._reason = None if reason is None else checked_text("reason", reason)
        self._lease = seconds("lease", lease)
        self._ttl = None if ttl is None else seconds("ttl", ttl)
        self._audit = log_audit if audit is None else audit

    @property
    def _runs(self) -> AsyncRuns:
        return self._engine.internals  # each time, which notices a fork

    @property
    def store(self) -> Any:
        """The engine's store; another one after a fork."""
        return self._runs.store

    async def adopt(self, identity: Identity) -> Record | None:
        """Become the owner of an abandoned attempt; None = there is nothing to decide any more."""
        record: Record | None = await self.store.adopt(
            identity, self._runs.owners.next(), self._lease
        )
        return record

    async def give_back(self, record: Record, abandoned_for: float) -> bool:
        """Leave an adopted attempt abandoned, as it has been for this time; False as in `write`."""
        # At least 0: what is given back is no longer ours.
        lease = -max(0.0, abandoned_for)
        stored: bool = await self.store.renew(record.identity, record.owner, lease)
        return stored

    def knows_ttl(self, record: Record, resolution: Succeeded | Failed) -> bool:
        """Return whether it is known how long the outcome of an attempt has to be kept.

        The policy of a held attempt may be written in a program that this engine knows nothing of,
        and forgotten too early its effect happens twice. Known are a ttl that was given, that of
        the record, and the policies of an engine that names the scope, or that itself holds every
        attempt.
        """
        if self._ttl is not None or not record.hold or run_info.read(record.run_info) is not None:
            return True
        if isinstance(resolution, Failed) and resolution.retryable:
            return True  # it may run again anyway
        engine_policy = self._runs.setup.levels[0]
        return bool(self._runs.setup.names(record.scope)) or (
            engine_policy is not None and engine_policy.abandoned == "hold"
        )

    def outcome(
        self, record: Record, resolution: Succeeded | Failed, *, may_omit: bool = False
    ) -> StoredResult[object]:
        """Encode the outcome of an attempt as its record's codec reads it.

        A result that doesn't fit raises ConfigError. With `may_omit`, a value that can never
        be stored is left out.
        """
        if isinstance(resolution, Failed):
            info = run_info.read(record.run_info) if resolution.retryable else None
            most = None if info is None else info.most
            return StoredResult(encode_failure(ResolvedFailure(resolution.error), most), None)
        setup = self._runs.setup
        result = encode_for(
            resolution.value,
            run_info.read(record.run_info),
            setup.rules(record.scope),
            setup.codecs,
            record.identity,
        )
        if result.problem is not None and not may_omit:
            raise ConfigError(f"the result cannot be stored: {result.problem}")
        return result

    async def write(
        self,
        record: Record,
        resolution: Succeeded | Failed,
        abandoned_for: float,
        *,
        may_omit: bool = False,
    ) -> bool:
        """Write the outcome of an adopted attempt; False = another process owns it by now.

        With `may_omit`, a success whose value can never be stored is written without it. If nothing
        can be written, the attempt is left as it was, `abandoned_for` this time.
        """
        try:
            outcome = self.outcome(record, resolution, may_omit=may_omit)
            return await self._write(record, resolution, outcome)
        except ValueRejected as rejected:
            if may_omit and isinstance(resolution, Succeeded):
                reason = "the store rejected it"
                without: StoredResult[object] = StoredResult(
                    omitted(reason), None, f"{reason}: {rejected}"
                )
                return await self._write(record, resolution, without)
            await self.give_back(record, abandoned_for)  # else it would be ours for a lease
            raise
        except ConfigError:
            await self.give_back(record, abandoned_for)
            raise

    async def _write(
        self, record: Record, resolution: Succeeded | Failed, outcome: StoredResult[object]
    ) -> bool:
        store, identity, owner = self.store, record.identity, record.owner
        ttl = self._ttl_of(record, resolution)
        if outcome.problem is not None:
            self._runs.announce(
                events.ResultOmitted(
                    identity=identity, number=record.number, reason=outcome.problem
                )
            )
        stored: bool
        if isinstance(resolution, Succeeded):
            stored = await store.complete(identity, owner, outcome.encoded, ttl)
        else:
            stored = await store.fail(
                identity,
                owner,
                outcome.encoded,
                retryable=resolution.retryable,
                keep_fingerprint=True,
                ttl=ttl,
            )
        return stored

    def _ttl_of(self, record: Record, resolution: Succeeded | Failed) -> float:
        if self._ttl is not None:
            return self._ttl
        rules = self._runs.setup.rules(record.scope)
        if isinstance(resolution, Failed) and resolution.retryable:
            return rules.failed_ttl
        info = run_info.read(record.run_info)
        return rules.ttl if info is None else info.ttl

    # --- the audit trail: before anything is changed ---------------------------------------------

    async def enter(self, record: Record, resolution: Succeeded | Failed) -> None:
        """Write into the audit trail what is about to be decided; if that fails, it must not be."""
        await self._trail.write(
            "resolve", [record.identity], details=verdict_of(resolution), reason=self._reason
        )

    async def enter_run(self, records: int) -> None:
        """Write into the audit trail that so many records are about to be looked into."""
        await self._trail.write("reconcile", details=f"{records} records", reason=self._reason)

    # --- reports ---------------------------------------------------------------------------------

    def decision(self, record: Record, resolution: Succeeded | Failed, *, stored: bool) -> Decision:
        """Make the event that says what became of a record."""
        verdict = verdict_of(resolution)
        if not stored:
            return self.made(Overtaken, record, verdict=verdict, reason=self._reason)
        kept_until = record.now + self._ttl_of(record, resolution)
        return self.made(
            Resolved, record, verdict=verdict, kept_until=kept_until, reason=self._reason
        )

    def made(self, kind: type[Decision], record: Record, **details: Any) -> Decision:
        """Make a decision on a record, with who and when."""
        return kind(
            identity=record.identity,
            number=record.number,
            fence=record.fence,
            by=self._trail.by,
            at=record.now,
            **details,
        )

    def report(self, decision: Decision) -> None:
        """Notify the hooks, and the log or the file; neither can undo what is stored."""
        self._runs.announce(decision)
        raised = unheard(self._audit, decision)
        if raised is not None:
            # By its entry, which has the digest: no key is logged.
            logger.error(
                "decision not written to the audit log: %s",
                entry(decision),
                exc_info=raised,
            )

    def store_failed(self, identity: Identity, error: Exception) -> None:
        """Report that a record could not be looked into."""
        self._runs.announce(events.StoreFailed(identity=identity, verb="adopt", error=str(error)))


def verdict_of(resolution: Succeeded | Failed) -> Verdict:
    """Name what is decided."""
    if isinstance(resolution, Succeeded):
        return "succeeded"
    return "retryable" if resolution.retryable else "failed"


async def settle_async(
    idempotency: AsyncIdempotency,
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str = "default",
    ttl: Duration | None = None,
    name: str | None = None,
    audit: Audit | None = None,
    reason: str | None = None,
) -> Decision | None:
    """Decide what the stuck attempt of a `key` in a `scope` did; return None if there is none.

    `idempotency` is the engine. `resolution` is `Failed(error)`, or `Succeeded(value)` with the
    result of a function, an `HttpAnswer`, or a `GrpcAnswer`. A result that the record's codec
    doesn't read raises `ConfigError`, and nothing changes. `name` and `reason` say who decides,
    and why: semel writes an entry to the audit trail first, and decides nothing if it can't.
    `audit` gets the decision instead of the log. The outcome is kept for `ttl`, or as long as the
    attempt's policy says; a retryable one is kept for the engine's `failed_ttl`. The decision says
    until when. A held attempt whose policy is unknown needs `ttl`.

    Examples:
        >>> outcome = Succeeded("ch_42")
        >>> made = await settle_async(idem, "order:42", outcome, scope="payments", ttl=3 * 86400)
        >>> made is None
        True
    """
    if not isinstance(resolution, Succeeded | Failed):
        raise ConfigError(
            f"a person decides Succeeded(...) or Failed(...), not {type(resolution).__name__}"
        )
    decider = AsyncDecider(idempotency, name=name, ttl=ttl, audit=audit, reason=reason)
    identity = idempotency.internals.setup.identity(key, scope)
    try:
        return await _decide_by_hand(decider, identity, resolution)
    except IdempotencyError as error:
        raise_about(error, identity)


async def _decide_by_hand(
    decider: AsyncDecider, identity: Identity, resolution: Succeeded | Failed
) -> Decision | None:
    found: Record | None = await decider.store.get(identity)
    if found is None or not found.abandoned:
        return None
    decider.outcome(found, resolution)  # what cannot be written is rejected here
    if not decider.knows_ttl(found, resolution):
        raise ConfigError(
            "the attempt is held, and neither its record, nor the settings, nor the engine say how "
            f"long outcomes of its scope {identity.scope!r} are kept: it might be forgotten too "
            "early, and its effect be repeated. Pass ttl (--ttl) with the value of the policy in "
            "the program, or name the scope in the settings"
        )
    await decider.enter(found, resolution)
    record = await decider.adopt(identity)
    if record is None:
        return None
    stored = await decider.write(record, resolution, found.abandoned_for)
    decision = decider.decision(record, resolution, stored=stored)
    decider.report(decision)
    return decision
