"""Numbers 20 to 24 of the web rules: what is stored of an answer, and what a duplicate gets."""

from __future__ import annotations

import gzip

import pytest

from semel import State
from web.client import over_http_2
from web.handlers import CHUNKS, CORS_ORIGIN, FIRST_EVENT, SECOND_EVENT
from web.profiles import SMALL
from web.serve import STACKS
from web.workers import eventually

REPEATING = [name for name, stack in STACKS.items() if stack.repeats_lines]
NEVER_STORED = (
    "set-cookie",
    "authorization",
    "www-authenticate",
    "proxy-authentication-info",
    "x-csrf-token",
    "x-csrftoken",
    "token",
    "refresh_token",
    "authentication-info",
    "access-control-allow-origin",
    "access-control-allow-credentials",
)


def test_20_a_replay_has_the_status_and_the_very_bytes(on, key, run):
    body = bytes(range(256)) * 3
    told = {"key": key, "body": body, "content_type": "application/octet-stream", "run": run}
    first, again = (on().post("/echo", **told) for _ in range(2))
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body == body
    assert again.replayed
    assert again.header("content-length") == str(len(body))
    assert again.header("content-type") == first.header("content-type")


def test_20_a_streamed_answer_is_replayed_whole(on, key, run, folder):
    first, again = (on().post("/chunks", key=key, run=run) for _ in range(2))
    assert first.body == again.body == b"".join(CHUNKS)
    assert again.replayed
    assert first.header("x-number") == again.header("x-number")
    assert folder.runs(run) == 1


@pytest.mark.parametrize("stack", REPEATING)
def test_20_header_lines_stay_unsplit_and_in_order(on, key, run):
    first, again = (on().post("/repeated", key=key, run=run) for _ in range(2))
    assert again.replayed
    names = (b"link", b"x-between")
    stored = [line for line in again.lines if line[0].lower() in names]
    assert [value for _, value in stored] == [
        b"</a>; rel=next, </b>; rel=prev",
        b"yes",
        b"</c>; rel=last",
        b"</c>; rel=last",
    ]
    assert stored == [line for line in first.lines if line[0].lower() in names]


def test_20_the_first_caller_gets_everything_a_duplicate_no_secret(on, key, run):
    first, again = (on().post("/secret", key=key, run=run) for _ in range(2))
    for name in NEVER_STORED:
        assert first.header(name) is not None, name
        assert again.header(name) is None, name
    assert "Mon, 16 Nov 2026 03:00:00 GMT" not in again.all("date")
    assert (again.header("x-first"), again.header("x-second")) == ("1", "2")
    assert first.body == again.body


def test_20_an_application_names_more_that_is_never_stored(on, key, run):
    client = on("never-stored")
    first, again = (client.post("/secret", key=key, run=run) for _ in range(2))
    assert (first.header("x-first"), again.header("x-first")) == ("1", None)
    assert again.header("x-second") == "2"


def test_21_only_a_replay_is_marked(on, key, run):
    """Neither a handler's nor a client's header of that name has any effect."""
    spoofed = [("Idempotent-Replayed", "true")]
    first = on().post("/secret", key=key, lines=spoofed, run=run)
    assert first.all("idempotent-replayed") == []
    again = on().post("/secret", key=key, run=run)
    assert again.all("idempotent-replayed") == ["true"]


def test_21_the_mark_has_the_name_that_the_application_chose(on, key, run):
    own = [("X-Idempotency-Key", key)]
    first, again = (on("own-header").post("/pay", lines=own, run=run) for _ in range(2))
    assert (first.all("x-replay"), again.all("x-replay")) == ([], ["true"])
    assert again.all("idempotent-replayed") == []


@pytest.mark.parametrize("path", [f"/large/{SMALL + 1}", "/large_chunks/9"])
def test_22_an_answer_above_the_cap_is_given_once_and_then_omitted(on, key, run, folder, path):
    first, again = (on("small").post(path, key=key, run=run) for _ in range(2))
    assert first.status == 200
    assert len(first.body) > SMALL
    assert set(first.body) in ({ord("x")}, {ord("y")})
    assert (again.status, again.code) == (200, "result_omitted")
    assert again.replayed
    assert again.json["status"] == 200
    assert folder.runs(run) == 1


@pytest.mark.parametrize("path", [f"/large/{SMALL}", "/large_chunks/4"])
def test_22_an_answer_at_the_cap_is_stored(on, key, run, folder, path):
    first, again = (on("small").post(path, key=key, run=run) for _ in range(2))
    assert first.body == again.body
    assert len(again.body) == SMALL
    assert folder.runs(run) == 1


