"""The reconciler: finds abandoned attempts, asks their resolvers, and writes what they say.

A record whose scope has no resolver is reported and never touched. What is left open between two
runs is remembered in memory alone: a restarted reconciler tries everything anew.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from random import random
from time import monotonic
from typing import Self, TypeVar

from msgspec import Struct

from semel.aio import AsyncIdempotency
from semel.core.observers import Log, is_for_the_caller
from semel.core.policy import Duration, seconds
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import Identity, Record, State
from semel.core.stop import Stop
from semel.engine.colours.tasks import in_thread, is_cancelled
from semel.errors import ConfigError, StoreError
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
from semel.repair.maintenance import check_target
from semel.repair.resolve import LEASE, AsyncDecider
from semel.stores.base import AsyncStore
from semel.stores.urls import whole_number

T = TypeVar("T")

logger = Log("semel.repair")

BATCH = 100
"""Records of one run that are looked into at least, if there are so many."""

PAGE = 500
"""Records that a full run reads at a time."""


class Report(Struct, frozen=True, kw_only=True):
    """The result of one run of a reconciler."""

    decisions: tuple[Decision, ...] = ()
    moved_on: int = 0
    """Records that had ended or had an owner again before the reconciler could adopt them."""
    errors: int = 0
    """Records that could not be read or written; the next run repeats them."""
    waiting: int = 0
    """Records that this reconciler leaves to a person, and that are not decided yet."""

    @property
    def resolved(self) -> int:
        """The number of outcomes that were stored."""
        return sum(isinstance(decision, Resolved) for decision in self.decisions)


class AsyncReconciler:
    """Runs the resolver of each scope over stuck attempts, and stores what they decide.

    Use it with `async with` to run in a task every `every` seconds, or call `run_once()` from your
    own job. Any number of reconcilers can work on one store. Resolvers can be async; plain
    functions run in threads.

    `idempotency` is an engine, a store, a URL, or None (the settings), and `resolvers` maps a
    scope to a function of the record. A resolver runs when an attempt has been abandoned for
    `older_than` seconds, and has `lease` seconds. After `Unknown` it runs again, first after
    `backoff` seconds, `max_tries` times in all. `name` and `reason` say who decides, and why:
    semel writes an entry to the audit trail before each run and each decision. `audit` gets the
    decisions instead of the log.

    Examples:
        >>> reconciler = AsyncReconciler(idem, {"payments": lambda record: Succeeded("ch_42")})
        >>> report = await reconciler.run_once()
        >>> report.resolved
        0
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency | AsyncStore | str | None,
        resolvers: Mapping[str, AsyncResolver],
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
        self._background = AsyncBackground()
        self._own: AsyncIdempotency | None = None
        if isinstance(idempotency, AsyncIdempotency):
            engine = idempotency
        else:
            check_target(idempotency)
            engine = self._own = AsyncIdempotency(idempotency)
        self._reconciliation = AsyncReconciliation(
            AsyncDecider(engine, name=name, lease=lease, audit=audit, reason=reason),
            resolvers,
            older_than=older_than,
            max_tries=max_tries,
            backoff=backoff,
        )
        self._stops = 0

    async def run_once(self, *, full: bool = False) -> Report:
        """Run once and return a report; `full` reads every running record instead of an index."""
        stops = self._stops
        return await self._run(lambda: self._stops != stops, full=full)

    def start(self) -> None:
        """Run now and then every `every` seconds, in a task."""
        self._background.start(self._look)

    async def stop(self) -> None:
        """Stop after the record in hand.

        That holds for a `run_once()` in progress, too; a later one runs again.
        """
        self._stops += 1
        await self._background.stop()

    async def close(self) -> None:
        """Stop, and close what the reconciler opened."""
        await self.stop()
        if self._own is not None:
            await self._own.close()

    async def _look(self, stopped: Callable[[], bool]) -> float:
        """Look once, whatever comes of it; returns seconds until the next look."""
        ran = await aio_caught(self._run, stopped)
        if isinstance(ran, Raised):
            logger.error("reconciliation failed; it will be repeated", exc_info=ran.error)
        # Many processes that start together should not all look together.
        return self._every * (0.75 + random() / 2)  # noqa: S311 - no secret

    async def _run(self, stopped: Callable[[], bool], *, full: bool = False) -> Report:
        notice_fork()
        async with self._background.one_at_a_time:
            return await self._reconciliation.run(full=full, stopped=stopped)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncReconciliation:
    """The work of a reconciler, run by run."""

    def __init__(
        self,
        decider: AsyncDecider,
        resolvers: Mapping[str, AsyncResolver],
        *,
        older_than: Duration,
        max_tries: int,
        backoff: Duration = 60.0,
    ) -> None:
        self._decider = decider
        self._resolvers = checked_resolvers(resolvers, asynchronous=True)
        self._older_than = seconds("older_than", older_than, zero=True)
        self._warned: set[str] = set()
        self._open_cases = OpenCases(
            whole_number("max_tries", max_tries), seconds("backoff", backoff)
        )

    async def run(
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
        found = await self._scan(stopped, show) if full else await self._list()
        errors = await self._close_what_was_decided(found, stopped)
        decisions = self._report_without_resolver(found)
        moved_on = 0
        due = [self._open_cases.open(record).identity for record in found if self._is_ready(record)]
        to_look_into = dict.fromkeys([*again, *due])
        if to_look_into and not stopped():
            await self._decider.enter_run(len(to_look_into))
        for number, identity in enumerate(to_look_into, start=1):
            if stopped():
                break
            show(f"looking into {number:,} of {len(to_look_into):,} stuck records")
            made = await self._tolerant(self._look_into, identity)
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

    async def _tolerant(
        self, step: Callable[[Identity], Awaitable[T]], identity: Identity
    ) -> T | None:
        """Let a store that fails for one record leave the others alone; None = it failed."""
        try:
            return await step(identity)
        except StoreError as error:
            self._decider.store_failed(identity, error)
            return None

    # --- finding ---------------------------------------------------------------------------------

    async def _list(self) -> list[Record]:
        """Ask the store what is stuck; records that are not to be tried must not hide others."""
        limit = BATCH
        while True:
            found: list[Record] = await self._decider.store.stuck(
                older_than=self._older_than, limit=limit
            )
            if len(found) < limit or sum(map(self._is_ready, found)) >= BATCH:
                return found
            limit *= 2

    async def _scan(
        self, stopped: Callable[[], bool], show: Callable[[str], object]
    ) -> list[Record]:
        """Read every running record: an index of a store is a hint, and hints get lost."""
        found: list[Record] = []
        cursor, read = None, 0
        while True:
            page = await self._decider.store.scan(state=State.PROCESSING, limit=PAGE, cursor=cursor)
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

    async def _close_what_was_decided(
        self, found: list[Record], stopped: Callable[[], bool]
    ) -> int:
        """Forget cases that somebody else has decided; returns how many could not be looked at."""
        errors = 0
        listed = {record.identity for record in found}
        for identity in self._open_cases.waiting():
            if stopped():
                break
            if identity not in listed:
                over = await self._tolerant(self._close_if_over, identity)
                errors += over is None
        return errors

    async def _close_if_over(self, identity: Identity) -> bool:
        record = await self._decider.store.get(identity)
        over = self._open_cases.is_over(record)
        if over:
            self._open_cases.close(identity)
        return over

    # --- deciding --------------------------------------------------------------------------------

    async def _look_into(self, identity: Identity) -> list[Decision]:
        """Resolve one record; no decisions = there was nothing to decide any more."""
        sent = monotonic()
        record = await self._decider.adopt(identity)
        if record is None:  # somebody else has it, perhaps only for a while
            await self._close_if_over(identity)
            return []
        resolution = await self._consult(record)
        age = record.now - self._open_cases.open(record).abandoned_at + monotonic() - sent
        if isinstance(resolution, Unknown):
            if not await self._decider.give_back(record, age):
                await self._close_if_over(identity)
                return []
            made = self._leave_open(record, resolution)
        else:
            self._warn_of_ttl(record, resolution)
            try:
                await self._decider.enter(record, resolution)
            except StoreError:
                await self._decider.give_back(record, age)  # else it would be ours for a lease
                raise
            stored = await self._decider.write(record, resolution, age, may_omit=True)
            self._open_cases.close(identity)
            made = [self._decider.decision(record, resolution, stored=stored)]
        for decision in made:
            self._decider.report(decision)
        return made

    async def _consult(self, record: Record) -> Resolution:
        """Ask the resolver; one that fails does not know."""
        answer = await aio_caught(aio_consult, self._resolvers[record.scope], record)
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


class Unanswered(Unknown, frozen=True):
    """The resolver failed: the outcome is unknown, and a person should look at it."""


def checked_resolvers(resolvers: object, *, asynchronous: bool) -> dict[str, AsyncResolver]:
    """Check the resolvers of a reconciler."""
    if not isinstance(resolvers, Mapping) or not all(map(callable, resolvers.values())):
        raise ConfigError("resolvers must be a mapping from scope to a function of the record")
    for scope, resolver in resolvers.items():
        if not asynchronous and inspect.iscoroutinefunction(resolver):
            raise ConfigError(f"the resolver of {scope} is async: use an AsyncReconciler")
    return dict(resolvers)


# --- what is left open between two runs ----------------------------------------------------------


class Case(Struct):
    """One abandoned attempt that is not resolved yet."""

    identity: Identity
    number: int
    created_at: float
    """With the number: the same key, forgotten and used again, is another case."""
    abandoned_at: float
    """When it was first seen to have no owner any more, on the store's clock."""
    tries: int = 0
    again_at: float = -math.inf
    """On the caller's clock; never, once a person has to decide."""


class OpenCases:
    """The open cases of one reconciler: since when, how often tried, when to try again."""

    longest_pause = 3600.0
    """Seconds between two tries, at most."""

    def __init__(self, max_tries: int, backoff: float) -> None:
        self._max_tries = max_tries
        self._backoff = backoff
        self._open: dict[Identity, Case] = {}

    def due(self, now: float) -> list[Identity]:
        """List what was looked into before and should be looked into again by now."""
        return [identity for identity, case in self._open.items() if case.again_at <= now]

    def is_ready(self, record: Record, now: float) -> bool:
        """Return whether a record is new here, or its time has come."""
        case = self._case(record)
        return case is None or case.again_at <= now

    def open(self, record: Record) -> Case:
        """Return the case of a record, or begin one."""
        case = self._case(record)
        if case is None:
            assert record.lease_until is not None  # noqa: S101 - cases are PROCESSING
            # A record that was adopted just now has a lease of ours, which is no sign of life.
            abandoned_at = min(record.lease_until, record.now)
            case = Case(record.identity, record.number, record.created_at, abandoned_at)
            self._open[record.identity] = case
        return case

    def tried(self, record: Record, now: float) -> tuple[int, bool]:
        """Note a try that found nothing; returns how many there were, and if it was the last."""
        case = self.open(record)
        case.tries += 1
        last = case.tries >= self._max_tries
        pause = min(self._backoff * 2 ** (case.tries - 1), self.longest_pause)
        # Jitter: a hundred records of one outage should not be asked about in one burst.
        case.again_at = math.inf if last else now + pause * (0.5 + random() / 2)  # noqa: S311 - no secret
        return case.tries, last

    def leave(self, record: Record) -> None:
        """Leave a record to a person."""
        self.open(record).again_at = math.inf

    def close(self, identity: Identity) -> None:
        """Forget a case: it was decided."""
        del self._open[identity]

    def is_over(self, record: Record | None) -> bool:
        """Return whether there is nothing left to decide: decided, gone, or another attempt."""
        return record is None or record.state is not State.PROCESSING or self._case(record) is None

    def waiting(self) -> list[Identity]:
        """List the cases that a person has to decide."""
        return [identity for identity, case in self._open.items() if case.again_at == math.inf]

    def _case(self, record: Record) -> Case | None:
        case = self._open.get(record.identity)
        if case is None or (case.number, case.created_at) != (record.number, record.created_at):
            return None
        return case


class AsyncBackground(ForkAware):
    """Repeats a step in a task, until it is stopped; by hand, as threads and tasks differ here."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Start with nothing running: the task belongs to the parent's loop."""
        self.one_at_a_time = asyncio.Lock()
        self.stopping = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    def start(self, step: Callable[[Callable[[], bool]], Awaitable[float]]) -> None:
        """Do the step now, and again after the seconds that it returns.

        It can ask whether it has to end early.
        """
        notice_fork()
        if self.running is None or self.running.done():
            self.stopping.clear()
            self.running = asyncio.create_task(self._run(step), name="semel-reconciler")

    async def stop(self) -> None:
        """Wait for the end of a step in progress."""
        notice_fork()
        self.stopping.set()  # first: what is not noted any more could never be stopped
        running, self.running = self.running, None
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)  # how it ended is in the log

    async def _run(self, step: Callable[[Callable[[], bool]], Awaitable[float]]) -> None:
        try:
            while True:
                pause = await step(self.stopping.is_set)
                try:
                    await asyncio.wait_for(self.stopping.wait(), pause)
                except TimeoutError:
                    continue
                return
        except BaseException:
            logger.exception("reconciler task ended by an error; start() starts it again")
            raise


