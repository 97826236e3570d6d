"""The check of handlers as they are registered, before a server starts.

An interceptor sees a handler no earlier than its first call. To learn of a mistake before that,
register services through `interceptor.checking(server)`: it looks at each handler and hands it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from semel.adapters.grpc.methods import MethodBooks


class CheckingServer:
    """A server on which services are registered, each handler checked before."""

    def __init__(self, server: Any, books: MethodBooks) -> None:
        self._server, self._books = server, books

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Check and register the handlers of a service."""
        self._check({f"/{service_name}/{name}": one for name, one in method_handlers.items()})
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Check and register generic handlers, as far as they tell what they hold."""
        handlers = tuple(generic_rpc_handlers)
        for handler in handlers:
            # The kind that `grpc.method_handlers_generic_handler` makes; others tell nothing.
            self._check(getattr(handler, "_method_handlers", {}))
        self._server.add_generic_rpc_handlers(handlers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def _check(self, handlers: Mapping[str, Any]) -> None:
        for method, handler in handlers.items():
            self._books.check(method, streaming=is_streaming(handler))


def is_streaming(handler: Any) -> bool:
    """Tell whether a handler takes or gives a stream."""
    return bool(handler.request_streaming or handler.response_streaming)
