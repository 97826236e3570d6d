"""The attempt of a transactional block, and the warning to who leaves it."""

from __future__ import annotations

import sys
import warnings

from semel.attempts import Attempt, Result, current_attempt

_PACKAGE = __name__.partition(".")[0]


class TransactionAttempt(Attempt[Result]):
    """An attempt whose record is committed with the caller's transaction."""


class OutsideTransaction(UserWarning):
    """The ordinary API was used inside a transactional block: what it does commits by itself."""


def warn_inside(store: object) -> None:
    """Warn, once for each place in the caller's code."""
    attempt = current_attempt()
    while attempt is not None:
        if isinstance(attempt, TransactionAttempt) and attempt.store is store:
            warnings.warn(
                "this call does not belong to the block of idem.transaction() around it: what it "
                "writes is committed at once and stays when the transaction is rolled back, and it "
                "sees nothing of this transaction; use idem.transaction() for it too, or call it "
                "outside",
                OutsideTransaction,
                stacklevel=_users_frame(),
            )
            return
        attempt = attempt.outer


def _users_frame() -> int:
    """Count the frames up to the first that is not ours."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - `inspect` reads source files for it
    while frame.f_back is not None and _ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _ours(module: str) -> bool:
    return f"{module}.".startswith(f"{_PACKAGE}.")
