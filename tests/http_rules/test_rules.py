from __future__ import annotations

import json
import re

import pytest

from http_rules.given import JSON, a_request, asked, route_rules
from semel import Policy
from semel.core.codec import codec_named
from semel.core.records import Identity
from semel.core.stored_answers import AnswerCodec, StoredAnswer, pack_answer
from semel.errors import ConfigError, DuplicateRequest, InvalidKey, ResultUnavailable
from semel.http.rules import Rejected

IDENTITY = Identity("http", "k")

KEYED = ("idempotency-key", "k")


def identity_of(rules, request, body=b""):
    return asked(rules, request, body)[0].identity


# --- keys ----------------------------------------------------------------------------------


def test_a_request_with_a_key_is_asked_for_its_body_once():
    operation, bodies = asked(route_rules(), a_request(KEYED), b"x")
    assert operation.identity == Identity("http", "k")
    assert bodies == 1


def test_a_request_without_a_key_passes_with_its_body_unread():
    assert asked(route_rules(), a_request()) == (None, 0)


@pytest.mark.parametrize(
    ("options", "lines", "query", "may"),
    [
        ({}, [("idempotency-key", "k")], b"", True),
        ({}, [("idempotency-key", '"')], b"", True),  # wrong, which is told later
        ({}, [], b"", False),
        ({"query": "key"}, [], b"key=k", True),
        ({"query": "key"}, [], b"", False),
        ({"field": "order.id"}, [], b"", True),
        ({"header": None, "key": lambda request, body: None}, [], b"", True),
    ],
)
def test_whether_a_request_may_have_a_key_is_known_without_its_body(options, lines, query, may):
    rules = route_rules(**options)
    assert rules.may_have_key(a_request(*lines, query=query)) is may


def test_a_required_key_that_is_missing_is_refused():
    with pytest.raises(Rejected, match="key_missing"):
        asked(route_rules(required=True), a_request())


def test_the_header_has_the_name_that_the_application_gave():
    rules = route_rules(header="X-Idempotency-Key")
    assert identity_of(rules, a_request(("X-IDEMPOTENCY-KEY", '"k"'))).key == "k"
    assert asked(rules, a_request(KEYED)) == (None, 0)


SOURCES = {"query": "key", "field": "order.id", "key": lambda request, body: "of-function"}
FULL = {"query": b"key=of-query", "method": "POST"}
BODY = b'{"order": {"id": "of-field"}}'


@pytest.mark.parametrize(
    ("lines", "query", "body", "key"),
    [
        ([KEYED], b"key=of-query", BODY, "k"),
        ([], b"key=of-query", BODY, "of-query"),
        ([], b"", BODY, "of-field"),
    ],
)
def test_sources_are_asked_in_order_header_query_field(lines, query, body, key):
    request = a_request(*lines, JSON, query=query)
    assert identity_of(route_rules(**SOURCES), request, body).key == key


def test_a_function_is_asked_last():
    rules = route_rules(query="key", key=lambda request, body: f"{request.method}-{body.decode()}")
    assert identity_of(rules, a_request(), b"b").key == "POST-b"
    assert asked(route_rules(key=lambda request, body: None), a_request()) == (None, 1)


def test_the_application_chooses_another_order():
    rules = route_rules(**SOURCES, order=("field", "function", "header", "query"))
    assert identity_of(rules, a_request(KEYED, JSON), BODY).key == "of-field"


@pytest.mark.parametrize(
    "body", [b"{}", b"", b'{"order": 5}', b'{"order": {"id": null}}', b'{"order": {"id": true}}']
)
def test_a_field_that_is_missing_is_an_error_and_no_silent_fallback(body):
    rules = route_rules(**SOURCES, order=("field", "function", "header", "query"))
    with pytest.raises(InvalidKey, match=r"order\.id"):
        asked(rules, a_request(KEYED, JSON), body)


def test_a_whole_number_is_a_key():
    assert identity_of(route_rules(field="id"), a_request(JSON), b'{"id": 7}').key == "7"


FORM = ("content-type", "application/x-www-form-urlencoded")
OTHER_TYPES = [
    [],
    [("content-type", "")],
    [("content-type", "text/plain")],
    [("content-type", "multipart/form-data; boundary=b")],
    [("content-type", "application/json, application/json")],
    [JSON, JSON],
    [FORM, JSON],
]


