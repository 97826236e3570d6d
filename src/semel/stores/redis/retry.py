"""What to do when a server did not simply answer: what is sent again, where, and for how long.

This module decides. It sends nothing and waits for nothing: a `Delivery` has the commands of the
next round trip, is given a reply or an error for each, and ends when every command has its own.

    NOSCRIPT             the server forgot the script      -> again, with the whole text
    TRYAGAIN             the slot is moving, two keys      -> the record alone, then its index entry
    ASK                  the slot is moving, one key       -> again, at the node named
    MOVED, node lost,    the map of the cluster is old     -> again, after a look at the new map
    CLUSTERDOWN
    `Large`              the record is long                -> a plain GET reads it

Every script may be run twice with the same answer, so sending again is always safe. A round trip
that failed is made again until half of the caller's time has passed (`Backoff`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from redis import exceptions as driver
from redis.backoff import EqualJitterBackoff
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ReadOnlyError

from semel.errors import StoreError
from semel.stores.redis.commands import Command, pack
from semel.stores.redis.errors import failure, is_hopeless
from semel.stores.redis.redis_py import pool_is_empty
from semel.stores.redis.replies import Large, granted

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
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25


class Sending(Struct, frozen=True):
    """One command of a round trip."""

    command: Command[Any]
    position: int
    """Which answer this is; the index entry of a record that went alone has none (-1)."""
    with_text: bool = False
    node: Address | None = None
    """Where a redirection said to go; None = the node that has the slot on the map."""
    asking: bool = False
    """The node is only about to get the slot: ASKING goes before the command."""
    whole: Command[Any] | None = None
    """Set when the record goes alone: the command with both keys."""

    def packed(self) -> bytes:
        """What to send."""
        return pack(self.command.parts(with_text=True)) if self.with_text else self.command.packed()


class Delivery:
    """The commands of one caller, on their way until each has a reply or an error."""

    def __init__(self, commands: Sequence[Command[Any]], redirect_until: float, where: str) -> None:
        self.pending = [Sending(command, position) for position, command in enumerate(commands)]
        """What to send in the next round trip; empty at the end."""
        self.answers: list[Any] = [None] * len(commands)
        """What each command answers; its error if there is one."""
        self._where = where
        self._redirect_until = redirect_until
        """Until when there are other nodes to go to, and time left to do so."""

    def replied(self, replies: Sequence[Reply | Exception]) -> None:
        """Take the replies to what was pending, and decide what to send next."""
        pending, self.pending = self.pending, []
        for sending, reply in zip(pending, replies, strict=True):
            follow = self._after(sending, reply)
            if sending.position != _NOTE and (follow is None or follow.position == _NOTE):
                follow = self._answer(sending, reply) or follow
            if follow is not None:
                self.pending.append(follow)

    def _answer(self, sending: Sending, reply: Reply | Exception) -> Sending | None:
        """Read the last reply; a large record follows by itself."""
        answer = _answer_to(sending.command, reply, self._where)
        if type(answer) is Large:
            command = sending.whole or sending.command
            return Sending(command.next_command(answer), sending.position)
        self.answers[sending.position] = answer
        return None

    def _after(self, sending: Sending, reply: Reply | Exception) -> Sending | None:
        """What to send after this reply; None when there is nothing more to do."""
        match reply:
            case driver.NoScriptError() if not sending.with_text:
                return replace(sending, with_text=True)
            case driver.TryAgainError() if len(sending.command.keys) > 1:
                alone = sending.command.without_index()
                return Sending(alone, sending.position, whole=sending.command)
            case driver.AskError() if monotonic() < self._redirect_until:  # also a MovedError
                asking = not isinstance(reply, driver.MovedError)
                return replace(sending, node=(reply.host, reply.port), asking=asking)
            case _ if means_old_map(reply) and monotonic() < self._redirect_until:
                return replace(sending, node=None, asking=False)
            case _ if sending.whole is not None and granted(reply):
                return Sending(sending.whole.note(), _NOTE)
        return None


def means_old_map(reply: Reply | Exception) -> bool:
    """Whether the error may go away with a new map of the cluster."""
    return isinstance(reply, _OLD_MAP) and not pool_is_empty(reply) and not is_hopeless(reply)


def _answer_to(
    command: Command[Answer], reply: Reply | Exception, where: str
) -> Answer | Large | StoreError:
    """Read a reply; what cannot be read is that member's error alone."""
    if isinstance(reply, Exception):
        return failure(reply, where)
    try:
        return command.read(reply)
    except StoreError as unreadable:
        return unreadable


def certain(answer: Answer | StoreError) -> Answer:
    """The answer; a member's error is raised where there is no place for it."""
    if isinstance(answer, StoreError):
        raise answer
    return answer


# --- round trips that failed -----------------------------------------------------------------


class Backoff:
    """Whether, and after which pause, a round trip that failed is made again."""

    def __init__(self, seconds: float) -> None:
        self._deadline = monotonic() + seconds
        # The last pause must not take what is left of the time.
        self._pauses = EqualJitterBackoff(base=_FIRST_PAUSE, cap=min(_LONGEST_PAUSE, seconds / 4))
        self._failures = 0

    def pause_after(self, error: Exception) -> float:
        """Return the seconds until the next try; raises the error when there is none."""
        # A wrong password stays wrong, and so does a certificate; the application's pool is not
        # waited for behind its back.
        if pool_is_empty(error) or is_hopeless(error):
            raise error
        if monotonic() >= self._deadline:
            raise error
        self._failures += 1
        pause: float = self._pauses.compute(self._failures)
        return pause


def unfit_server(replies: Sequence[Any]) -> Disconnected | None:
    """The error of a connection whose server takes no writes, or no commands at all."""
    for reply in replies:
        if isinstance(reply, ReadOnlyError):
            return Disconnected("The previous primary is now a replica")
        if isinstance(reply, Disconnected):  # still loading, or too many clients
            return reply
    return None


# --- Sentinel --------------------------------------------------------------------------------

SILENCE = 0.5
"""Seconds. A Sentinel calls no primary down that answered since then, so what a connection said
after a longer silence is believed only if Sentinel still names its server: a primary that was
frozen and has been replaced does not know it for a while, and still accepts writes."""

WITHOUT_SENTINEL = 5.0
"""Seconds until Sentinel is asked again after none answered: until then, what is open is used."""

NOT_THE_PRIMARY = "Sentinel names another primary now"


def follows_the_primary(client: Any) -> bool:
    """Whether a new connection leads to another server after a failover."""
    return getattr(client.connection_pool, "is_master", False)
