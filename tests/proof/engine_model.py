"""What an engine promises, in plain words: a model that predicts the answer to every call.

It knows keys, payloads and policies, and nothing of owner ids, codecs, timers or stores. A fault is
predicted too: a refused command changed nothing, a command whose reply was lost changed everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semel import (
    AttemptsExhausted,
    ConcurrentRequest,
    DuplicateRequest,
    LeaseLost,
    OutcomeUnknown,
    PayloadMismatch,
    Policy,
    PreviousFailure,
    StoreUnavailable,
    WaitTimeout,
)
from semel.core.records import State
from semel.events import LostLease, ResultStoredLate

LEASE, FAILED_TTL, TTL = 100.0, 400.0, 1_000.0
UNWANTED_LEASE, UNWANTED_TTL = 2.0, 300.0
DOUBT_ROUNDS = 6

REFUSED, REPLY_LOST = "refused", "reply lost"
SUCCEEDS, RAISES, STOPS = "succeeds", "raises", "stops"
RAN, REPLAYED, ENDED = "ran", "replayed", "ended by hand"


@dataclass(frozen=True)
class Terms:
    """The policy of one call, by the words that the model judges by."""

    hold: bool
    replace: bool
    guard: bool
    rejects: bool
    patient: bool
    """Goes on telling the store a result at once, instead of leaving that to the timer."""
    failure: str | None
    max_attempts: int | None

    @property
    def policy(self) -> Policy:
        """The same for an engine; nobody waits, and the only time that passes is the store's."""
        return Policy(
            lease=LEASE,
            ttl=TTL,
            failed_ttl=FAILED_TTL,
            wait_timeout=0,
            # Longer than a call may go on saving, or next to nothing.
            wait_interval=0.0001 if self.patient else 60.0,
            abandoned="hold" if self.hold else "takeover",
            mismatch="replace" if self.replace else "reject",
            duplicate="reject" if self.guard else "replay",
            concurrent="reject" if self.rejects else "wait",
            max_attempts=self.max_attempts,
            **({} if self.failure is None else {"failure": self.failure}),
        )

    @property
    def impatience(self) -> type[Exception]:
        """How a caller that does not wait is told that somebody else runs."""
        return ConcurrentRequest if self.guard or self.rejects else WaitTimeout

    def verdict(self, ending: str) -> str:
        """What becomes of a key whose function ended so; an interrupted one decided nothing."""
        by_itself = "unknown" if self.hold else "forget"
        return by_itself if ending == STOPS else self.failure or by_itself


@dataclass(frozen=True, eq=False)
class Asked:
    """One call: who asks for what. Two that ask for the same are still two."""

    engine: int
    key: str
    payload: str | None
    terms: Terms
    shares: bool
    """May share an execution in its process."""
    failed_ttl: float = FAILED_TTL
    """How long a failure is kept that is not final."""

    @property
    def place(self) -> tuple[int, str, str | None]:
        """Calls with the same place share one execution; each engine has a store object."""
        return self.engine, self.key, self.payload


@dataclass
class Entry:
    """What is known of one key; `until` ends its lease while it runs, its retention after that."""

    owner: object
    number: int
    state: State
    until: float
    payload: str | None = None
    superseded: frozenset[str] = frozenset()
    held: bool = False
    value: object = None
    final: bool = False


@dataclass(frozen=True)
class Begun:
    """What a call gets before anything runs: the run, the stored value, or an error."""

    runs: bool = False
    number: int | None = None
    value: object = None
    error: type[Exception] | None = None


