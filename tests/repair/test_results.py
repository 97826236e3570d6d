"""Results of every kind: written as their record's codec reads them, and shown whatever is stored."""

from __future__ import annotations

import datetime as dt
import enum
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest

from engines.facade import World, never
from repair.conftest import Repairs
from semel import ConfigError, Policy, ResultUnavailable, register_type
from semel.core.codec import (
    BY_STORED_NAME,
    MsgpackCodec,
    codec_named,
    encode_failure,
    encode_result,
    omitted,
)
from semel.core.codec_types import CLASS_FORMATS, CUSTOM
from semel.core.encryption import EncryptedCodec
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.core.run_info import build
from semel.core.stored_answers import (
    StoredAnswer,
    StoredMessage,
    pack_answer,
    pack_message,
    unpack_answer,
    unpack_message,
)
from semel.events import ResultOmitted
from semel.repair import (
    Failed,
    GrpcAnswer,
    HttpAnswer,
    NotKept,
    PlainValue,
    Resolved,
    ResolverFailed,
    StoredFailure,
    Succeeded,
    Unreadable,
    read_result,
    settle,
    settle_async,
)
from semel.repair.results import _OBJECTS, ShownValue, in_form_of, read_shown, unlike

DAYS = 3 * 86400
CREATED = HttpAnswer(201, {"Location": "/o/7", "Content-Type": "text/plain"}, b"made")
IDENTITY = Identity("orders", "a")


class Program(Repairs):
    """An engine that decides on attempts of programs whose policies it does not know."""

    def left(self, codec: str, key: str = "a") -> Identity:
        """Leave a held attempt behind, whose record says what its policy is."""
        identity = Identity("orders", key)
        info = build("web-1:4711", DAYS, codec)
        self.store(
            "claim",
            ClaimRequest(
                identity, b"\0the owner\0\0", None, 600.0, 600.0, hold=True, run_info=info
            ),
        )
        self.store("renew", identity, b"\0the owner\0\0", 0.0)
        return identity

    def decide(self, resolution, **options):
        function = settle if self.world.name == "threads" else settle_async
        return self.do(function, self.engine.engine, "a", resolution, scope="orders", **options)


@pytest.fixture
def operator(kind):
    """An operator's engine, which no policy is told to."""
    with World(kind, "memory://") as world:
        program = Program(world)
        program.engine = world.engine()
        yield program


def engine_with(kind, **options):
    world = World(kind, "memory://")
    program = Program(world)
    program.engine = world.engine(**options)
    return world, program


# --- written as the record's codec reads them -------------------------------------------------


def test_an_http_request_gets_an_answer(operator):
    identity = operator.left("http/1")
    decision = operator.decide(Succeeded(CREATED))
    assert isinstance(decision, Resolved)
    stored = operator.record(identity)
    assert stored.outcome.codec == "http/1"
    assert unpack_answer(stored.outcome.data) == StoredAnswer(
        201, ((b"location", b"/o/7"), (b"content-type", b"text/plain")), b"made"
    )
    assert stored.remaining == pytest.approx(DAYS, abs=60)
    assert decision.kept_until - decision.at == DAYS


def test_lines_of_one_name_stay_in_their_order(operator):
    identity = operator.left("http/1")
    lines = [("Link", "</a>"), ("X-Between", " yes "), ("LINK", "</b>"), ("X-Empty", "")]
    operator.decide(Succeeded(HttpAnswer(204, lines)))
    assert unpack_answer(operator.record(identity).outcome.data).headers == (
        (b"link", b"</a>"),
        (b"x-between", b"yes"),
        (b"link", b"</b>"),
        (b"x-empty", b""),
    )


def test_a_grpc_call_gets_a_message(operator):
    identity = operator.left("grpc/1")
    operator.decide(Succeeded(GrpcAnswer(b"\x08\x07")))
    stored = operator.record(identity)
    assert stored.outcome.codec == "grpc/1"
    assert unpack_message(stored.outcome.data) == StoredMessage(0, message=b"\x08\x07")
    assert stored.remaining == pytest.approx(DAYS, abs=60)


