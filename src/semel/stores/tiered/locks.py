"""A lock that is free in a forked child."""

from __future__ import annotations

import threading

from semel.stores.forking import follow_forks


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
