"""Many tasks, one request: claims and completes that come while a batch is away leave together.

For stores for asyncio that can answer many members in one round trip and one commit:

    batcher = Batcher(single, many)         # claim and complete; claim_many and complete_many
    await batcher.claim(ask)
    await batcher.complete(identity, owner, result, ttl)

The law of a lane:

- Idle, it is not there: the call goes straight through, in the task of its caller.
- One batch is away at a time (beside a call that went straight through, and members that are
  asked for alone), and the next one fills meanwhile. There is no timer.
- An identity is in a batch once; whoever asks for it again comes with a later batch.
- Each member has its own answer. What a batch cannot tell (`ALONE`), and every member of a batch
  that failed, is asked for again alone; only a store that is away is not asked again for each.
- Who is cancelled is free at once; what was sent for it is done, and its answer is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from semel.core.records import Claim, ClaimRequest, CompleteRequest, Encoded, Identity
from semel.errors import StoreError, StoreUnavailable
from semel.stores.forking import follow_forks

MOST_MEMBERS: Final = 64
"""More save little, and make the first of them wait for the last; with fewer, one half of a crowd
is served while the other half works."""

MOST_BYTES: Final = 1 << 20
"""A batch ends with the member that fills it; a large result does not wait for many others."""


class _Alone(enum.Enum):
    ALONE = enum.auto()


ALONE: Final = _Alone.ALONE
"""In the place of an answer: this member must be asked for again, by itself."""

Alone: TypeAlias = Literal[_Alone.ALONE]

_INTERRUPTED: Final = "the event loop ended the task that would have brought the answer"


class Request(Protocol):
    """What a lane knows of its members."""

    @property
    def identity(self) -> Identity:
        """Two of the same never share a batch."""
        ...


Ask = TypeVar("Ask", bound=Request)
Answer = TypeVar("Answer")


class _Member(Generic[Ask, Answer]):
    __slots__ = ("answer", "ask")

    def __init__(self, ask: Ask, answer: asyncio.Future[Answer]) -> None:
        self.ask = ask
        self.answer = answer

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Lane(Generic[Ask, Answer]):
    """The calls of one verb on their way to a store."""

    def __init__(
        self,
        one: Callable[[Ask], Awaitable[Answer]],
        many: Callable[[Sequence[Ask]], Awaitable[Sequence[Answer | StoreError | Alone]]],
        *,
        weight: Callable[[Ask], int],
        most_members: int = MOST_MEMBERS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`weight` tells about how many bytes a member adds to a batch."""
        self._one = one
        self._many = many
        self._weight = weight
        self._most_members = most_members
        self._most_bytes = most_bytes
        self._closed = False
        self._begin()
        follow_forks(self)

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._straight = 0
        """Calls that went straight through and have not come back."""
        self._queue: deque[_Member[Ask, Answer]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._stragglers: set[asyncio.Task[None]] = set()

    async def send(self, ask: Ask) -> Answer:
        """Ask, with others if the lane is busy."""
        if self._sender is None and not self._straight:
            self._loop = asyncio.get_running_loop()
        elif self._loop is asyncio.get_running_loop() and not self._closed:
            return await self._join(ask)
        # Also for another event loop, and after the end: the store has its own word on both.
        self._straight += 1
        try:
            return await self._one(ask)
        finally:
            self._straight -= 1

    def _join(self, ask: Ask) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        member: _Member[Ask, Answer] = _Member(ask, loop.create_future())
        self._queue.append(member)
        if self._sender is None:
            # It begins when all who are awake now have joined. A batch is nobody's own: it runs
            # in no caller's context.
            self._sender = loop.create_task(self._send(), context=contextvars.Context())
        return member.answer

    async def _send(self) -> None:
        batch: list[_Member[Ask, Answer]] = []
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        finally:
            self._sender = None
            for member in (*batch, *self._queue):  # only if this task itself was cancelled
                member.fail(StoreUnavailable(_INTERRUPTED))
            self._queue.clear()

    def _next_batch(self) -> list[_Member[Ask, Answer]]:
        batch: list[_Member[Ask, Answer]] = []
        names: set[Identity] = set()
        again: list[_Member[Ask, Answer]] = []
        room = self._most_bytes
        while self._queue and len(batch) < self._most_members and room > 0:
            member = self._queue.popleft()
            if member.answer.done():
                continue  # cancelled before it left
            identity = member.ask.identity
            if identity in names:
                again.append(member)
                continue
            names.add(identity)
            batch.append(member)
            room -= self._weight(member.ask)
        self._queue.extendleft(reversed(again))
        return batch

    async def _send_batch(self, batch: list[_Member[Ask, Answer]]) -> None:
        answers: Sequence[Answer | StoreError | Alone] = [ALONE] * len(batch)
        try:
            answers = await self._many([member.ask for member in batch])
        except StoreUnavailable as away:
            answers = [_own_copy(away) for _ in batch]
        except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
            pass
        for member, answer in zip(batch, answers, strict=True):
            if answer is ALONE:
                self._ask_alone(member)
            elif isinstance(answer, StoreError):
                member.fail(answer)
            elif not member.answer.done():
                member.answer.set_result(answer)

    def _ask_alone(self, member: _Member[Ask, Answer]) -> None:
        """Beside the next batches: what this one waits for must not hold them up."""
        task = asyncio.create_task(self._alone(member), context=contextvars.Context())
        self._stragglers.add(task)
        task.add_done_callback(self._stragglers.discard)

    async def _alone(self, member: _Member[Ask, Answer]) -> None:
        try:
            answer = await self._one(member.ask)
        except Exception as error:  # noqa: BLE001 - it is its caller's
            member.fail(error)
        else:
            if not member.answer.done():
                member.answer.set_result(answer)
        finally:
            member.fail(StoreUnavailable(_INTERRUPTED))  # has an answer, but if this was cancelled

    async def close(self) -> None:
        """Refuse who waits, and let what is away come back."""
        self._closed = True
        for member in self._queue:
            member.fail(StoreUnavailable("the store was closed"))
        self._queue.clear()
        while away := {*self._stragglers, *filter(None, (self._sender,))}:
            await asyncio.wait(away)

    def before_fork(self) -> None:
        """Do nothing: what is away comes back in the parent."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Start idle: the tasks that waited are not here."""
        self._begin()


class Single(Protocol):
    """A store's verbs for one."""

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        ...

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        ...


class Many(Protocol):
    """A store's verbs for many; each may answer ALONE for a member, too."""

    async def claim_many(
        self, asks: Sequence[ClaimRequest]
    ) -> Sequence[Claim | StoreError | Alone]:
        """`claim` for each."""
        ...

    async def complete_many(
        self, asks: Sequence[CompleteRequest]
    ) -> Sequence[bool | StoreError | Alone]:
        """`complete` for each."""
        ...


class Batcher:
    """A lane for claims and a lane for completes.

    `single` has a store's verbs for one member, `many` those for many, which may also answer
    `ALONE`: ask for this member by itself.
    """

    def __init__(
        self,
        single: Single,
        many: Many,
        *,
        most_members: int = MOST_MEMBERS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._claims = Lane(
            single.claim,
            many.claim_many,
            weight=weight_of_claim,
            most_members=most_members,
            most_bytes=most_bytes,
        )
        complete = single.complete
        self._completes: Lane[CompleteRequest, bool] = Lane(
            lambda ask: complete(ask.identity, ask.owner, ask.result, ask.ttl),
            many.complete_many,
            weight=weight_of_complete,
            most_members=most_members,
            most_bytes=most_bytes,
        )

    async def claim(self, ask: ClaimRequest) -> Claim:
        """Ask to run the operation."""
        return await self._claims.send(ask)

    async def complete(self, identity: Identity, owner: bytes, result: Encoded, ttl: float) -> bool:
        """Store the owner's success."""
        return await self._completes.send(CompleteRequest(identity, owner, result, ttl))

    async def close(self) -> None:
        """Refuse who waits, and let what is away come back."""
        await self._claims.close()
        await self._completes.close()


def weight_of_claim(ask: ClaimRequest) -> int:
    """Guess how much a claim adds to a batch."""
    return 100 + len(ask.identity.key) + len(ask.identity.scope)


def weight_of_complete(ask: CompleteRequest) -> int:
    """Guess how much a complete adds to a batch."""
    return 100 + len(ask.identity.key) + len(ask.identity.scope) + len(ask.result.data)


def _own_copy(error: StoreUnavailable) -> StoreUnavailable:
    """Raised by many tasks, one error would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
