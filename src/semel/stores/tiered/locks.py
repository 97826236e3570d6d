"""A lock that is free in a forked child."""

from __future__ import annotations

import threading
from types import TracebackType

from semel.stores.forking import follow_forks


class ForkSafeLock:
    """Held across every fork, so that what it protects is whole on both sides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        follow_forks(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()

    def before_fork(self) -> None:
        """Come to rest."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Go on: the lock that was taken before the fork is this process's own."""
        self._lock.release()