@pytest.mark.parametrize("codec", ["json/1", "msgpack/1"])
def test_a_function_gets_a_value_in_the_format_of_its_record(operator, codec):
    identity = operator.left(codec)
    operator.decide(Succeeded({"total": Decimal("9.90")}))
    assert operator.record(identity).outcome.codec == codec
    assert operator.engine.execute("a", never, scope="orders") == {"total": Decimal("9.90")}


@pytest.mark.parametrize("given", [Succeeded(CREATED), Succeeded(GrpcAnswer(b""))], ids=repr)
def test_an_answer_says_by_itself_what_it_is_where_the_record_does_not(operator, given):
    """As of a record that an older version left."""
    identity = operator.abandon("a")
    operator.decide(given, ttl=60)
    expected = "http/1" if given.value is CREATED else "grpc/1"
    assert operator.record(identity).outcome.codec == expected


def test_a_final_failure_is_kept_like_a_success_and_a_retryable_one_for_its_own_time(kind):
    world, program = engine_with(kind, policy=Policy(ttl=7200, failed_ttl=600))
    with world:
        identity = program.left("http/1")
        program.decide(Failed("not at the bank", retryable=False))
        assert program.record(identity).remaining == pytest.approx(DAYS, abs=60)
        program.store("forget", identity)
        program.left("http/1")
        program.decide(Failed("not at the bank", retryable=True))
        assert program.record(identity).remaining == pytest.approx(600, abs=60)
        program.store("forget", identity)
        program.left("http/1")
        program.decide(Failed("not at the bank", retryable=False), ttl=60)
        assert program.record(identity).remaining <= 60


# --- rejected before anything is stored -------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "value", "of", "instead"),
    [
        ("http/1", {"charge": "ch_1"}, "an HTTP request", "--status, --header and --body"),
        ("http/1", GrpcAnswer(b""), "an HTTP request", "Succeeded(HttpAnswer("),
        ("grpc/1", "ch_1", "a gRPC call", "--message @FILE"),
        ("grpc/1", CREATED, "a gRPC call", "Succeeded(GrpcAnswer("),
        ("json/1", CREATED, "a call of a function", "--succeeded JSON"),
        ("msgpack/1", GrpcAnswer(b""), "a call of a function", "Succeeded(value)"),
    ],
)
def test_a_kind_that_the_codec_does_not_read_names_the_right_one(
    operator, codec, value, of, instead
):
    identity = operator.left(codec)
    before = operator.record(identity)
    with pytest.raises(ConfigError, match=f"the record of {of}") as rejected:
        operator.decide(Succeeded(value))
    assert codec in str(rejected.value)
    assert instead in str(rejected.value)
    assert (rejected.value.scope, rejected.value.key_digest) == ("orders", identity.key_digest)
    after = operator.record(identity)
    assert (after.owner, after.fence) == (before.owner, before.fence)


def encrypting(*, strict=True):
    return EncryptedCodec(keys={"1": b"0123456789abcdef"}, primary="1", strict=strict)


@pytest.mark.parametrize("value", ["ch_42", CREATED, GrpcAnswer(b"")], ids=repr)
def test_a_codec_that_is_not_known_is_named(operator, value):
    identity = operator.left(encrypting().name)
    before = operator.record(identity)
    with pytest.raises(ConfigError, match=r"'aesgcm/1\+json/1', which is not known here"):
        operator.decide(Succeeded(value))
    assert operator.record(identity).owner == before.owner
    assert isinstance(operator.decide(Failed("never sent", retryable=False)), Resolved)


@pytest.mark.parametrize(
    "options",
    [
        {"codecs": [encrypting()]},
        {"policy": Policy(codec=encrypting())},
        {"scopes": {"orders": Policy(codec=encrypting())}},
    ],
    ids=["codecs", "policy", "scopes"],
)
def test_an_engine_that_has_the_codec_writes_with_it(kind, options):
    world, program = engine_with(kind, **options)
    with world:
        identity = program.left(encrypting().name)
        program.decide(Succeeded(CREATED))
        stored = program.record(identity).outcome
        assert stored.codec == "aesgcm/1+json/1"
        packed = encrypting().decode(stored.data, identity.encoded)
        assert unpack_answer(packed).body == b"made"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("json/1", "ch_42"),
        ("msgpack/1", "ch_42"),
        ("http/1", CREATED),
        ("grpc/1", GrpcAnswer(b"")),
    ],
)
def test_an_engine_that_encrypts_never_writes_a_plain_result(kind, named, value, strict):
    """Also of an attempt that began before you switched encryption on."""
    world, program = engine_with(kind, policy=Policy(codec=encrypting(strict=strict)))
    with world:
        identity = program.left(named)
        assert isinstance(program.decide(Succeeded(value)), Resolved)
        stored = program.record(identity).outcome
        assert stored.codec == "aesgcm/1+json/1"
        encrypting().decode(stored.data, identity.encoded)


