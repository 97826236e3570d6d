"""Flask: the decorator of a view, behind authorization by before_request."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any

from flask import Flask, Response, abort, request

from semel import Idempotency
from semel.adapters.flask import Idempotent
from web.handlers import CORS_ORIGIN, Asked, Business

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE"]


def application(business: Business, engine: Idempotency, options: Mapping[str, Any]) -> Flask:
    app = Flask(__name__)
    idempotent = Idempotent(engine, **options)

    @app.before_request
    def authorize() -> None:
        if not business.admits(_headers()):
            abort(403)

    @app.after_request
    def around(response: Response) -> Response:
        """CORS and compression."""
        if request.headers.get("Origin") == CORS_ORIGIN:
            response.headers["Access-Control-Allow-Origin"] = CORS_ORIGIN
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.set_data(gzip.compress(response.get_data()))
            response.headers["Content-Encoding"] = "gzip"
        return response

    @app.route("/<path:path>", methods=METHODS)
    @idempotent
    def view(path: str) -> Response:
        try:
            body = request.get_data()
        except OSError:  # nobody sent a whole body
            abort(400)
        asked = Asked(request.method, f"/{path}", _headers(), body)
        reply = business(asked)
        chunks = reply.chunks if reply.streamed else b"".join(reply.chunks)
        response = Response(chunks, reply.status)
        response.headers.clear()
        response.headers.extend(reply.lines)
        if reply.after is not None:
            response.call_on_close(reply.after)
        return response

    return app


def _headers() -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}
