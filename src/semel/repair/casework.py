"""One run of a reconciler: find what is stuck, ask its resolver, write the answer.

This module is generators, see `steps`; `reconciler` and `aio` run them. A record without a
resolver is reported and never touched.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TypeVar

from msgspec import Struct

from semel.core.policy import Duration, seconds
from semel.core.records import Identity, Record, State
from semel.engine.setup import Setup
from semel.errors import ConfigError, StoreError
from semel.repair.cases import Cases
from semel.repair.decisions import (
    AsyncResolver,
    Audit,
    Decision,
    Failed,
    GaveUp,
    Resolution,
    Resolved,
    ResolverFailed,
    Succeeded,
    Unknown,
    Unresolved,
)
from semel.repair.desk import Desk
from semel.repair.steps import Consult, Steps, ask
from semel.stores.urls import whole_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

BATCH = 100
"""Records of one run that are looked into at least, if there are so many."""

_PAGE = 500


class Report(Struct, frozen=True, kw_only=True):
    """What one run did."""

    decisions: tuple[Decision, ...] = ()
    moved_on: int = 0
    """Records that had ended, or had an owner again, before they could be adopted."""
    errors: int = 0
    """Records that the store could not give or take; the next run tries them again."""
    waiting: int = 0
    """Records that this reconciler leaves to a person, and that nobody has decided yet."""

    @property
    def resolved(self) -> int:
        """How many outcomes were stored."""
        return sum(isinstance(decision, Resolved) for decision in self.decisions)


class Unanswered(Unknown, frozen=True):
    """The resolver failed: nobody knows, and somebody should look at it."""


class Options(Struct, frozen=True, kw_only=True):
    """How a reconciler works."""

    older_than: Duration
    max_tries: int
    backoff: Duration
    lease: Duration
    name: str | None
    audit: Audit | None


class Casework:
    """The work of both reconcilers."""

    def __init__(
        self,
        engine: Setup[Any],
        resolvers: Mapping[str, AsyncResolver],
        options: Options,
        *,
        asynchronous: bool,
    ) -> None:
        self._desk = Desk(
            engine,
            name=options.name,
            lease=seconds("lease", options.lease),
            audit=options.audit,
        )
        self._resolvers = _checked(resolvers, asynchronous=asynchronous)
        self._older_than = seconds("older_than", options.older_than, zero=True)
        self._warned: set[str] = set()
        self._cases = Cases(
            whole_number("max_tries", options.max_tries), seconds("backoff", options.backoff)
        )

    def run(self, *, full: bool, stopped: Callable[[], bool]) -> Steps[Report]:
        """Look into what is stuck, and into what was left open before.

        Once `stopped`, the record that is being looked into is the last one.
        """
        again = self._cases.due(monotonic())
        found = yield from (self._scanned(stopped) if full else self._listed())
        unseen = yield from self._close_what_was_decided(found, stopped)
        decisions = self._without_resolver(found)
        due = [self._cases.open(record).identity for record in found if self._is_ready(record)]
        looks: list[list[Decision] | None] = []
        for identity in dict.fromkeys([*again, *due]):
            if stopped():
                break
            made = yield from self._tolerant(identity, self._look_into(identity))
            looks.append(made)
        told = (decision for look in looks if look is not None for decision in look)
        return Report(
            decisions=(*decisions, *told),
            moved_on=looks.count([]),
            errors=unseen + looks.count(None),
            waiting=len(self._cases.waiting()),
        )

    def _tolerant(self, identity: Identity, steps: Steps[T]) -> Steps[T | None]:
        """Let one record's trouble with the store leave the others alone; None = it had some."""
        try:
            return (yield from steps)
        except StoreError as error:
            self._desk.store_failed(identity, error)
            return None

    # --- finding -------------------------------------------------------------------------

    def _listed(self) -> Steps[list[Record]]:
        """Ask the store what is stuck; records that are not to be tried must not hide others."""
        limit = BATCH
        while True:
            found: list[Record] = yield ask(
                self._desk.store.stuck, older_than=self._older_than, limit=limit
            )
            if len(found) < limit or sum(map(self._is_ready, found)) >= BATCH:
                return found
            limit *= 2

    def _scanned(self, stopped: Callable[[], bool]) -> Steps[list[Record]]:
        """Read every running record: an index of a store is a hint, and hints get lost."""
        found: list[Record] = []
        cursor = None
        while True:
            page = yield ask(
                self._desk.store.scan, state=State.PROCESSING, limit=_PAGE, cursor=cursor
            )
            found += [record for record in page.records if self._is_stuck(record)]
            cursor = page.cursor
            if cursor is None or stopped():
                return found

    def _is_stuck(self, record: Record) -> bool:
        return record.lease_until is not None and (
            record.now - record.lease_until >= self._older_than
        )

    def _is_ready(self, record: Record) -> bool:
        return record.scope in self._resolvers and self._cases.is_ready(record, monotonic())

    def _without_resolver(self, found: list[Record]) -> list[Decision]:
        """Tell once of each record whose scope has no resolver."""
        decisions: list[Decision] = []
        for record in found:
            if record.scope not in self._resolvers and self._cases.is_ready(record, monotonic()):
                self._cases.leave(record)
                reason = "no resolver is registered for its scope"
                decisions.append(self._desk.made(Unresolved, record, reason=reason, tries=0))
                self._desk.tell(decisions[-1])
        return decisions

    # --- what a person had to decide -----------------------------------------------------

    def _close_what_was_decided(
        self, found: list[Record], stopped: Callable[[], bool]
    ) -> Steps[int]:
        """Forget cases that somebody else has decided; tells how many could not be looked at."""
        errors = 0
        listed = {record.identity for record in found}
        for identity in self._cases.waiting():
            if stopped():
                break
            if identity not in listed:
                over = yield from self._tolerant(identity, self._close_if_over(identity))
                errors += over is None
        return errors

    def _close_if_over(self, identity: Identity) -> Steps[bool]:
        record = yield ask(self._desk.store.get, identity)
        over = self._cases.is_over(record)
        if over:
            self._cases.close(identity)
        return over

    # --- deciding ------------------------------------------------------------------------

    def _look_into(self, identity: Identity) -> Steps[list[Decision]]:
        """Resolve one record; no decisions = there was nothing to decide any more."""
        sent = monotonic()
        record = yield from self._desk.adopt(identity)
        if record is None:  # somebody else has it, perhaps only for a while
            yield from self._close_if_over(identity)
            return []
        resolution = yield from self._consulted(record)
        if isinstance(resolution, Unknown):
            age = record.now - self._cases.open(record).abandoned_at + monotonic() - sent
            if not (yield from self._desk.give_back(record, age)):
                yield from self._close_if_over(identity)
                return []
            made = self._left_open(record, resolution)
        else:
            self._warn_of_ttl(record, resolution)
            stored = yield from self._desk.write(record, resolution, may_omit=True)
            self._cases.close(identity)
            made = [self._desk.decision(record, resolution, stored=stored)]
        for decision in made:
            self._desk.tell(decision)
        return made

    def _warn_of_ttl(self, record: Record, resolution: Succeeded | Failed) -> None:
        if record.scope not in self._warned and not self._desk.knows_ttl(record, resolution):
            self._warned.add(record.scope)
            logger.warning(
                "outcomes of held attempts of scope %s are kept for the default ttl, because "
                "neither the settings nor the engine name the scope. If the policy in the program "
                "keeps them longer, their effects can be repeated",
                record.scope,
            )

    def _left_open(self, record: Record, unknown: Unknown) -> list[Decision]:
        tries, last = self._cases.tried(record, monotonic())
        kind = ResolverFailed if isinstance(unknown, Unanswered) else Unresolved
        made = [self._desk.made(kind, record, reason=unknown.reason, tries=tries)]
        if last:
            made.append(self._desk.made(GaveUp, record, tries=tries))
        return made

    def _consulted(self, record: Record) -> Steps[Resolution]:
        """Ask the resolver; one that fails does not know."""
        try:
            answer = yield Consult(self._resolvers[record.scope], record)
        except Exception as error:
            logger.exception("the resolver of %s failed", record.scope)
            return Unanswered(type(error).__name__)
        if isinstance(answer, Succeeded | Failed | Unknown):
            return answer
        return Unanswered(f"the resolver gave {type(answer).__name__}, which is no resolution")


def _checked(resolvers: object, *, asynchronous: bool) -> dict[str, AsyncResolver]:
    if not isinstance(resolvers, Mapping) or not all(map(callable, resolvers.values())):
        raise ConfigError("resolvers must be a mapping from scope to a function of the record")
    for scope, resolver in resolvers.items():
        if not asynchronous and inspect.iscoroutinefunction(resolver):
            raise ConfigError(f"the resolver of {scope} is async: use an AsyncReconciler")
    return dict(resolvers)