class LongNamed(MsgpackCodec):
    """A codec of an application, whose name does not fit into a running record."""

    name = f"{'long' * 20}/1"


def test_a_codec_whose_name_is_too_long_is_that_of_the_scope_or_not_known(kind, operator):
    """Written by the default codec, a result might be readable that was to be encrypted."""
    operator.left(LongNamed.name)
    with pytest.raises(ConfigError, match="a codec whose name is too long for the record, which"):
        operator.decide(Succeeded("ch_42"))
    world, program = engine_with(kind, policy=Policy(codec=LongNamed()))
    with world:
        for value in ("ch_42", CREATED):
            identity = program.left(LongNamed.name)
            program.decide(Succeeded(value))
            assert program.record(identity).outcome.codec == LongNamed.name
            program.store("forget", identity)


def test_the_codec_of_the_scope_is_used_where_the_record_names_none(kind):
    world, program = engine_with(kind, policy=Policy(codec=encrypting()))
    with world:
        for number, value in enumerate(("ch_42", CREATED)):
            identity = program.abandon("a")
            program.decide(Succeeded(value), ttl=60)
            assert program.record(identity).outcome.codec == "aesgcm/1+json/1", number
            program.store("forget", identity)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (HttpAnswer(99), "200 to 599; got 99"),
        (HttpAnswer(600), "200 to 599"),
        (HttpAnswer(True), "200 to 599"),
        (HttpAnswer("201"), "200 to 599"),
        (HttpAnswer(401), "status 401 is never stored"),
        (HttpAnswer(429), "status 429 is never stored"),
        (HttpAnswer(204, (), b"text"), "status 204 has no body"),
        (HttpAnswer(200, (), "text"), "body must be bytes, not str"),
        (HttpAnswer(200, (), None), "body must be bytes, not NoneType"),
        (HttpAnswer(200, None), "pairs of strings"),
        (HttpAnswer(200, "Location"), "pairs of strings"),
        (HttpAnswer(200, {"X-A": 5}), "pairs of strings"),
        (HttpAnswer(200, [("X-A", "1", "2")]), "pairs of strings"),
        (HttpAnswer(200, {"X A": "1"}), "'X A' is not the name of a header"),
        (HttpAnswer(200, {"": "1"}), "'' is not the name of a header"),
        (HttpAnswer(200, {"X-A": "1\r\nSet-Cookie: a=b"}), "X-A must be one line"),
        (HttpAnswer(200, {"X-A": "\N{SNOWMAN}"}), "X-A must be one line"),
        (HttpAnswer(200, {"Set-Cookie": "a=b"}), "set-cookie is never stored"),
        (HttpAnswer(200, {"Content-Length": "5"}), "content-length is never stored"),
        (HttpAnswer(200, {"X-Auth-Token": "t"}), "x-auth-token is never stored"),
        (HttpAnswer(200, {"Idempotent-Replayed": "true"}), "idempotent-replayed is never"),
        (GrpcAnswer("text"), "message must be bytes, not str"),
        (GrpcAnswer(None), "message must be bytes, not NoneType"),
        (GrpcAnswer(b"", "NOT_FOUND"), "only a message with code OK"),
        (GrpcAnswer(b"", details="why"), "only a message with code OK"),
    ],
    ids=repr,
)
def test_an_answer_that_no_client_could_use_is_rejected(operator, answer, reason):
    identity = operator.left("http/1" if isinstance(answer, HttpAnswer) else "grpc/1")
    before = operator.record(identity)
    with pytest.raises(ConfigError, match=reason):
        operator.decide(Succeeded(answer))
    assert operator.record(identity).owner == before.owner


def test_a_value_that_cannot_be_stored_is_rejected(operator):
    identity = operator.left("json/1")
    before = operator.record(identity)
    with pytest.raises(ConfigError, match="cannot be stored"):
        operator.decide(Succeeded(object()))
    assert operator.record(identity).owner == before.owner
    assert operator.told(ResultOmitted) == []


