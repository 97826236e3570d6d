"""A gRPC service for tests, its text written once for servers on threads and on asyncio.

What a call does is written in its request: `ok`, `hold`, `abort NOT_FOUND no such order`. Messages are
protobuf's well-known types, so nothing has to be generated.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import grpc
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import StringValue

from engines.facade import PATIENCE, World
from semel import current_attempt
from semel.adapters.grpc import AsyncIdempotencyInterceptor, IdempotencyInterceptor

KINDS = ("threads", "asyncio", "plain")
"""A server for threads, one for asyncio, and one for asyncio whose handlers are plain functions."""

SERVICE = "test.Shop"
PAY, REFUND, ORDER, RAW, WATCH = (
    f"/{SERVICE}/{name}" for name in ("Pay", "Refund", "Order", "Raw", "Watch")
)


async def given(value: Any) -> Any:
    """What a context of either kind gave."""
    return await value if inspect.isawaitable(value) else value


def driven(step: Any) -> Any:
    """Run a coroutine that never has to wait."""
    try:
        step.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


class Shop:
    """The service; every run is counted outside the library."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.runs: list[str] = []
        self.seen: list[Any] = []
        """What handlers noticed, for tests to look at."""
        self._held = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._gate = threading.Event()

    def release(self) -> None:
        """Let what is held go on."""
        self._gate.set()

    def wait_held(self) -> None:
        assert self._held.acquire(timeout=PATIENCE), "it never ran"

    def wait_ended(self) -> None:
        assert self._ended.acquire(timeout=PATIENCE), "it never ended"

    # --- what handlers do ------------------------------------------------------------------

    async def pay(self, request: StringValue, context: Any) -> Any:
        self.runs.append(request.value)
        order, _, rest = request.value.partition(" ")
        try:
            return await getattr(self, f"_{order}")(rest, context)
        finally:
            self._ended.release()

    async def order(self, request: Struct, _: Any) -> Struct:
        self.runs.append("order")
        answer = Struct()
        answer.update({"runs": len(self.runs), **dict.fromkeys(request.fields, "seen")})
        return answer

    async def raw(self, request: bytes, _: Any) -> bytes:
        self.runs.append("raw")
        return b"%d:" % len(self.runs) + request

    async def _ok(self, _: str, __: Any) -> StringValue:
        return StringValue(value=f"run {len(self.runs)}")

    async def _hold(self, rest: str, context: Any) -> Any:
        self._held.release()
        if self.kind == "asyncio":
            assert await asyncio.to_thread(self._gate.wait, PATIENCE)
        else:
            assert self._gate.wait(PATIENCE)
        order, _, rest = rest.partition(" ")
        return await getattr(self, f"_{order or 'ok'}")(rest, context)

    async def _big(self, size: str, _: Any) -> StringValue:
        return StringValue(value="x" * int(size))

    async def _raise(self, words: str, _: Any) -> StringValue:
        raise ValueError(words)

    async def _abort(self, rest: str, context: Any) -> StringValue:
        code, _, details = rest.partition(" ")
        await given(context.abort(grpc.StatusCode[code], details))

    async def _abort_with_trailers(self, rest: str, context: Any) -> StringValue:
        context.set_trailing_metadata((("x-own", "1"), ("grpc-status-details-bin", b"\x08\x05")))
        await given(context.abort(grpc.StatusCode[rest], "with trailers"))

    async def _status(self, rest: str, context: Any) -> StringValue:
        await given(context.abort_with_status(Status(grpc.StatusCode[rest], "by status", ())))

    async def _swallow(self, rest: str, context: Any) -> StringValue:
        try:
            await self._abort(rest, context)
        except (grpc.aio.AbortError, Exception):
            return StringValue(value="nevertheless")

    async def _set_code(self, rest: str, context: Any) -> StringValue:
        context.set_code(grpc.StatusCode[rest])
        context.set_details("set, not aborted")
        return StringValue(value="ignored")

    async def _set_number(self, rest: str, context: Any) -> StringValue:
        context.set_code(int(rest))
        return StringValue(value="with a number")

    async def _set_nonsense(self, _: str, context: Any) -> StringValue:
        context.set_code(99)
        return StringValue(value="ignored")

    async def _set_code_and_raise(self, rest: str, context: Any) -> StringValue:
        context.set_code(grpc.StatusCode[rest])
        raise ValueError("after the code")

    async def _unserializable(self, _: str, __: Any) -> StringValue:
        return StringValue(value="unserializable")

    async def _trailers(self, _: str, context: Any) -> StringValue:
        context.set_trailing_metadata((("idempotent-replayed", "true"), ("x-own", "1")))
        return StringValue(value="with trailers")

    async def _initial(self, _: str, context: Any) -> StringValue:
        await given(context.send_initial_metadata((("x-early", "1"),)))
        return StringValue(value="early")

    async def _callback(self, _: str, context: Any) -> StringValue:
        if self.kind == "asyncio":
            context.add_done_callback(lambda _: self.seen.append("called back"))
        else:
            context.add_callback(lambda: self.seen.append("called back"))
        return StringValue(value="later")

    async def _peer(self, _: str, context: Any) -> StringValue:
        """Ask all that only the call knows, which may be gone."""
        if self.kind == "asyncio":
            await context.send_initial_metadata((("x-late", "1"),))
        self.seen.append((context.peer(), context.auth_context(), context.peer_identities()))
        return StringValue(value="peer")

    async def _derive(self, part: str, _: Any) -> StringValue:
        return StringValue(value=current_attempt().derive(part))

    # --- handlers of each kind -----------------------------------------------------------------

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        text = (StringValue.FromString, _serialized)
        return {
            "Pay": grpc.unary_unary_rpc_method_handler(self._made(self.pay), *text),
            "Refund": grpc.unary_unary_rpc_method_handler(self._made(self.pay), *text),
            "Order": grpc.unary_unary_rpc_method_handler(
                self._made(self.order), Struct.FromString, Struct.SerializeToString
            ),
            "Raw": grpc.unary_unary_rpc_method_handler(self._made(self.raw)),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *text),
        }

    def _made(self, behaviour: Any) -> Any:
        if self.kind == "asyncio":
            return behaviour
        return lambda request, context: driven(behaviour(request, context))

    def _watch(self, request: StringValue, _: Any) -> Iterable[StringValue]:
        self.runs.append("watch")
        yield StringValue(value=f"event {len(self.runs)}")


