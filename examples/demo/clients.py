"""The clients: they send every request, and send it again until they have an answer for good."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from semel import Event
from semel.events import Mismatched, Replayed, TakenOver

from .network import Receipt
from .staff import Kill, Staff
from .storm import Request
from .worker import Answer, Refused, TryAgain


class Clients:
    """All clients together, and what they saw."""

    def __init__(self, requests: list[Request]) -> None:
        self._to_send = deque(requests)
        self.keys = sorted({request.key for request in requests})
        self.deaths_planned = sum(
            request.fault is not None and request.fault.deadly for request in requests
        )
        self.sent = 0
        self.ended = 0
        self.retries = 0
        self.kills: list[Kill] = []
        self.events: list[Event] = []
        self.answers: defaultdict[str, list[Answer]] = defaultdict(list)
        """What they were told for good, by key."""

    @property
    def total(self) -> int:
        """How many requests there are, as far as is known: each retry is one more."""
        return self.sent + len(self._to_send)

    @property
    def replays(self) -> list[Replayed]:
        """Duplicates that got the stored receipt."""
        return [event for event in self.events if isinstance(event, Replayed)]

    @property
    def mismatches(self) -> int:
        """Requests with a changed payload."""
        return sum(isinstance(event, Mismatched) for event in self.events)

    @property
    def takeovers(self) -> list[TakenOver]:
        """Attempts that replaced a dead worker's."""
        return [event for event in self.events if isinstance(event, TakenOver)]

    def send_all(self, workers: Staff, deadline: float) -> Iterator[None]:
        """Send everything; yields now and then, so that progress can be shown."""
        while self._to_send or workers.busy:
            while self._to_send and workers.idle:
                workers.give(self._to_send.popleft())
                self.sent += 1
            for message in workers.hear(deadline):
                self.ended += 1
                match message:
                    case Answer():
                        self._answered(message)
                    case Kill(request):
                        self.kills.append(message)
                        # Its client heard nothing and is impatient: it asks twice at once.
                        self._again(request, times=2)
            yield

    def _answered(self, answer: Answer) -> None:
        self.events += answer.events
        match answer.result:
            case Receipt() | Refused():
                self.answers[answer.request.key].append(answer)
            case TryAgain():
                self._again(answer.request, times=1)

    def _again(self, request: Request, *, times: int) -> None:
        self._to_send.extendleft([request.again()] * times)
        self.retries += times
