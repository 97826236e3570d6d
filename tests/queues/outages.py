"""Kill Redis and start it again, while consumers handle messages that are all sent several times.

    make soak-outages                             500 outages, within MINUTES=60
    make soak-outages OUTAGES=50 MINUTES=10

Consumers of pika and aio-pika share a queue. Each order is sent three times, and its handler runs
for up to four seconds, longer than its lease of three. Redis is killed in the middle, and started
again after a second. Half of the outages are with `appendfsync always`, where Redis writes before it
answers. The other half are with `everysec`, where it may answer first: what it then has not written
is lost by the kill.

Effects are counted outside, in a file. For each that is repeated, everything known is printed: what
the consumers noted, the outages around it, and the writes to its record that Redis has kept. A
repeat is explained if the file shows that Redis lost what it had answered (`everysec` only), or if
from the time when a renewal was due until the lease ended Redis was down, or the machine too busy to
run the consumer. Any other repeat ends the run with an error.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from queues import aof
from queues.brokers import Amqp, Send
from queues.deployments import Deployment, Servers
from queues.ledger import Note, eventually
from queues.processes import ForkServer, fork_server
from queues.workers import QUEUE
from semel.core.attempts import RENEWALS_PER_LEASE
from semel.core.records import Identity
from servers.rabbitmq import RabbitMQServer, rabbitmq_server
from servers.redis import RedisServer, redis_server

KINDS = ("pika", "aio_pika")
PRELOADED = (
    "queues.workers",
    "semel.adapters.pika",
    "semel.adapters.aio_pika",
    "semel.stores.redis",
)
LEASE = 3.0
RENEWED = LEASE / RENEWALS_PER_LEASE
"""Seconds after which a lease is renewed."""
SLACK = 0.5
"""Seconds that a renewal may take when nothing is in its way: it is tried every quarter of one."""
POLICY = {"lease": LEASE}
PREFETCH = 20
"""How many messages a consumer handles at a time."""
DOWN = 1.0
"""Seconds between a kill and the start."""
UP = (1.0, 4.0)
"""Seconds between a start and the next kill."""
COPIES = 3
"""How often each order is sent: twice at once, and again while it may run."""
PAUSE = 0.1
"""Seconds between two orders."""
BACKLOG = 150
LONGEST = 4.0
OF_A_ROUND = 25
"""Outages that the same consumers live through; then others begin, with an empty Redis."""
AT_ONCE = 4
"""Rounds at the same time."""

MODES = {
    "always": ("--appendonly", "yes", "--appendfsync", "always"),
    "everysec": ("--appendonly", "yes", "--appendfsync", "everysec"),
}
PENDING = ("aof_delayed_fsync", "aof_pending_bio_fsync", "aof_buffer_length")
WALL = time.time() - time.monotonic()
"""The server's clock tells the time of day; all notes are by the monotonic one."""


class Outage(NamedTuple):
    """One kill, and the start after it; times are by the monotonic clock."""

    killed: float
    ready: float
    """When the server accepted connections again, as it says itself."""
    answered: float
    """When it answered us, who asked all the time: on a busy machine, later."""
    written: int
    """Bytes of the append-only file at the kill."""
    pending: dict[str, Any]
    """What Redis said just before about writes that were late."""

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.pending.items())
        return (
            f"Redis killed, ready again after {self.ready - self.killed:.2f} s, answered after "
            f"{self.answered - self.killed:.2f} s ({self.written} bytes written; {said})"
        )


class Repeat(NamedTuple):
    """An order with more than one effect."""

    order: str
    cause: str
    explained: bool
    history: str


class Found(NamedTuple):
    """What one round has shown."""

    mode: str
    outages: list[Outage]
    sent: int
    orders: int
    met: int
    """How many orders an outage has met while their handlers ran."""
    repeats: list[Repeat]


