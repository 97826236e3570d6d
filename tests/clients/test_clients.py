"""The clients in other languages, against the service over real sockets.

Every test runs in each language: in JavaScript always, in Go and Java by `make test-clients`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from clients.between import Between, Made, between
from clients.programs import LANGUAGES, Program, wait_for
from clients.scenarios import FILE, VECTORS, settings
from semel.core.records import Identity
from server.conftest import RunningService

LEASE = 2.0
"""Short, for attempts whose lease is to end."""
LONG = 60.0


class Given:
    """A service, and how to run programs against it."""

    def __init__(self, command: list[str], service: RunningService, folder: Path) -> None:
        self.command = command
        self.service = service
        self.folder = folder
        self.key = f"k-{uuid.uuid4().hex}"
        self.programs: list[Program] = []

    def once(self, *, to: Between | None = None, scope: str = "vectors", **told: Any) -> Program:
        """Begin a call of `once`."""
        url = self.service.url if to is None else to.url
        about = {"url": url, "scope": scope, "key": self.key, "folder": str(self.folder), **told}
        self.programs.append(Program(self.command, "once", json.dumps(about)))
        return self.programs[-1]

    def said(self, **told: Any) -> Any:
        """Call `once`, and return what came of it."""
        (said,) = self.once(**told).said()
        return said

    def post(self, verb: str, **fields: Any) -> Any:
        return self.service.post(verb, **{"scope": "vectors", "key": self.key, **fields}).data

    @property
    def effects(self) -> list[str]:
        """What the functions have done: "attempt takeover"."""
        file = self.folder / "effects"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_effects(self, count: int = 1) -> None:
        wait_for(lambda: len(self.effects) >= count)

    def open_gate(self) -> None:
        self.folder.joinpath("gate").touch()


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    folder.joinpath("semel.toml").write_text(settings())
    running = RunningService(folder, f"sqlite:///{folder / 'semel.db'}", (), {})
    yield running
    running.stop()


@pytest.fixture(scope="module", params=LANGUAGES)
def command(request, tmp_path_factory) -> list[str]:
    """The program of a language, built."""
    return LANGUAGES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def given(command, service, tmp_path) -> Iterator[Given]:
    made = Given(command, service, tmp_path)
    yield made
    for each in made.programs:
        each.end()


def losing(
    *losses: tuple[str, int], how: str = "lose the answer"
) -> Callable[[str, int], str | None]:
    """Make the rule of a `between` that loses these requests: each a verb, and which one of it."""
    return lambda verb, nth: how if (verb, nth) in losses else None


# --- the vectors ---------------------------------------------------------------------------------


def test_the_vectors(command, service):
    said = Program(command, "vectors", service.url, str(FILE)).said()
    assert [each for each in said if each["wrong"] is not None] == []
    assert [each["name"] for each in said] == [each["name"] for each in VECTORS["scenarios"]]


# --- one run, in whatever language ---------------------------------------------------------------

RESULT = {"charge": "ch_1", "text": 'grün ✓ "\\ \u2028', "items": [1, -2.5, 1e30, None, True, {}]}
PAYLOAD = {"order": 7, "amount": "10.00", "lines": [{"n": 1}, "é"]}


def test_a_duplicate_gets_the_result_of_the_first_call(given):
    told = {"result": RESULT, "call": {"payload": PAYLOAD}}
    assert given.said(**told) == {"result": RESULT, "lost": False}
    assert given.said(**told) == {"result": RESULT, "lost": False}
    assert given.effects == ["1 false"]


@pytest.mark.parametrize("result", [None, False, 0, "", [], {}])
def test_a_result_may_be_empty(given, result):
    assert given.said(result=result)["result"] == result
    assert given.said(result="another")["result"] == result
    assert given.effects == ["1 false"]


@pytest.mark.parametrize("through", ["store", "service"])
def test_python_waits_for_another_language(given, through):
    first = given.once(work="gate", result=RESULT, call={"payload": PAYLOAD})
    given.wait_for_effects()
    opened = threading.Timer(0.2, given.open_gate)
    opened.start()
    with semel.Idempotency(url_for(given.service, through)) as engine:
        got = engine.execute(given.key, lambda: "python ran", scope="vectors", payload=PAYLOAD)
    opened.join()
    assert got == RESULT
    assert first.said() == [{"result": RESULT, "lost": False}]
    assert given.effects == ["1 false"]


@pytest.mark.parametrize("through", ["store", "service"])
def test_another_language_waits_for_python(given, through):
    waiting: list[Program] = []

    def work() -> Any:
        waiting.append(given.once(result="the other ran", call={"payload": PAYLOAD}))
        one_waits = b"\nsemel_service_waiting 1\n"
        wait_for(lambda: one_waits in given.service.get("/metrics").body)
        return RESULT

    with semel.Idempotency(url_for(given.service, through)) as engine:
        engine.execute(given.key, work, scope="vectors", payload=PAYLOAD)
    assert waiting[0].said() == [{"result": RESULT, "lost": False}]
    assert given.effects == []


def url_for(service: RunningService, through: str) -> str:
    if through == "service":
        return service.url.replace("http://", "semel+http://")
    return f"sqlite:///{service.folder / 'semel.db'}"


def test_calls_at_the_same_time_run_once(given):
    calls = [given.once(result=number) for number in range(4)]
    results = [each["result"] for call in calls for each in call.said()]
    assert len(set(results)) == 1
    assert given.effects == ["1 false"]


def test_another_payload_is_refused(given):
    given.said(result=1, call={"payload": {"amount": 1}})
    said = given.said(result=2, call={"payload": {"amount": 2}})
    assert (said["error"], said["status"]) == ("payload_mismatch", 422)
    assert said["problem"]["superseded"] is False
    assert given.effects == ["1 false"]


def test_a_wrong_field_is_named(given):
    said = given.said(call={"lease": -1})
    assert (said["error"], said["status"]) == ("invalid_request", 400)
    assert said["problem"]["field"] == "lease"


def test_one_that_does_not_wait_is_told_so(given):
    given.post("start")
    said = given.said(result=1, call={"wait": 0})
    assert (said["error"], said["status"]) == ("concurrent_request", 409)
    assert given.effects == []


def test_one_that_waits_gives_up_in_time(given):
    given.post("start")
    said = given.said(result=1, call={"wait": 0.5})
    assert said["error"] in {"wait_timeout", "concurrent_request"}
    assert given.effects == []


def test_a_stored_response_is_the_result(given):
    response = {"status": 201, "headers": [["location", "/orders/7"]], "body": "made"}
    said = given.said(result=response, call={"response": True})
    assert said == {"result": response, "lost": False}
    assert given.post("start")["response"] == response
    assert given.said(result="another")["result"] == response


# --- failures ------------------------------------------------------------------------------------


def test_an_error_reaches_the_caller_and_the_next_call_runs(given):
    said = given.said(work="raise")
    assert (said["error"], said["message"]) == ("CardDeclined", "insufficient funds")
    assert given.said(result=2)["result"] == 2
    assert given.effects == ["1 false", "2 false"]


@pytest.mark.parametrize(
    ("outcome", "code"), [("final", "previous_failure"), ("unknown", "outcome_unknown")]
)
def test_the_caller_says_what_an_error_means(given, outcome, code):
    scope = "vectors.hold"
    assert (
        given.said(work="raise", scope=scope, call={"outcome": outcome})["error"] == "CardDeclined"
    )
    said = given.said(result=2, scope=scope)
    assert said["error"] == code
    if outcome == "final":
        wanted = {"type": "CardDeclined", "message": "insufficient funds"}
        assert said["problem"]["error"] == wanted
    assert given.effects == ["1 false"]


def test_an_error_of_finish_is_never_sent_as_fail(given):
    def never(verb: str, _nth: int) -> str | None:
        return "lose" if verb == "finish" else None

    with between(given.service.port, never) as flaky:
        said = given.said(to=flaky, result=RESULT, options={"patience": 0.5}, call={"lease": LONG})
    assert (said["error"], said["kept"]) == ("unreachable", RESULT)
    assert set(flaky.verbs()) == {"start", "finish"}
    assert given.post("start")["code"] == "concurrent_request"  # as it was: the lease runs


def test_a_result_that_is_too_large_is_no_failure(given):
    with between(given.service.port) as seen:
        said = given.said(to=seen, work="too large")
    assert (said["error"], said["status"]) == ("body_too_large", 413)
    assert seen.verbs() == ["start", "finish"]


def test_a_result_that_is_no_json_is_no_failure(given):
    with between(given.service.port) as seen:
        said = given.said(to=seen, work="no JSON")
    assert said["error"] in {"bad_result", "invalid_request"}
    assert "fail" not in seen.verbs()
    assert given.effects == ["1 false"]


def test_whatever_is_raised_is_recorded(given):
    assert "error" in given.said(work="raise oddly", scope="vectors.final")
    assert given.said(scope="vectors.final")["error"] == "previous_failure"


# --- callers that give up ------------------------------------------------------------------------


def test_a_caller_that_gives_up_stops_waiting(given):
    owner = given.post("start")["owner"]
    assert "error" in given.said(result=1, gives_up=0.3)
    assert given.effects == []
    assert given.post("finish", owner=owner, result="unharmed")["status"] == "stored"


def test_a_caller_that_gives_up_before_its_answer_frees_the_key(given):
    """Nothing ran: under hold, the key would need a person else."""

    def hanging_starts(verb: str, _nth: int) -> str | None:
        return "hang" if verb == "start" else None

    with between(given.service.port, hanging_starts) as slow:
        told = {"scope": "vectors.hold", "call": {"lease": LONG}, "gives_up": 2.0}
        assert "error" in given.said(to=slow, **told)
        assert slow.verbs() == ["start", "fail"]
    again = given.post("start", scope="vectors.hold")
    assert (again["status"], again["attempt"]) == ("run", 1)


# --- lost replies and outages --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lose the answer", "lose"])
def test_lost_requests_and_replies_are_sent_again_with_their_owner(given, how):
    rule = losing(("start", 1), ("start", 2), ("finish", 1), ("finish", 2), how=how)
    with between(given.service.port, rule) as flaky:
        said = given.said(to=flaky, result=RESULT, call={"lease": LONG})
    assert said == {"result": RESULT, "lost": False}
    assert flaky.verbs() == ["start"] * 3 + ["finish"] * 3
    assert len({body["owner"] for _, body in flaky.came}) == 1
    assert given.effects == ["1 false"]
    assert given.post("start")["result"] == RESULT


def test_a_lost_fail_is_sent_again(given):
    with between(given.service.port, losing(("fail", 1))) as flaky:
        said = given.said(to=flaky, work="raise", call={"outcome": "final", "lease": LONG})
    assert said["error"] == "CardDeclined"
    assert flaky.verbs() == ["start", "fail", "fail"]
    assert given.post("start")["error"]["message"] == "insufficient funds"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_answers_that_say_later_are_asked_again(given, status):
    later = Made(status, headers={"Retry-After": "1"})
    with between(given.service.port, lambda _, nth: later if nth == 1 else None) as busy:
        assert given.said(to=busy, result=1, call={"lease": LONG})["result"] == 1
    assert busy.verbs() == ["start", "start", "finish", "finish"]


def test_answers_that_no_retry_changes_are_not_asked_again(given):
    refused = json.dumps({"code": "forbidden", "detail": "This token does not permit it."})
    with between(given.service.port, lambda *_: Made(403, refused.encode())) as refusing:
        said = given.said(to=refusing, options={"token": "secret-token"})
    assert (said["error"], said["status"]) == ("forbidden", 403)
    assert "does not permit" in said["message"]
    assert refusing.verbs() == ["start"]
    assert refusing.headers[0]["Authorization"] == "Bearer secret-token"


def test_what_is_no_answer_of_the_service_is_an_error(given):
    with between(given.service.port, lambda *_: Made(200, b"<html>hello</html>")) as other:
        said = given.said(to=other)
    assert said["error"] == "bad_answer"


def test_an_unreachable_service_is_an_error_after_some_tries(given):
    with between(given.service.port, lambda *_: "lose") as dead:
        said = given.said(to=dead, options={"patience": 0.5})
    assert said["error"] == "unreachable"
    assert given.effects == []
    assert dead.verbs()[:2] == ["start", "start"]


def test_a_start_without_an_answer_frees_the_key(given):
    """Nothing ran: under hold, the key would need a person else."""

    def losing_starts(verb: str, _nth: int) -> str | None:
        return "lose the answer" if verb == "start" else None

    with between(given.service.port, losing_starts) as flaky:
        told = {"scope": "vectors.hold", "options": {"patience": 0.5}, "call": {"lease": LONG}}
        assert given.said(to=flaky, **told)["error"] == "unreachable"
        assert flaky.verbs()[-1] == "fail"
    again = given.post("start", scope="vectors.hold")
    assert (again["status"], again["attempt"]) == ("run", 1)


# --- leases --------------------------------------------------------------------------------------


def test_a_lease_is_renewed_while_the_function_runs(given):
    with between(given.service.port) as seen:
        call = given.once(to=seen, work="gate", result=1, call={"lease": 6.0})
        wait_for(lambda: [verb for verb, _ in seen.came].count("renew") >= 2)
        assert given.post("start")["code"] == "concurrent_request"
        given.open_gate()
        assert call.said() == [{"result": 1, "lost": False}]
    assert all(body["lease"] == 6.0 for verb, body in seen.came if verb == "renew")
    assert given.effects == ["1 false"]


def test_a_killed_process_has_a_successor(given):
    killed = given.once(work="gate", call={"lease": LEASE})
    given.wait_for_effects()
    killed.send_signal(signal.SIGKILL)
    assert given.said(result="successor") == {"result": "successor", "lost": False}
    assert given.effects == ["1 false", "2 true"]


def test_under_hold_a_killed_process_has_no_successor(given):
    killed = given.once(work="gate", scope="vectors.hold", call={"lease": LEASE})
    given.wait_for_effects()
    killed.send_signal(signal.SIGKILL)
    assert given.said(scope="vectors.hold")["error"] == "outcome_unknown"
    assert given.effects == ["1 false"]


def test_a_paused_process_loses_its_lease_and_its_stale_finish_is_refused(given):
    paused = given.once(work="until lost", result="stale", call={"lease": LEASE})
    given.wait_for_effects()
    paused.send_signal(signal.SIGSTOP)
    assert given.said(result="successor") == {"result": "successor", "lost": False}
    paused.send_signal(signal.SIGCONT)
    (said,) = paused.said()
    assert (said["error"], said["status"], said["kept"]) == ("lease_lost", 409, "stale")
    assert said["lost"] == "lease_lost"
    assert given.effects == ["1 false", "2 true"]
    assert given.post("start")["result"] == "successor"


def test_a_lease_that_cannot_be_renewed_is_lost_in_time(given):
    def no_renewals(verb: str, _nth: int) -> str | None:
        return "lose" if verb == "renew" else None

    with between(given.service.port, no_renewals) as cut:
        said = given.said(to=cut, work="until lost", result="late", call={"lease": LEASE})
    # No other attempt has started, so the result still counts.
    assert said == {"result": "late", "lost": "lease_lost"}
    assert given.post("start")["result"] == "late"


def test_an_operator_ends_an_attempt(given):
    """The record is gone: the next renewal says so, long before the lease would end."""
    call = given.once(work="until lost", result="late", call={"lease": 9.0})
    given.wait_for_effects()
    with contextlib.closing(semel.open_store(url_for(given.service, "store"))) as store:
        assert store.forget(Identity("vectors", given.key))
    (said,) = call.said()
    assert (said["error"], said["lost"]) == ("lease_lost", "lease_lost")
