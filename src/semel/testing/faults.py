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
from msgspec.structs import force_setattr

from semel.core.policy import seconds
from semel.errors import ConfigError, StoreUnavailable


def _cut() -> Exception:
    return StoreUnavailable("the connection was cut (a fault of the test)")


class _Failing(Struct, frozen=True):
    error: Exception = field(default_factory=_cut)

    def __post_init__(self) -> None:
        if not isinstance(self.error, BaseException):
            name = type(self).__name__
            raise ConfigError(f"{name} takes the exception to raise; got {self.error!r}")


class Refuse(_Failing, frozen=True):
    """The call fails before the store has seen it."""


class LoseReply(_Failing, frozen=True):
    """The store applies the verb; its answer never arrives."""


class Delay(Struct, frozen=True):
    """The call reaches the store only after some seconds."""

    seconds: float

    def __post_init__(self) -> None:
        force_setattr(self, "seconds", seconds("a delay", self.seconds))  # a timedelta, too


Fault: TypeAlias = Refuse | LoseReply | Delay


class Call(Struct, frozen=True):
    """One call as it was made, and the fault it met."""

    verb: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fault: Fault | None


class FaultScript:
    """What shall go wrong, and what was called; `verbs` are those that may fail."""

    def __init__(self, verbs: Iterable[str]) -> None:
        self.calls: list[Call] = []
        self._verbs = frozenset(verbs)
        self._faults: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def inject(self, verb: str, fault: Fault, *, times: int = 1) -> None:
        """Let the next calls of a `verb`, `times` of them, meet this `fault`.

        The store must have such a verb.
        """
        # What would never happen is refused: the test that counts on it would prove nothing.
        self._check_verb(verb)
        if isinstance(fault, type):
            raise ConfigError(f"a fault is made by calling its class: {fault.__name__}(...)")
        if not isinstance(fault, Fault):
            raise ConfigError(f"a fault is a Refuse, LoseReply or Delay; got {fault!r}")
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ConfigError(f"times must be a whole number of 1 or more; got {times!r}")
        self._faults[verb].extend(repeat(fault, times))

    def heal(self) -> None:
        """Drop the faults that have not happened yet."""
        self._faults.clear()

    def fired(self, verb: str) -> int:
        """How many calls of this verb have met a fault; the store must have such a verb."""
        self._check_verb(verb)
        return sum(call.verb == verb and call.fault is not None for call in self.calls)

    def _check_verb(self, verb: str) -> None:
        if verb not in self._verbs:
            known = ", ".join(sorted(self._verbs))
            raise ConfigError(f"no call of {verb!r} can meet a fault: the verbs are {known}")

    def _next(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fault | None:
        faults = self._faults[verb]
        fault = faults.popleft() if faults else None
        self.calls.append(Call(verb, args, kwargs, fault))
        return fault
