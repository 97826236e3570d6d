"""The front, for threads: asked if it is in use, told what it should know.

This module sends. No error of the front reaches a caller, but for `confirm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

from semel.errors import StoreError, StoreUnavailable
from semel.stores.redis.commands import Command
from semel.stores.redis.threads import Transport
from semel.stores.tiered.breaker import Breaker
from semel.stores.tiered.calls import Found, Look, looks

Answer = TypeVar("Answer")


class Front:
    """What stands in front of SQL."""

    def __init__(self, transport: Transport, breaker: Breaker) -> None:
        self._transport = transport
        self._breaker = breaker

    def look(self, questions: Sequence[Command[Found] | None]) -> list[Look | None]:
        """Ask the questions; None where there is none, or no answer."""
        asked = [question for question in questions if question is not None]
        answers = self._send(asked) if asked and self._breaker.allows(monotonic()) else []
        return looks(questions, answers, monotonic())

    def tell(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls if the front is in use; nobody waits for it otherwise."""
        if calls and self._breaker.allows(monotonic()):
            self._send(calls)

    def confirm(self, calls: Sequence[Command[bool]]) -> None:
        """Make the calls, whatever is known of the front; an error of one is raised."""
        for answer in self._send(calls):
            if isinstance(answer, StoreError):
                raise not_confirmed(self._transport.where) from answer

    def _send(self, calls: Sequence[Command[Answer]]) -> list[Answer | StoreError]:
        answers: list[Answer | StoreError]
        began = monotonic()
        try:
            answers = self._transport.send(calls)
        except StoreError as error:
            answers = [error] * len(calls)
        self._breaker.learn(answers, began, monotonic())
        return answers


def not_confirmed(where: str) -> StoreUnavailable:
    """What a caller is told whose change the front may not have heard of."""
    return StoreUnavailable(
        f"{where} did not confirm that this key is forgotten, and may answer with it until "
        "front_ttl has passed; forget it again when the front is back"
    )
