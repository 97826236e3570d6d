"""A resolver asks the next system by the key that the attempt has sent there."""

from __future__ import annotations

import httpx
import pytest
from flask import Flask

from semel import Idempotency, Policy, current_attempt
from semel.adapters.flask import Idempotent
from semel.adapters.httpx import IdempotentTransport
from semel.http import part_of_call
from semel.observe import message_headers
from semel.repair import Reconciler, Succeeded

CHARGES = "https://bank.example/charges?at=12"


def resolved(url, scope, key_at_bank):
    """Run a resolver that gives the key it would ask by as the result."""
    with Idempotency(url) as idem:
        report = Reconciler(
            idem, {scope: lambda record: Succeeded(key_at_bank(record))}, older_than=0
        ).run_once()
        assert report.resolved == 1


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/semel.db"


def test_a_resolver_knows_the_key_that_the_attempt_sent(url):
    sent = []

    def charge():
        attempt = current_attempt()
        sent.extend((attempt.derive("charge"), *(attempt.derive_next("item") for _ in range(3))))
        sent.extend(message_headers("paid").values())
        raise TimeoutError

    with Idempotency(url, policy=Policy(abandoned="hold")) as idem:
        with pytest.raises(TimeoutError):
            idem.execute("order:1", charge, scope="orders.pay")
        resolved(
            url,
            "orders.pay",
            lambda record: [
                record.derive("charge"),
                *(record.derive("item", nth) for nth in (1, 2, 3)),
                record.derive("paid"),
            ],
        )
        assert idem.execute("order:1", charge, scope="orders.pay") == sent
        assert len(set(sent)) == 5


def test_a_resolver_knows_the_keys_that_http_clients_sent(url):
    sent = []

    def bank(request):
        sent.append(request.headers["Idempotency-Key"].strip('"'))
        return httpx.Response(201)

    client = httpx.Client(transport=IdempotentTransport(httpx.MockTransport(bank)))

    def charge():
        client.post(CHARGES)
        client.post(CHARGES)
        raise TimeoutError

    part = part_of_call("POST", CHARGES)
    with client, Idempotency(url, policy=Policy(abandoned="hold")) as idem:
        with pytest.raises(TimeoutError):
            idem.execute("order:1", charge, scope="orders.pay")
        resolved(
            url, "orders.pay", lambda record: [record.derive(part), record.derive(part, nth=2)]
        )
        assert idem.execute("order:1", charge, scope="orders.pay") == sent


def test_the_record_of_a_request_with_a_tenant_derives_what_its_endpoint_sent(url):
    sent = []
    idempotent = Idempotent(url, tenant=lambda request: "ann")

    app = Flask(__name__)

    @app.post("/pay")
    @idempotent
    def pay():
        sent.append(current_attempt().derive("charge"))
        return "paid", 201

    app.test_client().post("/pay", headers={"Idempotency-Key": "order-1"})
    with Idempotency(url) as idem:
        record = idem.peek("ann/order-1", scope="http")
        assert [record.derive("charge")] == sent
    idempotent.close()
