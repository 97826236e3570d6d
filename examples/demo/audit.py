"""Compares what the card network's ledger, semel's store and the clients say of each key.

The ledger is written by the effects themselves: about charges, semel's own word is not taken.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator

from semel import Record, State, open_store

from .clients import Clients
from .network import Entry, Receipt, call
from .place import Place
from .storm import Fault
from .worker import SCOPE


class Audit:
    """The books of one demo, side by side."""

    def __init__(self, place: Place, clients: Clients) -> None:
        self._clients = clients
        self._taken_over = {event.identity.key for event in clients.takeovers}
        self._charged_by_the_dead = {
            kill.request.key
            for kill in clients.kills
            if kill.request.fault is Fault.KILLED_AFTER_CHARGE
        }
        self._records = records_in(place.store)
        self._ledger: defaultdict[str, list[Entry]] = defaultdict(list)
        with call(place.ledger) as network:
            self.entries = network.entries()
        for entry in self.entries:
            self._ledger[entry.key].append(entry)

    @property
    def charges(self) -> int:
        """How often money was moved."""
        return sum(entry.moved_money for entry in self.entries)

    @property
    def absorbed(self) -> int:
        """How often the card network knew a token, and moved nothing."""
        return len(self.entries) - self.charges

    def of_key(self, key: str) -> Iterator[str]:
        """What is wrong with one key."""
        entries = self._ledger[key]
        match [entry for entry in entries if entry.moved_money]:
            case []:
                yield f"LOST {key}: never charged"
            case [charge]:
                yield from self._told(charge)
                yield from self._recorded(key, {entry.fence for entry in entries})
                if len(entries) > 1 and key not in self._charged_by_the_dead:
                    yield f"REPEATED {key}: came to the card network again without need"
            case charges:
                yield f"CHARGED {len(charges)} TIMES {key}: {'; '.join(map(str, charges))}"

    def of_kills(self) -> Iterator[str]:
        """What is wrong with the workers that died."""
        if len(self._clients.kills) < self._clients.deaths_planned:
            yield "NOT KILLED: a worker was meant to die, and did not"
        for kill in self._clients.kills:
            if kill.exit_code != -signal.SIGKILL:
                yield f"NOT KILLED: worker {kill.pid} ended with {kill.exit_code}"
            if kill.request.key not in self._taken_over:
                yield f"NOT TAKEN OVER {kill.request.key}: its worker {kill.pid} was killed"

    def of_strangers(self) -> Iterator[str]:
        """What nobody asked for."""
        asked_for = set(self._clients.keys)
        for key in sorted((self._records.keys() | self._ledger.keys()) - asked_for):
            yield f"UNKNOWN {key}: nobody asked for this payment"

    def _told(self, charge: Entry) -> Iterator[str]:
        """Everyone who asked for what was charged has its receipt; nobody else has one."""
        right = Receipt(charge.charge, charge.cents)
        answers = self._clients.answers[charge.key]
        if all(answer.result != right for answer in answers):
            yield f"UNTOLD {charge.key}: charged, and no client has the receipt"
        for answer in answers:
            asked_for_it = answer.request.payment.cents == charge.cents
            if (answer.result == right) != asked_for_it:
                yield f"TOLD WRONGLY {charge.key}: {answer.result} for {answer.request.payment}"

    def _recorded(self, key: str, fences: set[int]) -> Iterator[str]:
        record = self._records.get(key)
        if record is None:
            yield f"NO RECORD {key}: the store does not know this key"
        elif record.state is not State.SUCCEEDED:
            yield f"NOT DONE {key}: the store says {record.state.name}"
        elif record.fence not in fences:
            yield f"NO EFFECT {key}: the attempt that succeeded never came to the card network"


def records_in(store_url: str) -> dict[str, Record]:
    """Read every record of the demo's scope."""
    store = open_store(store_url)
    try:
        records: dict[str, Record] = {}
        page = store.scan(scope=SCOPE)
        while True:
            records |= {record.identity.key: record for record in page.records}
            if page.cursor is None:
                return records
            page = store.scan(scope=SCOPE, cursor=page.cursor)
    finally:
        store.close()