@pytest.mark.parametrize("options", [{"header": None, "field": "id"}, {"payload": ["id"]}])
@pytest.mark.parametrize(
    ("body_format", "lines"),
    [
        *(("json", lines) for lines in [*OTHER_TYPES, [FORM]]),
        *(("form", each) for each in OTHER_TYPES),
    ],
)
def test_fields_are_looked_for_in_one_format_alone(options, body_format, lines):
    """Two readings of one body are two values of a field, and a client would choose between them."""
    rules = route_rules(**options, format=body_format)
    with pytest.raises(Rejected, match="unsupported_media_type"):
        asked(rules, a_request(KEYED, *lines), b'{"id": 1, "x": "&id=2&"}')


@pytest.mark.parametrize(
    "parameters",
    [
        "charset=utf-7",
        "Charset=UTF-16",
        'charset="utf-7"',
        "charset = utf-7",
        "charset*=us-ascii''utf-7",
        "charset=utf-8; charset=utf-7",
        'x="; charset=utf-7',
    ],
)
@pytest.mark.parametrize("kind", [JSON, FORM])
def test_fields_are_looked_for_in_utf_8_alone(kind, parameters):
    """A framework reads the charset that a client names: the client would choose its key."""
    rules = route_rules(header=None, field="id", format="form" if kind is FORM else "json")
    with pytest.raises(Rejected, match="unsupported_media_type"):
        asked(rules, a_request((kind[0], f"{kind[1]}; {parameters}")), b'{"id": "+AGE-"}')


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        'application/json;v=1;Charset="UTF-8"',
        "application/json; charset=us-ascii",
        "a/b+json",
    ],
)
def test_fields_are_looked_for_in_json_by_default(kind):
    rules = route_rules(header=None, field="id")
    assert (
        identity_of(rules, a_request(("content-type", kind)), b'{"id": "&id=2&"}').key == "&id=2&"
    )


def test_a_content_type_does_not_matter_where_no_field_is_looked_for():
    rules = route_rules(field="id")
    assert identity_of(rules, a_request(KEYED, FORM), b"id=5").key == "k"


def test_a_form_has_the_key_where_the_application_says_so():
    rules = route_rules(header=None, field="id", format="form")
    assert identity_of(rules, a_request(FORM), b"id=a%3Bb&x=1").key == "a;b"


@pytest.mark.parametrize("form", [b"id=a;x=1", b"x=1;id=a", b"id=a&id=b", b"id=%ff", b"\xff", b""])
def test_a_form_that_parsers_read_differently_has_no_key(form):
    """A parser of Starlette's ends a field at a semicolon, and one of Python's does not."""
    with pytest.raises(InvalidKey):
        asked(route_rules(header=None, field="id", format="form"), a_request(FORM), form)


@pytest.mark.parametrize(
    "query", [b"key=", b"key=a&key=b", b"key=%00", b"key=%ff", b"\xff", b"a=1&" * 2000]
)
def test_a_parameter_that_is_no_key_is_refused(query):
    with pytest.raises(InvalidKey):
        asked(route_rules(header=None, query="key"), a_request(query=query))


def test_the_pattern_of_the_engine_is_asked_of_what_the_client_sent():
    rules = route_rules(re.compile("k+"), tenant=lambda request: "ann")
    assert identity_of(rules, a_request(KEYED)).key == "ann/k"
    with pytest.raises(InvalidKey, match="form"):
        asked(rules, a_request(("idempotency-key", "other")))


# --- whose it is ---------------------------------------------------------------------------


def test_two_callers_with_one_key_are_two_operations():
    rules = route_rules(tenant=lambda request: request.headers.get("x-user"))
    identities = {
        identity_of(rules, a_request(KEYED, ("x-user", user))) for user in ("ann", "bob", "a/b")
    }
    assert len(identities) == 3


@pytest.mark.parametrize("nobody", [None, ""])
def test_a_caller_who_is_nobody_is_refused_and_not_shared(nobody):
    with pytest.raises(Rejected, match="identity_missing"):
        asked(route_rules(tenant=lambda request: nobody), a_request(KEYED))


def test_a_tenant_that_is_no_text_is_the_applications_mistake():
    with pytest.raises(ConfigError, match="tenant"):
        asked(route_rules(tenant=lambda request: 5), a_request(KEYED))