def test_an_answer_may_be_larger_than_a_result(kind):
    world, program = engine_with(kind, policy=Policy(max_result_bytes=100))
    with world:
        identity = program.left("http/1")
        program.decide(Succeeded(HttpAnswer(200, (), b"x" * 1000)))
        assert len(program.record(identity).outcome.data) > 1000


def test_a_record_that_changes_meanwhile_is_given_back(operator):
    """Between looking and adopting, another attempt of another kind was abandoned."""
    identity = operator.left("json/1")

    def change():
        operator.store("forget", identity)
        operator.left("http/1")

    operator.engine.store.before["adopt"] = change
    with pytest.raises(ConfigError, match="an HTTP request"):
        operator.decide(Succeeded("ch_42"))
    after = operator.record(identity)
    assert after.abandoned
    assert after.outcome is None


# --- by a reconciler --------------------------------------------------------------------------


def test_a_resolver_may_give_an_answer(operator):
    identity = operator.left("http/1")
    report = operator.run(operator.reconciler({"orders": lambda _: Succeeded(CREATED)}))
    assert report.resolved == 1
    stored = operator.record(identity)
    assert unpack_answer(stored.outcome.data).body == b"made"
    assert stored.remaining == pytest.approx(DAYS, abs=60)


@pytest.mark.parametrize("codec", ["http/1", "aesgcm/1+json/1"])
def test_a_resolver_that_gives_another_kind_resolves_nothing(operator, codec):
    """Written as something that no retry can read, the result would be lost for good."""
    identity = operator.left(codec)
    report = operator.run(operator.reconciler({"orders": lambda _: Succeeded("ch_42")}))
    (decision,) = report.decisions
    assert isinstance(decision, ResolverFailed)
    assert codec in decision.reason
    assert operator.record(identity).abandoned


def test_a_reconciler_keeps_a_value_that_cannot_be_stored_as_a_success(operator):
    operator.left("json/1")
    report = operator.run(operator.reconciler({"orders": lambda _: Succeeded(object())}))
    assert report.resolved == 1
    assert len(operator.told(ResultOmitted)) == 1
    with pytest.raises(ResultUnavailable):
        operator.engine.execute("a", never, scope="orders")


# --- shown ------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Flag(enum.Flag):
    A = 1
    B = 2


class Item(msgspec.Struct):
    price: Decimal


@dataclass
class Receipt:
    number: str
    items: list[Item] = field(default_factory=list)


class Order(pydantic.BaseModel, extra="allow"):
    id: int
    _secret: str = "s"


Point = namedtuple("Point", "x y")  # noqa: PYI024 - a tuple with names, as some write it


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


register_type(Money, name="repair.Money", encode=lambda money: money.cents, decode=Money)

ZONED = dt.datetime(2026, 1, 2, 3, 4, tzinfo=ZoneInfo("Europe/Berlin"))

SECRET = {"_secret": "s"}
NUMBERED = {"number": "r-2", "items": []}


def noted(receipt: Receipt) -> Receipt:
    """Give an object an attribute that is no field of its class."""
    receipt.note = "n"  # type: ignore[attr-defined]
    return receipt


def tagged(tag, body):
    return {"$": tag, "v": body}


def described(tag, cls, body, **more):
    return {"$": tag, "t": f"{__name__}:{cls}", "v": body, **more}


