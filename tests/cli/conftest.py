"""The command line on stores that outlive a process, in an empty folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from contract.reference_store import DictStore
from semel import Idempotency, Policy, open_store
from semel.cli import main
from semel.core.records import ClaimRequest, Identity
from semel.core.run_info import build
from semel.stores.urls import BACKENDS, Backend
from servers.redis import RedisServer, redis_server

OWNER = b"\x00the owner\xff\x00"


class Said(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Terminal:
    """Types commands at a store."""

    def __init__(self, url: str, capsys: Any) -> None:
        self.url = url
        self._capsys = capsys

    def __call__(self, *words: str) -> Said:
        self._capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as end:  # argparse
            code = end.code
        out, err = self._capsys.readouterr()
        return Said(code, out, err)

    def on_store(self, *words: str) -> Said:
        return self("--url", self.url, *words)

    # --- what is in the store ------------------------------------------------------------

    def succeed(self, key: str, value: object = "done", *, scope: str = "orders") -> None:
        with Idempotency(self.url) as engine:
            engine.execute(key, lambda: value, scope=scope, policy=Policy(ttl=3600))

    def fail(self, key: str, *, final: bool) -> None:
        def declined() -> None:
            raise ValueError("declined")

        policy = Policy(failure="final" if final else "retryable")
        with Idempotency(self.url) as engine, pytest.raises(ValueError, match="declined"):
            engine.execute(key, declined, scope="orders", policy=policy)

    def abandon(
        self, key: str, *, scope: str = "orders", hold: bool = True, ago: float = 0.0
    ) -> None:
        self.run(key, scope=scope, hold=hold)
        with closing(open_store(self.url)) as store:
            store.renew(Identity(scope, key), OWNER, -ago)

    def exhaust(self, key: str, *, hold: bool = False) -> None:
        """Abandon the one attempt that its policy allows."""
        self.run(key, hold=hold, run_info=build("web-1:4711", 3600.0, "json/1", most=1))
        with closing(open_store(self.url)) as store:
            store.renew(Identity("orders", key), OWNER, 0.0)

    def run(
        self, key: str, *, scope: str = "orders", hold: bool = False, run_info: bytes = b""
    ) -> None:
        ask = ClaimRequest(
            Identity(scope, key), OWNER, None, 600.0, 600.0, hold=hold, run_info=run_info
        )
        with closing(open_store(self.url)) as store:
            store.claim(ask)

    def get(self, key: str, *, scope: str = "orders") -> Any:
        with closing(open_store(self.url)) as store:
            return store.get(Identity(scope, key))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    """No settings but those of the test."""
    for name in [name for name in os.environ if name.startswith("SEMEL_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(params=["sqlite", "redis"])
def semel(request, capsys) -> Iterator[Terminal]:
    """The command on each store in turn."""
    if request.param == "sqlite":
        return request.getfixturevalue("semel_sqlite")
    return Terminal(request.getfixturevalue("redis_url"), capsys)


@pytest.fixture
def semel_sqlite(sqlite_url, capsys) -> Terminal:
    """The command on one store, for what has nothing to do with its kind."""
    with closing(open_store(sqlite_url)) as store:
        store.migrate()
    return Terminal(sqlite_url, capsys)


@pytest.fixture
def plain_url(monkeypatch) -> str:
    """A store of somebody else's that offers the verbs and nothing more."""
    module = SimpleNamespace(open_store=lambda *_, **__: DictStore())
    monkeypatch.setitem(sys.modules, "somebody_elses", module)
    monkeypatch.setitem(BACKENDS, "plain", Backend("somebody_elses", None))
    return "plain://"


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that the test may change and kill."""
    with redis_server() as server:
        yield server
