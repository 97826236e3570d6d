"""Many threads, one request: claims and completes that come while a batch is out leave together.

The counterpart of `batching`, for stores for threads:

    batcher = Batcher(ask, send)            # the store's own ways to answer one, and many
    batcher.ask(request)

The rules of a queue (claims have one, and completes another):

- While the queue is idle, up to `STRAIGHT` calls bypass it, each in its caller's thread.
- The caller that comes then leads a batch, in its own thread. While a batch is out, no call goes
  straight, and the next batch fills: it leaves when the one before it is back, or beside it when
  it has `FULL` members. The first of those that wait leads it; the others sleep. It takes them when
  its thread is awake, so that those that came meanwhile leave with it.
- No call waits for one that went straight, which a lock may hold up, only for batches, which wait
  for no lock. There is no thread of its own, and no timer.
- What `batching` says of members, identities, answers and errors holds here, too.
- A caller that an exception interrupts while it waits leaves, and nothing is sent for it. If its
  request was sent, it waits for the answer, which the store's own time limit bounds: what its owner
  sends next, to give back what it may have got, comes after it.
- A leader that an exception interrupts (a signal handler's, say) raises it, and its followers ask
  for themselves. So that no call is left behind, what a thread changes here is changed in one step,
  or done again by that thread before the exception leaves.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast
from weakref import ReferenceType, ref

from semel.core import records
from semel.core.process import ForkAware, follow_forks, notice_fork
from semel.core.records import ClaimRequest, CompleteRequest, Identity
from semel.errors import ConfigError, StoreError, StoreUnavailable
from semel.stores.batching import (
    ALONE,
    MOST_BYTES,
    MOST_MEMBERS,
    NextBatches,
    Request,
    own_copy,
    weight_of_claim,
    weight_of_complete,
)

STRAIGHT: Final = 8
"""Calls that may bypass a queue at the same time. A lower limit saves work on a near server, but
costs more in waiting on a distant one."""

BATCHES: Final = 2
"""Batches of a queue that are out at once; the second one leaves when it has `FULL` members."""

FULL: Final = 6
"""Well below half of 16 threads, so that these have two batches away all the time: with 8 they had
one or two by chance."""

Ask: TypeAlias = Callable[[Any], Any]
Send: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers many; in place of an answer there may be a `StoreError`, or `ALONE`."""

T = TypeVar("T")


class Batcher:
    """Sends the claims and the completes of many threads in batches; other requests go straight.

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
        nobody: NextBatches[RequestTurn] = NextBatches(most_members, most_bytes)
        self._claims = RequestQueue(ask, send, nobody, weight=weight_of_claim)
        self._completes = RequestQueue(ask, send, nobody, weight=weight_of_complete)
        self._ask = ask

    def ask(self, request: records.Request[T]) -> T:
        """Return the answer to one `request`."""
        if isinstance(request, ClaimRequest):
            return cast("T", self._claims.ask(request))
        if isinstance(request, CompleteRequest):
            return cast("T", self._completes.ask(request))
        return cast("T", self._ask(request))

    def close(self) -> None:
        """Reject requests that wait; batches that are out come back."""
        self._claims.close()
        self._completes.close()


MOST_SLOTS: Final = 1 << 16
"""There are no more ports to connect from; more than that means "as many as possible"."""


class Slot:
    """The right to be one of a limited number. One that no call holds anymore returns by itself.

    So none is lost when an exception of a signal handler strikes between taking and giving.
    """

    __slots__ = ("_free",)

    def __init__(self, free: ReferenceType[SimpleQueue[Any]]) -> None:
        self._free = free

    def __del__(self) -> None:
        free = self._free()
        if free is not None:  # else all of them are gone, or were left behind by a fork
            free.put(Slot(self._free))


class Slots(ForkAware):
    """A limited number of slots for threads: at connections, or at work that few may do at a time.

    Each has one holder at a time. Taking and giving are one step each, which no exception of a
    signal handler can tear apart; a semaphore for threads is written in Python, and may lose a
    slot or keep its lock. It costs ten times as much, too.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Begin anew: slots taken by the parent's threads will never come back here."""
        self._free: SimpleQueue[Slot] = SimpleQueue()
        free = ref(self._free)
        for _ in range(min(self._count, MOST_SLOTS)):
            self._free.put(Slot(free))
        # Not wrapped in functions: every exchange with a server calls them.
        self.get: Callable[..., Slot] = self._free.get
        """Take a slot (`block=`, `timeout=`); raises `queue.Empty`."""
        self.give: Callable[[Any], None] = self._free.put
        """Release a slot."""


