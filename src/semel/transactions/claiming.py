"""The steps of a transactional block: generators that yield statements and receive replies.

They do no I/O. Every decision is the law's (`semel.core.judge`), made by the verbs of the store.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from semel.core.policy import Rules
from semel.core.records import Abandoned, Busy, Claim, Claimed, ClaimRequest, CompleteRequest
from semel.stores.sql.verbs import Verb
from semel.transactions.dialects import Records

LOCKED: Final = Busy(0.0)
"""An open transaction has the record, and this caller does not wait for its end.

Known by identity: a record that runs elsewhere under a lease is busy, too."""


def prepare(records: Records, rules: Rules, *, wait: bool, spent: float = 0.0) -> Verb[Any]:
    """Bound the wait for the transaction of another one, and tell what the bound was.

    `spent` seconds of it have passed already.
    """
    patience = rules.store_timeout if rules.wait_timeout is None else rules.wait_timeout
    return records.prepare(max(0.0, patience - spent), wait=wait)


def claim(records: Records, ask: ClaimRequest, *, wait: bool) -> Verb[Claim]:
    """Claim the record: held, and with its lease at once past.

    A transaction that is committed too early then leaves a record whose outcome is unknown, never
    a success. Before its commit nobody else sees the row.
    """
    if not (yield from records.lock(ask.identity, wait=wait)):
        return LOCKED
    parked = replace(ask, lease=0.0)
    answer = yield from records.verbs.claim(replace(parked, hold=True)).start()
    if isinstance(answer, Abandoned) and not ask.hold:
        # Our own hold must not keep us from what this caller's policy lets it take over.
        answer = yield from records.verbs.claim(parked).start()
        if isinstance(answer, Claimed):
            yield from records.hold(ask.identity, ask.owner, held=True)
    return answer


def complete(records: Records, ask: CompleteRequest, rules: Rules) -> Verb[bool]:
    """Store the success, held only if the caller's policy says so: tiers copy no held record."""
    if not rules.hold:
        yield from records.hold(ask.identity, ask.owner, held=False)
    return (yield from records.verbs.complete(ask).start())