class Background(ForkAware):
    """Repeats a step in a thread, until it is stopped."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Start with nothing running: the thread exists only in the parent."""
        self.one_at_a_time = threading.Lock()
        self.stopping = Stop()
        self.running: threading.Thread | None = None

    def start(self, step: Callable[[Callable[[], bool]], float]) -> None:
        """Do the step now, and again after the seconds that it returns; see `AsyncBackground`."""
        notice_fork()
        if self.running is None or not self.running.is_alive():
            stopping = self.stopping = Stop()
            running = threading.Thread(
                target=self._run, args=(step, stopping), name="semel-reconciler", daemon=True
            )
            try:
                running.start()
            except BaseException:
                stopping.set()  # an interruption may have come after the thread began
                raise
            self.running = running

    def stop(self) -> None:
        """Wait for the end of a step in progress."""
        notice_fork()
        self.stopping.set()  # first: what is not noted any more could never be stopped
        running, self.running = self.running, None
        if running is not None:
            running.join()

    def _run(self, step: Callable[[Callable[[], bool]], float], stopping: Stop) -> None:
        try:
            while not stopping.wait(step(stopping.is_set)):
                pass
        except BaseException:
            logger.exception("reconciler thread ended by an error; start() starts it again")
            raise


async def aio_consult(resolver: Callable[[Record], object], record: Record) -> object:
    """Ask a resolver, which may be async."""
    answer: object
    if inspect.iscoroutinefunction(resolver):
        answer = resolver(record)
    else:  # It asks other systems: a plain function would hold up the event loop.
        answer = await in_thread(resolver, record)
    return await answer if inspect.isawaitable(answer) else answer


def consult(resolver: Callable[[Record], object], record: Record) -> object:
    """Ask a resolver."""
    return resolver(record)


class Raised(Struct, frozen=True):
    """What a step raised, in place of what it returns."""

    error: BaseException


async def aio_caught(step: Callable[..., Awaitable[object]], *args: object) -> object:
    """Return what a step returns or raises, unless that ends the program or this task."""
    try:
        return await step(*args)
    except BaseException as error:
        if is_for_the_caller(error) or _ends_the_task(error):
            raise
        return Raised(error)


def caught(step: Callable[..., object], *args: object) -> object:
    """Return what a step returns or raises, unless that ends the program."""
    try:
        return step(*args)
    except BaseException as error:
        if is_for_the_caller(error):
            raise
        return Raised(error)


def _ends_the_task(error: BaseException) -> bool:
    """Whether the running task was canceled, or its loop is gone.

    A resolver may raise a CancelledError of its own: it has waited for a task that was canceled.
    """
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    return isinstance(error, GeneratorExit)
