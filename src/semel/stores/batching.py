"""What stores for asyncio share: batches of requests, and the event loop that a store belongs to.

Many tasks, one request: claims and completes that come while a batch is out leave together. For
stores that can answer many members in one round trip and one commit:

    batcher = AsyncBatcher(ask, send)            # the store's own ways to answer one, and many
    await batcher.ask(request)

The rules of a queue (claims have one, and completes another):

- While the queue is idle, a call bypasses it and runs in the task of its caller.
- Those that went together come back together: after a batch of two or more, the next call is not
  sent ahead of the others, but in a batch with those that come in the same turn of the event loop.
- A batch that is not full waits one turn of the loop for more members, and at most `MOST_TURNS`
  while each turn brings some: the loop is busy then, and larger batches leave it more time.
- One batch is out at a time (beside a call that went straight through, and members that are
  asked for alone), and the next one fills meanwhile. There is no timer.
- What has to go in several batches is spread evenly over them.
- An identity is in a batch once; another request for it comes with a later batch.
- Each member has its own answer. What a batch cannot tell (`ALONE`), and every member of a batch
  that failed, is asked for again alone; only an unreachable store is not asked again for each.
- A batch that finds the store unreachable says so to those that wait for the next ones: one
  search after another would take longer than each of them may wait.
- A canceled caller is free at once; what was sent for it is done, and its answer is dropped. It is
  not sent again; and what its owner sends next, to give back what it may have got, comes after it.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from queue import Empty
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

from msgspec import Struct

from semel.core import records
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import ClaimRequest, CompleteRequest, Identity
from semel.errors import ConfigError, StoreError, StoreUnavailable

MOST_MEMBERS: Final = 64
"""More save little, and make the first of them wait for the last; with fewer, one half of a crowd
is served while the other half works."""

MOST_BYTES: Final = 1 << 20
"""A batch ends with the member that fills it; a large result does not wait for many others."""


MOST_TURNS: Final = 2
"""How many turns of the event loop a batch waits at most; with more, batches hardly grow."""


class _Alone(enum.Enum):
    ALONE = enum.auto()


ALONE: Final = _Alone.ALONE
"""In the place of an answer: this member must be asked for again, by itself."""

Alone: TypeAlias = Literal[_Alone.ALONE]

_INTERRUPTED: Final = "the event loop ended the task that would have brought the answer"

T = TypeVar("T")


class Request(Protocol):
    """What a queue knows of its members."""

    @property
    def identity(self) -> Identity:
        """Two of the same never share a batch."""
        ...

    @property
    def owner(self) -> bytes:
        """What one owner asks of an identity stays in its order."""
        ...


Ask: TypeAlias = Callable[[Any], Awaitable[Any]]
Send: TypeAlias = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Answers many; in place of an answer there may be a `StoreError`, or `ALONE`."""


