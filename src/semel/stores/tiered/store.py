# Generated from stores/tiered/aio.py by `make generate`: change that file instead.
"""Redis in front, SQL behind, for threads.

This module sends: what the front may answer is not asked of SQL, the rest is, and the front is
informed of what SQL answered. `rules` decides all of that. No error of the front reaches a caller,
except where the front has to confirm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar, cast

from semel.core.policy import Duration, seconds
from semel.core.process import notice_fork
from semel.core.records import Identity, Request
from semel.errors import StoreError
from semel.stores.base import Store, Watch
from semel.stores.redis import RedisStore
from semel.stores.redis import open_store as open_redis
from semel.stores.redis.commands import Command
from semel.stores.redis.threads import Transport
from semel.stores.tiered.front import (
    FRONT_TIMEOUT,
    FRONT_TTL,
    Breaker,
    Found,
    Look,
    check_behind_url,
    check_front_url,
    checked_behind,
    checked_front,
    looks,
)
from semel.stores.tiered.rules import Asked, Tier, not_confirmed
from semel.stores.urls import DEFAULT_PREFIX, DEFAULT_TIMEOUT, open_store

T = TypeVar("T")


class Front:
    """The Redis server in front of SQL: asked only while it answers."""

    def __init__(self, transport: Transport, breaker: Breaker) -> None:
        self._transport = transport
        self._breaker = breaker

    def look(self, questions: Sequence[Command[Found] | None]) -> list[Look | None]:
        """Ask the questions; None where there is none, or no answer."""
        asked = [question for question in questions if question is not None]
        answers = self._send(asked) if asked and self._breaker.allows(monotonic()) else []
        return looks(questions, answers, monotonic())

    def tell(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls if the front is in use; otherwise do not wait for it."""
        if calls and self._breaker.allows(monotonic()):
            self._send(calls)

    def confirm(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls, whatever is known of the front; an error of one is raised."""
        for answer in self._send(calls):
            if isinstance(answer, StoreError):
                raise not_confirmed(self._transport.where) from answer

    def _send(self, calls: Sequence[Command[T]]) -> list[T | StoreError]:
        answers: list[T | StoreError]
        began = monotonic()
        try:
            answers = self._transport.send(calls)
        except StoreError as error:
            answers = [error] * len(calls)
        self._breaker.learn(answers, began, monotonic())
        return answers


class TieredStore(Store):
    """SQL decides, Redis saves work.

    `front` and `behind` are URLs, or stores of the application, which also closes them. What is
    opened by URL gets `prefix`; the store behind `timeout`, the front `front_timeout` and further
    options of redis-py. A store given as `front` keeps the time-outs it was opened with.
    """

    def __init__(
        self,
        front: str | RedisStore,
        behind: str | Store,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout: float = DEFAULT_TIMEOUT,
        front_ttl: Duration = FRONT_TTL,
        front_timeout: Duration = FRONT_TIMEOUT,
        **options: Any,
    ) -> None:
        longest = seconds("front_ttl", front_ttl)
        limit = seconds("front_timeout", front_timeout)
        self._opened: list[Store] = []
        if isinstance(front, str):
            check_front_url(front)
            front = open_redis(front, prefix=prefix, timeout=limit, **options)
            self._opened.append(front)
        else:
            front = checked_front(front, RedisStore, options)
        if isinstance(behind, str):
            check_behind_url(behind)
            behind = open_store(behind, prefix=prefix, timeout=timeout)
            self._opened.append(behind)
        self.behind: Store = checked_behind(behind, asynchronous=False)
        """The store that decides, and has the records."""
        self.unsupported = behind.unsupported
        self.path = behind.path
        transport = front.transport
        self._front = Front(transport, Breaker(transport.where, limit))
        self._tier = Tier(front.keys.prefix, longest)

    def __repr__(self) -> str:
        return f"<TieredStore in front of {self.behind!r}>"

    def migrate(self) -> int | None:
        """Create the tables of the store behind, or bring them up to date."""
        return self.behind.migrate()

    def ask(self, request: Request[T]) -> T:
        """Answer one request: the front if it may, else SQL."""
        notice_fork()
        if not self._tier.concerns(request):
            return self.behind.ask(request)
        return self._ask_both(request)

    def _ask_both(self, request: Request[T]) -> T:
        (look,) = self._front.look([self._tier.question(request)])
        known = self._tier.answer(request, look)
        if known is not None:
            return cast("T", known)
        (answer,) = self._ask_sql([request], [look], self._ask_behind)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def _ask_behind(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        try:
            return [self.behind.ask(requests[0])]
        except StoreError as error:
            return [error]

    def send(self, requests: Sequence[Request[T]]) -> list[T | StoreError]:
        """Answer each: one round trip to the front, one to SQL for what is left."""
        notice_fork()
        found = self._front.look([self._tier.question(request) for request in requests])
        answers: list[Any] = list(map(self._tier.answer, requests, found))
        left = [place for place, answer in enumerate(answers) if answer is None]
        if left:
            asked = [requests[place] for place in left], [found[place] for place in left]
            of_sql = self._ask_sql(*asked, self.behind.send)
            for place, answer in zip(left, of_sql, strict=True):
                answers[place] = answer
        return answers

    def _ask_sql(
        self,
        requests: Sequence[Request[T]],
        found: Sequence[Look | None],
        ask: Callable[[Sequence[Request[T]]], list[T | StoreError]],
    ) -> list[T | StoreError]:
        tier = self._tier
        asked = list(map(tier.sending, requests, found))
        marks = [mark for each in asked for mark in tier.to_confirm(each)]
        if marks:
            self._front.confirm(marks)
        sent = monotonic()
        answers = ask(requests)
        if marks:
            self._front.confirm(marks)
        answered = list(zip(asked, answers, strict=True))
        self._front.tell(
            [call for each, answer in answered for call in tier.updates(each, answer, sent)]
        )
        wanted = [each for each, answer in answered if tier.wants_copy(each, answer)]
        if wanted:
            self._copy(wanted)
        return answers

    def _copy(self, wanted: Sequence[Asked]) -> None:
        sent = monotonic()
        with suppress(StoreError):  # the claim is answered; a copy is for those who come next
            records = self.behind.get_many([each.identity for each in wanted])
            self._front.tell(self._tier.copies(wanted, records, sent))

    def close(self) -> None:
        """Close what was opened by URL."""
        for store in self._opened:
            store.close()

    def watch(self, identity: Identity) -> AbstractContextManager[Watch] | None:
        """Listen to SQL, and ask it alone meanwhile: the front may still say busy after the end."""
        watch = self.behind.watch(identity)
        return None if watch is None else self._watch(identity, watch)

    @contextmanager
    def _watch(self, identity: Identity, behind: AbstractContextManager[Watch]) -> Iterator[Watch]:
        with self._tier.asking_sql(identity), behind as watch:
            yield watch
