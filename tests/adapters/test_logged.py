"""What an integration logs of a request that it could not process."""

from __future__ import annotations

import logging
from wsgiref.util import setup_testing_defaults

import pytest

from semel import ConfigError, Idempotency, StoreError, StoreFull, StoreUnavailable
from semel.adapters.wsgi import IdempotencyMiddleware
from semel.http.problems import log_failure
from semel.stores.memory import MemoryStore
from semel.testing import FaultyStore, Refuse


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (StoreUnavailable("it is away"), 1),
        (StoreFull("no room"), 1),
        (StoreError("what is this?"), 2),
        (ConfigError("nobody said where"), 2),
    ],
)
def test_only_a_mistake_has_a_traceback(error, lines, caplog):
    log_failure("not done", error)
    (record,) = caplog.records
    said = logging.Formatter().format(record).splitlines()
    assert said[0] == f"not done: {error}"
    assert len(said) == lines


def test_a_request_to_a_store_that_is_away_is_logged_in_a_line(caplog):
    store = FaultyStore(MemoryStore())
    store.inject("claim", Refuse())
    app = IdempotencyMiddleware(lambda *_: [b"never"], Idempotency(store))
    environ = {"REQUEST_METHOD": "POST", "HTTP_IDEMPOTENCY_KEY": "k"}
    setup_testing_defaults(environ)
    answered = []
    list(app(environ, lambda status, headers, exc_info=None: answered.append(status)))
    assert answered[0].startswith("503")
    (record,) = [each for each in caplog.records if "was not processed" in each.message]
    assert record.exc_info is None