class AsyncBatcher:
    """Sends the claims and the completes of many tasks in batches; other requests go straight.

    `ask` answers one request, and `send` answers many of a kind; it can also answer `ALONE`, so
    that this member is asked by itself. A batch has at most `most_members`, and ends with the
    member that makes it larger than `most_bytes`.
    """

    def __init__(
        self,
        ask: Ask,
        send: Send,
        *,
        most_members: int = MOST_MEMBERS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        limits = {"most_members": most_members, "most_bytes": most_bytes}
        self._claims = RequestQueue(ask, send, weight=weight_of_claim, **limits)
        self._completes = RequestQueue(ask, send, weight=weight_of_complete, **limits)
        self._ask = ask

    # A coroutine: a queue counts what is under way, so a call that nobody awaits must not begin.
    async def ask(self, request: records.Request[T]) -> T:
        """Return the answer to one `request`."""
        if isinstance(request, ClaimRequest):
            return cast("T", await self._claims.ask(request))
        if isinstance(request, CompleteRequest):
            return cast("T", await self._completes.ask(request))
        return cast("T", await self._ask(request))

    async def close(self) -> None:
        """Reject requests that wait, and wait for batches that are out."""
        await self._claims.close()
        await self._completes.close()


class RequestQueue(ForkAware):
    """The requests of one kind on their way to a store."""

    def __init__(
        self,
        ask: Ask,
        send: Send,
        *,
        weight: Callable[[Any], int],
        most_members: int = MOST_MEMBERS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`weight` tells about how many bytes a member adds to a batch."""
        self._ask_one = ask
        self._send_many = send
        self._weight = weight
        self._most_members = most_members
        self._most_bytes = most_bytes
        self._closed = False
        self._begin()
        follow_forks(self)

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._crowded = False
        """Whether the last batch had more than one member, which may all come back at once."""
        self._straight = 0
        """Calls that went straight through and have not come back."""
        self._next: NextBatches[Member] = NextBatches(self._most_members, self._most_bytes)
        self._sender: asyncio.Task[None] | None = None
        self._stragglers: dict[asyncio.Task[None], Request] = {}

    def ask(self, request: Request) -> Awaitable[Any]:
        """Ask, with others if the queue is busy; to be awaited at once."""
        notice_fork()
        loop = asyncio.get_running_loop()
        idle = self._sender is None and not self._straight
        if idle:
            self._loop = loop
        for straggler, sent in self._stragglers.items():
            if sent.owner == request.owner and sent.identity == request.identity:
                return self._ask_after(straggler, request)
        if (idle and not self._crowded) or self._loop is not loop or self._closed:
            # Also for another event loop, and after the end: the store has its own word on both.
            return self._ask_straight(request)
        return self._join(request, loop)

    async def _ask_after(self, straggler: asyncio.Task[None], request: Request) -> Any:
        await asyncio.wait((straggler,))
        return await self.ask(request)

    async def _ask_straight(self, request: Request) -> Any:
        self._straight += 1
        try:
            return await self._ask_one(request)
        finally:
            self._straight -= 1

    def _join(self, request: Request, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = loop.create_future()
        self._next.append(Member(request, self._weight(request), answer))
        if self._sender is None:
            # It begins when all that are awake now have joined: so by no factory of the
            # application's, which may begin tasks at once. A batch is nobody's own: it runs in no
            # caller's context.
            self._sender = asyncio.Task(self._send(), loop=loop, context=contextvars.Context())
        return answer

    async def _send(self) -> None:
        batch: list[Member] = []
        try:
            while batch := await self._filled():
                self._crowded = len(batch) > 1
                await self._send_batch(batch)
                batch = []  # each has its answer, or is asked for alone
        finally:
            self._sender = None
            for member in batch:  # only if this task itself was canceled
                member.fail(StoreUnavailable(_INTERRUPTED))
            self._reject(_INTERRUPTED)

    async def _filled(self) -> list[Member]:
        """Take the next batch, after the turns of the loop that bring more members."""
        for _ in range(MOST_TURNS):
            waiting = len(self._next.members)
            if not 0 < waiting < self._most_members:
                break
            await asyncio.sleep(0)
            if len(self._next.members) <= waiting:
                break
        return self._next.take()

    def _reject(self, reason: str) -> None:
        """Answer all callers that wait with an error."""
        for member in self._next.take_all():
            member.fail(StoreUnavailable(reason))

    async def _send_batch(self, batch: list[Member]) -> None:
        answers: Sequence[Any] = [ALONE] * len(batch)
        try:
            answers = await self._send_many([member.request for member in batch])
        except StoreUnavailable as away:
            answers = [own_copy(away) for _ in batch]
        except Exception:  # noqa: BLE001, S110 - the member that it belongs to meets it again
            pass
        if all(type(answer) is StoreUnavailable for answer in answers):
            self._reject(str(answers[0]))  # a locked record has an error of another class
        for member, answer in zip(batch, answers, strict=True):
            if answer is ALONE:
                self._ask_alone(member)
            elif isinstance(answer, StoreError):
                member.fail(answer)
            else:
                member.succeed(answer)

    def _ask_alone(self, member: Member) -> None:
        """Beside the next batches: what this one waits for must not hold them up."""
        if member.answer.done():
            return  # cancelled: its caller could not give back a claim
        task = asyncio.create_task(self._alone(member), context=contextvars.Context())
        self._stragglers[task] = member.request
        task.add_done_callback(self._stragglers.pop)

    async def _alone(self, member: Member) -> None:
        try:
            answer = await self._ask_one(member.request)
        except Exception as error:  # noqa: BLE001 - it is its caller's
            member.fail(error)
        else:
            member.succeed(answer)
        finally:
            member.fail(StoreUnavailable(_INTERRUPTED))  # has an answer, but if this was canceled

    async def close(self) -> None:
        """Reject requests that wait, and wait for batches that are out."""
        notice_fork()
        self._closed = True
        self._reject("the store was closed")
        while away := {*self._stragglers, *filter(None, (self._sender,))}:
            await asyncio.wait(away)

    def after_fork_in_child(self) -> None:
        """Start idle: the tasks that waited are not here."""
        self._begin()


class Member(Struct, eq=False):
    """One request on its way, and the answer that its caller waits for."""

    request: Request
    weight: int
    """About how many bytes it adds to a batch."""
    answer: asyncio.Future[Any]

    @property
    def identity(self) -> Identity:
        """Two of the same never share a batch."""
        return self.request.identity

    @property
    def gone(self) -> bool:
        """Whether its caller was canceled before it left."""
        return self.answer.done()

    def succeed(self, answer: object) -> None:
        """Wake the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Wake the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Waiting(Protocol):
    """What the next batches know of their members."""

    @property
    def identity(self) -> Hashable:
        """Two of the same never share a batch."""
        ...

    @property
    def weight(self) -> int:
        """About how many bytes it adds to a batch."""
        ...

    @property
    def gone(self) -> bool:
        """Whether no call waits for the answer anymore."""
        ...


M = TypeVar("M", bound=Waiting)


class NextBatches(Generic[M]):
    """The members of the next batches, in the order in which they came. It sends nothing."""

    def __init__(self, most_members: int, most_bytes: int, members: Iterable[M] = ()) -> None:
        """A batch ends with the member that fills it."""
        self._most_members = most_members
        self._most_bytes = most_bytes
        self.members = deque(members)

    def append(self, member: M) -> None:
        """Wait behind the others."""
        self.members.append(member)

    def without(self, member: M | None = None) -> NextBatches[M]:
        """Make a copy, without a member that leaves."""
        copy = NextBatches(self._most_members, self._most_bytes, self.members)
        if member is not None:
            copy.members.remove(member)
        return copy

    def take(self) -> list[M]:
        """Take the members that leave now; an identity is in a batch once."""
        batch: list[M] = []
        identities: set[Hashable] = set()
        again: list[M] = []
        most_members = self._most_of_this_batch()
        bytes_left = self._most_bytes
        while self.members and len(batch) < most_members and bytes_left > 0:
            member = self.members.popleft()
            if member.gone:
                continue
            if (identity := member.identity) in identities:
                again.append(member)
                continue
            identities.add(identity)
            batch.append(member)
            bytes_left -= member.weight
        self.members.extendleft(reversed(again))
        return batch

    def take_all(self) -> list[M]:
        """Take all of them: they do not leave any more."""
        members = list(self.members)
        self.members.clear()
        return members

    def _most_of_this_batch(self) -> int:
        # As many to each of the batches that it takes: after a full one, the few that are left
        # would come back alone, and pay for a commit of their own.
        waiting = len(self.members)
        batches = _rounded_up(waiting, self._most_members)
        return _rounded_up(waiting, batches) if batches else 0


def weight_of_claim(request: ClaimRequest) -> int:
    """Guess how much a claim adds to a batch."""
    names = len(request.identity.key) + len(request.identity.scope)
    return 100 + names + len(request.run_info)


def weight_of_complete(request: CompleteRequest) -> int:
    """Guess how much a complete adds to a batch."""
    names = len(request.identity.key) + len(request.identity.scope)
    return 100 + names + len(request.result.data)


def _rounded_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def own_copy(error: StoreUnavailable) -> StoreUnavailable:
    """Raised by many callers, one error would gather all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


# --- one event loop: the connections of a store cannot follow to another ----------------------


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of asyncio that runs here, or say that semel needs one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "AsyncIdempotency runs on asyncio, and no event loop of asyncio is running here; under "
            "trio use an Idempotency in threads, as in `await trio.to_thread.run_sync(...)`"
        ) from None


loop_here = asyncio._get_running_loop  # noqa: SLF001 - raises nothing where none runs
"""Return the loop that runs in this thread, or None; in a forked child none does."""


def only_loop(first: asyncio.AbstractEventLoop | None, place: str) -> asyncio.AbstractEventLoop:
    """Return the loop that runs; reject it if the store at this place was used on another."""
    running = running_loop()
    if first is not None and first is not running:
        raise ConfigError(f"the store at {place} belongs to another event loop; open one per loop")
    return running


def has_ended(first: asyncio.AbstractEventLoop | None, place: str) -> bool:
    """Whether the loop of a store is gone, and what was open on it; reject one that is not."""
    if first is None or first is asyncio.get_running_loop():
        return False
    if not first.is_closed():
        raise ConfigError(f"the store at {place} belongs to another event loop; close it there")
    return True


class AsyncSlots(ForkAware):
    """A limited number of slots for tasks, taken and given back as `thread_batching.Slots` are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Begin anew: slots taken by the parent's tasks will never come back here."""
        self._free = asyncio.Semaphore(self._count)

    async def get(
        self,
        *,
        block: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - as a queue for threads has it
    ) -> object:
        """Take a slot; raises `queue.Empty`."""
        if self._free.locked():  # else there is no need for a timer
            if not block:
                raise Empty
            try:
                async with asyncio.timeout(timeout):
                    await self._free.acquire()
            except TimeoutError:
                raise Empty from None
        else:
            await self._free.acquire()
        return self

    def give(self, _slot: object) -> None:
        """Release a slot."""
        self._free.release()
