"""A held call that a person resolves: its retries get exactly the message that was given."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from adapters.rpc.shop import PAY
from semel import Policy
from semel.cli import main
from semel.repair import GrpcAnswer, Succeeded, settle, settle_async


@pytest.fixture
def held(lasting_shops):
    """A server, its shop and its engine; the call `k` is held."""
    server, shop, engine = lasting_shops.serve(policy=Policy.payment())
    assert server.client.pay("raise the reply got lost", "k").code is grpc.StatusCode.UNKNOWN
    assert retry(server).status == "outcome-unknown"
    return server, shop, engine


def retry(server):
    return server.client.call(PAY, "raise the reply got lost", "k")


def check(held, message):
    server, shop, engine = held
    record = engine.peek("k", scope="grpc")
    assert record.remaining == pytest.approx(3 * 86400, abs=60), "as the policy says"
    for answer in (retry(server), retry(server)):
        assert (answer.code, answer.data) == (grpc.StatusCode.OK, message)
        assert answer.trailers == {"idempotent-replayed": "true"}
    assert len(shop.runs) == 1


@pytest.mark.parametrize("value", ["paid by hand", ""])
def test_a_retry_gets_exactly_the_message_that_a_person_gave(
    held, lasting_shops, tmp_path, monkeypatch, value
):
    monkeypatch.chdir(tmp_path)
    message = StringValue(value=value).SerializeToString()
    (tmp_path / "receipt.bin").write_bytes(message)
    url = lasting_shops.world.url
    assert main(["--url", url, "resolve", "grpc", "k", "--message", "@receipt.bin"]) == 0
    check(held, message)


def test_a_program_may_give_the_message_too(held, lasting_shops):
    message = StringValue(value="paid by hand").SerializeToString()
    world, engine = lasting_shops.world, held[2]
    function = settle if world.name == "threads" else settle_async
    resolution = Succeeded(GrpcAnswer(message))
    assert world.kind.finish(function, engine.engine, "k", resolution, scope="grpc") is not None
    check(held, message)