def test_one_key_on_two_routes_is_one_operation_unless_the_application_wants_two():
    one, other = a_request(KEYED), a_request(KEYED, path="/refund")
    assert identity_of(route_rules(), one) == identity_of(route_rules(), other)
    assert asked(route_rules(), one)[0].fingerprint != asked(route_rules(), other)[0].fingerprint
    separate = route_rules(separate_routes=True)
    assert identity_of(separate, one) != identity_of(separate, other)


# --- what is compared ----------------------------------------------------------------------


def test_chosen_fields_are_all_that_is_compared():
    rules = route_rules(payload=["amount", "lines.0.sku"])

    def of(body, path="/pay"):
        return rules.fingerprint(a_request(JSON, path=path), json.dumps(body).encode())

    first = of({"amount": 5, "lines": [{"sku": "a"}], "sent_at": 1})
    assert first == of({"sent_at": 2, "lines": [{"sku": "a"}], "amount": 5})
    assert first != of({"amount": 6, "lines": [{"sku": "a"}]})
    assert first != of({"amount": 5, "lines": []})
    assert first != of({"amount": 5, "lines": [{"sku": "a"}]}, path="/refund")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.1", "0.10000000000000001"),
        ("1.000000000000000001", "1.000000000000000002"),
        ("9007199254740993.01", "9007199254740992.02"),
        ("18446744073709551617", "18446744073709551618"),
        ("100000000000000000000000000000000000000", "100000000000000000000000000000000000001"),
    ],
)
@pytest.mark.parametrize("field", ["amount", "order"])
def test_numbers_in_chosen_fields_are_compared_as_they_were_written(one, other, field):
    rules = route_rules(payload=[field])

    def of(number):
        body = f'{{"amount": {number}, "order": {{"b": [{number}], "a": 1}}}}'
        return rules.fingerprint(a_request(JSON), body.encode())

    assert of(one) == of(one)
    assert of(one) != of(other)


def test_the_format_of_chosen_fields_is_held():
    rules = route_rules(payload=["amount", "order"])
    body = b'{"order": {"b": [1.5, "x"], "a": null}, "amount": 2.25}'
    assert rules.fingerprint(a_request(JSON), body).hex() == "47aa01079ce6ec84e25cdd776dabeece"


def test_fields_of_a_form_are_compared_too():
    rules, form = route_rules(payload=["amount"], format="form"), a_request(FORM)
    assert rules.fingerprint(form, b"amount=5&at=1") == rules.fingerprint(form, b"at=2&amount=5")
    assert rules.fingerprint(form, b"amount=5") != rules.fingerprint(form, b"amount=5&amount=6")


def test_a_function_says_what_is_compared():
    rules = route_rules(payload=lambda request, body: {"length": len(body)}, secret=b"s")
    assert rules.fingerprint(a_request(), b"ab") == rules.fingerprint(a_request(), b"cd")
    assert rules.fingerprint(a_request(), b"ab") != rules.fingerprint(a_request(), b"abc")


def test_a_function_cannot_make_two_routes_the_same():
    rules = route_rules(payload=lambda request, body: "always this")
    one = rules.fingerprint(a_request(), b"")
    assert one != rules.fingerprint(a_request(path="/refund"), b"")
    assert one != rules.fingerprint(a_request(method="PATCH"), b"")


@pytest.mark.parametrize(("body_format", "line"), [("json", JSON), ("form", FORM)])
def test_bodies_in_which_no_fields_can_be_looked_for_are_compared_as_a_whole(body_format, line):
    rules, request = route_rules(payload=["amount"], format=body_format), a_request(line)
    assert rules.fingerprint(request, b"amount;5") == rules.fingerprint(request, b"amount;5")
    assert rules.fingerprint(request, b"amount;5") != rules.fingerprint(request, b"amount;6")


@pytest.mark.parametrize("options", [{}, {"payload": ["amount"]}, {"separate_routes": True}])
def test_a_path_that_is_not_unicode_is_one_of_many(options):
    rules = route_rules(**options)
    paths = "/\udcff", "/\udcfe", "/"
    operations = [asked(rules, a_request(KEYED, JSON, path=path), b"{}")[0] for path in paths]
    assert len({(each.identity, each.fingerprint) for each in operations}) == len(paths)


# --- rules and answers ---------------------------------------------------------------------


