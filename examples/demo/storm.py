"""The requests that clients send: all that can go wrong with them is planned here, by a seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, replace
from typing import Self

SMALLEST = 40
"""Below this many requests, some kind of trouble might not happen at all."""

CHANGED_EACH = 20
"""One in so many payments is asked for again with another amount."""
FAILING_EACH = 7
"""In one of so many payments, the card network does not answer at first."""


class Fault(enum.Enum):
    """What goes wrong while a request is being served."""

    NETWORK_DOWN = "the card network does not answer"
    KILLED_BEFORE_CHARGE = "before its charge"
    KILLED_AFTER_CHARGE = "after its charge"

    @property
    def deadly(self) -> bool:
        """The worker does not survive it."""
        return self in {Fault.KILLED_BEFORE_CHARGE, Fault.KILLED_AFTER_CHARGE}


@dataclass(frozen=True)
class Payment:
    """What the client wants: the payload, which must not change under one key."""

    order: str
    cents: int


@dataclass(frozen=True)
class Request:
    """One request on the wire; a client that gets no answer sends the same again."""

    key: str
    payment: Payment
    network_seconds: float
    """How long the card network will take for it."""
    fault: Fault | None = None

    def again(self) -> Self:
        """The same request, sent once more; this time nothing goes wrong."""
        return replace(self, fault=None)

    def changed(self) -> Self:
        """The same key with another amount: a mistake of the client."""
        other = replace(self.payment, cents=self.payment.cents + 1)
        return replace(self, payment=other, fault=None)


def storm(size: int, seed: int) -> list[Request]:
    """Plan `size` requests in the order of their arrival; three in ten are new payments."""
    dice = random.Random(seed)
    fresh = [_new_request(number, dice) for number in range(size * 3 // 10)]

    # The two whose workers die come without duplicates, so that it is they who get to run.
    arrivals = [(1 / 4, _failing(fresh.pop(), Fault.KILLED_BEFORE_CHARGE))]
    arrivals += [(2 / 4, _failing(fresh.pop(), Fault.KILLED_AFTER_CHARGE))]

    first_arrival: dict[str, float] = {}
    for number, request in enumerate(fresh):
        at = first_arrival[request.key] = dice.random()
        down = number % FAILING_EACH == 0
        arrivals.append((at, _failing(request, Fault.NETWORK_DOWN) if down else request))
        if number % CHANGED_EACH == 0:
            arrivals.append((_later(at, dice), request.changed()))
        elif number % 2 == 0:
            arrivals.append((at, request))  # a double click: both are under way at once
    while len(arrivals) < size:
        request = dice.choice(fresh)
        arrivals.append((_later(first_arrival[request.key], dice), request))

    arrivals.sort(key=lambda arrival: arrival[0])
    return [request for _, request in arrivals]


def _new_request(number: int, dice: random.Random) -> Request:
    payment = Payment(order=f"order-{number:04}", cents=dice.randrange(100, 100_000))
    return Request(f"pay-{number:04}", payment, network_seconds=dice.uniform(0.005, 0.040))


def _failing(request: Request, fault: Fault) -> Request:
    return replace(request, fault=fault)


def _later(at: float, dice: random.Random) -> float:
    return dice.uniform(at, 1.0)
