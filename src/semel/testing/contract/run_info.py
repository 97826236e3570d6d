"""The contract of `run_info`: a running record says who runs it, and a finished one nothing.

Claims of all other tests bring one, too (`given.ask`), so that none of them depends on its absence.
What resolvers and listings do with it is in `operators`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.core.records import (
    RUN_INFO_BYTES,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Identity,
    RenewRequest,
    State,
)
from semel.errors import ConfigError
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    KEY,
    LONG,
    OTHER,
    OTHER_RUN_INFO,
    RED,
    RESULT,
    RUN_INFO,
    SHORT,
    Sleep,
    StoreUnderTest,
    abandon,
    ask,
    fail,
    park,
    record_of,
    succeed,
)
from semel.testing.driver import StoreDriver

VALUES = [
    b"",
    b"{}",
    b"\x00\xff'\"\\%s? \n\x00",
    b"x" * RUN_INFO_BYTES,
    b"\xff" * RUN_INFO_BYTES,
]
"""What is stored is bytes: a zero, quotes, and as many of them as there may be."""


def told(driven: StoreDriver, identity: Identity = KEY) -> bytes:
    """Read what a record says about its attempt."""
    return record_of(driven, identity).run_info


class RunInfoContract(StoreUnderTest):
    """It comes with the claim, stays while the attempt runs or is abandoned, and ends with it."""

    @pytest.mark.parametrize("run_info", VALUES)
    def test_a_running_record_says_what_its_claim_brought(
        self, driven: StoreDriver, run_info: bytes
    ) -> None:
        assert isinstance(driven.claim(ask(ANNA, RED, run_info=run_info)), Claimed)
        record = record_of(driven)
        assert record.run_info == run_info
        assert record.outcome is None

    @pytest.mark.parametrize("run_info", VALUES)
    def test_a_renewal_replaces_it(self, driven: StoreDriver, run_info: bytes) -> None:
        driven.claim(ask(ANNA))
        assert driven.renew(KEY, ANNA, LONG, run_info) is True
        assert told(driven) == run_info

    def test_a_claim_without_it_leaves_it_empty(self, driven: StoreDriver) -> None:
        driven.claim(ClaimRequest(KEY, ANNA, None, LONG, LONG))
        assert told(driven) == b""
        assert driven.renew(KEY, ANNA, LONG, RUN_INFO) is True
        assert told(driven) == RUN_INFO

    # Stores with key expiry keep an abandoned attempt that may be taken over for its ttl, LONG.
    @pytest.mark.parametrize("lease", [LONG, 0.0, -LONG / 2])
    def test_a_renewal_without_it_keeps_it(self, driven: StoreDriver, lease: float) -> None:
        driven.claim(ask(ANNA))
        assert driven.renew(KEY, ANNA, lease) is True
        assert told(driven) == RUN_INFO

    @pytest.mark.parametrize("lease", [0.0, -LONG])
    def test_parking_replaces_it_and_says_why(self, driven: StoreDriver, lease: float) -> None:
        driven.claim(ask(ANNA, hold=True))
        assert driven.renew(KEY, ANNA, lease, OTHER_RUN_INFO) is True
        record = record_of(driven)
        assert (record.run_info, record.abandoned) == (OTHER_RUN_INFO, True)
        assert driven.renew(KEY, ANNA, LONG) is True
        assert told(driven) == OTHER_RUN_INFO

    def test_a_repeated_claim_of_its_owner_keeps_it(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        driven.renew(KEY, ANNA, LONG, OTHER_RUN_INFO)
        assert isinstance(driven.claim(ask(ANNA, run_info=b"{}")), Claimed)
        assert told(driven) == OTHER_RUN_INFO

    def test_an_abandoned_attempt_keeps_it(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, lease=SHORT, hold=True))
        sleep(2 * SHORT)
        driven.claim(ask(BERT, run_info=OTHER_RUN_INFO))
        record = record_of(driven)
        assert (record.abandoned, record.run_info) == (True, RUN_INFO)

    def test_a_claim_that_is_rejected_changes_nothing_of_it(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        driven.claim(ask(BERT, RED, run_info=OTHER_RUN_INFO))
        driven.claim(ask(BERT, BLUE, run_info=OTHER_RUN_INFO))
        assert told(driven) == RUN_INFO

    def test_a_renewal_of_somebody_else_changes_nothing_of_it(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.renew(KEY, BERT, LONG, OTHER_RUN_INFO) is False
        assert driven.renew(KEY, BERT, 0, OTHER_RUN_INFO) is False
        assert told(driven) == RUN_INFO

    @pytest.mark.parametrize("run_info", [OTHER_RUN_INFO, b""])
    def test_a_takeover_says_who_took_over(self, driven: StoreDriver, run_info: bytes) -> None:
        abandon(driven, ANNA)
        assert isinstance(driven.claim(ask(BERT, run_info=run_info)), Claimed)
        assert told(driven) == run_info

    @pytest.mark.parametrize("run_info", [OTHER_RUN_INFO, b""])
    def test_a_claim_after_a_failure_says_who_runs_it_now(
        self, driven: StoreDriver, run_info: bytes
    ) -> None:
        driven.claim(ask(ANNA))
        fail(driven)
        driven.claim(ask(BERT, run_info=run_info))
        record = record_of(driven)
        assert (record.run_info, record.outcome) == (run_info, None)

    def test_a_replaced_payload_says_who_runs_the_new_one(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        driven.claim(ask(BERT, BLUE, replace=True, run_info=OTHER_RUN_INFO))
        assert told(driven) == OTHER_RUN_INFO

    def test_a_record_made_anew_after_it_was_forgotten_knows_nothing_of_the_old_one(
        self, driven: StoreDriver
    ) -> None:
        driven.claim(ask(ANNA))
        driven.forget(KEY)
        driven.claim(ask(BERT, run_info=b""))
        assert told(driven) == b""

    @pytest.mark.parametrize("parked", [False, True])
    def test_a_success_drops_it(self, driven: StoreDriver, *, parked: bool) -> None:
        driven.claim(ask(ANNA, run_info=b"x" * RUN_INFO_BYTES))
        if parked:
            park(driven)
        driven.complete(KEY, ANNA, RESULT, LONG)
        record = record_of(driven)
        assert (record.state, record.outcome, record.run_info) == (State.SUCCEEDED, RESULT, b"")

    @pytest.mark.parametrize("retryable", [True, False])
    def test_a_failure_drops_it(self, driven: StoreDriver, *, retryable: bool) -> None:
        driven.claim(ask(ANNA, run_info=b"x" * RUN_INFO_BYTES))
        fail(driven, retryable=retryable)
        record = record_of(driven)
        assert (record.state, record.run_info) == (State.FAILED, b"")

    @pytest.mark.parametrize("end", [abandon, fail])
    def test_a_mark_drops_it(self, driven: StoreDriver, end: Callable[..., object]) -> None:
        driven.claim(ask(ANNA))
        end(driven, ANNA)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.state, record.outcome, record.run_info) == (State.SUCCEEDED, RESULT, b"")

    def test_a_batch_carries_that_of_each_claim(self, driven: StoreDriver) -> None:
        keys = [Identity("batch", str(index)) for index in range(2 * len(VALUES))]
        each = [*VALUES, *reversed(VALUES)]
        abandon(driven, ANNA, identity=keys[1])
        driven.claim(ask(ANNA, identity=keys[2]))
        driven.send(
            [
                ask(BERT, identity=key, run_info=run_info)
                for key, run_info in zip(keys, each, strict=True)
            ]
        )
        expected = [*each[:2], RUN_INFO, *each[3:]]
        assert [record and record.run_info for record in driven.get_many(keys)] == expected

    def test_a_batch_without_any_payload_carries_it_too(self, driven: StoreDriver) -> None:
        keys = [Identity("batch", str(index)) for index in range(200)]
        driven.send([ask(ANNA, identity=key) for key in keys])
        records = driven.get_many(keys)
        assert {record and record.run_info for record in records} == {RUN_INFO}
        driven.send([CompleteRequest(key, ANNA, RESULT, LONG) for key in keys])
        records = driven.get_many(keys)
        assert {record and (record.outcome, record.run_info) for record in records} == {
            (RESULT, b"")
        }

    @pytest.mark.parametrize("lease", [LONG, 0.0])
    @pytest.mark.parametrize(
        "each", [(None, None), (OTHER_RUN_INFO, None), (b"", OTHER_RUN_INFO), (b"{}", b"{}")]
    )
    def test_a_batch_of_renewals_keeps_or_replaces_each(
        self, driven: StoreDriver, lease: float, each: tuple[bytes | None, bytes | None]
    ) -> None:
        keys = (KEY, OTHER)
        for key in keys:
            driven.claim(ask(ANNA, identity=key))
        renewals = [
            RenewRequest(key, ANNA, lease, run_info)
            for key, run_info in zip(keys, each, strict=True)
        ]
        assert driven.send(renewals) == [True, True]
        expected = [RUN_INFO if run_info is None else run_info for run_info in each]
        assert [told(driven, key) for key in keys] == expected

    def test_more_than_a_record_keeps_is_refused_before_anything_is_stored(
        self, driven: StoreDriver
    ) -> None:
        too_long = b"x" * (RUN_INFO_BYTES + 1)
        with pytest.raises(ConfigError, match=f"run_info has {RUN_INFO_BYTES + 1} bytes"):
            driven.claim(ask(ANNA, run_info=too_long))
        assert driven.get(KEY) is None
        driven.claim(ask(ANNA))
        with pytest.raises(ConfigError, match=f"run_info has {RUN_INFO_BYTES + 1} bytes"):
            driven.renew(KEY, ANNA, 0, too_long)
        record = record_of(driven)
        assert (record.run_info, record.abandoned) == (RUN_INFO, False)
        park(driven)
        with pytest.raises(ConfigError, match=f"run_info has {RUN_INFO_BYTES + 1} bytes"):
            driven.claim(ask(BERT, run_info=too_long))
        record = record_of(driven)
        assert (record.owner, record.run_info, record.abandoned) == (ANNA, RUN_INFO, True)

    def test_a_batch_refuses_more_than_records_keep(self, driven: StoreDriver) -> None:
        keys, too_long = (KEY, OTHER), b"x" * (RUN_INFO_BYTES + 1)
        for payload in (RED, None):
            with pytest.raises(ConfigError, match=f"run_info has {RUN_INFO_BYTES + 1} bytes"):
                driven.send([ask(ANNA, payload, identity=key, run_info=too_long) for key in keys])
        assert list(driven.get_many(keys)) == [None, None]