class Round:
    """A Redis, and the consumers on a queue whose records it keeps."""

    def __init__(self, mode: str, store: RedisServer, deployed: list[Deployment]) -> None:
        self.mode = mode
        self.store = store
        self.deployed = deployed
        self.queue, self.ledger = deployed[0].queue, deployed[0].ledger
        self.outages: list[Outage] = []

    def outage(self, seconds: float = DOWN) -> None:
        """Kill Redis, and start it again after these seconds."""
        with contextlib.closing(self.store.client()) as client:
            told = client.info("persistence")
        killed = time.monotonic()
        self.store.kill()
        written = aof.size(self.store.folder)
        time.sleep(seconds)
        self.store.start()
        pending = {name: told[name] for name in PENDING if name in told}
        answered = time.monotonic()
        ready = ready_at(self.store.folder)
        self.outages.append(Outage(killed, ready, answered, written, pending))

    def run(self, outages: int, deadline: float) -> Found:
        """Send messages and kill Redis, then let the consumers finish."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as producer:
            sending = producer.submit(self._send, stop)
            try:
                while len(self.outages) < outages and time.monotonic() < deadline:
                    if sending.done():
                        break  # with an error
                    time.sleep(random.uniform(*UP))
                    self.outage()
            finally:
                stop.set()
            sending.result()
        self.deployed[0].settled()
        return self.found()

    def _send(self, stop: threading.Event) -> None:
        one = self.deployed[0]
        late: list[tuple[float, str, str]] = []
        with one.sending() as send:
            while not stop.wait(PAUSE):
                eventually(lambda: self.queue.left() < BACKLOG, "the consumers to go on")
                order = one.order()
                plan = f"linger {random.choice([0.01, random.uniform(0.2, LONGEST)]):.2f}"
                for _ in range(COPIES - 1):
                    send(order, plan, order)
                late.append((time.monotonic() + random.uniform(0, LONGEST), order, plan))
                late = self._sent_late(send, late, time.monotonic())
            self._sent_late(send, late, float("inf"))

    def _sent_late(
        self, send: Send, late: list[tuple[float, str, str]], now: float
    ) -> list[tuple[float, str, str]]:
        """Send the duplicates that are due, and return the others."""
        for at, order, plan in late:
            if at <= now:
                send(order, plan, order)
        return [one for one in late if one[0] > now]

    # --- what came of it -------------------------------------------------------------------------

    def found(self) -> Found:
        by_order: dict[str, list[Note]] = defaultdict(list)
        for note in sorted(self.ledger.notes("effect"), key=lambda one: one.more["fence"]):
            by_order[note.order].append(note)
        sent = self.deployed[0].sent
        assert set(by_order) == set(sent), "an order has no effect, or nobody has sent it"
        ran = [note for note in self.ledger.notes("verdict") if note.more["replayed"] is False]
        ends = {note.order: note.at for note in ran}
        met = sum(
            any(effects[0].at < outage.killed < ends.get(order, 0) for outage in self.outages)
            for order, effects in by_order.items()
        )
        repeats = [
            self._explained(order, effects)
            for order, effects in by_order.items()
            if len(effects) > 1
        ]
        return Found(self.mode, self.outages, sum(sent.values()), len(sent), met, repeats)

    def _explained(self, order: str, effects: list[Note]) -> Repeat:
        kept = aof.writes(self.store.folder, order)
        causes = [
            cause_of(first, second, kept, self._hindrances(first), self._answered(first, second))
            for first, second in pairwise(effects)
        ]
        explained = all(
            cause in HINDERED or (cause in LOST and self.mode == "everysec") for cause in causes
        )
        return Repeat(order, "; ".join(causes), explained, self._history(order, kept))

    def _hindrances(self, effect: Note) -> Hindrances:
        """When no renewal could be made, in the consumer of this effect."""
        return Hindrances(
            [Span(outage.killed, self._first_answer(outage)) for outage in self.outages],
            [
                Span(note.at - note.more["seconds"], note.at)
                for note in self.ledger.notes("starved")
                if note.worker == effect.worker and note.more["queued"] > note.more["seconds"] / 2
            ],
        )

    def _first_answer(self, outage: Outage) -> float:
        """When Redis answered anybody: a server that is ready may have no processor."""
        told = [*self.ledger.notes("renewed"), *self.ledger.notes("began")]
        return min([outage.answered, *(note.at for note in told if note.at > outage.ready)])

    def _answered(self, first: Note, second: Note) -> Answered:
        """What Redis had answered to the first attempt when the second one ran."""
        return Answered(
            outcome=any(
                first.at < note.at < second.at and note.more["replayed"] is False
                for note in self.ledger.notes("verdict", first.order)
                if note.worker == first.worker
            ),
            renewed=max(
                (
                    note.more["sent"]
                    for note in self.ledger.notes("renewed", first.order)
                    if note.more["owner"] == first.more["owner"]
                ),
                default=0.0,
            ),
        )

    def _history(self, order: str, kept: list[aof.Write]) -> str:
        """Everything that is known about an order, by time."""
        digest = Identity(QUEUE, order).key_digest
        lines: list[tuple[float, str]] = []
        for what in ("delivered", "began", "effect", "renewed", "verdict"):
            for note in self.ledger.notes(what, order):
                more = " ".join(f"{name}={value}" for name, value in note.more.items())
                lines.append((note.at, f"consumer {note.worker}: {what} {more}"))
        begin, end = min(lines)[0] - LEASE, max(lines)[0] + LEASE
        lines += [
            (note.at, f"consumer {note.worker}: log {note.more['text']}")
            for note in self.ledger.notes("log")
            if digest in note.more["text"]
        ]
        workers = {note.worker for note in self.ledger.notes("effect", order)}
        lines += [
            (note.at, f"consumer {note.worker}: did not run, in seconds: {note.more}")
            for note in self.ledger.notes("starved")
            if note.worker in workers and begin < note.at < end
        ]
        lines += [
            (outage.killed, str(outage)) for outage in self.outages if begin < outage.killed < end
        ]
        known = [f"  {at - begin:8.3f} s  {line}" for at, line in sorted(lines)]
        known += [f"  in the file: {_line(write, self.outages, begin)}" for write in kept]
        return "\n".join([f"{order} [{self.mode}]", *known])


def _line(write: aof.Write, outages: list[Outage], begin: float) -> str:
    before = sum(outage.written < write.ends for outage in outages)
    until = write.lease_until
    lease = "" if until is None else f", lease until {until - WALL - begin:.3f} s"
    return (
        f"{write.state} number={write.number} fence={write.fence} owner={write.owner}{lease}, "
        f"after outage {before} of {len(outages)}"
    )


class Span(NamedTuple):
    """A stretch of time."""

    begin: float
    end: float


class Answered(NamedTuple):
    """What Redis has answered to an attempt, by its consumer."""

    outcome: bool
    """That its outcome is stored."""
    renewed: float
    """When the last renewal was sent that was answered."""


class Hindrances(NamedTuple):
    """When no renewal could be made."""

    down: list[Span]
    """Redis was down."""
    starved: list[Span]
    """The consumer was ready to run, and the machine ran others."""


NO_CLAIM = "Redis lost the claim that it had answered"
NO_OUTCOME = "Redis lost the outcome that it had answered"
NO_RENEWAL = "Redis lost the renewals that it had answered"
LOST = (NO_CLAIM, NO_OUTCOME, NO_RENEWAL)
DOWN_TOO_LONG = "Redis was down from when a renewal was due until the lease ended"
BUSY_TOO_LONG = (
    "Redis was down, and then the machine did not run the consumer, until the lease ended"
)
HINDERED = (DOWN_TOO_LONG, BUSY_TOO_LONG)
LATE = "the lease ended, and a renewal could have been made before"
UNKNOWN = "nothing shows why"


def cause_of(
    first: Note,
    second: Note,
    kept: list[aof.Write],
    hindrances: Hindrances,
    answered: Answered,
) -> str:
    """Say why an order had a second effect, by what Redis has kept of its record."""
    own = [write for write in kept if write.owner == first.more["owner"]]
    if not own:
        return NO_CLAIM
    if answered.outcome and all(write.state == "processing" for write in own):
        return NO_OUTCOME
    if own[-1].lease_until is None or second.more["owner"] not in {one.owner for one in kept}:
        return UNKNOWN
    ended = own[-1].lease_until - WALL
    if answered.renewed > ended - LEASE + SLACK:
        return NO_RENEWAL
    due = Span(ended - LEASE + RENEWED, ended)
    if free(due, hindrances.down) < SLACK:
        return DOWN_TOO_LONG
    if free(due, hindrances.down + hindrances.starved) < SLACK:
        return BUSY_TOO_LONG
    return LATE


def free(span: Span, others: list[Span]) -> float:
    """How many seconds of a span no other one covers."""
    left, at = 0.0, span.begin
    for other in sorted(others):
        left += max(0.0, min(other.begin, span.end) - at)
        at = max(at, other.end)
    return left + max(0.0, span.end - at)


def ready_at(folder: Path) -> float:
    """When a server was ready the last time, by its own log: who asks it may be late."""
    lines = (folder / "log").read_text().splitlines()
    told = [line for line in lines if "Ready to accept connections" in line][-1]
    _, *date = told.partition(" * ")[0].split(" ")  # 4711:M 18 Nov 2026 12:01:29.123 * Ready ...
    local = datetime.strptime(" ".join(date), "%d %b %Y %H:%M:%S.%f").astimezone()
    return local.timestamp() - WALL


@contextlib.contextmanager
def round_of(
    mode: str,
    args: tuple[str, ...],
    rabbitmq: RabbitMQServer,
    parent: ForkServer,
    folder: Path,
) -> Iterator[Round]:
    """Consumers of each kind on a queue of their own, and a Redis started with these arguments."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(redis_server(args=args))
        host = stack.enter_context(rabbitmq.virtual_host())
        settings = {"database": None, "prefetch": PREFETCH, "policy": POLICY}
        settings |= {"connect": host.url, "store": store.url}
        servers = Servers(rabbitmq, store, store, parent)
        deployed = [Deployment(kind, servers, folder, Amqp(host), dict(settings)) for kind in KINDS]
        for one in deployed:
            stack.callback(one.kill)
            one.start()
        yield Round(mode, store, deployed)
        for one in deployed:
            one.ledger.let_go()
            one.stop()


