"""Which process this is: what a forked child must not inherit starts afresh there.

A child inherits everything that its parent's threads have in memory: locks that nothing there
will release, timers without a thread, owner ids that the parent hands out as well, connections
whose replies belong to the parent. Whatever has such state is a `ForkAware`, and follows forks.

Python calls its hooks around `os.fork`. C code that forks by itself, as uWSGI does, calls none of
them. So `notice_fork` is called wherever inherited state would do harm: at the entrance of a call,
before a save, before a renewal, at the end of a block, and where a connection is taken. It costs
0.05 us: the kernel wipes one page of memory in every child, and the page is looked at.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class ForkAware:
    """Something that starts afresh in a forked child. Subclasses call `follow_forks`."""

    __slots__ = ()

    def before_fork(self) -> None:
        """Finish or block every change, until the fork is over. An unseen fork has no before."""

    def after_fork(self) -> None:
        """Undo what `before_fork` did, in the parent and in the child."""

    def after_fork_in_child(self) -> None:
        """Start afresh: no other thread of the parent exists here.

        A lock that is still held was held by one of them. Replace locks, and never wait for one.
        """


_members: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []
_at_rest: list[ForkAware] = []
_one_fork_at_a_time = threading.Lock()


def follow_forks(member: ForkAware) -> None:
    """Call the methods of `member` at every fork of this process, for as long as it lives."""
    _members.add(member)


def in_forked_child(function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` in every forked child, after all members and the functions before it."""
    _functions.append(function)
    return function


def _all_members() -> tuple[ForkAware, ...]:
    while True:
        try:
            return tuple(_members)
        except RuntimeError:  # another thread has added one meanwhile
            continue


# --- is this still the same process? ---------------------------------------------------------

_WIPEONFORK = 18
"""Linux's MADV_WIPEONFORK, which Python has no name for."""


class _ProcessId:
    """Compares process ids, where the kernel wipes no page: that takes a system call each time."""

    _mine = 0

    def __getitem__(self, _: int) -> int:
        return int(self._mine == os.getpid())

    def __setitem__(self, _: int, value: int) -> None:
        self._mine = os.getpid()


def _wiped_page() -> Any:
    """Return what is 1 at 0 in this process, and 0 in a child that nothing has noticed yet."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPEONFORK)
    except (AttributeError, OSError, TypeError, ValueError):  # another system, or an old kernel
        return _ProcessId()
    return page


_known = _wiped_page()
_known[0] = 1
_starting: dict[int, Any] = {}
"""The lock of each process that starts afresh: an inherited one may be held for ever."""


def notice_fork() -> None:
    """Start afresh if this process was forked since the last call; else do nothing."""
    if not _known[0]:
        _start_unseen()


def _start_unseen() -> None:
    global _one_fork_at_a_time  # noqa: PLW0603 - a thread of the parent may have forked, too
    # Reentrant: a signal handler may make a call here.
    with _starting.setdefault(os.getpid(), threading.RLock()):
        if not _known[0]:
            _one_fork_at_a_time = threading.Lock()
            _at_rest.clear()
            _start_afresh()


def _start_afresh() -> None:
    for member in _all_members():
        member.after_fork_in_child()
    for function in _functions:
        function()
    _known[0] = 1  # Last: other threads wait until then, and an interrupted start is repeated.


# --- forks that Python sees ------------------------------------------------------------------


def _before() -> None:
    notice_fork()
    _one_fork_at_a_time.acquire()  # noqa: SIM115, RUF100 - released after the fork, by the parent
    for member in _all_members():
        _at_rest.append(member)
        member.before_fork()


def _after() -> None:
    # Python drops what a hook raises, and forks all the same: the others go on in any case.
    try:
        while _at_rest:
            _at_rest.pop().after_fork()
    finally:
        if _at_rest:
            _after()
        elif _one_fork_at_a_time.locked():
            _one_fork_at_a_time.release()


def _after_in_child() -> None:
    _after()
    _start_afresh()


if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)


# --- what members share ----------------------------------------------------------------------

_left_alone: list[object] = []


def leave_alone(connections: object) -> None:
    """Keep the parent's connections for ever: they are not this process's to close."""
    _left_alone.append(connections)


class ForkSafeLock(ForkAware):
    """Held across every fork that Python sees, so that what it protects is whole on both sides.

    Enter `lock` itself: a `with` of the interpreter's own lock has no step of Python between taking
    it and its block, at which an exception of a signal handler would leave it taken for ever.

    A `reentrant` one may be taken again by the thread that holds it, as by a signal handler.
    """

    def __init__(self, *, reentrant: bool = False) -> None:
        self._new = threading.RLock if reentrant else threading.Lock
        self.lock: Any = self._new()
        self._held_for_fork = False
        follow_forks(self)

    def before_fork(self) -> None:
        """Take the lock, so that no other thread holds it during the fork."""
        self._held_for_fork = self.lock.acquire()

    def after_fork(self) -> None:
        """Release the lock, unless taking it was interrupted."""
        if self._held_for_fork:
            self._held_for_fork = False
            self.lock.release()

    def after_fork_in_child(self) -> None:
        """Take a new lock: no thread here will release one that is still held."""
        self.lock = self._new()