class Turn:
    """A caller that waits: its thread sleeps until it is answered, or is to lead a batch."""

    weight: int
    """About how much it adds to a batch."""
    batch: Sequence[Any] = ()
    """The turns that it leads, its own among them."""
    sent = False
    """Whether another thread has taken it into a batch."""
    released = False
    """Whether its answer is final."""
    gone = False

    def __init__(self) -> None:
        self._asleep = threading.Lock()  # the cheapest wake-up there is: another thread frees it
        self._asleep.acquire()

    @property
    def identity(self) -> Hashable:
        """Two of the same never share a batch."""
        return self

    def sleep(self, seconds: float = -1) -> bool:
        """Wait to be woken; False when the time is over first."""
        return self._asleep.acquire(timeout=seconds)

    def wake(self) -> None:
        """Let its thread go on; to do it again does no harm."""
        if self._asleep.locked():
            self._asleep.release()

    def release(self) -> None:
        """Let its thread go on with the answer that it has."""
        self.released = True
        if self._asleep.locked():
            self._asleep.release()


W = TypeVar("W", bound=Turn)


class ThreadQueue(ForkAware, ABC, Generic[W]):
    """Threads that wait, and those among them that lead the batches of the others."""

    def __init__(self, empty: NextBatches[W], *, most_leaders: int = 1, full: int = 1) -> None:
        """With `full` that wait, as many as `most_leaders` may lead a batch at the same time."""
        self._empty = empty
        self._most_leaders = most_leaders
        self._full = full
        self.after_fork_in_child()
        follow_forks(self)

    def after_fork_in_child(self) -> None:
        """Start idle: the threads that waited are not here."""
        self.mutex = threading.Lock()
        self.waiting = self._empty.without()
        self.leaders: frozenset[W] = frozenset()
        """Those that lead a batch, or were appointed to. While a call waits, there is one."""

    @abstractmethod
    def serve(self, leader: W) -> None:
        """Answer the turns of the leader's batch."""

    def wait(self, turn: W) -> None:
        """Sleep until the turn is released, or is to lead."""
        turn.sleep()

    def wait_for_answer(self, turn: W) -> None:
        """Sleep on, although the caller was interrupted: another thread has sent its request."""
        turn.sleep()

    def take_turn(self, turn: W) -> None:
        """Wait until `turn` is released by the thread that leads, which may be this one."""
        try:
            with self.mutex:
                if self.leaders:
                    self.waiting.append(turn)
                    self._appoint()
                else:  # nobody waits
                    turn.batch = (turn,)
                    self.leaders = frozenset(turn.batch)
            if not turn.batch:
                self.wait(turn)
                if turn in self.leaders:
                    self._take_batch(turn)
            if turn.batch:
                self.serve(turn)
            if turn in self.leaders:
                self.leave(turn)
        except BaseException:
            self._leave_for_sure(turn)
            if turn.sent and not turn.released:
                self.wait_for_answer(turn)
            raise

    def leave(self, turn: W) -> None:
        """Stop to wait, or to lead; to do it again does no harm."""
        with self.mutex:
            self.leaders -= {turn}
            if self.waiting.members:
                if turn in self.waiting.members:
                    self.waiting, turn.released = self.waiting.without(turn), True
                self._appoint()
            for leader in self.leaders:
                leader.wake()
        for member in turn.batch:
            if member is not turn:
                member.release()

    def _leave_for_sure(self, turn: W) -> None:
        """Leave, although further exceptions of signal handlers strike meanwhile."""
        try:
            try:
                self.leave(turn)
            except BaseException:
                self.leave(turn)
                raise
        except BaseException:
            self.leave(turn)
            raise

    def _appoint(self) -> None:
        """Let the first of those that wait lead the next batch, if one may leave."""
        waiting = self.waiting.members
        most_leaders = self._most_leaders if len(waiting) >= self._full else 1
        if waiting and len(self.leaders) < most_leaders and all(one.batch for one in self.leaders):
            leader = waiting[0]
            self.leaders |= {leader}
            leader.wake()

    def _take_batch(self, leader: W) -> None:
        """Take its batch when its thread is awake: those that came meanwhile leave with it."""
        with self.mutex:
            if leader in self.waiting.members:  # else it was rejected
                rest = self.waiting.without()
                batch = rest.take()
                for follower in batch[1:]:
                    follower.sent = True
                leader.batch, self.waiting = batch, rest  # in one step
                self._appoint()


