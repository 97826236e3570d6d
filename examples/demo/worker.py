"""A worker process: it takes payment requests, and pays each one once with semel's help.

`Worker.answer` and `Worker.pay` are what an application would have; the rest is the demo's
plumbing: a pipe to the clients, and faults that strike when a request says so.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from semel import Event, Idempotency, IdempotencyError, Policy, current_attempt, new_key

from .network import CardNetwork, Receipt, call
from .place import Place
from .storm import Fault, Request

SCOPE = "payments"

POLICY = Policy(
    # A killed worker's key is free again after this time; living workers renew their leases.
    lease=2.0,
    # The next attempt repeats what the dead one may have done. That is right here, because the
    # card network honours our token. Without one: Policy.payment(), which holds the key instead.
    abandoned="takeover",
    # After a failure only the same payload may try again.
    failure="retryable",
)


class CardNetworkDown(Exception):
    """The card network did not answer, and nothing was charged."""


@dataclass(frozen=True)
class Refused:
    """The request is wrong; sending it again would not help."""

    reason: str


@dataclass(frozen=True)
class TryAgain:
    """It did not work this time."""

    reason: str


@dataclass(frozen=True)
class Answer:
    """The end of one request, and what semel told of on the way."""

    request: Request
    result: Receipt | Refused | TryAgain
    events: tuple[Event, ...]


@dataclass(frozen=True)
class ReadyToDie:
    """The worker stands still in the middle of a payment, to be killed."""


@dataclass(frozen=True)
class Started:
    """The worker takes requests now."""


class Worker:
    """Serves one request at a time."""

    def __init__(
        self, store: str, network: CardNetwork, pipe: Connection, *, sabotage: bool
    ) -> None:
        self._network = network
        self._pipe = pipe
        self._sabotage = sabotage
        self._events: list[Event] = []
        self._idem = Idempotency(store, policy=POLICY, hooks=[self._events.append])

    def serve(self) -> None:
        """Answer requests until the clients hang up."""
        with self._idem, contextlib.suppress(EOFError):
            self._pipe.send(Started())
            while True:
                request = self._pipe.recv()
                result = self.answer(request)
                self._pipe.send(Answer(request, result, tuple(self._events)))
                self._events.clear()

    def answer(self, request: Request) -> Receipt | Refused | TryAgain:
        """Pay, unless it was paid before: then the answer is the same receipt."""
        # The classic mistake: a new key for each request, so that no duplicate is ever known.
        key = new_key() if self._sabotage else request.key
        try:
            return self._idem.execute(
                key, lambda: self.pay(request), scope=SCOPE, payload=request.payment
            )
        except CardNetworkDown as error:
            return TryAgain(str(error))
        except IdempotencyError as error:
            return TryAgain(error.code) if error.retry_helps else Refused(error.code)

    def pay(self, request: Request) -> Receipt:
        """Charge the card: the effect that must not happen twice."""
        attempt = current_attempt()
        if attempt is None:
            raise RuntimeError("a payment runs only inside an attempt")
        time.sleep(request.network_seconds)
        if request.fault is Fault.NETWORK_DOWN:
            raise CardNetworkDown(request.fault.value)
        if request.fault is Fault.KILLED_BEFORE_CHARGE:
            self._wait_for_death()
        attempt.check()
        receipt = self._network.charge(request, attempt.derive("charge"), attempt)
        if request.fault is Fault.KILLED_AFTER_CHARGE:
            self._wait_for_death()
        return receipt

    def _wait_for_death(self) -> NoReturn:
        self._pipe.send(ReadyToDie())
        while True:
            time.sleep(1)


def work(place: Place, pipe: Connection, *, sabotage: bool) -> None:
    """Be a worker: the main function of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    logging.basicConfig(filename=place.log)
    with call(place.ledger) as network:
        Worker(place.store, network, pipe, sabotage=sabotage).serve()
