"""What can go wrong between a caller and its store, as a script.

A verb's faults are used up in the order they were injected, one per call; then it works again.
Every call is recorded, so that a test can check that its fault really fired.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeAlias

from msgspec import Struct, field

from semel.errors import ConfigError, StoreUnavailable


def _cut() -> Exception:
    return StoreUnavailable("the connection was cut (a fault of the test)")


class Refuse(Struct, frozen=True):
    """The call fails before the store has seen it."""

    error: Exception = field(default_factory=_cut)


class LoseReply(Struct, frozen=True):
    """The store applies the verb; its answer never arrives."""

    error: Exception = field(default_factory=_cut)


class Delay(Struct, frozen=True):
    """The call reaches the store only after some seconds."""

    seconds: float


Fault: TypeAlias = Refuse | LoseReply | Delay


class Call(Struct, frozen=True):
    """One call as it was made, and the fault it met."""

    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fault: Fault | None


class FaultScript:
    """What shall go wrong, and what was called."""

    def __init__(self, verbs: Iterable[str]) -> None:
        self.calls: list[Call] = []
        self._verbs = frozenset(verbs)
        self._faults: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def inject(self, verb: str, fault: Fault, *, times: int = 1) -> None:
        """Let the next calls of a verb meet this fault; the store must have such a verb."""
        if verb not in self._verbs:
            # It would never happen, and the test that counts on it would prove nothing.
            known = ", ".join(sorted(self._verbs))
            raise ConfigError(f"no call of {verb!r} can meet a fault: the verbs are {known}")
        self._faults[verb].extend(repeat(fault, times))

    def heal(self) -> None:
        """Drop the faults that have not happened yet."""
        self._faults.clear()

    def fired(self, verb: str) -> int:
        """How many calls of this verb have met a fault."""
        return sum(call.verb == verb and call.fault is not None for call in self.calls)

    def _next(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fault | None:
        faults = self._faults[verb]
        fault = faults.popleft() if faults else None
        self.calls.append(Call(verb, args, kwargs, fault))
        return fault
