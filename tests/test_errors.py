"""Errors as they travel: between processes, and into logs that must not hold secrets."""

from __future__ import annotations

import copy
import pickle

import pytest

import semel
from semel import errors, open_async_store, open_store
from servers.redis import redis_server

MADE = [
    errors.PreviousFailure("ValueError", "no money"),
    errors.AttemptsExhausted(3),
    errors.ResultUnavailable("too large"),
    errors.RecordUnreadable("cut short"),
    errors.ConcurrentRequest(retry_after=2.5),
    errors.PayloadMismatch(superseded=True),
    errors.DuplicateRequest("only once"),
    errors.WaitTimeout("too late"),
    errors.StoreFull("no room"),
]


def pickled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - what we just made


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [pickled, copy.copy])
def test_an_error_arrives_in_another_process_as_it_was(error, travel):
    arrived = travel(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize("url", ["redis:user:pa55word@host", "postgresql:/user:pa55word@host/db"])
def test_a_url_that_is_none_is_not_repeated(opener, url):
    with pytest.raises(semel.ConfigError, match="a text without ://") as refused:
        opener(url)
    assert "pa55word" not in str(refused.value)


def test_a_server_that_repeats_the_command_is_not_quoted():
    with (
        redis_server(args=("--rename-command", "EVALSHA", "")) as server,
        semel.Idempotency(server.url) as idem,
        pytest.raises(semel.StoreError, match="unknown command") as refused,
    ):
        idem.execute("secret-key", lambda: "must not run")
    error = refused.value
    while error is not None:
        assert "secret-key" not in str(error)
        error = error.__cause__ or error.__context__
