"""The store of a simulation, with the real rules, and the unreliable network in front of it.

`Ledger` is the database: it judges by `semel.core.judge` and remembers what it ever agreed to, so
that the checks can tell what was true at each moment. `Proxy` is what one process sees of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Self

from proof.sim.clock import Process, SimLoop
from proof.sim.plan import FAULTS_END, Network
from semel.core import judge
from semel.core.records import Claimed, Identity, Record, State
from semel.errors import StoreError, StoreUnavailable
from semel.stores.base import AsyncStore
from semel.testing.faults import VERBS

TIMEOUT = 2.0
"""How long a driver waits for an answer."""

EPOCH = 1000.0
"""The store's clock when a history begins."""

NOISE: ContextVar[Random] = ContextVar("NOISE")
"""The dice of one caller, so that removing another caller changes as little as possible."""

NOBODY = Context()
"""No process's context: what the network does goes on while a process stands still."""

SENT: ContextVar[float | None] = ContextVar("SENT", default=None)
"""When the batch was sent that this command belongs to."""

Law = Callable[..., tuple[Any, Record | None]]
"""The answer of a command and the record as it should become."""


@dataclass(frozen=True)
class Command:
    """One verb with what it asks, as a process has sent it."""

    process: Process
    verb: str
    identity: Identity
    owner: bytes | None
    law: Law
    ask: Any = None


@dataclass(frozen=True)
class Granted:
    """A claim that the store agreed to."""

    key: str
    process: Process
    at: float
    store_time: float
    fingerprint: bytes | None
    numbers: set[int]
    """More than one if its record was removed and its command repeated."""
    lease: float
    hold: bool


@dataclass
class Success:
    """A result that the store has had."""

    owner: bytes
    value: object
    fingerprint: bytes | None
    at: float
    expires: float
    gone: float | None = None


@dataclass(frozen=True)
class Delivered:
    """An answer that reached its process."""

    sent: float
    at: float
    verb: str
    answer: object

    @property
    def grants(self) -> bool:
        return self.verb in {"claim", "renew"} and (
            self.answer is True or isinstance(self.answer, Claimed)
        )


class Ledger:
    """The records, and everything that was ever true of them."""

    def __init__(self, loop: SimLoop, log: Callable[..., None]) -> None:
        self._loop, self._log = loop, log
        self.offset = EPOCH
        self.records: dict[Identity, Record] = {}
        self.granted: dict[bytes, Granted] = {}
        self.completed: dict[bytes, float] = {}
        self.failed: dict[bytes, bool] = {}
        """Whose failure was recorded, and whether it may run again."""
        self.parked: set[bytes] = set()
        self.replaced: dict[bytes, float] = {}
        self.successes: defaultdict[str, list[Success]] = defaultdict(list)
        self.taken_over: list[tuple[bytes, bytes]] = []
        self._names: dict[bytes, str] = {}

    @property
    def now(self) -> float:
        return self._loop.now + self.offset

    def name(self, owner: bytes | None) -> str:
        if owner is None:
            return "-"
        return self._names.setdefault(owner, f"o{len(self._names)}")

    def unsuccessful(self, owner: bytes) -> bool:
        """Whether the store knows that this owner's attempt ended without a result."""
        return owner in self.failed or owner in self.parked

    def ended(self, owner: bytes) -> bool:
        """Whether the store knows how this owner's attempt ended."""
        return owner in self.completed or self.unsuccessful(owner)

    def apply(self, command: Command) -> tuple[Any, Record | None, Record | None]:
        """Carry a command out; gives its answer and the record before and after."""
        identity, owner = command.identity, command.owner
        before = self.records.get(identity)
        answer, after = command.law(before, now=self.now)
        if after is None:
            self.records.pop(identity, None)
        else:
            self.records[identity] = after
        self._note(command, answer, before, after)
        shown = answer if isinstance(answer, bool) else type(answer).__name__
        state = (
            f"{after.state.name}#{after.number} of {self.name(after.owner)}" if after else "none"
        )
        sender = command.process.name
        self._log("store", command.verb, identity.key, self.name(owner), sender, shown, state)
        return answer, before, after

    def _note(
        self, command: Command, answer: Any, before: Record | None, after: Record | None
    ) -> None:
        now, verb, key, owner = self._loop.now, command.verb, command.identity.key, command.owner
        if before is not None and (after is None or after.owner != before.owner):
            self.replaced.setdefault(before.owner, now)
        if before is not None and before.state is State.SUCCEEDED:
            self._note_what_became(key, before, after)
        if verb == "claim" and isinstance(answer, Claimed) and answer.takeover:
            self.taken_over.append((before.owner, owner))
        if verb == "claim" and isinstance(answer, Claimed) and owner not in self.granted:
            ask = command.ask
            self.granted[owner] = Granted(
                key=key,
                process=command.process,
                at=now,
                store_time=self.now,
                fingerprint=ask.fingerprint,
                numbers={answer.number},
                lease=ask.lease,
                hold=ask.hold,
            )
        elif verb == "claim" and isinstance(answer, Claimed):
            self.granted[owner].numbers.add(answer.number)
        if answer is not True:
            return
        if verb in {"complete", "put"} and owner not in self.completed:
            self.completed[owner] = now
            value = json.loads(command.ask.result.data)
            self.successes[key].append(
                Success(owner, value, after.fingerprint, now, after.expires_at)
            )
        elif verb == "fail":
            self.failed.setdefault(owner, command.ask.retryable)
        elif verb == "renew" and command.ask.lease <= 0:
            self.parked.add(owner)

    def _note_what_became(self, key: str, before: Record, after: Record | None) -> None:
        for success in self.successes[key]:
            if success.owner != before.owner:
                continue
            if after is not None and after.fence == before.fence:
                success.expires = after.expires_at  # it may have been touched
            elif success.gone is None:
                success.gone = self._loop.now


