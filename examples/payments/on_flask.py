"""The payment API on Flask: a decorator on each view that must not run twice."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from examples.payments.business import Book, NotFound, Refused
from examples.payments.serving import Place, run
from flask import Flask, request

from semel import Policy
from semel.adapters.flask import Idempotent


def create_app(place: Place) -> Flask:
    """Make the application."""
    app = Flask(__name__)
    book = Book(place.book)
    # One client, the shop's own checkout, sends all requests: nobody else's keys can meet its own.
    idempotent = Idempotent(place.store, tenant=None, required=True, policy=Policy(ttl=3 * 86400))

    @app.post("/payments")
    @idempotent
    def pay() -> tuple[dict[str, Any], int]:
        try:
            asked = request.get_json()
            made = book.pay(str(asked["account"]), int(asked["amount"]), str(asked["currency"]))
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"account, amount and currency are needed: {error}"}, 422
        return asdict(made), 201

    @app.post("/payments/<int:number>/refund")
    @idempotent
    def refund(number: int) -> dict[str, Any]:
        return asdict(book.refund(number))

    @app.get("/payments/<int:number>")
    def show(number: int) -> dict[str, Any]:
        return asdict(book.find(number))

    @app.errorhandler(Refused)
    def refused(error: Refused) -> tuple[dict[str, Any], int]:
        return {"error": str(error)}, 409

    @app.errorhandler(NotFound)
    def not_found(error: NotFound) -> tuple[dict[str, Any], int]:
        return {"error": str(error)}, 404

    return app


if __name__ == "__main__":
    run(lambda place, port: create_app(place).run(port=port))
