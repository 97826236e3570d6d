"""A storm: 1,000 duplicates of one key at once, in one process and in four.

The operation takes a moment, so that all of them arrive while it runs. Counted are the commands
that reach the store, and how long after the end of the function the slowest of the thousand has
its answer (the save lies in between). Whoever runs the operation twice is refused.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks import backends
from benchmarks.contenders.ours import ASYNC_SEMEL
from benchmarks.contenders.postgres_alternatives import ASYNC_ON_POSTGRES
from benchmarks.contenders.redis_alternatives import ASYNC_ON_REDIS
from benchmarks.figures import OURS, Lane, Race, Section, at_most
from benchmarks.measuring import Effort, Place, TaskContender, Work, present

DUPLICATES = 1000
SMOKE = 16
PROCESSES = 4
STORMS = 15
WITH_OTHERS = (0, 7)
"""The alternatives take part in these storms only: some of them need many seconds for one."""
TOO_LONG = 5.0
"""Whose storm takes longer has one, and its commands are not counted: it would need another."""
TAKES = 0.1
WORKERS_READY = 120.0

ON_REDIS: tuple[TaskContender, ...] = (ASYNC_SEMEL, *ASYNC_ON_REDIS)
ON_POSTGRES: tuple[TaskContender, ...] = (ASYNC_SEMEL, *ASYNC_ON_POSTGRES)
FIELDS = {"redis": ON_REDIS, "postgres": ON_POSTGRES}


class Order(NamedTuple):
    """What a worker is told: which key, how many callers, and when."""

    key: str
    callers: int
    start: float


class Seen(NamedTuple):
    """What a worker tells: when its last caller was answered, and when the operation ended."""

    last: float
    ended: list[float]


class Storms(NamedTuple):
    """What the storms of one contender showed."""

    slowest: list[float]
    """Milliseconds from the end of the function to the last answer; one for each storm."""
    commands: list[float]
    """How many commands reached the store; counted in a storm of its own, which is not timed."""


def run(effort: Effort) -> list[Section]:
    """Storms on Redis and PostgreSQL."""
    return [_redis(effort), _postgres(effort)]


def _redis(effort: Effort) -> Section:
    here, missing = present(ON_REDIS)
    with backends.redis_server() as server:
        count = partial(_count_commands, server)
        alone = _storms(here, "redis", server.url, processes=1, effort=effort, count=count)
        spread = _storms(
            here,
            "redis",
            server.url,
            processes=effort.count(PROCESSES, 2),
            effort=effort,
            count=count,
        )
    each = statistics.median(alone[OURS].slowest) * 1e3 / effort.count(DUPLICATES, SMOKE)
    commands = {1: alone[OURS].commands[0], PROCESSES: spread[OURS].commands[0]}
    slowest = statistics.median(spread[OURS].slowest)
    return Section(
        "Storm of 1,000 duplicates, Redis",
        "Not counted as store commands: the greeting of a connection, and subscriptions. "
        f"Nor are those of a contender that needs more than {TOO_LONG:g} s for a storm.",
        [
            _race("1 process, slowest", "ms", here, alone, lambda s: s.slowest),
            _race("1 process, store commands", "", here, alone, lambda s: s.commands),
            _race("4 processes, slowest", "ms", here, spread, lambda s: s.slowest),
            _race("4 processes, store commands", "", here, spread, lambda s: s.commands),
        ],
        [
            at_most(4, "store commands in one process", commands[1], 2),
            at_most(4, "store commands in four processes", commands[PROCESSES], 11),
            at_most(4, "slowest of 1,000 in four processes", slowest, 25, "ms"),
            at_most(5, "wake-up in the same process", each, 6, "us a waiter"),
        ],
        missing,
    )


def _postgres(effort: Effort) -> Section:
    here, missing = present(ON_POSTGRES)
    with backends.postgres_server(durable=effort.durable) as server:
        url = server.fresh_database()
        alone = _storms(here, "postgres", url, processes=1, effort=effort)
        spread = _storms(here, "postgres", url, processes=effort.count(PROCESSES, 2), effort=effort)
    return Section(
        "Storm of 1,000 duplicates, PostgreSQL",
        "",
        [
            _race("1 process, slowest", "ms", here, alone, lambda s: s.slowest),
            _race("4 processes, slowest", "ms", here, spread, lambda s: s.slowest),
        ],
        missing=missing,
    )


def _race(
    what: str,
    unit: str,
    contenders: Sequence[TaskContender],
    storms: Mapping[str, Storms],
    value: Callable[[Storms], list[float]],
) -> Race:
    lanes = [
        Lane(one.title, one.role, samples)
        for one in contenders
        if (samples := value(storms[one.name]))
    ]
    return Race(what, unit, lanes, more_is_better=False)


# --- counting ----------------------------------------------------------------------------

UNCOUNTED = frozenset({"HELLO", "AUTH", "SELECT", "CLIENT", "PING", "ECHO"})
END = "the storm is over"


@contextmanager
def _count_commands(server: Any, counted: list[float]) -> Iterator[None]:
    """Watch the server's commands; what a script does inside is its own business."""
    with closing(server.client(socket_timeout=None)) as client, client.monitor() as monitor:
        yield
        client.echo(END)
        commands = 0
        for seen in monitor.listen():
            if END in seen["command"]:
                break
            word = seen["command"].split(" ", 1)[0].upper()
            counts = word not in UNCOUNTED and not word.endswith("SUBSCRIBE")
            commands += counts and seen["client_type"] != "lua"
        counted.append(commands)


