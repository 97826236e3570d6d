"""What happens in one simulated history, decided before it begins.

This module plans. A plan is data: it can be printed, pasted into a test, and made smaller.
The same plan always gives the same history.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, TypeAlias

FAULTS_END = 20.0
"""From this second on the network loses, delays and repeats nothing."""

PROBES_AT = 100.0
"""When every key is asked for once more, by both processes: none may be stuck."""

PROCESS_OF_ENGINE = (0, 0, 1)
"""Two engines share one process and its store object; the third is another process."""

ENGINES, PROCESSES = range(3), range(2)


class RefusedError(Exception):
    """The function's business error."""


class NotDoneError(Exception):
    """The function's error that promises that nothing was done."""


KINDS: dict[str, dict[str, Any]] = {
    "takeover": {},
    "hold": {"abandoned": "hold", "not_done": (NotDoneError,), "ttl": 1e6},
    "final": {"failure": "final"},
    "retryable": {"failure": "retryable"},
    "limited": {"failure": "retryable", "max_attempts": 3},
    "replace": {"mismatch": "replace"},
    "short": {"ttl": 3.0},
    "open": {"store_error": "open"},
    "reject": {"concurrent": "reject"},
    "hurried": {"wait_timeout": 0.7},
    "guard": {"duplicate": "reject"},
}
"""The policies; each has keys of its own."""

MIXED = "mixed"
"""A key that callers use with different policies."""


@dataclass(frozen=True)
class Network:
    """How the store and the way to it behave."""

    instant: bool = False
    """Half of the commands are answered without a wait."""
    slow: bool = False
    lossy: bool = False
    """Commands and replies are lost, and wake-ups too."""
    repeats: bool = False
    """Some commands are applied twice."""
    late: bool = False
    """Some commands are applied after their caller has given up."""
    notifies: bool = False
    """The store can wake callers that wait."""
    batches: bool = False
    """The store can do several things at once."""
    shuffled: bool = False
    """What is ready runs in any order."""
    cached: bool = False
    """The engines have a local cache."""


@dataclass(frozen=True)
class Cancel:
    """When a caller is cancelled: after its start, or after it has sent a command."""

    after: float
    command: str | None = None


@dataclass(frozen=True)
class Call:
    """Somebody asks for a key."""

    at: float
    name: str
    engine: int
    key: str
    policy: str
    lease: float
    method: str = "execute"
    payload: str | None = None
    works: tuple[float, ...] = ()
    """How long the function sleeps, each time."""
    ends: str = "ok"
    nested: bool = False
    """The function executes another key."""
    cancel: Cancel | None = None
    probe: bool = False

    @cached_property
    def options(self) -> dict[str, Any]:
        return KINDS[self.policy] | {"lease": self.lease, "failed_ttl": 1000.0}


@dataclass(frozen=True)
class Pause:
    """A process stands still, and goes on later."""

    at: float
    process: int
    seconds: float


@dataclass(frozen=True)
class Crash:
    """A process ends without a word."""

    at: float
    process: int


@dataclass(frozen=True)
class ClockJump:
    """The store's clock jumps ahead."""

    at: float
    seconds: float


@dataclass(frozen=True)
class Outage:
    """The store rejects everything."""

    at: float
    seconds: float


@dataclass(frozen=True)
class Close:
    """An engine is closed."""

    at: float
    engine: int
    timeout: float


@dataclass(frozen=True)
class Repair:
    """Somebody changes a record by hand."""

    at: float
    engine: int
    key: str
    what: str


Action: TypeAlias = Call | Pause | Crash | ClockJump | Outage | Close | Repair


@dataclass(frozen=True)
class Plan:
    """Everything that decides one history."""

    seed: int
    network: Network
    actions: tuple[Action, ...]

    def has(self, kind: type[Action]) -> bool:
        return any(isinstance(action, kind) for action in self.actions)

    @property
    def calls(self) -> list[Call]:
        return [action for action in self.actions if isinstance(action, Call)]

    @property
    def unsteady(self) -> bool:
        """Whether the store may be unreachable for longer than a lease."""
        return self.network.slow or self.network.late or self.has(Outage)

    def __str__(self) -> str:
        on = ", ".join(f"{name}=True" for name, value in vars(self.network).items() if value)
        lines = "".join(f"        {_shown(action)},\n" for action in self.actions)
        return f"Plan(\n    seed={self.seed},\n    network=Network({on}),\n    actions=(\n{lines}    ),\n)"


def _shown(action: Action) -> str:
    """Write an action as Python, without what it leaves as it is."""
    fields = type(action).__dataclass_fields__
    told = (
        f"{name}={getattr(action, name)!r}"
        for name, field in fields.items()
        if getattr(action, name) != field.default
    )
    return f"{type(action).__name__}({', '.join(told)})"


