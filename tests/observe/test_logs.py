"""The running operation on log records."""

from __future__ import annotations

import io
import logging

import pytest

from semel import Idempotency
from semel.core.records import Identity
from semel.observe import KeyFilter

DIGEST = Identity("orders", "order:42").digest.hex()
FORMAT = "%(semel_scope)s %(semel_key_digest)s %(semel_attempt)s %(semel_key)s %(message)s"


@pytest.fixture
def written():
    """What a handler with a filter writes."""
    handlers = []

    def make(**options):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(FORMAT))
        handler.addFilter(KeyFilter(**options))
        logging.getLogger("shop").addHandler(handler)
        handlers.append(handler)
        return stream

    yield make
    for handler in handlers:
        logging.getLogger("shop").removeHandler(handler)


def test_log_records_tell_the_operation_that_is_running(written):
    stream = written()
    with Idempotency("memory://") as idem:
        logging.getLogger("shop").warning("before")
        idem.execute(
            "order:42", lambda: logging.getLogger("shop").warning("inside"), scope="orders"
        )
        logging.getLogger("shop").warning("after")
    assert stream.getvalue().splitlines() == [
        "- - - - before",
        f"orders {DIGEST} 1 - inside",
        "- - - - after",
    ]


def test_the_key_itself_is_shown_only_when_asked_for(written):
    stream = written(key=True)
    with Idempotency("memory://") as idem:
        logging.getLogger("shop").warning("before")
        idem.execute(
            "order:42", lambda: logging.getLogger("shop").warning("inside"), scope="orders"
        )
    assert stream.getvalue().splitlines() == [
        "- - - - before",
        f"orders {DIGEST} 1 order:42 inside",
    ]