VALUES = [
    (None, None),
    ("text", "text"),
    ([1, 2.5, True], [1, 2.5, True]),
    ({"a": {"b": 1}}, {"a": {"b": 1}}),
    (2**100, tagged("int", hex(2**100))),
    (float("inf"), tagged("float", "inf")),
    (1 + 2j, tagged("complex", [1.0, 2.0])),
    (b"\x00\xff", tagged("bytes", "AP8=")),
    (bytearray(b"\x01"), tagged("bytearray", "AQ==")),
    (Decimal("9.90"), tagged("decimal", "9.90")),
    (UUID(int=5), tagged("uuid", "00000000000000000000000000000005")),
    (
        dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
        tagged("datetime", "2026-01-02T03:04:00+00:00"),
    ),
    (ZONED, tagged("datetime", ["2026-01-02T03:04:00", 0, "Europe/Berlin"])),
    (dt.time(2, 30, fold=1), tagged("time", ["02:30:00", 1, None])),
    (dt.date(2026, 1, 2), tagged("date", "2026-01-02")),
    (dt.timedelta(days=1, seconds=2), tagged("timedelta", [1, 2, 0])),
    ((1, (2,)), tagged("tuple", [1, tagged("tuple", [2])])),
    ({5}, tagged("set", [5])),
    (frozenset({5}), tagged("frozenset", [5])),
    (deque([1], 3), tagged("deque", [3, [1]])),
    (
        {1: "a", (2,): "b"},
        tagged("dict", [[1, "a"], [tagged("tuple", [2]), "b"]]),
    ),
    ({"$": "mine", "v": 1}, tagged("dict", [["$", "mine"], ["v", 1]])),
    (OrderedDict(a=1), tagged("ordereddict", [["a", 1]])),
    (defaultdict(list, a=[1]), tagged("defaultdict", ["list", [["a", [1]]]])),
    (msgspec.UNSET, tagged("unset", None)),
    (Colour.RED, described("enum", "Colour", "RED")),
    (Flag.A | Flag.B, described("flag", "Flag", 3)),
    (
        Receipt("r-1", [Item(Decimal("1.5"))]),
        described(
            "dataclass",
            "Receipt",
            {
                "number": "r-1",
                "items": [described("struct", "Item", {"price": tagged("decimal", "1.5")})],
            },
        ),
    ),
    (noted(Receipt("r-2")), described("dataclass", "Receipt", NUMBERED, x={"note": "n"})),
    (Point(1, 2), described("namedtuple", "Point", {"x": 1, "y": 2})),
    (
        Order(id=7, note="n"),
        described("model", "Order", {"id": 7}, set=["id", "note"], x={"note": "n"}, p=SECRET),
    ),
    (Money(5), {"$": "custom", "t": "repair.Money", "v": 5}),
]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize(("value", "shown"), VALUES, ids=lambda value: repr(value)[:40])
def test_a_value_is_shown_with_its_types(codec, value, shown):
    stored = encode_result(value, codec_named(codec), IDENTITY, None, 10_000)
    assert stored.problem is None
    assert read_result(stored.encoded) == PlainValue(shown)


@pytest.mark.parametrize("codec", ["json/1", "msgpack/1"])
@pytest.mark.parametrize(
    "value", [value for value, _ in VALUES], ids=lambda value: repr(value)[:40]
)
def test_what_is_shown_can_be_given_and_is_the_same_value(kind, codec, value):
    """Given without its class, which only the program has, it is stored as its object was."""
    written = encode_result(value, BY_STORED_NAME[codec], IDENTITY, None, 10_000).encoded
    shown = msgspec.json.decode(msgspec.json.encode(read_result(written).value))
    world, program = engine_with(kind)
    with world:
        identity = program.left(codec)
        program.decide(Succeeded(read_shown(shown)))
        assert program.record(identity).outcome == written


