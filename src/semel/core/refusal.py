"""Says which part of a value could not be taken, and why.

A walk over a value raises `Refused` where it stands; every container it passes on the way out adds
one step. The path is so made only for values that fail.
"""

from __future__ import annotations

from semel.errors import SerializationError

_SHOWN_STEPS = 12


class Refused(Exception):
    """A part of a value cannot be taken; knows the way to it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._steps: list[str] = []

    def inside(self, step: str) -> Refused:
        """Add the step that led here: `[0]`, `['a']` or `.name`."""
        self._steps.append(step)
        return self

    def as_error(self, root: str) -> SerializationError:
        """Make the error for the caller: the reason, and where it is, from `root` on."""
        steps = [*self._steps[: -_SHOWN_STEPS - 1 : -1]]
        if len(self._steps) > _SHOWN_STEPS:
            steps.append("...")
        return SerializationError(f"{self.reason} (at {root}{''.join(steps)})")


def type_name(cls: type) -> str:
    """Name a class as a person would write it: `Decimal`, `shop.orders.Receipt`."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def check_text(text: str) -> None:
    """Refuse a string that UTF-8 cannot hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("a string with a lone surrogate is not text") from None