@dataclass
class Wires:
    """The ways between the processes and the store, and what is wrong with them."""

    loop: SimLoop
    network: Network
    ledger: Ledger
    log: Callable[..., None]
    sending: Callable[[str], None]
    outages: list[tuple[float, float]] = field(default_factory=list)
    waiting: defaultdict[Identity, list[Watch]] = field(default_factory=lambda: defaultdict(list))
    delivered: defaultdict[bytes, list[Delivered]] = field(
        default_factory=lambda: defaultdict(list)
    )
    faulted: defaultdict[bytes | None, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Commands of an owner that met a fault."""

    @property
    def away(self) -> bool:
        return any(start <= self.loop.now < end for start, end in self.outages)

    def later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        """Do this later, whatever becomes of the process that asked for it."""
        self.loop.call_later(seconds, callback, *args, context=NOBODY.copy())

    def delay(self, noise: Random) -> float:
        if self.network.slow and self.loop.now < FAULTS_END and noise.random() < 0.15:
            return noise.choice([0.1, 0.3, 0.5, 1.0, 1.9])
        return noise.choice([0, 0, 0, 0.001, 0.001, 0.002, 0.01])

    def fate(self, noise: Random, sent: float) -> str:
        """What befalls one command."""
        if sent >= FAULTS_END:
            return "none"
        if self.network.lossy:
            dice = noise.random()
            if dice < 0.14:
                return "lost" if dice < 0.06 else "reply lost"
        return "late" if self.network.late and noise.random() < 0.05 else "none"

    def applied(self, command: Command) -> Any:
        """Apply a command, and wake those that wait for what it ended."""
        answer, before, after = self.ledger.apply(command)
        if before is None or after is None or before.state is not State.PROCESSING:
            return answer
        if after.state is State.PROCESSING and not (
            command.verb == "renew" and command.ask.lease <= 0
        ):
            return answer
        noise = NOISE.get()
        for watch in tuple(self.waiting[command.identity]):
            if self.network.lossy and noise.random() < 0.3:
                continue
            for _ in range(1 + (self.network.repeats and noise.random() < 0.3)):
                self.later(self.delay(noise), watch.wake)
        return answer


class Proxy(AsyncStore):
    """The store as one process sees it."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self.wires, self.process = wires, process
        self.watching = 0

    async def _send(
        self, verb: str, identity: Identity, owner: bytes | None, law: Law, ask: Any = None
    ) -> Any:
        wires, noise = self.wires, NOISE.get()
        command = Command(self.process, verb, identity, owner, law, ask)
        wires.sending(verb)
        sent = SENT.get() or wires.loop.now
        if wires.network.instant and noise.random() < 0.5 and not wires.away:
            value = wires.applied(command)
            wires.delivered[owner].append(Delivered(sent, wires.loop.now, verb, value))
            return value
        on_its_way = _OnItsWay(wires, command, sent)
        try:
            return await on_its_way.sent_off()
        except asyncio.CancelledError:
            # Some drivers take back what has not left yet.
            if not on_its_way.arrived and noise.random() < 0.6:
                on_its_way.withdrawn = True
            raise

    async def _answer(self, request):
        owner = getattr(request, "owner", None)
        law = partial(judge.answer, request=request)
        return await self._send(VERBS[type(request)], request.identity, owner, law, request)

    def ask(self, request):
        return self._answer(request)

    async def send(self, requests):
        """One after the other, as a store that has no batches."""
        loop, sent = self.wires.loop, self.wires.loop.now
        SENT.set(sent)
        try:
            answers = [await _answered(self._answer(request)) for request in requests]
        finally:
            SENT.set(None)
        for request in requests:  # their sender knows of none before it knows of all
            told = self.wires.delivered[getattr(request, "owner", None)]
            verb = VERBS[type(request)]
            told[:] = [
                replace(each, at=loop.now) if (each.sent, each.verb) == (sent, verb) else each
                for each in told
            ]
        return answers

    async def close(self):
        pass


class _OnItsWay:
    """A command between its process and the store, and the answer on its way back."""

    def __init__(self, wires: Wires, command: Command, sent: float) -> None:
        self._wires, self._command, self._sent = wires, command, sent
        self._noise = NOISE.get()
        self._answer = wires.loop.create_future()
        self.arrived = self.withdrawn = False

    def sent_off(self) -> Awaitable[Any]:
        wires, noise = self._wires, self._noise
        there, back = wires.delay(noise), wires.delay(noise)
        fate = wires.fate(noise, self._sent)
        if fate != "none":
            command = self._command
            wires.faulted[command.owner].add(command.verb)
            owner = wires.ledger.name(command.owner)
            wires.log("fault", fate, command.verb, command.identity.key, owner)
        if fate == "late":
            there = TIMEOUT + noise.choice([0.1, 0.5, 2.0])
        if fate != "lost":
            if wires.network.repeats and self._sent < FAULTS_END and noise.random() < 0.15:
                wires.later(there * noise.random(), self._arrive, None)
            wires.later(there, self._arrive, None if fate == "reply lost" else back)
        gives_up = TIMEOUT
        if fate in {"lost", "reply lost"}:
            gives_up = there + noise.choice([0.0, 0.05, TIMEOUT])
        wires.later(gives_up, self._fail, "timed out")
        return self._answer

    def _arrive(self, back: float | None) -> None:
        """The command is at the store; its answer takes `back` seconds, None = it is lost."""
        NOISE.set(self._noise)
        if self.withdrawn:
            return
        self.arrived = True
        if self._wires.away:
            if back is not None:
                self._wires.later(back, self._fail, "away")
            return
        value = self._wires.applied(self._command)
        if back is not None:
            self._wires.later(back, self._deliver, value)

    def _deliver(self, value: object) -> None:
        if not self._answer.done():
            self._note(value)
            self._answer.set_result(value)

    def _fail(self, why: str) -> None:
        if not self._answer.done():
            self._note("error")
            self._answer.set_exception(StoreUnavailable(why))

    def _note(self, answer: object) -> None:
        wires, command = self._wires, self._command
        told = Delivered(self._sent, wires.loop.now, command.verb, answer)
        wires.delivered[command.owner].append(told)


class Batching:
    """Several commands at once: one way there, and an answer for each."""

    async def send(self, requests):
        wires, noise = self.wires, NOISE.get()  # type: ignore[attr-defined]
        SENT.set(wires.loop.now)
        if noise.random() < 0.5:  # they share a fate, too
            if wires.network.lossy and wires.loop.now < FAULTS_END and noise.random() < 0.1:
                await asyncio.sleep(noise.choice([0, TIMEOUT]))
                raise StoreUnavailable("the batch was lost")
            await asyncio.sleep(wires.delay(noise))
        try:
            return await asyncio.gather(*(_answered(self._answer(request)) for request in requests))
        finally:
            SENT.set(None)


class Notifying:
    """Wakes those that wait."""

    def watch(self, identity):
        return Watch(self, identity)


class Watch:
    """One caller that waits for the end of an attempt."""

    def __init__(self, proxy: Proxy, identity: Identity) -> None:
        self._proxy, self._identity = proxy, identity
        self._woken = asyncio.Event()

    def __enter__(self) -> Self:
        self._proxy.watching += 1
        self._proxy.wires.waiting[self._identity].append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.watching -= 1
        self._proxy.wires.waiting[self._identity].remove(self)

    def pause(self, planned: float) -> float:
        return max(planned, 2.0)

    def wake(self) -> None:
        self._woken.set()

    async def wait(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken


class BatchingProxy(Batching, Proxy):
    pass


class NotifyingProxy(Notifying, Proxy):
    pass


class FullProxy(Batching, Notifying, Proxy):
    pass


PROXIES = {
    (False, False): Proxy,
    (True, False): BatchingProxy,
    (False, True): NotifyingProxy,
    (True, True): FullProxy,
}
"""By whether the store batches and whether it notifies."""


async def _answered(command: Awaitable[Any]) -> Any:
    try:
        return await command
    except StoreError as error:
        return error