class Progress:
    """Counts the rounds' findings, and prints them as they come."""

    def __init__(self, outages: int) -> None:
        self.outages, self.sent, self.orders, self.met = (Counter[str]() for _ in range(4))
        self.repeats: dict[str, list[Repeat]] = {mode: [] for mode in MODES}
        self.longest = dict.fromkeys(MODES, 0.0)
        self._wanted = outages
        self._lock = threading.Lock()

    def add(self, found: Found) -> None:
        with self._lock:
            mode = found.mode
            self.outages[mode] += len(found.outages)
            self.sent[mode] += found.sent
            self.orders[mode] += found.orders
            self.met[mode] += found.met
            self.repeats[mode] += found.repeats
            down = [outage.answered - outage.killed for outage in found.outages]
            self.longest[mode] = max(self.longest[mode], *down)
            for repeat in found.repeats:
                print(f"repeated: {repeat.cause}\n{repeat.history}", flush=True)
            print(f"{self.outages.total()} of {self._wanted} outages", flush=True)

    def summary(self) -> Iterator[str]:
        for mode, repeats in self.repeats.items():
            causes = Counter(repeat.cause for repeat in repeats)
            yield (
                f"{mode}: {self.outages[mode]} outages of at most {self.longest[mode]:.2f} s, "
                f"{self.sent[mode]} messages for {self.orders[mode]} orders, {self.met[mode]} of "
                f"them running at a kill, {len(repeats)} repeated"
            )
            yield from (f"  {count}: {cause}" for cause, count in causes.items())