def test_every_tag_of_a_class_can_be_given():
    assert set(_OBJECTS) == {CUSTOM, *(form.tag for form in CLASS_FORMATS)}


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"$": "shop.Receipt", "charge": "ch_1"}, "the tag 'shop.Receipt' is not known"),
        ({"$": 5}, "the tag 5 is not known"),
        ({"$": []}, "TypeError in it"),
        ([{"$": "decimal"}], "'decimal' must have '$' and 'v', and nothing else"),
        ({"$": "decimal", "v": "1", "w": 2}, "and nothing else"),
        ({"$": "decimal", "v": 4.2}, "'decimal' is never written as float"),
        ({"$": "decimal", "v": "4,20"}, "InvalidOperation in it"),
        ({"$": "unset", "v": 5}, "'unset' is never written as int"),
        ({"$": "tuple", "v": {"a": 1}}, "found dict where list should be"),
        ({"$": "set", "v": [[1]]}, "TypeError in it"),
        ({"$": "datetime", "v": "yesterday"}, "ValueError in it"),
        ({"$": "dataclass", "v": {}}, "'dataclass' must have '$', 't', 'v'"),
        ({"$": "dataclass", "t": "shop:A", "v": {}, "p": {}}, "'dataclass' must have"),
        ({"$": "dataclass", "t": 5, "v": {}}, "found int where str should be"),
        ({"$": "dataclass", "t": "shop:A", "v": []}, "found list where dict should be"),
        ({"$": "enum", "t": "shop:A", "v": 1}, "found int where str should be"),
        ({"$": "flag", "t": "shop:A", "v": "RED"}, "found str where int should be"),
        ({"$": "model", "t": "shop:A", "v": {}}, "'model' must have '$', 'set', 't', 'v'"),
        ({"$": "model", "t": "shop:A", "v": {}, "set": [1]}, "ValidationError in it"),
        ({"$": "custom", "t": "shop.A", "v": {"$": "shop.B"}}, "the tag 'shop.B' is not known"),
    ],
    ids=repr,
)
def test_what_no_codec_writes_is_rejected(tree, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as rejected:
        read_shown(tree)
    assert "semel show --result" in str(rejected.value)


def test_a_given_object_is_rejected_where_it_cannot_be_stored(kind):
    shown = read_shown(described("dataclass", "Receipt", {"number": "r-1"}))
    deep = read_shown(msgspec.json.decode(_nested(101)))
    for options, codec, value, reason in (
        ({"policy": Policy(max_result_bytes=20)}, "json/1", shown, "the policy keeps at most 20"),
        ({"policy": Policy(codec=encrypting())}, "aesgcm/1+json/1", shown, "StoredObject"),
        ({}, "json/1", deep, "nested deeper than 99 levels"),
        ({}, "http/1", shown, "the record of an HTTP request"),
    ):
        world, program = engine_with(kind, **options)
        with world:
            identity = program.left(codec)
            before = program.record(identity)
            with pytest.raises(ConfigError, match=reason):
                program.decide(Succeeded(value))
            assert program.record(identity).owner == before.owner


def test_a_codec_of_the_application_writes_given_values_of_built_in_types(kind):
    world, program = engine_with(kind, policy=Policy(codec=encrypting()))
    with world:
        program.left(encrypting().name)
        program.decide(Succeeded(ShownValue((1, Decimal("2.50")))))
        assert program.engine.execute("a", never, scope="orders") == (1, Decimal("2.50"))


def test_other_outcomes_are_told_in_words():
    assert read_result(omitted("it is too large")) == NotKept("it is too large")
    assert read_result(encode_failure(ValueError("no"))) == StoredFailure("ValueError", "no")
    assert read_result(Encoded("http/1", pack_answer(StoredAnswer(200, (), None)))) == HttpAnswer(
        200, (), None
    )
    answer = StoredAnswer(201, ((b"Location", b"/o/7"), (b"X-Name", "é".encode("latin-1"))), b"x")
    assert read_result(Encoded("http/1", pack_answer(answer))) == HttpAnswer(
        201, (("Location", "/o/7"), ("X-Name", "é")), b"x"
    )
    error = StoredMessage(5, "no such order", None, b"\x08\x05")
    assert read_result(Encoded("grpc/1", pack_message(error))) == GrpcAnswer(
        None, "NOT_FOUND", "no such order"
    )


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("aesgcm/1+json/1", b"\x00"),
        ("json/1", b"{"),
        ("json/1", b"\xff"),
        ("json/1", _nested(100_000)),
        ("msgpack/1", b"\xc1"),
        ("http/1", b""),
        ("http/1", pickle.dumps({"status": 200})),
        ("grpc/1", b"\x90"),
        ("failure", b"{}"),
    ],
)
def test_what_cannot_be_read_is_shown_as_bytes(codec, data):
    assert read_result(Encoded(codec, data)) == Unreadable(codec, data)


def test_tags_that_are_wrong_or_new_and_keys_that_are_no_texts_are_shown_as_they_are():
    assert read_result(Encoded("json/1", b'{"$": "new", "v": [1]}')).value == {"$": "new", "v": [1]}
    packed = msgspec.msgpack.encode({5: {None: b"\x00"}})
    assert read_result(Encoded(MsgpackCodec.name, packed)).value == {
        "5": {"None": tagged("bytes", "AA==")}
    }


