"""What to do when a server did not simply answer: send again what can be sent again.

This module decides. It sends nothing and reads no clock: `deliver` yields the commands of one
round trip, is given an answer or an error for each, and goes on until every call has its own.

    NOSCRIPT             the server forgot the script      -> again, with the whole text
    TRYAGAIN             the slot is moving, two keys      -> the record alone, then its index entry
    ASK                  the slot is moving, one key       -> again, at the node named
    MOVED, node lost,    the map of the cluster is old     -> again, after a look at the new map
    CLUSTERDOWN

Every script may be run twice with the same answer, so sending again is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from redis import exceptions as driver
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ReadOnlyError

from semel.errors import StoreError
from semel.stores.redis.clients import backoff
from semel.stores.redis.commands import Call, granted, packed
from semel.stores.redis.errors import failure, is_hopeless
from semel.stores.redis.redis_py import pool_is_empty

Answer = TypeVar("Answer")
Address: TypeAlias = tuple[str, int]
Reply: TypeAlias = Any

_OLD_MAP = (
    driver.ConnectionError,
    driver.TimeoutError,
    driver.ClusterDownError,
    driver.SlotNotCoveredError,
)
_NOTE = -1


class Attempt(Struct, frozen=True):
    """One command of a round trip."""

    call: Call[Any]
    position: int
    """Which answer this is; the index entry of a call that went alone has none (-1)."""
    with_text: bool = False
    node: Address | None = None
    """Where a redirection said to go; None = whoever the map says has the slot."""
    asking: bool = False
    """The node is only about to get the slot: ASKING goes before the command."""
    whole: Call[Any] | None = None
    """Set when the record goes alone: the call with both keys."""

    def wire(self) -> bytes:
        """What to send."""
        return packed(self.call.command(with_text=True)) if self.with_text else self.call.wire()


Delivery: TypeAlias = Generator[list[Attempt], Sequence[Reply | Exception], list[Reply | Exception]]


def deliver(calls: Sequence[Call[Any]], may_redirect: Callable[[], bool]) -> Delivery:
    """Yield the attempts of each round trip; return a reply or an error for every call.

    `may_redirect` says whether there are other nodes to go to, and time left to do so.
    """
    answers: list[Reply | Exception] = [None] * len(calls)
    pending = [Attempt(call, position) for position, call in enumerate(calls)]
    while pending:
        replies = yield pending
        again: list[Attempt] = []
        for attempt, reply in zip(pending, replies, strict=True):
            if attempt.position != _NOTE:
                answers[attempt.position] = reply
            follow = _after(attempt, reply, may_redirect)
            if follow is not None:
                again.append(follow)
        pending = again
    return answers


def _after(
    attempt: Attempt, reply: Reply | Exception, may_redirect: Callable[[], bool]
) -> Attempt | None:
    """The attempt that follows this reply; None when there is nothing more to do."""
    match reply:
        case driver.NoScriptError() if not attempt.with_text:
            return replace(attempt, with_text=True)
        case driver.TryAgainError() if len(attempt.call.keys) > 1:
            return Attempt(attempt.call.without_index(), attempt.position, whole=attempt.call)
        case driver.AskError() if may_redirect():  # a MovedError is one too
            asking = not isinstance(reply, driver.MovedError)
            return replace(attempt, node=(reply.host, reply.port), asking=asking)
        case _ if means_old_map(reply) and may_redirect():
            return replace(attempt, node=None, asking=False)
        case _ if attempt.whole is not None and granted(reply):
            return Attempt(attempt.whole.note(), _NOTE)
    return None


def means_old_map(reply: Reply | Exception) -> bool:
    """Whether the error may go away with a new map of the cluster."""
    return isinstance(reply, _OLD_MAP) and not pool_is_empty(reply) and not is_hopeless(reply)


def answers_to(
    calls: Sequence[Call[Answer]], replies: Sequence[Reply | Exception], where: str
) -> list[Answer | StoreError]:
    """Read each reply; what cannot be read is that member's error alone."""
    answers: list[Answer | StoreError] = []
    for call, reply in zip(calls, replies, strict=True):
        try:
            answers.append(
                failure(reply, where) if isinstance(reply, Exception) else call.read(reply)
            )
        except StoreError as unreadable:
            answers.append(unreadable)
    return answers


def certain(answer: Answer | StoreError) -> Answer:
    """The answer; a member's error is raised where there is no place for it."""
    if isinstance(answer, StoreError):
        raise answer
    return answer


def never() -> bool:
    """For `deliver`: there is nowhere else to go."""
    return False


# --- Whether, and after which pause, an exchange that failed is made again ----------------
#
# This module decides. It sends nothing and waits for nothing. Every script may be run twice with
# the same answer, so repeating is always safe; it ends with half of the caller's time.


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