class RequestTurn(Turn):
    """A caller that waits for the answer to one request."""

    def __init__(self, request: Any, weight: int) -> None:
        super().__init__()
        self.request: Request = request
        self.weight = weight
        self.answer: Any = ALONE

    @property
    def identity(self) -> Identity:
        """Two of the same never share a batch."""
        return self.request.identity


class RequestQueue(ThreadQueue[RequestTurn]):
    """The requests of one kind on their way to a store."""

    def __init__(
        self,
        ask: Ask,
        send: Send,
        empty: NextBatches[RequestTurn],
        *,
        weight: Callable[[Any], int],
    ) -> None:
        """`weight` tells about how many bytes a member adds to a batch."""
        super().__init__(empty, most_leaders=BATCHES, full=FULL)
        self._ask_one = ask
        self._send_many = send
        self._weight = weight
        self._straight = Slots(STRAIGHT)

    def ask(self, request: Request) -> Any:
        """Ask, with others if the queue is busy."""
        notice_fork()
        if not self.leaders:
            try:
                slot = self._straight.get(block=False)
            except Empty:
                pass
            else:
                try:
                    return self._ask_one(request)
                finally:
                    self._straight.give(slot)
        turn = RequestTurn(request, self._weight(request))
        self.take_turn(turn)
        if turn.answer is ALONE:
            return self._ask_one(request)
        if isinstance(turn.answer, StoreError):
            raise turn.answer
        return turn.answer

    def serve(self, leader: RequestTurn) -> None:
        """Send the leader's batch; of what fails for another reason, each member asks by itself."""
        batch = leader.batch
        try:
            answers = self._send_many([turn.request for turn in batch])
        except StoreUnavailable as away:
            answers = [own_copy(away) for _ in batch]
        except (StoreError, ConfigError):
            return
        for turn, answer in zip(batch, answers, strict=True):
            turn.answer = answer
        if all(type(answer) is StoreUnavailable for answer in answers):
            self._reject(leader, answers[0])  # a locked record has an error of another class

    def close(self) -> None:
        """Reject those that wait."""
        stand_in = RequestTurn(None, 0)
        self._reject(stand_in, StoreUnavailable("the store was closed"))
        self.leave(stand_in)

    def _reject(self, leader: RequestTurn, reason: StoreUnavailable) -> None:
        """Answer those that wait with an error, as if they were in the leader's batch."""
        with self.mutex:
            rejected = self.waiting.without().take_all()
            for turn in rejected:
                turn.answer = own_copy(reason)
            leader.batch, self.waiting = [*leader.batch, *rejected], self._empty.without()
