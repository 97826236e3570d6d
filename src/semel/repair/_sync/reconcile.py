# Generated from repair/reconcile.py by `make generate`: change that file instead.
"""The reconciler: finds abandoned attempts, asks their resolvers, and writes what they say.

A record whose scope has no resolver is reported and never touched. What is left open between two
runs is remembered in memory alone: a restarted reconciler tries everything anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import random
from time import monotonic
from typing import Self, TypeVar

from semel.core.observers import Log
from semel.core.policy import Duration, seconds
from semel.core.process import notice_fork
from semel.core.records import Identity, Record, State
from semel.errors import ConfigError, StoreError
from semel.repair._sync.resolve import LEASE, Decider
from semel.repair.decisions import (
    Audit,
    Decision,
    Failed,
    GaveUp,
    Resolution,
    Resolver,
    ResolverFailed,
    Succeeded,
    Unknown,
    Unresolved,
)
from semel.repair.maintenance import check_target
from semel.repair.reconcile import (
    Background,
    OpenCases,
    Raised,
    Report,
    Unanswered,
    caught,
    checked_resolvers,
    consult,
)
from semel.stores.base import Store
from semel.stores.urls import whole_number
from semel.sync import Idempotency

T = TypeVar("T")

logger = Log("semel.repair")

BATCH = 100
"""Records of one run that are looked into at least, if there are so many."""

PAGE = 500
"""Records that a full run reads at a time."""


class Reconciler:
    """Runs the resolver of each scope over stuck attempts, and stores what they decide.

    Use it with `with` to run on a thread every `every` seconds, or call `run_once()` from your
    own job. Any number of reconcilers can work on one store. Resolvers can be async; plain
    functions run in threads.

    `idempotency` is an engine, a store, a URL, or None (the settings), and `resolvers` maps a
    scope to a function of the record. A resolver runs when an attempt has been abandoned for
    `older_than` seconds, and has `lease` seconds. After `Unknown` it runs again, first after
    `backoff` seconds, `max_tries` times in all. `name` and `reason` say who decides, and why:
    semel writes an entry to the audit trail before each run and each decision. `audit` gets the
    decisions instead of the log.

    Examples:
        >>> reconciler = Reconciler(idem, {"payments": lambda record: Succeeded("ch_42")})
        >>> report = reconciler.run_once()
        >>> report.resolved
        0
    """

    def __init__(
        self,
        idempotency: Idempotency | Store | str | None,
        resolvers: Mapping[str, Resolver],
        *,
        older_than: Duration = 600.0,
        every: Duration = 60.0,
        max_tries: int = 5,
        backoff: Duration = 60.0,
        lease: Duration = LEASE,
        name: str | None = None,
        audit: Audit | None = None,
        reason: str | None = None,
    ) -> None:
        self._every = seconds("every", every)
        self._background = Background()
        self._own: Idempotency | None = None
        if isinstance(idempotency, Idempotency):
            engine = idempotency
        else:
            check_target(idempotency)
            engine = self._own = Idempotency(idempotency)
        self._reconciliation = Reconciliation(
            Decider(engine, name=name, lease=lease, audit=audit, reason=reason),
            resolvers,
            older_than=older_than,
            max_tries=max_tries,
            backoff=backoff,
        )
        self._stops = 0

    def run_once(self, *, full: bool = False) -> Report:
        """Run once and return a report; `full` reads every running record instead of an index."""
        stops = self._stops
        return self._run(lambda: self._stops != stops, full=full)

    def start(self) -> None:
        """Run now and then every `every` seconds, on a thread."""
        self._background.start(self._look)

    def stop(self) -> None:
        """Stop after the record in hand.

        That holds for a `run_once()` in progress, too; a later one runs again.
        """
        self._stops += 1
        self._background.stop()

    def close(self) -> None:
        """Stop, and close what the reconciler opened."""
        self.stop()
        if self._own is not None:
            self._own.close()

    def _look(self, stopped: Callable[[], bool]) -> float:
        """Look once, whatever comes of it; returns seconds until the next look."""
        ran = caught(self._run, stopped)
        if isinstance(ran, Raised):
            logger.error("reconciliation failed; it will be repeated", exc_info=ran.error)
        # Many processes that start together should not all look together.
        return self._every * (0.75 + random() / 2)  # noqa: S311 - no secret

    def _run(self, stopped: Callable[[], bool], *, full: bool = False) -> Report:
        notice_fork()
        with self._background.one_at_a_time:
            return self._reconciliation.run(full=full, stopped=stopped)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reconciliation:
    """The work of a reconciler, run by run."""

    def __init__(
        self,
        decider: Decider,
        resolvers: Mapping[str, Resolver],
        *,
        older_than: Duration,
        max_tries: int,
        backoff: Duration = 60.0,
    ) -> None:
        self._decider = decider
        self._resolvers = checked_resolvers(resolvers, asynchronous=False)
        self._older_than = seconds("older_than", older_than, zero=True)
        self._warned: set[str] = set()
        self._open_cases = OpenCases(
            whole_number("max_tries", max_tries), seconds("backoff", backoff)
        )

    def run(
        self,
        *,
        full: bool,
        stopped: Callable[[], bool],
        progress: Callable[[str], object] | None = None,
    ) -> Report:
        """Look into what is stuck, and into what was left open before.

        Once `stopped`, the record that is being looked into is the last one. `progress` is called
        with a text that says how far it is.
        """
        show = _ignore if progress is None else progress
        again = self._open_cases.due(monotonic())
        found = self._scan(stopped, show) if full else self._list()
        errors = self._close_what_was_decided(found, stopped)
        decisions = self._report_without_resolver(found)
        moved_on = 0
        due = [self._open_cases.open(record).identity for record in found if self._is_ready(record)]
        to_look_into = dict.fromkeys([*again, *due])
        if to_look_into and not stopped():
            self._decider.enter_run(len(to_look_into))
        for number, identity in enumerate(to_look_into, start=1):
            if stopped():
                break
            show(f"looking into {number:,} of {len(to_look_into):,} stuck records")
            made = self._tolerant(self._look_into, identity)
            if made is None:
                errors += 1
            elif not made:
                moved_on += 1
            else:
                decisions += made
        return Report(
            decisions=tuple(decisions),
            moved_on=moved_on,
            errors=errors,
            waiting=len(self._open_cases.waiting()),
        )

    def _tolerant(self, step: Callable[[Identity], T], identity: Identity) -> T | None:
        """Let a store that fails for one record leave the others alone; None = it failed."""
        try:
            return step(identity)
        except StoreError as error:
            self._decider.store_failed(identity, error)
            return None

    # --- finding ---------------------------------------------------------------------------------

    def _list(self) -> list[Record]:
        """Ask the store what is stuck; records that are not to be tried must not hide others."""
        limit = BATCH
        while True:
            found: list[Record] = self._decider.store.stuck(
                older_than=self._older_than, limit=limit
            )
            if len(found) < limit or sum(map(self._is_ready, found)) >= BATCH:
                return found
            limit *= 2

    def _scan(self, stopped: Callable[[], bool], show: Callable[[str], object]) -> list[Record]:
        """Read every running record: an index of a store is a hint, and hints get lost."""
        found: list[Record] = []
        cursor, read = None, 0
        while True:
            page = self._decider.store.scan(state=State.PROCESSING, limit=PAGE, cursor=cursor)
            found += [record for record in page.records if self._is_stuck(record)]
            read += len(page.records)
            show(f"{read:,} running records read, {len(found):,} of them stuck")
            cursor = page.cursor
            if cursor is None or stopped():
                return found

    def _is_stuck(self, record: Record) -> bool:
        return record.lease_until is not None and (
            record.now - record.lease_until >= self._older_than
        )

    def _is_ready(self, record: Record) -> bool:
        return record.scope in self._resolvers and self._open_cases.is_ready(record, monotonic())

    def _report_without_resolver(self, found: list[Record]) -> list[Decision]:
        """Report once each record whose scope has no resolver."""
        decisions: list[Decision] = []
        for record in found:
            if record.scope not in self._resolvers and self._open_cases.is_ready(
                record, monotonic()
            ):
                self._open_cases.leave(record)
                reason = "no resolver is registered for its scope"
                decisions.append(self._decider.made(Unresolved, record, reason=reason, tries=0))
                self._decider.report(decisions[-1])
        return decisions

    def _close_what_was_decided(self, found: list[Record], stopped: Callable[[], bool]) -> int:
        """Forget cases that somebody else has decided; returns how many could not be looked at."""
        errors = 0
        listed = {record.identity for record in found}
        for identity in self._open_cases.waiting():
            if stopped():
                break
            if identity not in listed:
                over = self._tolerant(self._close_if_over, identity)
                errors += over is None
        return errors

    def _close_if_over(self, identity: Identity) -> bool:
        record = self._decider.store.get(identity)
        over = self._open_cases.is_over(record)
        if over:
            self._open_cases.close(identity)
        return over

    # --- deciding --------------------------------------------------------------------------------

    def _look_into(self, identity: Identity) -> list[Decision]:
        """Resolve one record; no decisions = there was nothing to decide any more."""
        sent = monotonic()
        record = self._decider.adopt(identity)
        if record is None:  # somebody else has it, perhaps only for a while
            self._close_if_over(identity)
            return []
        resolution = self._consult(record)
        age = record.now - self._open_cases.open(record).abandoned_at + monotonic() - sent
        if isinstance(resolution, Unknown):
            if not self._decider.give_back(record, age):
                self._close_if_over(identity)
                return []
            made = self._leave_open(record, resolution)
        else:
            self._warn_of_ttl(record, resolution)
            try:
                self._decider.enter(record, resolution)
            except StoreError:
                self._decider.give_back(record, age)  # else it would be ours for a lease
                raise
            stored = self._decider.write(record, resolution, age, may_omit=True)
            self._open_cases.close(identity)
            made = [self._decider.decision(record, resolution, stored=stored)]
        for decision in made:
            self._decider.report(decision)
        return made

    def _consult(self, record: Record) -> Resolution:
        """Ask the resolver; one that fails does not know."""
        answer = caught(consult, self._resolvers[record.scope], record)
        if isinstance(answer, Raised):
            logger.error(
                "resolver of %s failed; the attempt stays unresolved",
                record.scope,
                exc_info=answer.error,
            )
            return Unanswered(type(answer.error).__name__)
        if isinstance(answer, Unknown):
            return answer
        if isinstance(answer, Succeeded | Failed):
            return self._checked(record, answer)
        return Unanswered(f"the resolver gave {type(answer).__name__}, which is no resolution")

    def _checked(self, record: Record, resolution: Succeeded | Failed) -> Resolution:
        """Return the resolution, or that it is none for this record, which a person has to see."""
        try:
            self._decider.outcome(record, resolution, may_omit=True)
        except ConfigError as error:
            return Unanswered(error.text)
        return resolution

    def _leave_open(self, record: Record, unknown: Unknown) -> list[Decision]:
        tries, last = self._open_cases.tried(record, monotonic())
        kind = ResolverFailed if isinstance(unknown, Unanswered) else Unresolved
        made = [self._decider.made(kind, record, reason=unknown.reason, tries=tries)]
        if last:
            made.append(self._decider.made(GaveUp, record, tries=tries))
        return made

    def _warn_of_ttl(self, record: Record, resolution: Succeeded | Failed) -> None:
        if record.scope not in self._warned and not self._decider.knows_ttl(record, resolution):
            self._warned.add(record.scope)
            logger.warning(
                "outcomes of held attempts of scope %s are kept for the default ttl, because "
                "neither the settings nor the engine name the scope. If the policy in the program "
                "keeps them longer, their effects can be repeated",
                record.scope,
            )


def _ignore(_: str) -> None:
    """Show no progress."""
