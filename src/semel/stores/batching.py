"""Many tasks, one request: claims and completes that come while a batch is away leave together.

For stores for asyncio that can answer many members in one round trip and one commit:

    batcher = Batcher(single, many)         # claim and complete; claim_many and complete_many
    await batcher.claim(ask)
    await batcher.complete(identity, owner, result, ttl)

The law of a lane:

- Idle, it is not there: the call goes straight through, in the task of its caller.
- Who went together comes back together: after a batch of two or more, the next call is not sent
  ahead of the others, but at the end of this turn of the event loop, with all who came in it.
- One batch is away at a time (beside a call that went straight through, and members that are
  asked for alone), and the next one fills meanwhile. There is no timer.
- Who has to go in several batches is spread evenly over them.
- An identity is in a batch once; whoever asks for it again comes with a later batch.
- Each member has its own answer. What a batch cannot tell (`ALONE`), and every member of a batch
  that failed, is asked for again alone; only a store that is away is not asked again for each.
- A batch that learns that the store is away says so to those who wait for the next ones: one
  search after another would take longer than each of them may wait.
- Who is cancelled is free at once; what was sent for it is done, and its answer is dropped. It is
  not sent again; and what its owner sends next, to give back what it may have got, comes after it.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from semel.core.records import Claim, ClaimRequest, CompleteRequest, Encoded, Identity
from semel.errors import StoreError, StoreUnavailable
from semel.stores.forking import follow_forks
from semel.stores.waiting import Member, Queue

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

    @property
    def owner(self) -> bytes:
        """What one owner asks of an identity stays in its order."""
        ...


Ask = TypeVar("Ask", bound=Request)
Answer = TypeVar("Answer")


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
        self._crowded = False
        """Whether the last batch had more than one member, who may all come back at once."""
        self._straight = 0
        """Calls that went straight through and have not come back."""
        self._queue: Queue[Ask, Answer] = Queue(
            most_members=self._most_members, most_bytes=self._most_bytes
        )
        self._sender: asyncio.Task[None] | None = None
        self._stragglers: dict[asyncio.Task[None], Ask] = {}

    def send(self, ask: Ask) -> Awaitable[Answer]:
        """Ask, with others if the lane is busy; to be awaited at once."""
        loop = asyncio.get_running_loop()
        idle = self._sender is None and not self._straight
        if idle:
            self._loop = loop
        for straggler, sent in self._stragglers.items():
            if sent.owner == ask.owner and sent.identity == ask.identity:
                return self._send_after(straggler, ask)
        if (idle and not self._crowded) or self._loop is not loop or self._closed:
            # Also for another event loop, and after the end: the store has its own word on both.
            return self._send_straight(ask)
        return self._join(ask, loop)

    async def _send_after(self, straggler: asyncio.Task[None], ask: Ask) -> Answer:
        await asyncio.wait((straggler,))
        return await self.send(ask)

    async def _send_straight(self, ask: Ask) -> Answer:
        self._straight += 1
        try:
            return await self._one(ask)
        finally:
            self._straight -= 1

    def _join(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = loop.create_future()
        self._queue.join(Member(ask, ask.identity, self._weight(ask), answer))
        if self._sender is None:
            # It begins when all who are awake now have joined: so by no factory of the
            # application's, which may begin tasks at once. A batch is nobody's own: it runs in no
            # caller's context.
            self._sender = asyncio.Task(self._send(), loop=loop, context=contextvars.Context())
        return answer

    async def _send(self) -> None:
        batch: list[Member[Ask, Answer]] = []
        try:
            while batch := self._queue.next_batch():
                self._crowded = len(batch) > 1
                await self._send_batch(batch)
        finally:
            self._sender = None
            for member in batch:  # only if this task itself was cancelled
                member.fail(StoreUnavailable(_INTERRUPTED))
            self._queue.refuse(_INTERRUPTED)

    async def _send_batch(self, batch: list[Member[Ask, Answer]]) -> None:
        answers: Sequence[Answer | StoreError | Alone] = [ALONE] * len(batch)
        try:
            answers = await self._many([member.ask for member in batch])
        except StoreUnavailable as away:
            answers = [_own_copy(away) for _ in batch]
        except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
            pass
        if all(
            type(answer) is StoreUnavailable for answer in answers
        ):  # a locked record has another
            self._queue.refuse(str(answers[0]))
        for member, answer in zip(batch, answers, strict=True):
            if answer is ALONE:
                self._ask_alone(member)
            elif isinstance(answer, StoreError):
                member.fail(answer)
            else:
                member.succeed(answer)

    def _ask_alone(self, member: Member[Ask, Answer]) -> None:
        """Beside the next batches: what this one waits for must not hold them up."""
        if member.answer.done():
            return  # cancelled: what it got now, nobody would give back
        task = asyncio.create_task(self._alone(member), context=contextvars.Context())
        self._stragglers[task] = member.ask
        task.add_done_callback(self._stragglers.pop)

    async def _alone(self, member: Member[Ask, Answer]) -> None:
        try:
            answer = await self._one(member.ask)
        except Exception as error:  # noqa: BLE001 - it is its caller's
            member.fail(error)
        else:
            member.succeed(answer)
        finally:
            member.fail(StoreUnavailable(_INTERRUPTED))  # has an answer, but if this was cancelled

    async def close(self) -> None:
        """Refuse who waits, and let what is away come back."""
        self._closed = True
        self._queue.refuse("the store was closed")
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

    def claim(self, ask: ClaimRequest) -> Awaitable[Claim]:
        """Ask to run the operation."""
        ...

    def complete(
        self, identity: Identity, owner: bytes, result: Encoded, ttl: float
    ) -> Awaitable[bool]:
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
    `ALONE`: ask for this member by itself. A batch has at most `most_members`, and ends with the
    member that makes it larger than `most_bytes`.
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

    # Coroutines: a lane has to know at once what is under way, so it is told by whoever awaits.

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
