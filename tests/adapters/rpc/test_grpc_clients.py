"""Client interceptors: one key for each logical call, the same on every retry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from adapters.rpc.shop import PAY, SERVICE, Server, Shop, finished
from engines.facade import PATIENCE, Driven, World, wait_until
from semel import Idempotency
from semel.adapters.grpc import AsyncIdempotencyClientInterceptor, IdempotencyClientInterceptor
from semel.adapters.grpc.client import Retrying
from semel.events import RejectedBusy
from semel.testing import FakeClock

PUSHBACK = "grpc-retry-pushback-ms"


class Stubborn:
    """A service that fails as it is told, then answers with the key that it was called with."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str | None]] = []
        self.keys: list[list[str]] = []

    def pay(self, _: StringValue, context: Any) -> StringValue:
        found = [value for name, value in context.invocation_metadata() if name.endswith("key")]
        self.keys.append(found)
        if self.ends:
            code, pushback = self.ends.pop(0)
            if pushback is not None:
                context.set_trailing_metadata(((PUSHBACK, pushback),))
            context.abort(grpc.StatusCode[code], "not yet")
        return StringValue(value=found[0])


@pytest.fixture(scope="module")
def stubborn_server() -> Iterator[tuple[Stubborn, int]]:
    service = Stubborn()
    handler = grpc.unary_unary_rpc_method_handler(
        service.pay,
        StringValue.FromString,
        StringValue.SerializeToString,
    )
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Pay": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service, port
        server.stop(None).wait()


@pytest.fixture
def stubborn(stubborn_server) -> Stubborn:
    service, _ = stubborn_server
    service.__init__()
    return service


class Caller:
    """A client of either kind; the pauses between its tries are noted, not slept."""

    def __init__(self, kind: str, port: int) -> None:
        self.kind, self._port = kind, port
        self.slept: list[float] = []

    def pay(self, *, metadata: Any = None, timeout: float | None = PATIENCE, **options: Any) -> str:
        call = self._pay if self.kind == "threads" else self._pay_later
        ended = call(metadata, timeout, options)
        return ended if isinstance(ended, str) else asyncio.run(ended)

    def _pay(self, metadata: Any, timeout: float | None, options: Any) -> str:
        interceptor = IdempotencyClientInterceptor(**{"sleep": self.slept.append, **options})
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as plain:
            channel = grpc.intercept_channel(plain, interceptor)
            stub = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
            return stub(StringValue(value="ok"), metadata=metadata, timeout=timeout).value

    async def _pay_later(self, metadata: Any, patience: float | None, options: Any) -> str:
        async def sleep(pause: float) -> None:
            self.slept.append(pause)

        interceptor = AsyncIdempotencyClientInterceptor(**{"sleep": sleep, **options})
        target = f"127.0.0.1:{self._port}"
        async with grpc.aio.insecure_channel(target, interceptors=[interceptor]) as channel:
            stub = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
            answer = await stub(StringValue(value="ok"), metadata=metadata, timeout=patience)
            return answer.value


@pytest.fixture(params=["threads", "asyncio"])
def caller(request, stubborn_server) -> Caller:
    return Caller(request.param, stubborn_server[1])


