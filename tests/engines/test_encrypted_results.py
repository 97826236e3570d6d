"""Encryption is integrity, too: a store's writer cannot put a plain result in an encrypted one's place."""

from __future__ import annotations

import logging
import sqlite3
import traceback

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel import (
    EncryptedCodec,
    Idempotency,
    Policy,
    PreviousFailure,
    ResultUnavailable,
    SerializationError,
    repair,
)
from semel.adapters.asgi import IdempotencyMiddleware
from semel.aio import AsyncIdempotency
from semel.core.codec import JsonCodec, MsgpackCodec
from semel.core.stored_answers import StoredAnswer, pack_answer

KEY = bytes(range(32))
IBAN = "AT611904300234573201"


def encrypting(inner=None, *, strict=True, **fields):
    codec = EncryptedCodec(inner, keys={"a": KEY}, primary="a", strict=strict)
    return Policy(codec=codec, **fields)


class File:
    """A SQLite file, with a hand that may write to it and has no key."""

    def __init__(self, path):
        self.path = path
        self.url = f"sqlite:///{path}"

    def forge(self, codec, data):
        with sqlite3.connect(self.path) as hand:
            hand.execute(
                "UPDATE idempotent_record SET codec = ?, result_payload = ?", (codec, data)
            )
        hand.close()

    def stored(self):
        with sqlite3.connect(self.path) as hand:
            rows = hand.execute("SELECT codec, result_payload FROM idempotent_record").fetchall()
        hand.close()
        return rows


@pytest.fixture
def file(tmp_path):
    return File(tmp_path / "records.db")


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("json/1", b'{"iban":"ATTACKER"}'),
        ("msgpack/1", msgspec.msgpack.encode({"iban": "ATTACKER"})),
        ("http/1", pack_answer(StoredAnswer(200, (), b"ATTACKER"))),
        ("grpc/1", b"ATTACKER"),
        ("own/1", b'"ATTACKER"'),
    ],
)
def test_a_plain_result_in_place_of_an_encrypted_one_is_not_replayed(file, codec, data):
    class Own(JsonCodec):
        name = "own/1"

    with Idempotency(file.url, policy=encrypting(), codecs=[Own()]) as idem:
        idem.execute("order:42", lambda: {"iban": IBAN})
        file.forge(codec, data)
        with pytest.raises(ResultUnavailable, match="reads only encrypted"):
            idem.execute("order:42", lambda: pytest.fail("it ran again"))
        with pytest.raises(ResultUnavailable, match="reads only encrypted"):
            idem.marks.get_result("order:42")


def test_a_plain_result_from_before_encryption_is_replayed_if_the_codec_is_not_strict(file):
    with Idempotency(file.url) as plain:
        plain.execute("order:42", lambda: "paid")
    strict = Idempotency(file.url, policy=encrypting())
    with strict, pytest.raises(ResultUnavailable, match="strict=False"):
        strict.execute("order:42", lambda: pytest.fail("it ran again"))
    with Idempotency(file.url, policy=encrypting(strict=False)) as lenient:
        assert lenient.execute("order:42", lambda: pytest.fail("it ran again")) == "paid"


def test_a_strict_codec_reads_what_another_encrypted_codec_wrote(file):
    with Idempotency(file.url, policy=encrypting()) as before:
        before.execute("order:42", lambda: "paid")
    earlier = encrypting().codec
    with Idempotency(file.url, policy=encrypting(MsgpackCodec()), codecs=[earlier]) as after:
        assert after.execute("order:42", lambda: pytest.fail("it ran again")) == "paid"


def test_the_policy_of_the_scope_says_whether_plain_results_are_read(file):
    with Idempotency(file.url, scopes={"secret": encrypting()}) as idem:
        idem.execute("order:42", lambda: "paid")
        assert idem.execute("order:42", lambda: pytest.fail("it ran again")) == "paid"
        idem.execute("order:42", lambda: "paid", scope="secret")
        file.forge("json/1", b'"forged"')
        assert idem.execute("order:42", lambda: pytest.fail("it ran again")) == "forged"
        with pytest.raises(ResultUnavailable, match="reads only encrypted"):
            idem.execute("order:42", lambda: pytest.fail("it ran again"), scope="secret")


def test_omissions_and_failures_stay_plain(file):
    with Idempotency(file.url, policy=encrypting(failure="final")) as idem:
        idem.execute("omitted", object)
        with pytest.raises(ResultUnavailable, match="object cannot be stored"):
            idem.execute("omitted", lambda: pytest.fail("it ran again"))
        with pytest.raises(ZeroDivisionError):
            idem.execute("failed", lambda: 1 / 0)
        with pytest.raises(PreviousFailure, match="division by zero"):
            idem.execute("failed", lambda: pytest.fail("it ran again"))


