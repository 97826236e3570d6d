"""A held payment is decided by a person, who knows neither its program nor its policy.

Its record says who made it, why it was parked, and how long its outcome has to be kept: 3 days, as
`Policy.payment` has it. Forgotten earlier, a late retry would pay again. On every store, for threads
and asyncio, with claims that come one by one, at once and in one batch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from engines.facade import PATIENCE, World, never, wait_until
from faults.children import child
from faults.workers.batched import AsyncBatchedStore, BatchedStore
from semel import Policy, PreviousFailure, open_async_store, open_store
from semel.cli import main
from semel.core.records import Identity, Record, State
from semel.repair import Failed, Succeeded, settle, settle_async
from semel.stores.urls import BACKENDS, Backend
from servers.redis import redis_cluster
from stores.postgres_given import always_in_batches

SCOPE, PAYLOAD = "payments", {"amount": 5}
THREE_DAYS, FAILED_TTL, A_WHILE = 3 * 86_400.0, 300.0, 120.0

DECISIONS: dict[str, tuple[tuple[str, ...], Succeeded | Failed, float]] = {
    "succeeded": (("--succeeded", '"ch_1"'), Succeeded("ch_1"), THREE_DAYS),
    "failed": (("--failed", "declined"), Failed("declined", retryable=False), THREE_DAYS),
    "retryable": (
        ("--failed", "never sent", "--retryable"),
        Failed("never sent", retryable=True),
        FAILED_TTL,
    ),
}
"""At the command line, as a call, and how long each is kept."""

KEYS = [f"{by}:{outcome}" for by in ("command", "call") for outcome in DECISIONS]


@pytest.fixture(params=["one by one", "at once", "in one batch"])
def claims(request) -> str:
    """How the claims of the payments come to the store."""
    return request.param


class Place(NamedTuple):
    """Where the records are."""

    url: str
    options: dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with redis_cluster() as servers:
        yield servers.url


@pytest.fixture
def place(request) -> Place:
    """The empty store of this name."""
    name = request.param
    if name == "memory":
        return Place("memory://", {})
    if name == "tiers":
        behind = request.getfixturevalue("postgres_url")
        return Place(request.getfixturevalue("redis_url"), {"behind": behind})
    if name == "cluster":
        # One for all tests of the module: a prefix of its own is all that a store needs.
        prefix = f"{os.urandom(4).hex()}:"
        return Place(request.getfixturevalue("cluster"), {"prefix": prefix})
    return Place(request.getfixturevalue(f"{name}_url"), {})


LASTING = ["sqlite", "postgres", "mysql", "redis", "cluster", "tiers"]
"""Stores that outlive the process that pays."""


class Operator:
    """A person at the command line, beside payments of either kind of engine."""

    def __init__(self, world: World, capsys: Any) -> None:
        self.world = world
        self.capsys = capsys
        self.engine = world.engine()

    def types(self, *words: str) -> str:
        """Run a command, which must go well; what it prints."""
        self.capsys.readouterr()
        code = main(words)
        printed = self.capsys.readouterr()
        assert code == 0, printed
        return printed.out

    def sees(self, *, pid: int, why: str) -> None:
        """Look at each payment: which process made it, and what parked it."""
        by = f"{socket.gethostname()}:{pid}"
        for key in KEYS:
            shown = json.loads(self.types("show", SCOPE, key, "--json"))
            assert (shown["by"], shown["why"], shown["held"]) == (by, why, True)
            assert (shown["state"], shown["codec"]) == ("abandoned", "json/1")
            assert {by, *why.split()} <= set(self.types("show", SCOPE, key).split())

    def record(self, key: str) -> Record:
        return self.engine.ask_store("get", Identity(SCOPE, key))

    def decide(self, key: str) -> float:
        """Decide on one payment, without a ttl; for how long it has to be kept."""
        by, _, outcome = key.partition(":")
        words, resolution, kept = DECISIONS[outcome]
        if by == "command":
            self.types("resolve", SCOPE, key, *words)
        else:
            function = settle if self.world.name == "threads" else settle_async
            decision = self.world.kind.finish(
                function, self.engine.engine, key, resolution, scope=SCOPE
            )
            assert decision.kept_until - decision.at == kept
        return kept

    def decides_on_all(self) -> None:
        """Decide on each payment; each is kept as its policy says, and retries get the outcome."""
        for key in KEYS:
            kept = self.decide(key)
            record = self.record(key)
            assert kept - A_WHILE < record.remaining <= kept, key
            assert record.run_info == b""
            assert record.state is (State.SUCCEEDED if "succeeded" in key else State.FAILED)
        for by in ("command", "call"):
            assert self.retried(f"{by}:succeeded") == "ch_1"
            with pytest.raises(PreviousFailure, match="declined"):
                self.retried(f"{by}:failed")

    def retried(self, key: str) -> object:
        policy = Policy.payment()
        return self.engine.execute(key, never, scope=SCOPE, payload=PAYLOAD, policy=policy)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """No settings but those of the test."""
    for name in [name for name in os.environ if name.startswith("SEMEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(url: str, options: dict[str, Any]) -> None:
    """Let the command line find the records; it is told nothing about the scope."""
    written = {"url": url} | options
    Path("semel.toml").write_text("".join(f'{name} = "{text}"\n' for name, text in written.items()))


def opened(world: World, place: Place, claims: str) -> Any:
    """Open a store whose claims come as they should."""
    threads = world.name == "threads"
    store: Any = (open_store if threads else open_async_store)(place.url, **place.options)
    world._stores.append(store)
    if claims == "at once" and getattr(store, "_batcher", None) is not None and not threads:
        return always_in_batches(store)
    if claims == "in one batch":
        return (BatchedStore if threads else AsyncBatchedStore)(store, len(KEYS))
    return store


def park_all(world: World, store: Any, claims: str) -> None:
    """Make the payments; the bank does not answer any of them."""

    def pay() -> None:
        raise TimeoutError("the bank does not answer")

    engine = world.engine_on(world.kind.steered(store))
    terms = {"scope": SCOPE, "payload": PAYLOAD, "policy": Policy.payment()}
    if claims == "one by one":
        for key in KEYS:
            with pytest.raises(TimeoutError, match="the bank"):
                engine.execute(key, pay, **terms)
        return
    for payment in [engine.start(key, pay, **terms) for key in KEYS]:
        assert isinstance(payment.exception(PATIENCE), TimeoutError)
    if claims == "in one batch":
        assert store.sent == [len(KEYS), len(KEYS)]  # the claims, and what parked them


@pytest.mark.parametrize("place", ["memory", *LASTING], indirect=True)
@pytest.mark.usefixtures("folder")
def test_a_payment_that_was_parked_is_decided_without_a_ttl_and_kept_for_3_days(
    monkeypatch, capsys, kind, place, claims
):
    with World(kind, place.url, **place.options) as world:
        park_all(world, opened(world, place, claims), claims)
        operator = Operator(world, capsys)
        configure(*(shared_with_the_command_line(world, monkeypatch) or place))
        operator.sees(pid=os.getpid(), why="TimeoutError")
        operator.decides_on_all()


def shared_with_the_command_line(world: World, monkeypatch) -> Place | None:
    """Give a store in memory to the command line, which has no other way to it."""
    if world.url != "memory://":
        return None
    (store,) = world._stores
    shared = getattr(store, "_store", store)  # that of the store for asyncio
    module = SimpleNamespace(open_store=lambda *_, **__: shared)
    monkeypatch.setitem(sys.modules, "shared_memory_store", module)
    monkeypatch.setitem(BACKENDS, "shared", Backend("shared_memory_store", None))
    return Place("shared://", {})


@pytest.mark.parametrize("place", LASTING, indirect=True)
@pytest.mark.usefixtures("folder")
def test_a_payment_whose_process_was_killed_is_decided_without_a_ttl_and_kept_for_3_days(
    capsys, kind, place, claims
):
    # A lease that ends before its answer is there makes the engine claim once more, and a claim that
    # comes alone waits for a batch that never fills: there the leases are ended by hand.
    by_hand = claims == "in one batch"
    lease = 600.0 if by_hand else 0.4
    orders = {"kind": kind, "keys": KEYS, "claims": claims, "lease": lease} | place._asdict()
    with child("payments.py", **orders) as payer:
        payer.hear("running")
        payer.kill()
        assert payer.ended() == -signal.SIGKILL
    with World(kind, place.url, **place.options) as world:
        operator = Operator(world, capsys)
        configure(*place)
        for record in map(operator.record, KEYS if by_hand else ()):
            operator.engine.ask_store("renew", record.identity, record.owner, 0.0)
        wait_until(lambda: all(operator.record(key).abandoned for key in KEYS))
        operator.sees(pid=payer.process.pid, why="lease ended")
        operator.decides_on_all()