@contextmanager
def _count_nothing(_counted: list[float]) -> Iterator[None]:
    yield


# --- the processes -----------------------------------------------------------------------


def _storms(
    contenders: Sequence[TaskContender],
    field: str,
    url: str,
    *,
    processes: int,
    effort: Effort,
    count: Callable[[list[float]], AbstractContextManager[None]] = _count_nothing,
) -> dict[str, Storms]:
    """Let the contenders have their storms in turn, each in processes of its own."""
    storms = {one.name: Storms([], []) for one in contenders}
    callers = effort.count(DUPLICATES, SMOKE) // processes
    with ExitStack() as stack:
        lines = {
            one.name: stack.enter_context(_workers(field, one.name, url, processes))
            for one in contenders
        }
        for one in contenders:
            # All callers, so that each has its connection: later ones would find the result.
            _storm(lines[one.name], f"warm-up-{processes}", callers)
        slow: set[str] = set()
        for number in range(effort.rounds(STORMS)):
            for one in contenders:
                if one.name == OURS or (number in WITH_OTHERS and one.name not in slow):
                    seconds = _storm(lines[one.name], f"storm-{processes}-{number}", callers)
                    storms[one.name].slowest.append(seconds * 1e3)
                    slow |= {one.name} if seconds > TOO_LONG else set()
        for one in contenders:
            if one.name not in slow:
                with count(storms[one.name].commands):
                    _storm(lines[one.name], f"counted-{processes}", callers)
    return storms


def _storm(lines: Sequence[Connection], key: str, callers: int) -> float:
    """One storm; returns the seconds from the end of the function to the last answer."""
    start = time.monotonic() + 0.05
    for line in lines:
        line.send(Order(key, callers, start))
    seen: list[Seen] = [line.recv() for line in lines]
    ended = [moment for one in seen for moment in one.ended]
    if len(ended) != 1:
        raise AssertionError(f"a storm ran the operation {len(ended)} times")
    return max(one.last for one in seen) - ended[0]


@contextmanager
def _workers(field: str, name: str, url: str, processes: int) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")  # no contender inherits anything
    pipes = [context.Pipe() for _ in range(processes)]
    workers = [
        context.Process(target=_work, args=(field, name, url, theirs)) for _, theirs in pipes
    ]
    lines = [ours for ours, _ in pipes]
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()  # so that a worker that dies is noticed
        for line in lines:
            if not line.poll(WORKERS_READY):
                raise TimeoutError(f"{name}: a worker did not start")
            line.recv()
        yield lines
    finally:
        for line in lines:
            with suppress(OSError):  # it died
                line.send(None)
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()


def _work(field: str, name: str, url: str, line: Connection) -> None:
    """Serve as one of the processes."""
    contender = next(one for one in FIELDS[field] if one.name == name)
    asyncio.run(_answer(contender, url, line))


async def _answer(contender: TaskContender, url: str, line: Connection) -> None:
    work = Work(seconds=TAKES)
    async with contender.open(Place(url, work)) as go:
        line.send("ready")
        while (order := await asyncio.to_thread(line.recv)) is not None:
            work.ended.clear()
            await asyncio.sleep(order.start - time.monotonic())
            await go([order.key] * order.callers, order.callers, "first")
            line.send(Seen(time.monotonic(), list(work.ended)))
