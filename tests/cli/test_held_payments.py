"""A held payment, on every store: who left it, and why; decided by hand, it is kept for 3 days."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing
from datetime import datetime, timedelta

import pytest

from cli.conftest import Terminal
from engines.facade import PATIENCE, never, open_batching, wait_until
from semel import AsyncIdempotency, Idempotency, Policy, open_store
from semel.core.records import Identity, State
from semel.core.run_info import process_name
from semel.repair import Succeeded, settle, settle_async
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from stores.sqlite_helpers import start_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PAYMENT = Policy.payment(lease=0.2)
PAYLOAD = {"amount": 1}
THREE_DAYS = timedelta(days=3)
KEYS = [f"order:{number}" for number in range(5)]


@pytest.fixture(params=["sqlite", "redis", "postgres", "mysql", "tiers"])
def place(request, monkeypatch) -> tuple[str, dict[str, str]]:
    """Where the records are; the command finds it in the environment."""
    options = {}
    if request.param == "tiers":
        url = request.getfixturevalue("redis_url")
        options["behind"] = request.getfixturevalue("postgres_url")
        monkeypatch.setenv("SEMEL_BEHIND", options["behind"])
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    monkeypatch.setenv("SEMEL_URL", url)
    return url, options


def end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise TimeoutError("the bank does not answer")


def pay_in_a_thread(url: str, options: dict[str, str], how: str) -> None:
    """Pay once, one statement for each step."""
    with closing(open_store(url, **options)) as store, Idempotency(store) as idem:
        idem.execute(KEYS[0], lambda: end(how), scope="payments", payload=PAYLOAD, policy=PAYMENT)


def pay_in_batches(url: str, options: dict[str, str], how: str) -> None:
    """Pay five times at once: all have begun when the first one ends."""

    async def pay_all() -> None:
        begun = asyncio.Barrier(len(KEYS))

        async def pay() -> None:
            await begun.wait()
            end(how)

        async with AsyncIdempotency(open_batching(url, **options)) as idem:
            paying = (
                idem.execute(key, pay, scope="payments", payload=PAYLOAD, policy=PAYMENT)
                for key in KEYS
            )
            await asyncio.gather(*paying, return_exceptions=True)

    asyncio.run(pay_all())


@pytest.mark.parametrize("how", ["parked", "killed"])
@pytest.mark.parametrize("pay", [pay_in_a_thread, pay_in_batches])
def test_it_names_its_process_and_is_kept_for_three_days(place, pay, how, capsys):
    url, options = place
    semel = Terminal(url, capsys)
    with closing(open_store(options.get("behind", url))) as store:
        store.counts()  # makes the table, before anybody races for it
        child = start_fork(pay, url, options, how)
        child.join(PATIENCE)
        left = KEYS if pay is pay_in_batches else KEYS[:1]
        for key in left:
            wait_until(lambda key=key: store.get(Identity("payments", key)).abandoned)
    for key in left:
        shown = semel("show", "payments", key, "--json").data
        assert (shown["state"], shown["held"]) == ("abandoned", True)
        assert shown["by"] == f"{socket.gethostname()}:{child.pid}"
        assert shown["why"] == ("TimeoutError" if how == "parked" else None)
        assert shown["codec"] == "json/1"
        assert shown["by"] in semel("show", "payments", key).out
        assert semel("resolve", "payments", key, "--succeeded", '"ch_42"').code == 0
        ended = semel("show", "payments", key, "--json").data
        kept = datetime.fromisoformat(ended["expires_at"]) - datetime.fromisoformat(
            ended["updated_at"]
        )
        assert abs(kept - THREE_DAYS) <= timedelta(seconds=1)
        assert (ended["by"], ended["why"]) == (None, None)
    with closing(open_store(url, **options)) as store, Idempotency(store) as idem:
        for key in left:
            paid = idem.execute(key, never, scope="payments", payload=PAYLOAD, policy=PAYMENT)
            assert paid == "ch_42"


def test_in_memory_it_is_kept_for_three_days_too():
    with Idempotency(MemoryStore()) as idem:
        with pytest.raises(TimeoutError):
            idem.execute("k", lambda: end("parked"), payload=PAYLOAD, policy=PAYMENT)
        settle(idem, "k", Succeeded("ch_42"))
        record = idem.peek("k")
        assert record.expires_at - record.updated_at == pytest.approx(THREE_DAYS.total_seconds())


async def test_in_memory_for_asyncio_it_is_kept_for_three_days_too():
    async def pay() -> None:
        end("parked")

    async with AsyncIdempotency(AsyncMemoryStore()) as idem:
        with pytest.raises(TimeoutError):
            await idem.execute("k", pay, payload=PAYLOAD, policy=PAYMENT)
        held = await idem.peek("k")
        assert (held.state, process_name().encode() in held.run_info) == (State.PROCESSING, True)
        await settle_async(idem, "k", Succeeded("ch_42"))
        record = await idem.peek("k")
        assert record.expires_at - record.updated_at == pytest.approx(THREE_DAYS.total_seconds())
