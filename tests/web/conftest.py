"""What the tests of the web share: the workers of every stack, and names of their own."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator

import pytest

from semel import Idempotency
from web.client import Client
from web.handlers import Folder
from web.serve import FRAMEWORKS, STACKS
from web.workers import Worker, Workers, working


@pytest.fixture(scope="session")
def workers(tmp_path_factory) -> Iterator[Workers]:
    """All workers of this run; they share one folder and one SQLite store."""
    with working(tmp_path_factory.mktemp("web")) as started:
        yield started


@pytest.fixture(scope="session")
def folder(workers: Workers) -> Folder:
    """The ledger, the gates and the names of stores."""
    return workers.folder


@pytest.fixture(params=STACKS)
def stack(request) -> str:
    """Every framework on its server, in turn."""
    return request.param


@pytest.fixture(params=FRAMEWORKS)
def framework(request) -> str:
    """Every framework in turn, each on one server only."""
    return request.param


@pytest.fixture
def worker(stack: str, workers: Workers) -> Worker:
    """The shared worker of the stack."""
    return workers.first(stack)


@pytest.fixture
def on(worker: Worker) -> Callable[..., Client]:
    """Speak to the worker under a profile: `on("strict").post(...)`."""
    return worker.client


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"key-{uuid.uuid4().hex}"


@pytest.fixture
def run() -> str:
    """The name of this test's line in the ledger."""
    return f"run-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def records(folder: Folder) -> Iterator[Idempotency]:
    """The SQLite store that the workers use, seen from outside."""
    with Idempotency(folder.store("sqlite")) as engine:
        yield engine


@pytest.fixture(scope="session")
def _made_stores(folder: Folder) -> set[str]:
    return {"sqlite"}


@pytest.fixture
def shared_store(request, store: str, folder: Folder, _made_stores: set[str]) -> str:
    """The name of a store of this kind, which all workers know."""
    if store not in _made_stores:
        server = request.getfixturevalue(f"{store}_of_this_worker")
        folder.add_store(
            store, f"{server.url[:-1]}1" if store == "redis" else server.fresh_database()
        )
        _made_stores.add(store)
    return store


@pytest.fixture
def engine_on(folder: Folder) -> Iterator[Callable[[str], Idempotency]]:
    """Open a store of the workers by its name, and close it after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda store: opened.enter_context(Idempotency(folder.store(store)))
