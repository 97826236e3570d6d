"""Who leads each shared execution of a process, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from semel.core.records import Finished
from semel.errors import StoreError, StoreUnavailable


class WaitingCall(Protocol):
    """Where one call waits: a future, or what threads have in its place."""

    def done(self) -> bool:
        """Return whether it waits no more."""
        ...


T = TypeVar("T")
W = TypeVar("W", bound=WaitingCall)

AFTER_FAILURE = 1.0
"""Seconds until a timer whose tick failed is there again."""

REMEMBERED_FORGETS = 256

Answer: TypeAlias = Finished | StoreError
"""What the calls that wait for a shared execution get."""

LEAD: Literal["lead"] = "lead"
LATE: Literal["late"] = "late"
Reply: TypeAlias = Answer | Literal["lead", "late"]
"""An answer; or this call leads now; or its time ran out."""


class NoTimer(StoreUnavailable):
    """A claim that nothing would renew: no thread could be started, or the engine was closed.

    Nothing ran, and the claim is given back.
    """


class Forgets:
    """Counts `forget` calls, so that no later call gets a result from before a `forget`.

    A generation changes when its identity is forgotten, and may also change when others are: only a
    limited number is remembered one by one.
    """

    def __init__(self) -> None:
        self.any = False
        self._lock = threading.Lock()
        self._count = 0
        self._known: tuple[dict[Hashable, int], int] = {}, 0
        """Replaced as a whole, so that it can be read without the lock."""

    def generation(self, identity: Hashable) -> int:
        """A number that changes when this identity is forgotten."""
        known, others = self._known
        return known.get(identity, others)

    def add(self, identity: Hashable) -> None:
        """Note that the record of this identity was removed."""
        with self._lock:
            self._count += 1
            known, others = self._known
            if len(known) >= REMEMBERED_FORGETS:
                known, others = {}, self._count
            self._known = known | {identity: self._count}, others
            self.any = True


class SharedRun(dict[W, "ReferenceType[Any]"]):
    """The calls that wait for one shared execution, by their waiters, and the call that leads it.

    The calls are referenced weakly: an exception raised by a signal handler may end a call at any
    step, even while it says that it ends. A call that is gone leads nothing and waits for nothing.
    """

    __slots__ = ("answer", "leader")
    leader: ReferenceType[Any]
    answer: Answer | None


class Leaders(Generic[W]):
    """Who leads each shared execution, and who waits for it. The order of waiting is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, SharedRun[W]] = {}
        self.forgets = Forgets()

    def lead(self, place: Hashable, caller: object) -> bool:
        """Lead, unless another call does."""
        fresh: SharedRun[W] = SharedRun()
        fresh.leader = ref(caller)
        fresh.answer = None
        return self._waiting.setdefault(place, fresh) is fresh  # one step: needs no lock

    def take_lead(
        self, place: Hashable, caller: object, waiter: Callable[[SharedRun[W]], W]
    ) -> W | None:
        """Lead (None), or make a waiter when another call leads."""
        with self._lock:
            while not self.lead(place, caller):
                run = self._waiting.get(place)
                if run is None:
                    continue  # its leader has just left
                if run.leader() in (None, caller):
                    # Its call ended without saying so, or passed the lead on to this one.
                    run.leader = ref(caller)
                    return None
                mine = waiter(run)
                run[mine] = ref(caller)
                if self._waiting.get(place) is run:
                    return mine
                del run[mine]  # the leader left meanwhile, and may have seen an empty run
            return None

    def is_orphaned(self, place: Hashable, caller: object, waiter: W) -> bool:
        """Return True, and remove the waiter, if no leader is left to answer it."""
        with self._lock:
            run = self._waiting.get(place)
            if run is not None and waiter in run and run.leader() not in (None, caller):
                return False
            if run is not None:
                run.pop(waiter, None)
            return True

    def end(self, place: Hashable, answer: Answer) -> Iterable[W]:
        """End this execution, and return those that wait for its answer.

        The answer is in the run before the run is gone: a call that finds its run gone finds the
        answer, even if it is the last of a thousand to be woken, or if the leader is interrupted.
        """
        run = self._waiting.get(place)
        if run is None:
            return ()
        run.answer = answer
        # One step (of a Python with its global lock): mostly nobody waits, and no lock is needed.
        self._waiting.pop(place, None)
        if not run:
            return ()
        with self._lock:  # a call that is just making a waiter sees that the run is gone
            waiting = tuple(run)
            run.clear()  # a waiter may know its run: they would keep each other alive
            return waiting

    def next_leader(self, place: Hashable, caller: object) -> W | None:
        """Let the first call that waits lead the run, if this one does.

        The execution ends when there is none. Done twice, it changes nothing.
        """
        with self._lock:
            run = self._waiting.get(place)
            if run is None or run.leader() is not caller:
                return None
            for waiter, waiting in tuple(run.items()):
                run.leader = waiting
                del run[waiter]
                if waiting() is not None and not waiter.done():
                    return waiter
            self._waiting.pop(place, None)
            return None

    def leave(self, place: Hashable, waiter: W) -> bool:
        """Remove a waiter; False when it was answered already."""
        with self._lock:
            run = self._waiting.get(place)
            return run is not None and run.pop(waiter, None) is not None

    def waiter_of(self, place: Hashable, caller: object) -> W | None:
        """Find the waiter of a call that waits."""
        with self._lock:
            run = self._waiting.get(place)
            waiting = () if run is None else run.items()
            return next((waiter for waiter, who in waiting if who() is caller), None)


_of_stores: WeakKeyDictionary[object, Any] = WeakKeyDictionary()


def one_for(store: object, kind: type[T]) -> T:
    """Return the one object of this kind that belongs to a store."""
    return _one_of(_of_stores, store, kind)


def _one_of(known: WeakKeyDictionary[object, Any], owner: object, kind: type[T]) -> T:
    try:
        found = known.setdefault(owner, kind())
    except TypeError:
        return kind()  # An owner that cannot be referenced weakly: each engine for itself.
    return found if isinstance(found, kind) else kind()


class LeadersOfLoops:
    """The leaders of each event loop that uses a store: what waits belongs to its loop."""

    def __init__(self) -> None:
        self._of_loops: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        self.forgets = Forgets()

    def of(self, loop: object) -> Leaders[Any]:
        """Return those of one loop."""
        return _one_of(self._of_loops, loop, Leaders)


def forget_shared_runs() -> None:
    """In a forked child no call leads, whatever the parent's threads were doing."""
    _of_stores.clear()
