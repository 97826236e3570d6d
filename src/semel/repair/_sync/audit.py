# Generated from repair/audit.py by `make generate`: change that file instead.
"""The audit trail: who did what to which record, when and why. It is kept in the store itself.

An entry is a record in the scope `semel.audit`, written by `put` before the action: if it cannot be
written, the action is rejected. So an entry says what was about to happen. It names a record by
its digest, and never has its key or its result. Entries are kept for 400 days. No call can change
or remove one, and listings and counts leave them out (`semel.core.records.AUDIT_SCOPE`).

`settle`, reconcilers and `purge` write entries through this module; `forget` is here.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from semel.core.audit import checked_text, not_written, request_for
from semel.core.policy import Duration, seconds
from semel.core.records import (
    AUDIT_SCOPE,
    Identity,
    ScanRequest,
)
from semel.core.run_info import process_name
from semel.errors import ConfigError, RecordUnreadable, StoreError
from semel.repair.audit import KEY_PREFIX, PAGE, AuditEntry, by_time, read_entry
from semel.stores.base import Store
from semel.stores.urls import whole_number
from semel.sync import Idempotency


class AuditTrail:
    """The audit trail of a store; `place` is an engine or a store.

    `name` is who acts; semel adds the host and the process, or `SEMEL_NAME`.

    Examples:
        >>> trail = AuditTrail(idem, name="anna")
        >>> trail.write("view", [Identity("payments", "order:42")], reason="ticket 7")
        >>> [(entry.action, entry.reason) for entry in trail.read()]
        [('view', 'ticket 7')]
    """

    def __init__(self, place: Idempotency | Store, *, name: str | None = None) -> None:
        if not isinstance(place, Idempotency | Store):
            given = type(place).__name__
            raise ConfigError(f"an audit trail needs an engine or a store for threads; got {given}")
        self._place = place
        self._name = name if name is None else checked_text("name", name)

    @property
    def by(self) -> str:
        """Who acts: the name and the process."""
        process = process_name()  # not kept: a fork has another
        return process if self._name is None else f"{self._name}@{process}"

    def write(
        self,
        action: str,
        identities: Iterable[Identity] = (),
        *,
        scope: str | None = None,
        details: str = "",
        reason: str | None = None,
    ) -> None:
        """Write an entry for each record of `identities`; without them, one for the whole store.

        With `scope` and without identities, the entry is about that scope.

        Call it before the `action`, and don't act if it raises. `details` says what exactly
        happens, and `reason` why.
        """
        said = {"by": self.by, "action": checked_text("action", action)}
        if details:
            said["details"] = checked_text("details", details)
        if reason is not None:
            said["reason"] = checked_text("reason", reason)
        about = [{"scope": each.scope, "key_digest": each.key_digest} for each in identities]
        whole = {} if scope is None else {"scope": scope}
        requests = [request_for(said | named) for named in about or [whole]]
        try:
            answers = self._store.send(requests)
        except StoreError as error:
            answers = [error]
        for answer in answers:
            if answer is not True:
                raise not_written(answer)

    def read(
        self,
        *,
        scope: str | None = None,
        key_digest: str | None = None,
        since: Duration | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Return the newest entries, at most `limit` of them, the newest first.

        `scope` and `key_digest` select those about such records, and `since` those of the last so
        many seconds.
        """
        store = self._store
        if ScanRequest in store.unsupported:
            raise ConfigError(f"{type(store).__name__} cannot list its records")
        most = whole_number("limit", limit)
        youngest = None if since is None else seconds("since", since)
        found: dict[str, AuditEntry] = {}
        cursor: str | None = None
        while True:
            page = store.scan(scope=AUDIT_SCOPE, prefix=KEY_PREFIX, limit=PAGE, cursor=cursor)
            for record in page.records:
                entry = read_entry(record)
                if (
                    entry is not None
                    and (scope is None or entry.scope == scope)
                    and (key_digest is None or entry.key_digest == key_digest)
                    and (youngest is None or record.now - record.created_at <= youngest)
                ):
                    found[record.key] = entry
            found = dict(nlargest(most, found.items(), key=by_time))
            cursor = page.cursor
            if cursor is None:
                return list(found.values())

    @property
    def _store(self) -> Store:
        """The store of the place; an engine has another one after a fork."""
        place = self._place
        return place.internals.store if isinstance(place, Idempotency) else place


def forget(
    idempotency: Idempotency,
    key: str,
    *,
    scope: str = "default",
    name: str | None = None,
    reason: str | None = None,
) -> bool:
    """Remove the record of a `key` in a `scope`, with an entry in the audit trail.

    The next call runs again. Return False if there was none. `name` and `reason` are who removes
    it, and why. To remove a record of your own program, call `idempotency.forget`.

    Examples:
        >>> forget(idem, "order:42", name="anna", reason="ticket 7")
        False
    """
    trail = AuditTrail(idempotency, name=name)
    identity = idempotency.internals.setup.identity(key, scope)
    details = "unreadable"
    try:
        record = idempotency.peek(key, scope=scope)
    except RecordUnreadable:
        pass  # to forget it is the way out
    else:
        if record is None:
            return False
        details = "abandoned" if record.abandoned else record.state.name.lower()
    trail.write("forget", [identity], details=details, reason=reason)
    return idempotency.forget(key, scope=scope)
