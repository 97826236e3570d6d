"""What errors say, by class, and how they travel: between processes, and into logs that must not
hold secrets."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

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
    errors.TooManyWaiting(retry_after=2.5),
    errors.PayloadMismatch(superseded=True),
    errors.DuplicateRequest("only once"),
    errors.WaitTimeout("too late"),
    errors.StoreFull("no room"),
    errors.ConfigError("no such setting"),
    errors.InvalidKey("empty"),
    errors.NestedCall("its own key"),
    errors.OutcomeUnknown("held"),
    errors.LeaseLost("replaced"),
    errors.SerializationError("a socket"),
    errors.RetryTransaction("serialization failure"),
    errors.StoreError("odd"),
    errors.StoreUnavailable("away"),
    errors.StoreRefused("wrong password"),
    errors.ValueRejected("too large"),
    errors.IdempotencyError("any"),
]
"""One of each kind."""

PUBLIC = [
    error
    for _, error in inspect.getmembers(semel, inspect.isclass)
    if issubclass(error, errors.IdempotencyError)
]

SAID = {
    # The same call may get its answer later: something elsewhere has to end, come back or make room
    errors.ConcurrentRequest: ("concurrent_request", True, 409, "UNAVAILABLE"),
    errors.LeaseLost: ("lease_lost", True, 409, "ABORTED"),
    errors.RetryTransaction: ("retry_transaction", True, 503, "ABORTED"),
    errors.StoreError: ("store_error", True, 503, "UNAVAILABLE"),
    errors.StoreFull: ("store_full", True, 503, "UNAVAILABLE"),
    errors.StoreUnavailable: ("store_unavailable", True, 503, "UNAVAILABLE"),
    errors.TooManyWaiting: ("too_many_waiting", True, 409, "UNAVAILABLE"),
    errors.WaitTimeout: ("wait_timeout", True, 409, "DEADLINE_EXCEEDED"),
    # The answer stays the same until a person changes the call, the settings or the record.
    errors.AttemptsExhausted: ("attempts_exhausted", False, 409, "FAILED_PRECONDITION"),
    errors.ConfigError: ("config_error", False, 500, "INTERNAL"),
    errors.DuplicateRequest: ("duplicate_request", False, 409, "ALREADY_EXISTS"),
    errors.IdempotencyError: ("idempotency_error", False, 500, "INTERNAL"),
    errors.InvalidKey: ("invalid_key", False, 400, "INVALID_ARGUMENT"),
    errors.NestedCall: ("nested_call", False, 500, "INTERNAL"),
    errors.OutcomeUnknown: ("outcome_unknown", False, 409, "ABORTED"),
    errors.PayloadMismatch: ("payload_mismatch", False, 422, "FAILED_PRECONDITION"),
    errors.PreviousFailure: ("previous_failure", False, 409, "FAILED_PRECONDITION"),
    errors.RecordUnreadable: ("record_unreadable", False, 503, "UNAVAILABLE"),
    errors.ResultUnavailable: ("result_unavailable", False, 409, "FAILED_PRECONDITION"),
    errors.SerializationError: ("serialization_error", False, 500, "INTERNAL"),
    errors.StoreRefused: ("store_refused", False, 503, "UNAVAILABLE"),
    errors.ValueRejected: ("value_rejected", False, 500, "INTERNAL"),
}
"""What each kind says to its caller; people's clients rely on it."""


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_error_says_whether_a_retry_helps(kind):
    assert (kind.code, kind.retry_helps, kind.http_status, kind.grpc_status) == SAID[kind]


def test_every_error_has_a_code_of_its_own():
    assert {kind.code for kind in PUBLIC} == {said[0] for said in SAID.values()}
    assert len({kind.code for kind in PUBLIC}) == len(PUBLIC) == len(SAID)


def test_the_reference_has_the_tree_and_every_class_in_a_table(project):
    page = (project / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    tree = page.partition("```text\n")[2].partition("\n```")[0]
    assert tree in inspect.cleandoc(errors.__doc__).replace("\n    ", "\n")
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| (\d+) \| `(\w+)` \|$", page, re.MULTILINE
    )
    told = {name: (code, helps == "yes", int(http), grpc) for name, code, helps, http, grpc in rows}
    assert told == {kind.__name__: said for kind, said in SAID.items()}


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_can_be_made_again_from_its_args(error):
    again = type(error)(*error.args)
    assert str(again) == str(error)
    for name in ("type_name", "message", "number", "reason"):
        assert getattr(again, name, None) == getattr(error, name, None)


def pickled(error):
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - what we just made


def test_no_kind_of_error_is_left_at_home():
    assert {type(error) for error in MADE} == set(PUBLIC)


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
