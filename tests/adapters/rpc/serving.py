"""A server as a process of its own: `python serving.py KIND URL LEDGER` prints its port and serves.

Every run is a line in the ledger; a call that is told to `hang` never ends by itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from semel import Policy
from semel.adapters.grpc import AsyncIdempotencyInterceptor, IdempotencyInterceptor, MethodRule

OPTIONS: dict[str, Any] = {
    "policy": Policy(lease=1.0),
    "pushback": 0.2,
    "methods": {"/test.Shop/Refund": MethodRule(policy=Policy(lease=1.0, abandoned="hold"))},
}


def main(kind: str, url: str, ledger: str) -> None:
    def noted(request: StringValue) -> bool:
        with Path(ledger).open("a") as file:
            file.write(f"{os.getpid()} {request.value}\n")
        return request.value == f"hang {os.environ['HANGING']}"

    def answered(request: StringValue) -> StringValue:
        return StringValue(value=f"{request.value} by {os.getpid()}")

    def run(request: StringValue, _: Any) -> StringValue:
        if noted(request):
            threading.Event().wait()
        return answered(request)

    async def run_later(request: StringValue, _: Any) -> StringValue:
        if noted(request):
            await asyncio.Event().wait()
        return answered(request)

    def registered(server: Any, behaviour: Any) -> int:
        handler = grpc.unary_unary_rpc_method_handler(
            behaviour, StringValue.FromString, StringValue.SerializeToString
        )
        methods = {"Pay": handler, "Refund": handler}
        # Both, as generated code does: the asyncio server of grpcio 1.64 has no registered methods.
        generic = grpc.method_handlers_generic_handler("test.Shop", methods)
        server.add_generic_rpc_handlers((generic,))
        server.add_registered_method_handlers("test.Shop", methods)
        return server.add_insecure_port("127.0.0.1:0")

    async def serve() -> None:
        server = grpc.aio.server(interceptors=[AsyncIdempotencyInterceptor(url, **OPTIONS)])
        port = registered(server, run_later)
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    if kind == "asyncio":
        asyncio.run(serve())
    server = grpc.server(
        ThreadPoolExecutor(8), interceptors=[IdempotencyInterceptor(url, **OPTIONS)]
    )
    port = registered(server, run)
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
