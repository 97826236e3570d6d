"""The payment API on each framework, started as its readers start it, asked over real sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from examples_given import payments

ORDER = {"account": "ann", "amount": 500, "currency": "EUR"}


@pytest.fixture(params=["on_fastapi", "on_flask", "on_django"])
def framework(request):
    return request.param


@pytest.fixture
def api(framework, tmp_path):
    with payments(framework, tmp_path) as api:
        yield api


def test_a_payment_is_charged_once_however_often_it_is_sent(api, framework):
    status, first, headers = api.send("POST", "/payments", ORDER, "order-1")
    assert status == 201
    assert first == {"number": 1, **ORDER, "state": "charged"}
    assert "Idempotent-Replayed" not in {name.title() for name in headers}

    status, again, headers = api.send("POST", "/payments", dict(reversed(ORDER.items())), "order-1")
    assert (status, again) == (201, first)
    assert {name.title(): value for name, value in headers.items()}["Idempotent-Replayed"] == "true"

    with ThreadPoolExecutor(8) as clients:
        sent = list(
            clients.map(lambda _: api.send("POST", "/payments", ORDER, "order-2")[0], range(8))
        )
    assert set(sent) <= {201, 409}
    assert api.send("POST", "/payments", ORDER, "order-2")[0] == 201
    assert api.charges() == 2

    assert api.send("POST", "/payments", ORDER)[0] == 400
    assert api.send("POST", "/payments", {**ORDER, "amount": 6}, "order-1")[0] == 422
    # FastAPI's model refuses it, elsewhere the business does; neither uses up the key.
    refused = 422 if framework == "on_fastapi" else 409
    assert api.send("POST", "/payments", ORDER | {"currency": "XXX"}, "order-3")[0] == refused
    assert api.send("POST", "/payments", ORDER, "order-3")[0] == 201

    assert api.send("POST", "/payments/1/refund", {}, "refund-1")[1]["state"] == "refunded"
    assert api.send("POST", "/payments/1/refund", {}, "refund-1")[1]["state"] == "refunded"
    assert api.send("POST", "/payments/1/refund", {}, "refund-2")[0] == 409
    assert api.send("GET", "/payments/1")[1]["state"] == "refunded"
    assert api.send("GET", "/payments/99")[0] == 404
    assert api.send("POST", "/payments/1/refund", {}, "order-1")[0] == 422  # another route