def failed(caller: Caller, **options: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        caller.pay(**options)
    return caught.value.code()


def test_every_call_has_a_key_of_its_own(caller, stubborn):
    one, two = caller.pay(), caller.pay(app="shop")
    assert one != two
    assert two.startswith("shop-")
    assert stubborn.keys == [[one], [two]]


def test_a_call_keeps_its_key_on_every_retry(caller, stubborn):
    stubborn.ends = [("UNAVAILABLE", None), ("ABORTED", None)]
    key = caller.pay()
    assert stubborn.keys == [[key]] * 3
    assert 0.1 <= caller.slept[0] <= 0.2
    assert 0.2 <= caller.slept[1] <= 0.4


def test_a_key_that_the_caller_gave_is_kept(caller, stubborn):
    stubborn.ends = [("UNAVAILABLE", None)]
    assert caller.pay(metadata=(("x-other", "1"), ("idempotency-key", "mine"))) == "mine"
    assert stubborn.keys == [["mine"]] * 2


def test_calls_inside_an_attempt_have_keys_that_are_derived_from_it(caller, stubborn):
    seen = []

    def operation():
        seen.append([caller.pay(), caller.pay()])
        raise ConnectionError

    with Idempotency("memory://") as idem:
        for _ in range(2):
            with contextlib.suppress(ConnectionError):
                idem.execute("order-1", operation)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2
    assert all(key.startswith(PAY) for key in seen[0])


def test_the_server_s_pushback_goes_before_our_own_pauses(caller, stubborn):
    stubborn.ends = [("UNAVAILABLE", "2000"), ("UNAVAILABLE", "0")]
    caller.pay()
    assert 2.0 <= caller.slept[0] <= 2.2
    assert caller.slept[1] == 0.0


@pytest.mark.parametrize(
    "pushback", ["-1", "soon", "31000", pytest.param("9" * 5000, id="endless")]
)
def test_a_pushback_can_say_never_again(caller, stubborn, pushback):
    stubborn.ends = [("UNAVAILABLE", pushback)]
    assert failed(caller) is grpc.StatusCode.UNAVAILABLE
    assert len(stubborn.keys) == 1


def test_other_codes_are_not_tried_again_unless_it_is_asked_for(caller, stubborn):
    stubborn.ends = [("INTERNAL", None)]
    assert failed(caller) is grpc.StatusCode.INTERNAL
    stubborn.ends = [("INTERNAL", None)]
    assert caller.pay(codes=[grpc.StatusCode.INTERNAL])
    assert len(stubborn.keys) == 3


def test_tries_are_counted(caller, stubborn):
    stubborn.ends = [("UNAVAILABLE", None)] * 9
    assert failed(caller, retries=2) is grpc.StatusCode.UNAVAILABLE
    assert len(stubborn.keys) == 3


def test_a_pause_beyond_the_deadline_is_not_begun(caller, stubborn):
    stubborn.ends = [("UNAVAILABLE", "20000")]
    assert failed(caller, timeout=15.0) is grpc.StatusCode.UNAVAILABLE
    stubborn.ends = [("UNAVAILABLE", "20000")]
    assert failed(caller, timeout=None, retry_for=15) is grpc.StatusCode.UNAVAILABLE
    assert caller.slept == []


def test_the_deadline_is_that_of_the_whole_call(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("semel.adapters.grpc.client.monotonic", clock)
    call = Retrying().begin(PAY, None, 50.0)
    assert call.timeout == 50.0
    clock.advance(20.0)
    assert call.timeout == 30.0
    clock.advance(40.0)
    assert call.timeout == 0.0
    assert Retrying().begin(PAY, None, None).timeout is None


def test_a_connection_that_cannot_be_made_is_tried_again(caller):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        caller._port = taken.getsockname()[1]
        assert failed(caller, retries=2) is grpc.StatusCode.UNAVAILABLE
    assert len(caller.slept) == 2


def test_a_future_is_ready_when_it_is_given(stubborn_server, stubborn):
    stubborn.ends = [("UNAVAILABLE", "1")]
    with grpc.insecure_channel(f"127.0.0.1:{stubborn_server[1]}") as plain:
        channel = grpc.intercept_channel(plain, IdempotencyClientInterceptor())
        stub = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
        future = stub.future(StringValue(value="ok"), timeout=PATIENCE)
        assert future.done()
        assert future.result().value == stubborn.keys[1][0]


@pytest.fixture
def shop_server() -> Iterator[tuple[Server, Shop, Driven]]:
    """A protected server, which asks for a short pause."""
    with World("threads", "memory://") as world:
        shop, engine = Shop("threads"), world.engine()
        with Server(world, shop, engine.engine, pushback=0.05) as server:
            yield server, shop, engine


def test_client_and_server_together_give_a_retry_the_first_answer(caller, shop_server):
    server, _, _ = shop_server
    caller._port = server.port
    assert server.client.pay("ok", "k").value == "run 1"
    assert caller.pay(metadata=(("idempotency-key", "k"),)) == "run 1"
    assert caller.pay() == "run 2"


RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "50s",
                "maxBackoff": "50s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def test_the_retries_of_grpc_itself_heed_the_pushback(shop_server):
    server, shop, engine = shop_server
    held = server.client.start(PAY, "hold", "k")
    shop.wait_held()
    options = (("grpc.service_config", json.dumps(RETRIES)),)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        stub = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
        metadata = (("idempotency-key", "k"),)
        # Without the pushback it would come back after 40 seconds at least: too late.
        again = stub.future(StringValue(value="hold"), metadata=metadata, timeout=30.0)
        wait_until(lambda: engine.told(RejectedBusy))
        shop.release()
        assert again.result().value == "run 1"
    assert finished(held).value == "run 1"


@pytest.mark.parametrize("nested", [False, True])
async def test_a_call_that_is_cancelled_is_cancelled_on_its_server_too(nested):
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def pay(request: StringValue, context: Any) -> StringValue:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    handler = grpc.unary_unary_rpc_method_handler(
        pay, StringValue.FromString, StringValue.SerializeToString
    )
    server = grpc.aio.server()
    # Not as a registered method: the asyncio server of grpcio 1.64 has none.
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Pay": handler})
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    interceptors = [AsyncIdempotencyClientInterceptor() for _ in range(2 if nested else 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", interceptors=interceptors) as channel:
        method = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
        call = asyncio.ensure_future(_awaited(method(StringValue(value="1"))))
        await asyncio.wait_for(begun.wait(), PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        try:
            await asyncio.wait_for(cancelled.wait(), PATIENCE)
        finally:
            await server.stop(None)


async def _awaited(call: Any) -> Any:
    return await call