def make_plan(seed: int) -> Plan:
    """Plan the history of a seed."""
    return _Planner(seed).plan()


class _Planner:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._dice = Random(seed)
        self._policies = self._dice.sample([*KINDS], self._dice.choice([1, 2, 2]))
        self._mixed = self._is(0.1)
        self._copies = self._dice.choice([1, 1, 3])
        """With more keys fewer calls are replays, and more functions run."""
        self._lease = self._dice.choice([0.5, 1.0, 3.0])

    def _is(self, probability: float) -> bool:
        return self._dice.random() < probability

    def _moment(self, longest: float) -> float:
        return round(self._dice.random() * longest, 2)

    def plan(self) -> Plan:
        network = Network(
            instant=self._is(0.25),
            slow=self._is(0.3),
            lossy=self._is(0.4),
            repeats=self._is(0.3),
            late=self._is(0.2),
            notifies=self._is(0.4),
            batches=self._is(0.5),
            shuffled=self._is(0.25),
            cached=self._is(0.25),
        )
        cancels, nests = self._is(0.5), self._is(0.15)
        count = self._dice.randint(4, 22)
        calls = [self._call(number, cancels=cancels, nests=nests) for number in range(count)]
        return Plan(self._seed, network, (*calls, *self._disturbances(), *self._probes()))

    def _call(self, number: int, *, cancels: bool, nests: bool) -> Call:
        dice, lease = self._dice, self._lease
        policy = dice.choice(self._policies)
        durations = [0, 0, 0.01, 0.05, 0.3, lease * 0.4, lease, lease * 2.5]
        return Call(
            at=dice.choice([0.0, self._moment(3), self._moment(12)]),
            name=f"c{number}",
            engine=dice.choice([0, 1, 2, 2]),
            key=MIXED if self._mixed else self._some_key(policy),
            policy=policy,
            lease=dice.choice([lease, lease, lease / 2]) if self._mixed else lease,
            method=dice.choice(["execute"] * 4 + ["run", "run", "consume", "attempt"]),
            payload=dice.choice([None, "x", "x", "x", "x", "y"]),
            works=tuple(dice.choice(durations) for _ in range(dice.choice([0, 1, 1, 2]))),
            ends=dice.choice(["ok"] * 6 + ["refused"] * 2 + ["not done"]),
            nested=nests and self._is(0.3),
            cancel=self._cancel() if cancels and self._is(0.35) else None,
        )

    def _some_key(self, policy: str) -> str:
        return f"{policy}/{self._dice.randrange(self._copies)}"

    def _cancel(self) -> Cancel:
        dice = self._dice
        if self._is(0.4):
            span = dice.choice([0.0, 0.02, 1.0, 4.0])
            return Cancel(round(dice.random() * span, 3))
        command = dice.choice(["claim", "complete", "complete", "fail", "renew"])
        return Cancel(dice.choice([0, 0, 0.0005, 0.001, 0.005, 0.2]), command)

    def _disturbances(self) -> list[Action]:
        dice, lease = self._dice, self._lease
        found: list[Action] = []
        if self._is(0.25):
            found += [
                Pause(
                    self._moment(8),
                    dice.choice(PROCESSES),
                    dice.choice([0.3, lease, lease * 2, lease * 4]),
                )
                for _ in range(dice.randint(1, 3))
            ]
        if self._is(0.25):
            found.append(Crash(self._moment(6), dice.choice(PROCESSES)))
        if self._is(0.2):
            found += [
                ClockJump(self._moment(8), dice.choice([lease / 2, lease, lease * 3]))
                for _ in range(dice.randint(1, 2))
            ]
        if self._is(0.25):
            found += [
                Outage(self._moment(6), dice.choice([0.5, 2.5, 4.0, lease * 2]))
                for _ in range(dice.randint(1, 2))
            ]
        if self._is(0.15):
            found.append(Close(self._moment(6), dice.choice(ENGINES), dice.choice([0.0, 0.5, 5.0])))
        if self._is(0.25):
            whats = ["forget", "forget", "delete", "set_result", "refresh"]
            for _ in range(dice.randint(1, 6)):
                key = MIXED if self._mixed else self._some_key(dice.choice(self._policies))
                found.append(Repair(self._moment(8), dice.choice(ENGINES), key, dice.choice(whats)))
        return found

    def _probes(self) -> list[Call]:
        if self._mixed:
            return []  # what a mixed key answers depends on who used it last
        return [
            Call(
                at=PROBES_AT + engine,
                name=f"probe of {policy}/{copy} by {engine}",
                engine=engine,
                key=f"{policy}/{copy}",
                policy=policy,
                lease=self._lease,
                payload="x",
                probe=True,
            )
            for policy in self._policies
            for copy in range(self._copies)
            for engine in (0, 2)
        ]
