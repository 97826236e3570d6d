"""The front, for asyncio: the twin of `front`."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

from semel.errors import StoreError
from semel.stores.redis.commands import Command
from semel.stores.redis.tasks import AsyncTransport
from semel.stores.tiered.breaker import Breaker
from semel.stores.tiered.calls import Found, Look, looks
from semel.stores.tiered.front import not_confirmed

Answer = TypeVar("Answer")


class AsyncFront:
    """What stands in front of SQL."""

    def __init__(self, transport: AsyncTransport, breaker: Breaker) -> None:
        self._transport = transport
        self._breaker = breaker

    async def look(self, questions: Sequence[Command[Found] | None]) -> list[Look | None]:
        """Ask the questions; None where there is none, or no answer."""
        asked = [question for question in questions if question is not None]
        answers = await self._send(asked) if asked and self._breaker.allows(monotonic()) else []
        return looks(questions, answers, monotonic())

    async def tell(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls if the front is in use; nobody waits for it otherwise."""
        if calls and self._breaker.allows(monotonic()):
            await self._send(calls)

    async def confirm(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls, whatever is known of the front; an error of one is raised."""
        for answer in await self._send(calls):
            if isinstance(answer, StoreError):
                raise not_confirmed(self._transport.where) from answer

    async def _send(self, calls: Sequence[Command[Answer]]) -> list[Answer | StoreError]:
        answers: list[Answer | StoreError]
        began = monotonic()
        try:
            answers = await self._transport.send(calls)
        except StoreError as error:
            answers = [error] * len(calls)
        self._breaker.learn(answers, began, monotonic())
        return answers
