"""The commands of the runbook do what it shows, on stores that are in trouble as it says.

`<!-- run: payment -->` above a block of the page names what has happened before; the blocks of one
name are run in order. Each line that begins with `$` is given to a shell, and what it prints has to
be what the page shows. Ages, times and addresses may differ, and so may the width of columns.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from docs.test_examples import ROOT
from semel import Idempotency, Policy, open_store
from semel.adapters.wsgi import IdempotencyMiddleware
from semel.cli.deciding import FINAL
from semel.core.records import ClaimRequest, Identity
from semel.core.run_info import build
from servers.redis import free_port, redis_server

PAGE = (ROOT / "docs" / "operate" / "runbook.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- run: (\w+) -->\n```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)

VARYING = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00": "(time)",
    r"-?\b(?:\d+d\d+h|\d+h\d+m|\d+m\d+s|\d+(?:\.\d+)?s)\b": "(duration)",
    r"\b\d+\.\d ms": "(duration)",
    r"\b[0-9a-f]{24}\b": "(owner)",
    r"\b\d{16}\b": "(fence)",
    r"\b127\.0\.0\.1:\d+": "(address)",
    r"\banna@\S+": "anna",
    r"^\S+ \S+ semel\.audit INFO .*\n": "",  # what a decision logs beside the output
    rf"^{re.escape(FINAL)}\n": "",
}


class Step(NamedTuple):
    """A command of the page, and what it prints there."""

    command: str
    output: str


def steps(scenario: str) -> list[Step]:
    found = []
    for name, text in BLOCK.findall(PAGE):
        if name == scenario:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.replace("\\\n", "").partition("\n")
                found.append(Step(command, output))
    return found


def comparable(text: str) -> list[str]:
    for pattern, word in VARYING.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.strip().splitlines()]


class Night:
    """A store and the folder of a program, with something wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'semel.db'}"

    def age(self, scope: str, key: str, seconds: float) -> None:
        """Let an attempt be abandoned since that long."""
        with closing(open_store(self.url)) as store:
            record = store.get(Identity(scope, key))
            assert record is not None
            assert store.renew(record.identity, record.owner, -seconds)

    def shell(self, command: str) -> str:
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "semel").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m semel "$@"\n')
        (tools / "semel").chmod(0o755)
        settings = {key: value for key, value in os.environ.items() if key != "SEMEL_NAME"}
        settings |= {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SEMEL_URL": self.url,
            "LOGNAME": "anna",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1; {command}"],
            cwd=self.folder,
            env=settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout


PAYMENTS = {"orders.pay": Policy.payment()}


def charge_that_fails() -> str:
    raise TimeoutError("no answer from the bank")


def pay(idem: Idempotency, order: int = 42, charge: Callable[[], str] = charge_that_fails) -> str:
    return idem.execute(f"order:{order}", charge, scope="orders.pay", payload={"amount": 5})


def stuck_payment(night: Night) -> None:
    with Idempotency(night.url, scopes=PAYMENTS) as idem, pytest.raises(TimeoutError):
        pay(idem)
    night.age("orders.pay", "order:42", 1084)


def payment(night: Night) -> Iterator[None]:
    """A payment whose function raised: nobody knows whether the money has moved."""
    stuck_payment(night)
    with Idempotency(night.url, scopes=PAYMENTS) as idem:
        pay(idem, 41, lambda: "ch_41")
    yield
    with Idempotency(night.url, scopes=PAYMENTS) as idem:
        assert pay(idem) == "ch_42"
        record = idem.peek("order:42", scope="orders.pay")
        assert 3 * 86400 - 600 < record.expires_at - record.now <= 3 * 86400


def stuck(night: Night) -> Iterator[None]:
    """The payment, and a mail whose process was killed."""
    stuck_payment(night)
    mail = Identity("mails.send", "mail:7")
    info = build("shop-2:455", 86400, "json")
    with closing(open_store(night.url)) as store:
        store.claim(ClaimRequest(mail, b"the mailer  ", None, 60.0, 600.0, run_info=info))
    night.age("mails.send", "mail:7", 400)
    yield
    with closing(open_store(night.url)) as store:
        assert [record.key for record in store.stuck()] == ["order:42"]


def request(night: Night) -> Iterator[None]:
    """A request that the web application has answered with 500 under hold."""
    runs = []

    def endpoint(environ, start_response):
        runs.append(environ)
        start_response("500 Internal Server Error", [])
        return [b""]

    with Idempotency(night.url, policy=Policy.payment()) as idem:
        app = IdempotencyMiddleware(endpoint, idem, tenant=lambda request: "ann")
        transport = httpx.WSGITransport(app)
        with httpx.Client(transport=transport, base_url="http://shop.example") as client:

            def send() -> httpx.Response:
                return client.post(
                    "/payments", json={"amount": 5}, headers={"Idempotency-Key": '"k-7f3a"'}
                )

            assert send().status_code == 500
            night.age("http", "ann/k-7f3a", 1084)
            told = send()
            assert (told.status_code, told.json()["code"]) == (409, "outcome_unknown")
            assert told.json()["instance"] in PAGE
            assert "`answered with 500`" in PAGE
            assert "answered with 500" in night.shell("semel stuck")
            yield
            answer = send()
            assert (answer.status_code, answer.text) == (201, '{"id": 7}')
            assert answer.headers["location"] == "/payments/7"
            assert answer.headers["content-type"] == "application/json"
            assert len(runs) == 1


def storm(night: Night) -> Iterator[None]:
    """A client in a loop, beside two that repeat a call once or twice."""
    logger = logging.getLogger("semel")
    handler = logging.FileHandler(night.folder / "shop.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with Idempotency(night.url) as idem:
            for key, times in (("order:42", 1850), ("order:57", 3), ("order:61", 2)):
                for _ in range(times):
                    idem.execute(key, lambda key=key: f"ch_{key[6:]}", scope="orders.pay")
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
    yield


def down(night: Night) -> Iterator[None]:
    """A Redis that is not there."""
    night.url = f"redis://127.0.0.1:{free_port()}/0"
    yield


def back(night: Night) -> Iterator[None]:
    """The same, started again, with a payment that it interrupted."""
    with redis_server(args=("--appendonly", "yes")) as server:
        night.url = server.url
        stuck_payment(night)
        yield


SCENARIOS: dict[str, Callable[[Night], Iterator[None]]] = {
    "stuck": stuck,
    "payment": payment,
    "request": request,
    "storm": storm,
    "down": down,
    "back": back,
}


def test_every_block_that_is_run_has_its_scenario():
    assert {name for name, _ in BLOCK.findall(PAGE)} == set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_commands_of_the_runbook_print_what_it_shows(scenario, tmp_path, monkeypatch):
    monkeypatch.setenv("SEMEL_NAME", "shop-1:812")
    night = Night(tmp_path)
    prepared = SCENARIOS[scenario](night)
    next(prepared)
    for step in steps(scenario):
        printed = night.shell(step.command)
        assert comparable(printed) == comparable(step.output), f"$ {step.command}\n{printed}"
    assert next(prepared, "over") == "over"
