"""What a handler on asyncio sees of its call, in place of gRPC's own context.

A handler whose client has gone runs on, but its call is over: to send on it is an error, and gRPC
may free it under the handler. So a context is detached from its call in time. And `abort` is held
back until the end of the handler is recorded: when the client hears of it, its key is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NoReturn

import grpc

from semel.adapters.grpc.rulebook import Abort
from semel.adapters.grpc.storing import code_of

_ASKED_OF_THE_CALL: Final = ("peer", "peer_identities", "peer_identity_key", "auth_context")


class HandlerContext:
    """The context of an async handler."""

    def __init__(self, context: Any) -> None:
        self._context = context
        # Asked now: when the call is over, by a deadline say, some of it is gone at once.
        self._remembered: dict[str, Callable[..., Any]] = {
            name: _constant(getattr(context, name)()) for name in _ASKED_OF_THE_CALL
        }
        self.aborted: Abort | None = None

    def __getattr__(self, name: str) -> Any:
        remembered = self._remembered.get(name)
        return getattr(self._context, name) if remembered is None else remembered

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call; what it ends with is sent when the end is recorded."""
        self.note(code, details, trailing_metadata)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status."""
        self.note(status.code, status.details, status.trailing_metadata)

    def note(self, code: Any, details: str | None, trailers: Any) -> NoReturn:
        """Note what the call ends with, and leave the handler."""
        ended = code_of(code)
        if ended is grpc.StatusCode.OK:  # a mistake, which a server for threads tells of like this
            ended = grpc.StatusCode.UNKNOWN
        self.aborted = Abort(
            ended,
            details or self._context.details(),
            tuple(trailers or self._context.trailing_metadata()),
        )
        raise grpc.aio.AbortError("Locally aborted.")

    def end(self) -> tuple[grpc.StatusCode, str, Any]:
        """Code, details and trailers that the handler left."""
        if self.aborted is not None:
            return self.aborted.code, self.aborted.details, self.aborted.trailers
        context = self._context
        return code_of(context.code()), context.details(), context.trailing_metadata()

    def detach(self) -> None:
        """Send nothing any more: the call is about to go."""
        self._remembered["send_initial_metadata"] = _unsent


class PlainHandlerContext:
    """The context of a plain handler, which runs in a thread beside the loop."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.callbacks: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call; what it ends with is sent when the end is recorded."""
        self._context.note(code, details, trailing_metadata)

    def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status."""
        self._context.note(status.code, status.details, status.trailing_metadata)

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Send metadata before the response."""
        sending = self._context.send_initial_metadata(initial_metadata)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result()

    def add_callback(self, callback: Callable[[], Any]) -> bool:
        """Call this when the handler is done."""
        self.callbacks.append(callback)
        return True


def _constant(value: object) -> Callable[[], Any]:
    return lambda: value


async def _unsent(_: object) -> None:
    """Nobody is there to be told."""
