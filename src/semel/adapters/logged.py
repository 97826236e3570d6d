"""How a door logs what it could not do."""

from __future__ import annotations

from semel.errors import StoreFull, StoreUnavailable
from semel.events import logger


def log_failure(what: str, error: Exception) -> None:
    """Log in a line what the store says of itself; with its traceback what somebody has to mend.

    A store that is down fails every request in the same way, and its error names the reason.
    """
    of_the_store = isinstance(error, StoreUnavailable | StoreFull)
    logger.error("%s: %s", what, error, exc_info=None if of_the_store else error)