def test_who_does_not_wait_is_refused_at_once_and_who_does_waits_so_long():
    assert route_rules().policy.concurrent == "reject"
    waiting = route_rules(wait=2).policy
    assert (waiting.concurrent, waiting.wait_timeout) == ("wait", 2.0)


def test_a_policy_of_the_route_goes_before_the_options_of_the_integration():
    rules = route_rules(policy=Policy(concurrent="wait", ttl=60)).policy
    assert (rules.concurrent, rules.ttl) == ("wait", 60.0)


def test_answers_are_stored_as_they_are_unless_a_codec_of_the_applications_own_is_set():
    class Own:
        name = "own/1"

        def encode(self, value, context, hint=None):
            return value

        def decode(self, data, context, hint=None):
            return data

    assert isinstance(route_rules().policy.codec, AnswerCodec)
    assert isinstance(route_rules(policy=Policy(codec="msgpack")).policy.codec, AnswerCodec)
    own = Own()
    assert route_rules(policy=Policy(codec=own)).policy.codec is own
    assert codec_named("json").name == "json/1"


def test_an_answer_is_stored_without_a_marker_and_replayed_with_one():
    rules = route_rules(replayed_header="X-Replayed", never_stored=["x-mine"])
    lines = [(b"x-replayed", b"spoofed"), (b"X-Mine", b"1"), (b"x-kept", b"1")]
    answer = rules.replay(rules.stored(200, lines, b"body"), IDENTITY)
    assert answer.headers == (
        (b"x-kept", b"1"),
        (b"content-length", b"4"),
        (b"x-replayed", b"true"),
    )
    assert rules.first(lines) == [(b"X-Mine", b"1"), (b"x-kept", b"1")]


def test_an_answer_that_was_too_large_is_told_of_under_its_own_status():
    rules = route_rules()
    answer = rules.replay(rules.stored(201, [], None), IDENTITY)
    assert answer.status == 201
    told = json.loads(answer.body)
    assert told["code"] == "result_omitted"
    assert told["instance"] == f"urn:semel:key:{IDENTITY.key_digest}"
    assert (b"idempotent-replayed", b"true") in answer.headers


def test_the_message_of_guard_mode_reaches_the_client():
    answer = route_rules().rejection(DuplicateRequest("once is enough"))
    assert answer.status == 409
    assert json.loads(answer.body)["detail"] == "once is enough"


def test_statuses_are_kept_as_the_application_says():
    assert route_rules(stored=lambda status: status == 404).decide(404) == "store"


def test_an_unknown_outcome_that_nothing_holds_is_told_of(caplog):
    assert route_rules(stored=lambda _: "unknown").decide(500) == "unknown"
    assert 'abandoned="hold"' in caplog.text
    caplog.clear()
    held = route_rules(stored=lambda _: "unknown", policy=Policy(abandoned="hold"))
    assert held.decide(500) == "unknown"
    assert caplog.text == ""


def test_garbage_in_the_place_of_an_answer_is_told_and_runs_nothing():
    with pytest.raises(ResultUnavailable, match="cannot be read") as unreadable:
        route_rules().replay(b"garbage", IDENTITY)
    told = json.loads(route_rules().rejection(unreadable.value).body)
    assert told["instance"] == f"urn:semel:key:{IDENTITY.key_digest}"


FORGED = (
    (b"Set-Cookie", b"session=attacker"),
    (b"x-a", b"1\r\nSet-Cookie: session=attacker"),
    (b"Location", b"/1\r\nX-Injected: yes"),
    (b"idempotent-replayed", b"false"),
    (b"Content-Length", b"5000"),
    (b"x-mine", b"secret"),
    (b"location", b"/orders/1"),
)


@pytest.mark.parametrize("body", [b"paid", None])
def test_what_may_not_be_stored_is_not_replayed_either_whatever_wrote_it(body):
    rules = route_rules(never_stored=["X-Mine"])
    stored = pack_answer(StoredAnswer(201, FORGED, body))
    lines = rules.replay(stored, Identity("http", "k")).headers
    names = [name.lower() for name, _ in lines]
    assert {b"set-cookie", b"x-a", b"x-mine"}.isdisjoint(names)
    assert [value for name, value in lines if name.lower() == b"location"] == [b"/orders/1"]
    assert names.count(b"content-length") == names.count(b"idempotent-replayed") == 1
    assert (b"idempotent-replayed", b"true") in lines
    assert not any(b"\n" in part for line in lines for part in line)