# --- HTTP ----------------------------------------------------------------------------------------


async def pay(_):
    return JSONResponse({"paid": 5}, 201)


async def answers(file, policy, forged=None):
    """What two equal requests get; between them, the record may be forged."""
    async with AsyncIdempotency(file.url, policy=policy) as idem:
        inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        app = IdempotencyMiddleware(inner, idem, tenant=lambda _: "ann")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            first = await client.post("/pay", headers={"Idempotency-Key": "k"})
            if forged is not None:
                file.forge(*forged)
            return first, await client.post("/pay", headers={"Idempotency-Key": "k"})


@pytest.mark.parametrize("codec", ["http/1", "json/1"])
async def test_a_plain_response_in_place_of_an_encrypted_one_is_not_replayed(file, codec):
    packed = pack_answer(StoredAnswer(200, ((b"set-cookie", b"session=attacker"),), b"evil"))
    data = packed if codec == "http/1" else JsonCodec().encode(packed, b"")
    first, replay = await answers(file, encrypting(), (codec, data))
    assert first.status_code == 201
    assert replay.status_code == 409
    assert replay.json()["code"] == "result_unavailable"
    assert "set-cookie" not in replay.headers


async def test_a_response_from_before_encryption_is_replayed_if_the_codec_is_not_strict(file):
    await answers(file, None)
    assert file.stored()[0][0] == "http/1"
    first, replay = await answers(file, encrypting(strict=False))
    assert (first.status_code, replay.json()) == (201, {"paid": 5})
    strict, _ = await answers(file, encrypting())
    assert strict.status_code == 409


# --- what is said of a result --------------------------------------------------------------------


class Told(Exception):
    """An error that quotes."""


class Quoting:
    """A codec of an application's own whose errors quote the value."""

    name = "quoting/1"

    def encode(self, value, context, hint=None):
        if isinstance(value, dict):
            raise SerializationError(f"cannot write {value}")
        return value.encode()

    def decode(self, data, context, hint=None):
        text = data.decode()
        if self.damaged:
            raise SerializationError(f"cannot read {text}") from Told(text)
        return text

    damaged = False


def everything_said(caplog, idem, first, file):
    """What the log, the store and a duplicate's traceback say of a result."""
    caplog.set_level(logging.DEBUG)
    if first is not None:
        idem.execute("k", first)
    try:
        idem.execute("k", lambda: pytest.fail("it ran again"))
    except ResultUnavailable as error:
        told = "".join(traceback.format_exception(error))
    return f"{caplog.text} {file.stored()} {told}"


@pytest.mark.parametrize(
    "keys", [{IBAN: object()}, {int(IBAN[2:]): object()}, [{IBAN: {1: object()}}]]
)
def test_why_an_encrypted_result_is_not_kept_shows_no_part_of_it(file, caplog, keys):
    with Idempotency(file.url, policy=encrypting()) as idem:
        said = everything_said(caplog, idem, lambda: keys, file)
    assert "object cannot be stored" in said
    assert "[...]" in said
    assert IBAN[2:] not in said


def test_why_a_plain_result_is_not_kept_names_its_place(file, caplog):
    with Idempotency(file.url) as idem:
        said = everything_said(caplog, idem, lambda: {"items": [object()]}, file)
    assert "(at result['items'][0])" in said


def test_the_errors_of_an_encrypted_codecs_own_inner_one_are_not_repeated(file, caplog):
    with Idempotency(file.url, policy=encrypting(Quoting())) as idem:
        said = everything_said(caplog, idem, lambda: {"iban": IBAN}, file)
    assert "SerializationError while encoding dict" in said
    assert IBAN not in said


def test_why_an_encrypted_result_cannot_be_read_shows_no_part_of_it(file, caplog):
    inner = Quoting()
    with Idempotency(file.url, policy=encrypting(inner)) as idem:
        idem.execute("k", lambda: IBAN)
        inner.damaged = True
        said = everything_said(caplog, idem, None, file)
    assert "SerializationError while reading it back" in said
    assert IBAN not in said


# --- decided by a person -------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_a_decision_is_encrypted_where_results_are_though_the_attempt_began_in_plain(file, strict):
    """The running record names the codec, and a store's writer may have changed that."""
    hold = {"abandoned": "hold", "failure": "unknown"}
    with Idempotency(file.url, policy=Policy(**hold)) as plain, pytest.raises(ZeroDivisionError):
        plain.execute("k", lambda: 1 / 0)
    with Idempotency(file.url, policy=encrypting(strict=strict, **hold)) as idem:
        assert repair.settle(idem, "k", repair.Succeeded(IBAN), name="anna") is not None
        stored = idem.peek("k").outcome
        assert stored.codec == "aesgcm/1+json/1"
        assert IBAN.encode() not in stored.data
        assert idem.execute("k", lambda: "again") == IBAN
