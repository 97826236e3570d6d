"""What a client does with keys: the rules alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.policy import Rules
from semel.http.client import ClientRules, Sending, Target, may_succeed_later, seconds_asked
from semel.http.requests import check_key, key_of_lines, line_of_key

NOON = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT
HOME = Target.of("POST", "https://bank.example/charges")


def sending(now=0.0, **options) -> Sending:
    found = ClientRules(**options).sending(
        HOME, known=None, headers={}, attempt=None, repeatable=True, now=now
    )
    assert found is not None
    return found


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=255))
def test_a_key_comes_back_from_its_line(key):
    assert key_of_lines([line_of_key(check_key(key))], strict=True) == key


# --- Retry-After ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:13:50 -0000", 30.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("9" * 400, float("inf")),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("1, 2", None),
        ("٣", None),
        ("Tue, 14 Nov 99999999999 22:13:50 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(written, asked):
    assert seconds_asked(written, NOON) == asked


@given(st.text())
def test_no_retry_after_is_an_error(written):
    asked = seconds_asked(written, NOON)
    assert asked is None or asked >= 0


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 599])
def test_what_may_succeed_later(status):
    assert may_succeed_later(status, None)


@pytest.mark.parametrize("status", [200, 201, 303, 307, 400, 401, 403, 404, 408, 410, 422, 428])
def test_what_is_final(status):
    assert not may_succeed_later(status, 1.0)


def test_a_conflict_may_end_only_if_the_server_says_when():
    assert may_succeed_later(409, 0.0)
    assert not may_succeed_later(409, None)
    assert sending().after_answer(409, "soon", 0.0, NOON) is None


# --- waits ---------------------------------------------------------------------------------


def test_waits_grow_up_to_their_bound_and_are_jittered():
    firsts = set()
    for _ in range(50):
        one = sending(backoff=1, backoff_max=3, retries=4)
        waits = [one.after_error(OSError(), 0.0) for _ in range(5)]
        assert 0.5 <= waits[0] <= 1
        assert 1 <= waits[1] <= 2
        assert 1.5 <= waits[2] <= 3
        assert 1.5 <= waits[3] <= 3
        assert waits[4] is None
        firsts.add(waits[0])
    assert len(firsts) > 1


def test_no_wait_is_shorter_than_the_server_asked_for():
    wait = sending(backoff=1).after_answer(503, "Tue, 14 Nov 2023 22:13:40 GMT", 0.0, NOON)
    assert 20.5 <= wait <= 21


def test_a_wait_may_be_as_long_as_the_bound_and_no_longer():
    assert sending(retry_after_max=30).after_answer(503, "30", 0.0, NOON) is not None
    assert sending(retry_after_max=30).after_answer(503, "31", 0.0, NOON) is None


def test_no_try_begins_after_the_time_for_all_of_them():
    assert sending(now=100.0, retry_for=10, backoff=1).after_error(OSError(), 108.9) is not None
    assert sending(now=100.0, retry_for=10, backoff=1).after_error(OSError(), 109.6) is None
    assert sending(retry_for=0).after_error(OSError(), 0.0) is None


def test_a_hundred_retries_do_not_overflow():
    one = sending(retries=100, backoff=1, backoff_max=1, retry_for=100)
    assert all(one.after_error(OSError(), 0.0) is not None for _ in range(100))


def waits_for_a_running_call(retry_after="1", **options) -> list[float]:
    """The waits of a client whose server says "still running" for ever; no time passes by itself."""
    one = sending(**options)
    now, waits = 0.0, []
    while (wait := one.after_answer(409, retry_after, now, NOON)) is not None:
        now += wait
        waits.append(wait)
    return waits


def test_a_running_call_is_waited_for_longer_than_a_lease():
    lease = Rules().lease
    for _ in range(50):
        waits = waits_for_a_running_call()
        assert len(waits) > ClientRules().retries
        assert lease < sum(waits) <= 60


def test_a_running_call_is_waited_for_within_the_time_for_all_tries():
    assert sum(waits_for_a_running_call(retry_for=10)) <= 10
    assert waits_for_a_running_call(retry_for=0) == []


def test_waiting_for_a_running_call_ends_though_the_clock_stands_still():
    one = sending()
    tries = iter(range(100))
    while one.after_answer(409, "1", 0.0, NOON) is not None:
        next(tries)


def test_many_short_waits_for_a_running_call_do_not_overflow():
    assert len(waits_for_a_running_call("0", backoff=0.02, backoff_max=0.02)) > 2000


def test_a_running_call_takes_none_of_the_retries():
    one = sending(retries=1)
    assert one.after_answer(409, "1", 0.0, NOON) is not None
    assert one.after_answer(503, None, 0.0, NOON) is not None
    assert one.after_answer(409, "1", 0.0, NOON) is not None
    assert one.after_answer(503, None, 0.0, NOON) is None


def test_without_retries_a_running_call_is_not_waited_for():
    assert waits_for_a_running_call(retries=0) == []


def test_a_retry_is_told_to_the_log_without_key_and_path(caplog):
    caplog.set_level("INFO", logger="semel")
    sending().after_answer(503, None, 0.0, NOON)
    sending().after_error(TimeoutError(), 0.0)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("POST https://bank.example: 503; try 2 follows in ")
    assert said[1].startswith("POST https://bank.example: TimeoutError; try 2 follows in ")


# --- targets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "path"),
    [
        ("https://bank.example", "https://bank.example", "/"),
        ("https://BANK.example:443/a/b?c=d#e", "https://bank.example", "/a/b"),
        ("http://bank.example:80/", "http://bank.example", "/"),
        ("http://bank.example:443/", "http://bank.example:443", "/"),
        ("https://ann:secret@bank.example:8443/", "https://bank.example:8443", "/"),
        ("http://[::1]:8000/a", "http://[::1]:8000", "/a"),
        ("http://[::1:8000]/a", "http://[::1:8000]", "/a"),
    ],
)
def test_where_a_url_leads(url, origin, path):
    assert Target.of("post", url) == Target("POST", origin, path)


def test_the_part_of_a_derived_key_is_short_printable_ascii():
    assert HOME.part == "POST:https://bank.example/charges"
    assert Target("POST", "http://bücher.example", "/a b").part == (
        "POST:http://b%C3%BCcher.example/a%20b"
    )
    long = [Target("POST", "https://bank.example", f"/{'a' * 300}{end}").part for end in "xy"]
    assert [len(part) for part in long] == [200, 200]
    assert long[0] != long[1]
