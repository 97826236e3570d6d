"""The payment API on FastAPI: a decorator on each endpoint that must not run twice."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from examples.payments.business import LARGEST, Book, NotFound, Refused
from examples.payments.serving import Place, run
from fastapi import FastAPI, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from semel import Policy
from semel.adapters.fastapi import Idempotent

Number = Annotated[int, Path(ge=1, le=2**63 - 1)]


class NewPayment(BaseModel):
    """What a client asks for."""

    account: str = Field(min_length=1, max_length=50)
    amount: int = Field(gt=0, le=LARGEST)
    currency: Literal["EUR", "USD"]


class Payment(BaseModel):
    """What a client gets."""

    number: int
    account: str
    amount: int
    currency: str
    state: str


class Trouble(BaseModel):
    """Why not."""

    error: str


class Unreadable(BaseModel):
    """What FastAPI says of a body that is no text."""

    detail: str


UNREADABLE: dict[int | str, dict[str, Any]] = {400: {"model": Unreadable}}
REFUSED: dict[int | str, dict[str, Any]] = {409: {"model": Trouble}}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Trouble}}


def create_app(place: Place) -> FastAPI:
    """Make the application."""
    app = FastAPI(title="Payments")
    book = Book(place.book)
    # One client, the shop's own checkout, sends all requests: nobody else's keys can meet its own.
    idempotent = Idempotent(place.store, tenant=None, required=True, policy=Policy(ttl=3 * 86400))
    idempotent.init_app(app)

    @app.post("/payments", status_code=201, responses=UNREADABLE)
    @idempotent
    def pay(payment: NewPayment) -> Payment:
        made = book.pay(payment.account, payment.amount, payment.currency)
        return Payment.model_validate(made, from_attributes=True)

    @app.post("/payments/{number}/refund", responses=NOT_FOUND | REFUSED)
    @idempotent
    def refund(number: Number) -> Payment:
        return Payment.model_validate(book.refund(number), from_attributes=True)

    @app.get("/payments/{number}", responses=NOT_FOUND)
    def show(number: Number) -> Payment:
        return Payment.model_validate(book.find(number), from_attributes=True)

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> JSONResponse:
        del request
        return JSONResponse({"error": str(error)}, status_code=409)

    @app.exception_handler(NotFound)
    def not_found(request: Request, error: NotFound) -> JSONResponse:
        del request
        return JSONResponse({"error": str(error)}, status_code=404)

    return app


if __name__ == "__main__":
    import uvicorn

    run(lambda place, port: uvicorn.run(create_app(place), port=port, log_level="warning"))