def test_22_a_client_that_leaves_a_large_answer_does_not_free_its_key(
    on, key, run, folder, records
):
    path = "/large_chunks/3000"
    leaving = on("small").open("POST", path, key=key, run=run)
    leaving.until(b"yyyy")
    leaving.leave()
    eventually(
        lambda: records.peek(key, scope="http").state is State.SUCCEEDED, "the end to be saved"
    )
    assert on("small").post(path, key=key, run=run).code == "result_omitted"
    assert folder.runs(run) == 1


def test_23_events_pass_live_unprotected_and_marked(on, key, run, folder):
    for number in range(2):
        gate = f"{key}-{number}"
        stream = on().open("POST", f"/events/{gate}", key=key, run=run)
        assert SECOND_EVENT not in stream.until(FIRST_EVENT)
        folder.open_gate(gate)
        answer = stream.answer()
        assert answer.body == FIRST_EVENT + SECOND_EVENT
        assert answer.header("idempotent-unprotected") == "stream"
        assert not answer.replayed
    assert folder.runs(run) == 2


@pytest.mark.parametrize("stack", ["asgi", "asgi-hypercorn"])
def test_23_a_file_is_not_sent_past_the_integration(on, key, run):
    """The application would use `http.response.pathsend` if it saw that the server has it."""
    first, again = (on().post("/large/100", key=key, run=run) for _ in range(2))
    assert first.body == again.body == b"x" * 100


def test_24_it_works_inside_compression(on, key, run, folder):
    zipped = [("Accept-Encoding", "gzip")]
    first, again = (on().post("/large/1000", key=key, lines=zipped, run=run) for _ in range(2))
    plain = on().post("/large/1000", key=key, run=run)
    for answer in (first, again):
        assert answer.header("content-encoding") == "gzip"
        assert gzip.decompress(answer.body) == b"x" * 1000
    assert plain.header("content-encoding") is None
    assert plain.body == b"x" * 1000
    assert again.replayed
    assert plain.replayed
    assert folder.runs(run) == 1


def test_24_it_works_inside_cors(on, key, run):
    """Every answer has the header of its own caller, problems and replays included."""
    crossing = [("Origin", CORS_ORIGIN)]
    allowed = "access-control-allow-origin"
    for _ in range(2):
        assert on().post("/pay", key=key, lines=crossing, run=run).header(allowed) == CORS_ORIGIN
    mismatch = on().post("/pay", key=key, body=b"{}", lines=crossing, run=run)
    assert mismatch.code == "payload_mismatch"
    assert mismatch.header(allowed) == CORS_ORIGIN
    assert on().post("/pay", key=key, run=run).header(allowed) is None


@pytest.mark.parametrize("path", ["/empty", "/status/204"])
def test_24_an_empty_answer_has_no_body(on, key, run, path):
    first, again = (on().post(path, key=key, run=run) for _ in range(2))
    for answer in (first, again):
        assert answer.status == 204
        assert answer.rest == b""
        assert answer.header("content-length") is None
        assert answer.header("transfer-encoding") is None
    assert again.replayed
    assert again.header("x-number") == first.header("x-number")


@pytest.mark.parametrize("stack", ["asgi", "asgi-hypercorn"])
def test_24_what_belongs_to_one_connection_is_not_replayed(on, key, run):
    first, again = (
        on().post("/hop", key=key, body=b"", content_type=None, run=run) for _ in range(2)
    )
    assert (first.header("keep-alive"), first.header("x-hop")) == ("timeout=5", "1")
    assert (again.header("keep-alive"), again.header("x-hop")) == (None, None)
    assert first.body == again.body


@pytest.mark.parametrize("stack", ["asgi-hypercorn"])
def test_24_a_replay_over_http_2_has_nothing_of_http_1(on, key, run):
    first = on().post("/hop", key=key, body=b"", content_type=None, run=run)
    again = over_http_2(on().port, "/hop", [("idempotency-key", key)], on().host)
    assert again.status == 201
    assert again.replayed
    assert again.body == first.body


def test_24_no_answer_is_longer_than_it_says(on, key, run):
    for target in ("/pay", "/chunks", "/empty", "/large/10"):
        for _ in range(2):
            assert on().post(target, key=f"{key}{target[1]}", run=run).rest == b""
