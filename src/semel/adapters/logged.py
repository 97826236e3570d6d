"""What the web integrations log of redirects that are not stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from semel.events import logger
from semel.http.rules import Rulebook
from semel.http.storing import SEE_OTHER

_SHOWN: Final = 200
"""Characters of a path that are logged; a client may send one of any length."""


def log_redirect(book: Rulebook, status: int, raw: object, *, rolled_back: bool = False) -> None:
    """Log, once for each route, that a request with a key was answered by an unstored redirect.

    `raw` is the framework's own request. `rolled_back`: what the view wrote is gone, too.
    """
    route = _route_of(raw)[:_SHOWN]
    if not book.redirects(status, route):
        return
    logger.warning(
        "%r answered a request that has a key with a redirect (%d). Redirects are not stored: %s a "
        "retry with the same key runs again. If this redirect means that the operation is done, "
        "%s, or give a function that looks where the redirect leads: "
        "stored=lambda status, headers: ...",
        route,
        status,
        "what it wrote was rolled back, and" if rolled_back else "the key is free, and",
        "name it: stored=[303]" if status == SEE_OTHER else "answer with 303 and stored=[303]",
    )


def _route_of(raw: Any) -> str:
    """Name the route of a request: as it was declared, where the framework tells, or its path."""
    if isinstance(raw, Mapping):  # an ASGI scope, a request of Starlette's, a WSGI environ
        declared = (
            getattr(raw.get("route"), "path", None)
            or raw.get("path_template")  # of Litestar
            or getattr(raw.get("endpoint"), "__qualname__", None)  # of a Starlette without "route"
        )
        path = raw.get("path", raw.get("PATH_INFO", "/"))
    else:  # a request of Flask's, of Django's or of REST framework's
        declared = getattr(getattr(raw, "url_rule", None), "rule", None) or getattr(
            getattr(raw, "resolver_match", None), "route", None
        )
        path = getattr(raw, "path", "/")
    return str(declared or path)
