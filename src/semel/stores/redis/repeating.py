"""Whether, and after which pause, an exchange that failed is made again.

This module decides. It sends nothing and waits for nothing. Every script may be run twice with
the same answer, so repeating is always safe; it ends with half of the caller's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ReadOnlyError

from semel.stores.redis.clients import backoff
from semel.stores.redis.failures import is_hopeless
from semel.stores.redis.redis_py import pool_is_empty

SILENCE = 0.5
"""Seconds. A Sentinel calls no primary down that answered since then, so what a connection said
after a longer silence is believed only if Sentinel still names its server: a primary that was
frozen and has been replaced does not know it for a while, and still accepts writes."""

WITHOUT_SENTINEL = 5.0
"""Seconds until Sentinel is asked again after none answered: until then, what is open is used."""


NOT_THE_PRIMARY = "Sentinel names another primary now"


class Repeating:
    """The patience of one exchange."""

    def __init__(self, seconds: float) -> None:
        self._deadline = monotonic() + seconds
        self._backoff = backoff(seconds)
        self._failures = 0

    def pause_after(self, error: Exception) -> float:
        """Give the seconds until the next try; raises the error when there is none."""
        # A wrong password stays wrong, and so does a certificate; the application's pool is not
        # waited for behind its back.
        if pool_is_empty(error) or is_hopeless(error):
            raise error
        if monotonic() >= self._deadline:
            raise error
        self._failures += 1
        pause: float = self._backoff.compute(self._failures)
        return pause


def follows_the_primary(client: Any) -> bool:
    """Whether connecting anew leads to another server after a failover."""
    return getattr(client.connection_pool, "is_master", False)


def unfit_server(replies: Sequence[Any]) -> Disconnected | None:
    """What to tell a connection whose server takes no writes, or no commands at all."""
    for reply in replies:
        if isinstance(reply, ReadOnlyError):
            return Disconnected("The previous primary is now a replica")
        if isinstance(reply, Disconnected):  # still loading, or too many clients
            return reply
    return None