def soak(outages: int, deadline: float) -> Progress:
    """Have rounds, some at a time, until there were so many outages or the time is up."""
    progress = Progress(outages)
    rounds = [
        (mode, min(OF_A_ROUND, outages // len(MODES) - begun))
        for begun in range(0, outages // len(MODES), OF_A_ROUND)
        for mode in MODES
    ]
    with (
        fork_server(*PRELOADED) as parent,
        rabbitmq_server() as rabbitmq,
        tempfile.TemporaryDirectory(prefix="semel-outages-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def one(number: int, mode: str, count: int) -> None:
            if time.monotonic() < deadline:
                folder = Path(name) / str(number)
                folder.mkdir()
                with round_of(mode, MODES[mode], rabbitmq, parent, folder) as begun:
                    found = begun.run(count, deadline)
                progress.add(found)

        running = [pool.submit(one, number, *each) for number, each in enumerate(rounds)]
        for each in running:
            each.result()
    return progress


def main() -> int:
    outages = int(os.environ.get("OUTAGES") or 500)
    deadline = time.monotonic() + 60 * float(os.environ.get("MINUTES") or 60)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of the servers' own stop
    progress = soak(outages, deadline)
    print(*progress.summary(), sep="\n")
    if progress.outages.total() < outages:
        print("the time was up before all outages")
    open_ = [each for found in progress.repeats.values() for each in found if not each.explained]
    print(f"{len(open_)} repeats are not explained")
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
