"""The command line and the reconcilers, with a service for a store: their own tests, over its URL."""

from __future__ import annotations

import inspect

import pytest

from cli import (
    test_audit,
    test_deciding,
    test_finding,
    test_reading,
    test_results,
    test_stuck,
    test_upkeep,
)
from cli.conftest import Terminal, empty_folder  # noqa: F401 - a fixture
from engines.facade import KINDS, World
from repair import test_reconciler
from repair.conftest import Repairs
from semel.stores.sql.sqlite import AsyncSQLiteStore
from server.remote_given import served

pytestmark = pytest.mark.usefixtures("not_measured")

COMMANDS = (
    *(test_audit, test_deciding, test_finding, test_reading, test_results, test_stuck),
    test_upkeep,
)


def _take(modules, fixture) -> None:
    """Let the tests of these modules that ask for this fixture run here, with the one below."""
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and fixture in inspect.signature(test).parameters:
                assert name not in globals(), f"{name} is there twice"
                globals()[name] = test
            elif hasattr(test, "_fixture_function") or hasattr(test, "_pytestfixturefunction"):
                globals().setdefault(name, test)


@pytest.fixture(scope="module", name="served")
def _served():
    with served() as running:
        yield running


@pytest.fixture
def service_url(served, tmp_path):
    served.use(lambda: AsyncSQLiteStore(tmp_path / "of-the-service.db"))
    yield served.url
    served.leave()


@pytest.fixture
def semel(service_url, capsys) -> Terminal:
    return Terminal(service_url, capsys)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def repairs(kind, service_url):
    with World(kind, service_url) as world:
        yield Repairs(world)


_take(COMMANDS, "semel")
_take([test_reconciler], "repairs")


def test_doctor_names_the_service_and_finds_nothing_wrong(semel):
    said = semel.on_store("doctor")
    assert (said.code, said.err) == (0, "")
    assert f"the semel service at {semel.url.removeprefix('semel+')}" in said.out
    assert "prefix" not in said.out
    assert "written, read and removed a record" in said.out


def test_the_service_migrates_its_own_tables(semel):
    said = semel.on_store("migrate")
    assert (said.code, said.out) == (
        0,
        "this store creates what it needs by itself: nothing to migrate\n",
    )


def test_the_url_may_come_from_the_environment(semel, monkeypatch):
    monkeypatch.setenv("SEMEL_URL", semel.url)
    semel.succeed("order:1")
    assert "order:1" in semel("list").out
    assert semel("show", "orders", "order:1").code == 0
    assert semel("counts").code == 0


def test_a_service_that_is_down_is_named(semel, monkeypatch):
    monkeypatch.setenv("SEMEL_STORE_TIMEOUT", "0.1")
    said = semel("--url", "semel+http://127.0.0.1:9", "doctor")
    assert said.code == 1
    assert "the semel service at http://127.0.0.1:9 can't be reached" in said.out