def test_nothing_is_imported_to_show_or_to_write():
    """Neither the classes of a result, nor a framework."""
    script = """
        import json
        import sys
        from semel.core.records import Encoded
        from semel.repair import GrpcAnswer, HttpAnswer, Succeeded, read_result
        from semel.repair.results import read_shown
        before = set(sys.modules)
        stored = b'{"$": "dataclass", "t": "antigravity:Receipt", "v": {"number": "r-1"}}'
        print(read_result(Encoded("json/1", stored)).value)
        zone = b'{"$": "datetime", "v": ["2026-01-02T03:04:00", 0, "Europe/Berlin"]}'
        print(read_result(Encoded("json/1", zone)).value)
        print(read_shown(json.loads(stored)).value.name)
        read_result(Encoded("http/1", b"\\x94\\x01\\xcc\\xc8\\x90\\xc4\\x01x"))
        read_result(Encoded("grpc/1", b"\\x95\\x01\\x00\\xa0\\xc4\\x01x\\xc0"))
        print(set(sys.modules) - before)
        print({"grpc", "starlette", "flask", "django", "google.protobuf"} & set(sys.modules))
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert told.stdout.splitlines() == [
        "{'$': 'dataclass', 't': 'antigravity:Receipt', 'v': {'number': 'r-1'}}",
        "{'$': 'datetime', 'v': ['2026-01-02T03:04:00', 0, 'Europe/Berlin']}",
        "antigravity:Receipt",
        "set()",
        "set()",
    ]


RECEIPT = {"$": "dataclass", "t": "shop:Receipt", "v": {"id": "a", "day": {"$": "date", "v": "d"}}}
MODEL = {"$": "model", "t": "shop:Order", "v": {"id": 1}, "set": ["id"]}


@pytest.mark.parametrize(
    ("tree", "model", "said"),
    [
        ({"a": 1}, {"b": "x"}, None),
        ({"a": 1}, {"a": "x"}, "result.a is number, and that of the similar call text"),
        ({"a": 1}, {"a": 2.5}, None),
        ({"a": True}, {"a": 2.5}, "result.a is true or false"),
        ({"a": None}, {"a": 2.5}, None),
        ("x", None, None),
        ([1, "x"], [1], "result[1] is text"),
        ([1, "x"], [], None),
        ([1], {"a": 1}, "result is list, and that of the similar call object"),
        ("a", RECEIPT, "result is text, and that of the similar call shop:Receipt"),
        (RECEIPT, RECEIPT, None),
        (RECEIPT | {"v": {"id": "a"}}, RECEIPT, "don't have the same fields: day"),
        (RECEIPT | {"v": {"id": "a", "day": "d"}}, RECEIPT, "result.day is text"),
        (tagged("tuple", ["EUR", 1]), tagged("tuple", ["USD", 2]), None),
        (tagged("tuple", ["EUR", "1"]), tagged("tuple", ["USD", 2]), "result[1] is text"),
        (tagged("tuple", ["EUR", "1"]), tagged("tuple", ["USD"]), None),
        ({"$": "custom", "t": "m", "v": {"x": 1}}, {"$": "custom", "t": "m", "v": {"y": 1}}, None),
    ],
)
def test_another_form_is_named_by_its_place(tree, model, said):
    found = unlike(tree, model)
    assert found is None if said is None else said in found


@pytest.mark.parametrize(
    ("tree", "model", "made"),
    [
        (
            {"id": "b", "day": "e"},
            RECEIPT,
            RECEIPT | {"v": {"id": "b", "day": {"$": "date", "v": "e"}}},
        ),
        ([{"id": "b", "day": None}], [RECEIPT], [RECEIPT | {"v": {"id": "b", "day": None}}]),
        ({"r": RECEIPT, "n": 1}, {"r": RECEIPT}, {"r": RECEIPT, "n": 1}),
        ({"id": 2}, MODEL, MODEL | {"v": {"id": 2}}),
        (2, MODEL, {"$": "model", "t": "shop:Order", "v": 2}),
        ([1], [], [1]),
        (
            ["EUR", "9.90"],
            tagged("tuple", ["USD", tagged("decimal", "1.00")]),
            tagged("tuple", ["EUR", tagged("decimal", "9.90")]),
        ),
        (1, "x", 1),
        (None, RECEIPT, None),
    ],
)
def test_plain_json_takes_the_form_of_a_similar_result(tree, model, made):
    assert in_form_of(tree, model) == made
