"""Clients against semel's own middleware: lost answers, and one key through a chain of services."""

from __future__ import annotations

import contextlib
import json
import logging
import time

import httpx
import pytest

from adapters.chain import Bank, Shop, served
from adapters.clients import KINDS
from semel import Idempotency
from semel.adapters.httpx import IdempotentTransport
from semel.core.records import Identity
from semel.http.requests import key_of_lines, stored_key
from semel.observe import KeyFilter
from servers.proxy import proxy_to


@pytest.fixture
def bank(sqlite_url):
    return Bank(sqlite_url)


@pytest.fixture
def bank_port(bank):
    with served(bank) as port:
        yield port


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_call_whose_answer_was_lost_is_answered_again_and_has_one_effect(kind, bank, bank_port):
    with proxy_to(bank_port) as proxy, contextlib.closing(kind()) as client:
        proxy.lose_reply(lambda request: b"amount" in request)
        told = client.call(f"http://127.0.0.1:{proxy.port}/charges", body=b'{"amount": 5}')
        assert proxy.lost == 1
    assert told == (201, json.dumps({"charge": 1}).encode())
    assert bank.charges == 1
    assert len(bank.lines) == 2
    assert len(set(bank.lines)) == 1


def test_a_service_that_died_after_calling_another_does_not_repeat_its_effect(
    bank, bank_port, tmp_path
):
    waits = []
    with contextlib.closing(Shop(tmp_path, f"http://127.0.0.1:{bank_port}")) as shop:
        shop.crash.touch()

        def sleep(seconds):
            if not waits:
                assert shop.died()
                shop.start()
            waits.append(seconds)
            time.sleep(0.1)  # while the dead shop's lease runs out, the new one answers 409

        transport = IdempotentTransport(sleep=sleep, retries=100, retry_for=600)
        with httpx.Client(transport=transport, timeout=60) as client:
            answered = client.post(f"{shop.url}/orders", json={"item": 1})
    assert answered.status_code == 201
    assert answered.json() == {"charge": 1, "replayed": True}
    assert bank.charges == 1
    assert len(bank.lines) == 2
    assert len(set(bank.lines)) == 1


def test_the_key_that_came_is_on_log_records_and_the_derived_one_reaches_the_next_service(
    bank, bank_port
):
    records = []

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = Keeping()
    handler.addFilter(KeyFilter())
    logging.getLogger("bank").addHandler(handler)
    url = f"http://127.0.0.1:{bank_port}/charges"
    try:
        with (
            Idempotency("memory://") as shop,
            httpx.Client(transport=IdempotentTransport()) as client,
        ):
            shop.execute("order:42", lambda: client.post(url).json(), scope="orders")
    finally:
        logging.getLogger("bank").removeHandler(handler)
    (line,) = bank.lines
    key = key_of_lines([line])
    assert key.startswith(f"POST:{url}-")
    (record,) = records
    assert record.semel_scope == "http"
    assert record.semel_key_digest == Identity("http", stored_key(key)).digest.hex()
