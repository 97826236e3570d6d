"""What happens to a store when its process forks: its locks are free, its handles are its own.

A lock that another thread holds at the moment of a fork stays held in the child for ever, and
what it protects is copied half changed. So every store that registers here is brought to rest
before the fork, goes on in the parent, and starts afresh in the child. `ForkSafeLock` does.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something that has to be at rest while its process forks."""

    def before_fork(self) -> None:
        """Finish or block every change, until the fork is over."""
        ...

    def after_fork_in_parent(self) -> None:
        """Continue as before the fork."""
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


class ForkSafeLock:
    """Held across every fork, so that what it protects is whole on both sides.

    Enter `lock` itself: a `with` of the interpreter's own lock has no step of Python between taking
    it and its block, at which an exception of a signal handler would leave it taken for ever.

    A `reentrant` one may be taken again by the thread that holds it, as by a signal handler.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self.lock = threading.RLock() if reentrant else threading.Lock()
        follow_forks(self)

    def before_fork(self) -> None:
        """Take the lock, so that no other thread holds it during the fork."""
        self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Release the lock."""
        self.lock.release()

    def after_fork_in_child(self) -> None:
        """Release this process's copy of the lock, which was taken before the fork."""
        self.lock.release()