def _serialized(message: StringValue) -> bytes:
    if message.value == "unserializable":
        raise TypeError("as an old protobuf does of a message of another type")
    return message.SerializeToString()


class Status(NamedTuple):
    """What `abort_with_status` takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: Any


class Reply(NamedTuple):
    """What a client got."""

    code: grpc.StatusCode
    data: bytes | None
    details: str
    trailers: dict[str, Any]
    initial: dict[str, Any]

    @property
    def value(self) -> str:
        assert self.code is grpc.StatusCode.OK, self
        return StringValue.FromString(self.data).value

    @property
    def replayed(self) -> bool:
        return self.trailers.get("idempotent-replayed") == "true"

    @property
    def status(self) -> str | None:
        return self.trailers.get("idempotency-status")

    @property
    def instance(self) -> str | None:
        return self.trailers.get("idempotency-instance")

    @property
    def pushback(self) -> str | None:
        return self.trailers.get("grpc-retry-pushback-ms")


class Client:
    """A plain client, without any interceptor of ours."""

    def __init__(self, port: int) -> None:
        # A channel of its own: one that failed may not be the one of another test.
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)
        )

    def start(
        self, method: str, request: Any, *keys: str, metadata: Any = (), **options: Any
    ) -> Any:
        """Begin a call: a text is the request of `Pay` and `Refund`."""
        if isinstance(request, str):
            request = StringValue(value=request)
        data = request if isinstance(request, bytes) else request.SerializeToString()
        lines = (*(("idempotency-key", key) for key in keys), *metadata)
        options = {"timeout": PATIENCE, **options}
        return self.channel.unary_unary(method).future(data, metadata=lines, **options)

    def call(self, method: str, request: Any, *keys: str, **options: Any) -> Reply:
        return finished(self.start(method, request, *keys, **options))

    def pay(self, request: str, *keys: str, **options: Any) -> Reply:
        return self.call(PAY, request, *keys, **options)

    def close(self) -> None:
        self.channel.close()


def finished(call: Any) -> Reply:
    """Wait for the end of a call."""
    error = call.exception(PATIENCE)
    return Reply(
        call.code(),
        call.result() if error is None else None,
        call.details() or "",
        dict(call.trailing_metadata() or ()),
        dict(call.initial_metadata() or ()),
    )


class Server:
    """A server with the shop on it, and a client that talks to it over a real socket."""

    def __init__(
        self,
        world: World,
        shop: Shop,
        idempotency: Any,
        *,
        before: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        self.world, self._shop = world, shop
        threads = shop.kind == "threads"
        made = IdempotencyInterceptor if threads else AsyncIdempotencyInterceptor
        self.interceptor = made(idempotency, **options)
        interceptors = [*before, self.interceptor]
        if threads:
            self._pool = ThreadPoolExecutor(8)
            self._server = grpc.server(self._pool, interceptors=interceptors)
            self.port = _registered(self._server, shop)
            self._server.start()
        else:
            self._pool = None
            self.port = world.kind.finish(self._start, shop, interceptors)
        self.client = Client(self.port)

    async def _start(self, shop: Shop, interceptors: list[Any]) -> int:
        self._server = grpc.aio.server(interceptors=interceptors)
        port = _registered(self._server, shop)
        await self._server.start()
        return port

    def close(self) -> None:
        self._shop.release()
        self.client.close()
        stopped = self.world.kind.finish(self._server.stop, None)
        if self._pool is not None:
            stopped.wait()
            self._pool.shutdown()
        self.world.kind.finish(self.interceptor.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _registered(server: Any, shop: Shop) -> int:
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, shop.handlers()),)
    )
    return server.add_insecure_port("127.0.0.1:0")
