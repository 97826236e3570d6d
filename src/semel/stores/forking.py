"""What happens to a store when its process forks: its locks are free, its handles are its own.

A lock that another thread holds at the moment of a fork stays held in the child for ever, and
what it protects is copied half changed. So every store that registers here is brought to rest
before the fork, goes on in the parent, and starts afresh in the child. `ForkSafeLock` and `Slots`
are two that do.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol
from weakref import ReferenceType, ref


class ForkAware(Protocol):
    """Something that has to be at rest while its process forks."""

    def before_fork(self) -> None:
        """Come to rest, and stay there."""
        ...

    def after_fork_in_parent(self) -> None:
        """Go on."""
        ...

    def after_fork_in_child(self) -> None:
        """Start afresh: no other thread of the parent exists here."""
        ...


_members: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_at_rest: list[ForkAware] = []
_one_fork_at_a_time = threading.Lock()


def follow_forks(member: ForkAware) -> None:
    """Tell `member` about every fork of this process, for as long as it lives."""
    _members.add(member)


def _before() -> None:
    _one_fork_at_a_time.acquire()  # noqa: SIM115, RUF100 - released after the fork, by the parent
    _at_rest.extend(_members)
    for member in _at_rest:
        member.before_fork()


def _in_parent() -> None:
    for member in _at_rest:
        member.after_fork_in_parent()
    _at_rest.clear()
    _one_fork_at_a_time.release()


def _in_child() -> None:
    for member in _at_rest:
        member.after_fork_in_child()
    _at_rest.clear()
    _one_fork_at_a_time.release()


if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


_left_alone: list[object] = []


def leave_alone(connections: object) -> None:
    """Keep the parent's connections for ever: they are not this process's to close."""
    _left_alone.append(connections)


MOST_SLOTS: Final = 1 << 16
"""There are no more ports to connect from; more than that means "as many as possible"."""


class Slot:
    """The right to be one of a limited number. One that nobody holds any more returns by itself.

    So none is lost when an exception of a signal handler strikes between taking and giving.
    """

    __slots__ = ("_free",)

    def __init__(self, free: ReferenceType[SimpleQueue[Any]]) -> None:
        self._free = free

    def __del__(self) -> None:
        free = self._free()
        if free is not None:  # else all of them are gone, or were left behind by a fork
            free.put(Slot(self._free))


class Slots:
    """A limited number of slots for threads: at connections, or at work that few may do at a time.

    Each has one holder at a time. Taking and giving are one step each, which no exception of a
    signal handler can tear apart; a semaphore for threads is written in Python, and may lose a
    slot or keep its lock. It costs ten times as much, too.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.after_fork_in_child()
        follow_forks(self)

    def before_fork(self) -> None:
        """Do nothing: a queue of this kind is never caught half changed."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Begin anew: slots taken by the parent's threads will never come back here."""
        self._free: SimpleQueue[Slot] = SimpleQueue()
        free = ref(self._free)
        for _ in range(min(self._count, MOST_SLOTS)):
            self._free.put(Slot(free))
        # No functions of ours around these: every exchange with a server asks.
        self.get: Callable[..., Slot] = self._free.get
        """Take a slot (`block=`, `timeout=`); raises `queue.Empty`."""
        self.give: Callable[[Any], None] = self._free.put
        """Give a slot back."""


class ForkSafeLock:
    """Held across every fork, so that what it protects is whole on both sides.

    Enter `lock` itself: a `with` of the interpreter's own lock has no step of Python between taking
    it and its block, at which an exception of a signal handler would leave it taken for ever.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        follow_forks(self)

    def before_fork(self) -> None:
        """Come to rest."""
        self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self.lock.release()

    def after_fork_in_child(self) -> None:
        """Go on: the lock that was taken before the fork is this process's own."""
        self.lock.release()
