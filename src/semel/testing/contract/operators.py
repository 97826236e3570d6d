"""The contract of what operators ask: list, find stuck, purge, count, and adopt.

A store may leave these out (`Store.unsupported`); they are then skipped by name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import (
    AUDIT_SCOPE,
    LISTINGS,
    Abandoned,
    AdoptRequest,
    Busy,
    Claimed,
    Counts,
    Finished,
    Identity,
    State,
    StuckRequest,
)
from semel.stores.base import AsyncStore, Store
from semel.testing.contract.given import (
    ANNA,
    BERT,
    CARL,
    ERROR,
    KEY,
    LONG,
    OTHER,
    OTHER_RUN_INFO,
    RED,
    RESULT,
    SHORT,
    Sleep,
    StoreUnderTest,
    abandon,
    ask,
    expect,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver

ENTRY = Identity(AUDIT_SCOPE, "audit-1")


def scan_all(
    scannable: StoreDriver,
    *,
    scope: str | None = None,
    prefix: str = "",
    state: State | None = None,
    limit: int = 100,
) -> list[Identity]:
    """Follow the pages to the end; no page may hold more than was asked for."""
    found: list[Identity] = []
    cursor = None
    while True:
        page = scannable.scan(scope=scope, prefix=prefix, state=state, limit=limit, cursor=cursor)
        assert len(page.records) <= limit
        found.extend(record.identity for record in page.records)
        cursor = page.cursor
        if cursor is None:
            return found


class ScanContract(StoreUnderTest):
    """Readers see what a `get` would see, and purge removes nothing that matters."""

    @pytest.fixture
    def scannable(self, store: Store | AsyncStore, driven: StoreDriver) -> StoreDriver:
        """Drive a store that lists its records."""
        if not all(map(driven.offers, LISTINGS)):
            pytest.skip(f"{type(store).__name__} does not list its records")
        return driven

    def test_an_empty_store_has_nothing_to_show(self, scannable: StoreDriver) -> None:
        assert scan_all(scannable) == []
        assert scannable.stuck() == []
        assert scannable.purge() == 0
        assert scannable.counts() == Counts(processing=0, abandoned=0, succeeded=0, failed=0)

    def test_a_scanned_record_is_the_record(self, scannable: StoreDriver) -> None:
        succeed(scannable, ANNA, RED)
        (record,) = scannable.scan().records
        got = record_of(scannable)
        assert record.outcome == RESULT
        assert record.fingerprint == RED
        assert record.owner == ANNA
        assert (record.number, record.fence) == (got.number, got.fence)
        assert (record.created_at, record.expires_at) == (got.created_at, got.expires_at)

    def test_scanning_page_by_page_shows_every_record_once(self, scannable: StoreDriver) -> None:
        identities = [Identity("scan", f"{index}") for index in range(25)]
        for identity in identities:
            scannable.claim(ask(ANNA, identity=identity))
        found = scan_all(scannable, limit=10)
        assert sorted(found, key=lambda each: each.key) == sorted(
            identities, key=lambda each: each.key
        )

    def test_a_scan_shows_one_scope_only_when_asked(self, scannable: StoreDriver) -> None:
        for scope in ("orders", "Orders", "orders2"):
            succeed(scannable, identity=Identity(scope, "1"))
        assert scan_all(scannable, scope="orders") == [Identity("orders", "1")]
        assert len(scan_all(scannable)) == 3

    def test_a_prefix_is_taken_literally(self, scannable: StoreDriver) -> None:
        prefixes = ("a%", "a_", "a*", "a?", "a[x]", "a\\", "a'", "a{", "a:")
        for prefix in ("ax", *prefixes):
            succeed(scannable, identity=Identity("s", prefix + "1"))
            succeed(scannable, identity=Identity("s", prefix.upper() + "1"))
        for prefix in prefixes:
            assert scan_all(scannable, prefix=prefix) == [Identity("s", prefix + "1")], prefix

    def test_a_prefix_is_the_beginning_of_the_key(self, scannable: StoreDriver) -> None:
        for identity in (KEY, OTHER, Identity("orders.create", "my-order:1")):
            succeed(scannable, identity=identity)
        found = scan_all(scannable, scope="orders.create", prefix="order:4")
        assert sorted(found, key=lambda each: each.key) == [KEY, OTHER]

    def test_a_scan_shows_one_state_only_when_asked(self, scannable: StoreDriver) -> None:
        running, failed, done = (Identity("s", name) for name in ("running", "failed", "done"))
        scannable.claim(ask(ANNA, identity=running))
        scannable.claim(ask(ANNA, identity=failed))
        fail(scannable, identity=failed)
        succeed(scannable, identity=done)
        assert scan_all(scannable, state=State.PROCESSING) == [running]
        assert scan_all(scannable, state=State.FAILED) == [failed]
        assert scan_all(scannable, state=State.SUCCEEDED) == [done]

    def test_an_expired_record_is_neither_scanned_nor_counted(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(scannable, ttl=SHORT)
        sleep(2 * SHORT)
        assert scan_all(scannable) == []
        assert scannable.counts() == Counts(processing=0, abandoned=0, succeeded=0, failed=0)

    def test_stuck_shows_abandoned_attempts_oldest_first(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        stuck = [Identity("stuck", name) for name in ("c", "a", "b")]
        for identity in stuck:
            abandon(scannable, ANNA, identity=identity, hold=identity.key == "a")
            sleep(0.005)
        scannable.claim(ask(ANNA, identity=KEY))
        succeed(scannable, identity=OTHER)
        assert [record.identity for record in scannable.stuck()] == stuck
        assert [record.identity for record in scannable.stuck(limit=2)] == stuck[:2]
        assert all(record.abandoned for record in scannable.stuck())

    def test_stuck_leaves_out_what_was_abandoned_only_now(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        abandon(scannable, ANNA)
        sleep(2 * SHORT)
        abandon(scannable, ANNA, identity=OTHER)
        assert scannable.stuck(older_than=LONG) == []
        assert [record.identity for record in scannable.stuck(older_than=SHORT)][:1] == [KEY]

    def test_an_attempt_that_ended_or_was_revived_is_no_longer_stuck(
        self, scannable: StoreDriver
    ) -> None:
        for identity in (KEY, OTHER):
            abandon(scannable, ANNA, identity=identity)
        scannable.complete(KEY, ANNA, RESULT, LONG)
        scannable.renew(OTHER, ANNA, LONG)
        assert scannable.stuck() == []

    def test_an_attempt_that_was_taken_over_or_forgotten_is_no_longer_stuck(
        self, scannable: StoreDriver
    ) -> None:
        for identity in (KEY, OTHER):
            abandon(scannable, ANNA, identity=identity)
        scannable.claim(ask(BERT, identity=KEY))
        scannable.forget(OTHER)
        assert scannable.stuck() == []

    def test_an_attempt_whose_lease_passed_is_stuck(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        scannable.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert [record.identity for record in scannable.stuck()] == [KEY]

    def test_listings_show_who_runs_what(self, scannable: StoreDriver) -> None:
        scannable.claim(ask(ANNA, hold=True))
        scannable.renew(KEY, ANNA, 0, OTHER_RUN_INFO)
        succeed(scannable, identity=OTHER)
        shown = {record.identity: record.run_info for record in scannable.scan().records}
        assert shown == {KEY: OTHER_RUN_INFO, OTHER: b""}
        assert [record.run_info for record in scannable.stuck()] == [OTHER_RUN_INFO]

    def test_records_are_counted_by_what_is_known_of_them(self, scannable: StoreDriver) -> None:
        for name in ("running", "abandoned", "failed"):
            for copy in ("one", "two"):
                scannable.claim(ask(ANNA, identity=Identity(name, copy)))
        for copy in ("one", "two"):
            park(scannable, identity=Identity("abandoned", copy))
            fail(scannable, identity=Identity("failed", copy))
        succeed(scannable)
        assert scannable.counts() == Counts(processing=2, abandoned=2, succeeded=1, failed=2)

    def test_purge_removes_at_most_the_limit_and_only_what_expired(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        for index in range(5):
            succeed(scannable, identity=Identity("old", str(index)), ttl=SHORT)
        succeed(scannable)
        scannable.claim(ask(ANNA, identity=OTHER))
        sleep(2 * SHORT)
        # A store whose records go by themselves may have fewer to remove, never more.
        assert scannable.purge(limit=2) <= 2
        assert scannable.purge() <= 5
        assert scannable.purge() == 0
        assert isinstance(scannable.claim(ask(BERT)), Finished)
        assert record_of(scannable, OTHER).owner == ANNA

    def test_the_audit_trail_is_listed_only_when_it_is_named(self, scannable: StoreDriver) -> None:
        assert scannable.put(ENTRY, RESULT, LONG, owner=ANNA) is True
        succeed(scannable)
        assert scan_all(scannable) == [KEY]
        assert scan_all(scannable, state=State.SUCCEEDED) == [KEY]
        assert scan_all(scannable, prefix=ENTRY.key) == []
        assert scan_all(scannable, scope=AUDIT_SCOPE) == [ENTRY]
        assert scan_all(scannable, scope=AUDIT_SCOPE, prefix="audit-2") == []

    def test_the_audit_trail_is_not_counted(self, scannable: StoreDriver) -> None:
        scannable.put(ENTRY, RESULT, LONG, owner=ANNA)
        succeed(scannable)
        assert scannable.counts() == Counts(processing=0, abandoned=0, succeeded=1, failed=0)

    def test_purge_removes_entries_of_the_audit_trail_that_expired_and_does_not_count_them(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        old = [Identity(AUDIT_SCOPE, f"audit-0{number}") for number in range(3)]
        for identity in old:
            scannable.put(identity, RESULT, SHORT, owner=ANNA)
        scannable.put(ENTRY, RESULT, LONG, owner=ANNA)
        for number in range(3):  # they expire after the entries, so an index has them behind
            succeed(scannable, identity=Identity("old", str(number)), ttl=2 * SHORT)
        sleep(3 * SHORT)
        # A store whose records go by themselves may have fewer to remove, never more.
        assert [scannable.purge(limit=2) for _ in range(2)] in ([2, 1], [0, 0])
        assert [scannable.get(identity) for identity in old] == [None] * 3
        assert record_of(scannable, ENTRY).outcome == RESULT

    def test_purge_leaves_abandoned_attempts_alone_unless_asked(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        abandon(scannable, ANNA)
        sleep(2 * SHORT)
        assert scannable.purge() == 0
        assert scannable.purge(abandoned_after=LONG) == 0
        assert record_of(scannable).owner == ANNA

    def test_purge_removes_abandoned_attempts_that_nobody_holds(
        self, scannable: StoreDriver, sleep: Sleep
    ) -> None:
        held, live = Identity("purge", "held"), Identity("purge", "live")
        scannable.claim(ask(ANNA, identity=KEY))
        scannable.claim(ask(ANNA, identity=held, hold=True))
        scannable.claim(ask(ANNA, identity=live))
        park(scannable, identity=KEY)
        park(scannable, identity=held)
        sleep(2 * SHORT)
        assert scannable.purge(abandoned_after=SHORT) == 1
        assert scannable.get(KEY) is None
        assert record_of(scannable, held).hold is True
        assert record_of(scannable, live).owner == ANNA
        assert isinstance(scannable.claim(ask(BERT)), Claimed)


# --- an abandoned attempt is given to a resolver, and only to one -------------------------


class RepairContract(StoreUnderTest):
    """The resolver that adopts a record owns it: the abandoned attempt comes second everywhere."""

    @pytest.fixture
    def repairing(self, store: Store | AsyncStore, driven: StoreDriver) -> StoreDriver:
        """Drive a store that answers `AdoptRequest`."""
        if not driven.offers(AdoptRequest):
            pytest.skip(f"{type(store).__name__} does not answer AdoptRequest")
        return driven

    @pytest.mark.parametrize("hold", [False, True])
    def test_an_abandoned_attempt_is_given_to_a_resolver(
        self, repairing: StoreDriver, hold: bool
    ) -> None:
        abandon(repairing, ANNA, RED, hold=hold)
        before = record_of(repairing)
        adopted = repairing.adopt(KEY, BERT, LONG)
        assert adopted is not None
        assert (adopted.owner, adopted.number) == (BERT, before.number)
        assert adopted.fence > before.fence
        assert adopted.hold is hold
        assert adopted.fingerprint == RED
        assert adopted.created_at == before.created_at
        assert adopted.abandoned is False
        stored = record_of(repairing)
        assert (stored.owner, stored.number, stored.fence) == (BERT, 1, adopted.fence)
        assert (stored.hold, stored.fingerprint) == (hold, RED)

    def test_a_resolver_keeps_what_the_record_says_about_the_attempt(
        self, repairing: StoreDriver
    ) -> None:
        repairing.claim(ask(ANNA, hold=True))
        repairing.renew(KEY, ANNA, 0, OTHER_RUN_INFO)
        for _ in range(2):
            adopted = repairing.adopt(KEY, BERT, LONG)
            assert adopted is not None
            assert adopted.run_info == OTHER_RUN_INFO
            assert record_of(repairing).run_info == OTHER_RUN_INFO
        assert repairing.renew(KEY, BERT, -LONG) is True
        assert record_of(repairing).run_info == OTHER_RUN_INFO

    def test_a_resolver_gets_a_higher_fence_when_the_clock_was_set_back(
        self, repairing: StoreDriver, set_clock_back: Callable[[], None]
    ) -> None:
        repairing.claim(ask(ANNA))
        set_clock_back()
        park(repairing)
        before = record_of(repairing)
        adopted = repairing.adopt(KEY, BERT, LONG)
        assert adopted is not None
        assert adopted.fence > before.fence
        assert record_of(repairing).fence == adopted.fence

    def test_an_attempt_whose_lease_passed_is_given_to_a_resolver(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        repairing.claim(ask(ANNA, lease=SHORT))
        sleep(2 * SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is not None
        assert record_of(repairing).owner == BERT

    def test_adopt_sent_twice_gives_the_same_answer(self, repairing: StoreDriver) -> None:
        abandon(repairing, ANNA, hold=True)
        once, twice = (repairing.adopt(KEY, BERT, LONG) for _ in range(2))
        assert once is not None
        assert twice is not None
        assert (twice.owner, twice.number, twice.fence) == (once.owner, once.number, once.fence)

    def test_a_live_attempt_is_not_given_away(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA))
        assert repairing.adopt(KEY, BERT, LONG) is None
        assert record_of(repairing).owner == ANNA
        assert repairing.complete(KEY, ANNA, RESULT, LONG) is True

    def test_of_two_resolvers_one_gets_the_attempt(self, repairing: StoreDriver) -> None:
        abandon(repairing, ANNA, hold=True)
        assert repairing.adopt(KEY, BERT, LONG) is not None
        assert repairing.adopt(KEY, CARL, LONG) is None
        assert record_of(repairing).owner == BERT

    def test_a_revived_owner_is_refused_after_its_attempt_was_adopted(
        self, repairing: StoreDriver
    ) -> None:
        abandon(repairing, ANNA)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.renew(KEY, ANNA, LONG) is False
        assert repairing.complete(KEY, ANNA, RESULT, LONG) is False
        assert fail(repairing, ANNA) is False
        assert record_of(repairing).owner == BERT
        assert repairing.complete(KEY, BERT, RESULT, LONG) is True

    def test_callers_wait_while_a_resolver_finds_out(self, repairing: StoreDriver) -> None:
        abandon(repairing, ANNA, hold=True)
        repairing.adopt(KEY, BERT, LONG)
        assert isinstance(repairing.claim(ask(CARL)), Busy)

    def test_a_resolver_ends_what_it_adopted(self, repairing: StoreDriver) -> None:
        abandon(repairing, ANNA, hold=True)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.complete(KEY, BERT, RESULT, LONG) is True
        finished = expect(Finished, repairing.claim(ask(CARL)))
        assert finished.outcome == RESULT

    def test_a_resolver_that_does_not_know_leaves_the_record_held(
        self, repairing: StoreDriver
    ) -> None:
        abandon(repairing, ANNA, hold=True)
        repairing.adopt(KEY, BERT, LONG)
        park(repairing, BERT)
        assert repairing.claim(ask(CARL)) == Abandoned(1)
        assert repairing.adopt(KEY, CARL, LONG) is not None

    @pytest.mark.parametrize("hold", [False, True])
    def test_a_resolver_that_does_not_know_gives_the_attempt_back_with_its_age(
        self, repairing: StoreDriver, hold: bool
    ) -> None:
        abandon(repairing, ANNA, hold=hold)
        repairing.adopt(KEY, BERT, LONG)
        assert repairing.renew(KEY, BERT, -LONG / 2) is True
        record = record_of(repairing)
        assert record.abandoned is True
        assert record.lease_until is not None
        assert record.now - record.lease_until >= LONG / 2
        if repairing.offers(StuckRequest):
            (stuck,) = repairing.stuck(older_than=LONG / 2)
            assert stuck.identity == KEY
            assert repairing.stuck(older_than=LONG) == []
        assert repairing.adopt(KEY, CARL, LONG) is not None

    def test_there_is_nothing_to_adopt_where_nothing_runs(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        assert repairing.adopt(KEY, BERT, LONG) is None
        succeed(repairing, ttl=SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is None
        sleep(2 * SHORT)
        assert repairing.adopt(KEY, BERT, LONG) is None

    def test_an_owner_whose_attempt_has_ended_adopts_nothing(self, repairing: StoreDriver) -> None:
        repairing.claim(ask(ANNA))
        repairing.fail(KEY, ANNA, ERROR, retryable=True, keep_fingerprint=True, ttl=LONG)
        assert repairing.adopt(KEY, ANNA, LONG) is None

    def test_an_adopted_attempt_is_stuck_again_when_its_resolver_is_gone(
        self, repairing: StoreDriver, sleep: Sleep
    ) -> None:
        abandon(repairing, ANNA, hold=True)
        repairing.adopt(KEY, BERT, SHORT)
        sleep(2 * SHORT)
        assert record_of(repairing).abandoned is True
        if repairing.offers(StuckRequest):
            assert [record.identity for record in repairing.stuck()] == [KEY]