@dataclass
class Model:
    """All keys, and what each engine still has to tell the store."""

    clock: Callable[[], float]
    led: dict[Any, Asked] = field(default_factory=dict)
    """Who leads each shared execution."""
    forgets: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How often each engine has forgotten a key: an execution is not shared over that."""
    doubts: defaultdict[int, Counter[Asked]] = field(default_factory=lambda: defaultdict(Counter))
    """Claims of unknown fate, each with how often the store was asked for it."""
    unsaved: defaultdict[int, list[tuple[Asked, object]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _entries: dict[str, Entry] = field(default_factory=dict)

    def entry(self, key: str) -> Entry | None:
        """What is kept of a key; expired is absent."""
        entry = self._entries.get(key)
        if entry is None or (entry.state is not State.PROCESSING and entry.until <= self.clock()):
            return None
        return entry

    # --- beginning -----------------------------------------------------------------------

    def begin(self, asked: Asked, fault: str | None) -> Begun:
        """Predict a call up to its function."""
        place = (asked.place, self.forgets[asked.engine, asked.key])
        if asked.shares and place in self.led:
            return Begun(error=asked.terms.impatience)
        if asked.terms.max_attempts is not None:
            # A claim of unknown fate must not count; its question meets the fault.
            for doubted in [one for one in self.doubts[asked.engine] if one.key == asked.key]:
                self._give_back(doubted, fault)
                fault = None
        if fault is not None:
            if fault == REPLY_LOST:
                self._claim(asked)
            self.doubts[asked.engine][asked] = 0
            return Begun(error=StoreUnavailable)
        begun = self._claim(asked)
        if begun.runs and asked.shares:
            self.led[place] = asked
        return begun

    def _claim(self, asked: Asked) -> Begun:
        entry, terms = self.entry(asked.key), asked.terms
        if entry is None:
            return self._take(asked, 1, asked.payload, frozenset())
        differs = None not in {asked.payload, entry.payload} and asked.payload != entry.payload
        if differs and not terms.replace:
            return Begun(error=PayloadMismatch)
        if terms.replace and asked.payload in entry.superseded:
            return Begun(error=PayloadMismatch)
        if entry.state is State.SUCCEEDED and not differs:
            if terms.guard:
                return Begun(error=DuplicateRequest)
            return Begun(number=entry.number, value=entry.value)
        if entry.final and not differs:
            return Begun(error=PreviousFailure)
        if entry.state is State.PROCESSING:
            if entry.until > self.clock():
                return Begun(error=terms.impatience)
            if entry.held or terms.hold:
                return Begun(error=OutcomeUnknown)
        if differs:
            # A new payload is a new operation: it counts from one again.
            return self._take(asked, 1, asked.payload, entry.superseded | {entry.payload})
        if terms.max_attempts is not None and entry.number >= terms.max_attempts:
            return Begun(error=AttemptsExhausted)
        payload = entry.payload if asked.payload is None else asked.payload
        return self._take(asked, entry.number + 1, payload, entry.superseded)

    def _take(
        self, asked: Asked, number: int, payload: str | None, superseded: frozenset[Any]
    ) -> Begun:
        until, held = self.clock() + LEASE, asked.terms.hold
        self._place(
            asked.key, Entry(asked, number, State.PROCESSING, until, payload, superseded, held)
        )
        return Begun(runs=True, number=number)

    # --- ending --------------------------------------------------------------------------

    def succeed(self, asked: Asked, value: object, fault: str | None) -> type[Exception] | None:
        """Predict the end of a function that gave a value: how its caller is told."""
        self._end_flight(asked)
        if fault == REPLY_LOST:
            self._save(asked, value)
        if fault is not None and not asked.terms.patient:
            self.unsaved[asked.engine].append((asked, value))
            return None  # The effect is done: the caller gets its value.
        return None if self._save(asked, value) else LeaseLost

    def fail(self, asked: Asked, ending: str, fault: str | None) -> None:
        """Predict the end of a function that raised; its caller gets just that."""
        self._end_flight(asked)
        entry = self._entries.get(asked.key)
        if fault == REFUSED or entry is None or not _runs(entry, asked):
            return
        verdict = asked.terms.verdict(ending)
        if verdict == "unknown":
            entry.until = self.clock()
            return
        entry.state, entry.final = State.FAILED, verdict == "final"
        entry.until = self.clock() + (TTL if entry.final else asked.failed_ttl)
        if verdict == "forget":
            entry.payload = None

    def _end_flight(self, asked: Asked) -> None:
        self.led = {place: leader for place, leader in self.led.items() if leader is not asked}

    def _save(self, asked: Asked, value: object) -> bool:
        entry = self.entry(asked.key)
        if entry is None or entry.owner is not asked or entry.state is State.FAILED:
            return False
        if entry.state is State.PROCESSING:
            entry.state, entry.value, entry.until = State.SUCCEEDED, value, self.clock() + TTL
        return True

    # --- beside the calls ----------------------------------------------------------------

    def tick(self, engine: int) -> list[type]:
        """Predict the timer, which tells what could not be told: what it announces."""
        told = [
            ResultStoredLate if self._save(asked, value) else LostLease
            for asked, value in self.unsaved.pop(engine, [])
        ]
        for asked in [*self.doubts[engine]]:
            self._give_back(asked)
        return told

    def _give_back(self, asked: Asked, fault: str | None = None) -> None:
        """Predict what becomes of a claim that nobody wants, whose fate is unknown."""
        doubts = self.doubts[asked.engine]
        rounds = doubts.pop(asked)
        if fault is not None:
            doubts[asked] = rounds
        if fault == REFUSED:
            return
        entry = self.entry(asked.key)
        if entry is None:
            # The command may still be on its way: its owner is made to have ended.
            entry = self._place(asked.key, Entry(asked, 1, State.PROCESSING, 0.0, asked.payload))
        if _runs(entry, asked):
            if fault == REPLY_LOST:
                entry.until = self.clock() + UNWANTED_LEASE
                return
            # It never ran: its number is given back, and those before it are still counted.
            entry.state, entry.number = State.FAILED, entry.number - 1
            if entry.number == 0:
                entry.payload = None
            entry.until = self.clock() + (TTL if entry.number else UNWANTED_TTL)
        elif fault is None and entry.owner is not asked and rounds + 1 < DOUBT_ROUNDS:
            # Something else is there, and the command may come when it is gone.
            doubts[asked] = rounds + 1

    def mark(self, key: str) -> bool:
        """Predict `marks.set`."""
        entry = self.entry(key)
        marked = Entry(object(), 1, State.SUCCEEDED, self.clock() + TTL)
        if entry is None:
            self._place(key, marked)
            return True
        running = entry.state is State.PROCESSING and (entry.held or entry.until > self.clock())
        if entry.state is State.SUCCEEDED or entry.final or running:
            return False
        marked.number, marked.superseded = entry.number + 1, entry.superseded
        self._place(key, marked)
        return True

    def forget(self, engine: int, key: str) -> bool:
        """Predict `forget`."""
        self.forgets[engine, key] += 1
        known = self.entry(key) is not None
        self._entries.pop(key, None)
        return known

    def _place(self, key: str, entry: Entry) -> Entry:
        if key not in self._entries:
            # A new key makes the store look for room: what nobody holds goes after its ttl.
            for other, old in [*self._entries.items()]:
                if _abandoned_long_ago(old, self.clock()):
                    del self._entries[other]
        self._entries[key] = entry
        return entry


def _runs(entry: Entry, asked: Asked) -> bool:
    return entry.owner is asked and entry.state is State.PROCESSING


def _abandoned_long_ago(entry: Entry, now: float) -> bool:
    return entry.state is State.PROCESSING and not entry.held and entry.until + TTL <= now
