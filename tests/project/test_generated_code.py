"""The engine for threads is generated from the engine for tasks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("not_measured")

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(PROJECT / "scripts" / "generate_sync.py"))


def test_generating_again_changes_nothing(generator, capsys):
    assert generator["main"](["--check"]) == 0, capsys.readouterr().out


def test_a_change_by_hand_is_named(generator, capsys, monkeypatch):
    main = generator["main"]
    monkeypatch.setitem(main.__globals__, "generated", lambda name: f"something else: {name}")
    assert main(["--check"]) == 1
    assert "engine/_sync/runs.py" in capsys.readouterr().out


def test_every_file_of_the_engine_for_tasks_is_generated_for_threads(generator):
    source = PROJECT / "src" / "semel"
    generated = {
        str(path.relative_to(source)) for path in (source / "engine" / "_sync").glob("*.py")
    }
    assert generated - {"engine/_sync/__init__.py"} <= set(generator["GENERATED"].values())
    for path in (source / "engine").glob("*.py"):
        if "async def" in path.read_text():
            assert f"engine/{path.name}" in generator["GENERATED"]


FOR_TASKS = '''"""A part for asyncio."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from semel.engine.colours.tasks import mark_coroutine_function, raise_if_cancelled, sleep


class AsyncX:
    """One of them.

    It belongs to the first event loop that uses it.
    """

    def __init__(self) -> None:
        self.plan = Plan(asynchronous=True)
        self.loop_guard = LoopGuard()
        self.shared_runs = shared_runs_of(self.store, self.loop_guard)
        mark_coroutine_function(self)

    async def __aenter__(
        self, fn: Callable[[], Awaitable[int]], step: Callable[[], Coroutine[Any, Any, list[int]]]
    ) -> AsyncIterator[int]:
        """Say `async with AsyncX()`."""
        self.loop_guard.check()  # its loop
        async with self.lock:  # one AsyncLock
            raise_if_cancelled(before)
            (await step()).sort()
            await sleep((await step())[0])
            return [await one async for one in finished(fn())]
'''

FOR_THREADS = '''"""A part for threads."""

from collections.abc import Callable, Iterator

from semel.engine.colours.threads import sleep


class X:
    """One of them.

    Any number of threads may use it.
    """

    def __init__(self) -> None:
        self.plan = Plan(asynchronous=False)
        self.shared_runs = shared_runs_of(self.store)

    def __enter__(self, fn: Callable[[], int], step: Callable[[], list[int]]) -> Iterator[int]:
        """Say `with X()`."""
        with self.lock:  # one Lock
            step().sort()
            sleep(step()[0])
            return [one for one in fn()]
'''


def test_what_only_tasks_need_is_left_out(generator):
    for_threads = generator["for_threads"]
    assert for_threads(FOR_TASKS, "engine/runs.py") == FOR_THREADS
