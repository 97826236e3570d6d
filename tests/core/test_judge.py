"""The law of the record, line by line, and its table against what it does."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from semel.core import judge
from semel.core.records import (
    SUPERSEDED_LIMIT,
    Abandoned,
    AdoptRequest,
    Busy,
    Claimed,
    ClaimRequest,
    CompleteRequest,
    Encoded,
    Exhausted,
    FailRequest,
    Finished,
    Identity,
    Mismatch,
    PutRequest,
    Record,
    RenewRequest,
    State,
    TouchRequest,
)

NOW = 1_000.0
KEY = Identity("orders", "42")
ANNA, BERT = b"anna" * 3, b"bert" * 3
RED, BLUE = b"red." * 4, b"blue" * 4
ANNAS_RUN, BERTS_RUN = b'{"by":"anna:1"}', b'{"by":"bert:1"}'
RESULT, OTHER_RESULT = Encoded("json", b"1"), Encoded("json", b"2")


def running(**changes):
    record = Record(
        identity=KEY,
        state=State.PROCESSING,
        owner=ANNA,
        number=3,
        fence=77,
        hold=False,
        created_at=NOW - 20,
        updated_at=NOW - 10,
        now=NOW - 10,
        fingerprint=RED,
        lease_until=NOW + 30,
        run_info=ANNAS_RUN,
    )
    return replace(record, **changes)


def abandoned(**changes):
    return running(lease_until=NOW, **changes)


def ended(state=State.SUCCEEDED, **changes):
    end = {"state": state, "lease_until": None, "expires_at": NOW + 60, "outcome": RESULT}
    return running(**end | {"run_info": b""} | changes)


def ask(owner=BERT, fingerprint=RED, **changes):
    return replace(ClaimRequest(KEY, owner, fingerprint, lease=30.0, ttl=60.0), **changes)


def fail(record, owner=ANNA, *, retryable=True, keep_fingerprint=True, ran=True, now=NOW):
    ask = FailRequest(KEY, owner, OTHER_RESULT, retryable, keep_fingerprint, ttl=60.0, ran=ran)
    return judge.fail(record, ask, now)


# --- what is present ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "is_present"),
    [
        (None, False),
        (running(), True),
        (abandoned(), True),
        (ended(), True),
        (ended(expires_at=NOW), False),
        (ended(expires_at=NOW - 1), False),
    ],
)
def test_a_record_is_present_until_the_moment_it_expires(record, is_present):
    assert judge.present(record, NOW) == (record if is_present else None)


# --- claim -------------------------------------------------------------------------------


def test_a_first_claim_makes_a_record():
    claim, record = judge.claim(None, ask(ANNA, hold=True), NOW)
    assert claim == Claimed(number=1, fence=1_000_000_000, takeover=False)
    assert record == Record(
        identity=KEY,
        state=State.PROCESSING,
        owner=ANNA,
        number=1,
        fence=1_000_000_000,
        hold=True,
        created_at=NOW,
        updated_at=NOW,
        now=NOW,
        fingerprint=RED,
        lease_until=NOW + 30,
    )


@pytest.mark.parametrize(
    ("record", "request_", "answer"),
    [
        # own
        (running(), ask(ANNA), Claimed(3, 77)),
        (running(), ask(ANNA, BLUE), Claimed(3, 77)),
        (abandoned(hold=True), ask(ANNA, hold=True, max_attempts=1), Claimed(3, 77)),
        # ended
        (ended(), ask(ANNA, BLUE, replace=True), Finished(State.SUCCEEDED, RESULT, 3, 77, 60)),
        (ended(State.FAILED, retryable=True), ask(ANNA), Finished(State.FAILED, RESULT, 3, 77, 60)),
        # mismatch
        (running(), ask(BERT, BLUE), Mismatch()),
        (abandoned(hold=True), ask(BERT, BLUE, hold=True, max_attempts=1), Mismatch()),
        (ended(), ask(BERT, BLUE), Mismatch()),
        (ended(State.FAILED, retryable=True), ask(BERT, BLUE), Mismatch()),
        (ended(superseded=(BLUE,)), ask(BERT, BLUE, replace=True), Mismatch(superseded=True)),
        (running(superseded=(BLUE,)), ask(BERT, BLUE, replace=True), Mismatch(superseded=True)),
        (
            ended(State.FAILED, retryable=True, fingerprint=None, superseded=(BLUE,)),
            ask(BERT, BLUE, replace=True),
            Mismatch(superseded=True),
        ),
        (ended(superseded=(BLUE,)), ask(BERT, BLUE), Mismatch()),
        # finished
        (ended(), ask(hold=True, max_attempts=1), Finished(State.SUCCEEDED, RESULT, 3, 77, 60)),
        (ended(), ask(replace=True), Finished(State.SUCCEEDED, RESULT, 3, 77, 60)),
        (ended(), ask(fingerprint=None), Finished(State.SUCCEEDED, RESULT, 3, 77, 60)),
        (ended(State.FAILED), ask(), Finished(State.FAILED, RESULT, 3, 77, 60)),
        # busy
        (running(), ask(hold=True, max_attempts=1), Busy(30.0, ANNA)),
        (running(), ask(BERT, BLUE, replace=True), Busy(30.0, ANNA)),
        (running(fingerprint=None), ask(BERT, BLUE), Busy(30.0, ANNA)),
        # held
        (abandoned(hold=True), ask(max_attempts=1), Abandoned(3)),
        (abandoned(), ask(hold=True, max_attempts=1), Abandoned(3)),
        (abandoned(hold=True), ask(BERT, BLUE, replace=True), Abandoned(3)),
        # exhausted
        (abandoned(), ask(max_attempts=3), Exhausted(3)),
        (ended(State.FAILED, retryable=True), ask(max_attempts=3), Exhausted(3)),
    ],
)
def test_the_first_line_of_the_law_that_fits_is_the_answer(record, request_, answer):
    claim, written = judge.claim(record, request_, NOW)
    assert claim == answer
    if not isinstance(claim, Claimed):
        assert written is None


def test_an_own_claim_refreshes_the_lease_and_nothing_else():
    again = ask(ANNA, BLUE, hold=False, run_info=BERTS_RUN)
    _, record = judge.claim(running(hold=True), again, NOW)
    assert record == running(hold=True, lease_until=NOW + 30, updated_at=NOW, now=NOW)


@pytest.mark.parametrize(
    ("record", "takeover"),
    [(abandoned(), True), (ended(State.FAILED, retryable=True), False)],
)
def test_a_later_claim_counts_on_and_writes_its_own_terms(record, takeover):
    request = ask(hold=not record.hold and not takeover, run_info=BERTS_RUN)
    claim, written = judge.claim(record, request, NOW)
    assert claim == Claimed(4, 1_000_000_000, takeover)
    assert written == Record(
        identity=KEY,
        state=State.PROCESSING,
        owner=BERT,
        number=4,
        fence=1_000_000_000,
        hold=not takeover,
        created_at=record.created_at,
        updated_at=NOW,
        now=NOW,
        fingerprint=RED,
        lease_until=NOW + 30,
        run_info=BERTS_RUN,
    )


def test_an_expired_record_is_claimed_as_new_but_its_fence_is_kept_in_order():
    stored = ended(expires_at=NOW, fence=2_000_000_000, superseded=(BLUE,))
    claim, record = judge.claim(stored, ask(BERT, BLUE), NOW)
    assert claim == Claimed(1, 2_000_000_001, takeover=False)
    assert record is not None
    assert (record.created_at, record.superseded) == (NOW, ())


def test_a_fence_grows_although_the_clock_went_back():
    claim, _ = judge.claim(abandoned(fence=5_000_000_000), ask(), NOW)
    assert claim == Claimed(4, 5_000_000_001, takeover=True)


def test_a_caller_without_a_payload_keeps_the_one_that_is_known():
    _, record = judge.claim(abandoned(), ask(fingerprint=None), NOW)
    assert record is not None
    assert (record.fingerprint, record.superseded) == (RED, ())


def test_a_payload_is_remembered_from_the_first_claim_that_brings_one():
    _, record = judge.claim(abandoned(fingerprint=None), ask(BERT, BLUE), NOW)
    assert record is not None
    assert (record.fingerprint, record.superseded) == (BLUE, ())


@pytest.mark.parametrize("record", [ended(), ended(State.FAILED), abandoned()])
def test_a_replaced_payload_is_remembered(record):
    claim, written = judge.claim(record, ask(BERT, BLUE, replace=True), NOW)
    assert isinstance(claim, Claimed)
    assert written is not None
    assert (written.fingerprint, written.superseded) == (BLUE, (RED,))


@pytest.mark.parametrize("record", [ended(), ended(State.FAILED), abandoned()])
def test_a_payload_that_replaces_another_is_counted_from_one(record):
    claim, written = judge.claim(record, ask(BERT, BLUE, replace=True, max_attempts=1), NOW)
    assert isinstance(claim, Claimed)
    assert written is not None
    assert claim.number == written.number == 1
    assert claim.fence == written.fence > record.fence


def test_only_the_last_replaced_payloads_are_remembered():
    many = tuple(bytes([index]) * 16 for index in range(SUPERSEDED_LIMIT))
    _, record = judge.claim(ended(superseded=many), ask(BERT, BLUE, replace=True), NOW)
    assert record is not None
    assert record.superseded == (*many[1:], RED)


def test_the_answer_of_a_record_that_never_said_when_it_expires_is_kept_for_no_time():
    claim, _ = judge.claim(ended(expires_at=None), ask(), NOW)
    assert claim == Finished(State.SUCCEEDED, RESULT, 3, 77, 0.0)


def test_processing_without_a_lease_counts_as_abandoned():
    claim, _ = judge.claim(running(lease_until=None), ask(), NOW)
    assert isinstance(claim, Claimed)


# --- renew, complete, fail ---------------------------------------------------------------


@pytest.mark.parametrize("record", [running(), abandoned(), running(lease_until=NOW - 99)])
def test_the_owner_renews_whether_or_not_its_lease_has_passed(record):
    renewed = judge.renew(record, RenewRequest(KEY, ANNA, 30.0), NOW)
    assert renewed == replace(record, lease_until=NOW + 30, updated_at=NOW, now=NOW)


def test_a_renewal_may_say_anew_what_runs_and_why():
    said = judge.renew(running(), RenewRequest(KEY, ANNA, 30.0, BERTS_RUN), NOW)
    assert said == running(lease_until=NOW + 30, updated_at=NOW, now=NOW, run_info=BERTS_RUN)
    nothing = judge.renew(running(), RenewRequest(KEY, ANNA, 30.0, b""), NOW)
    assert nothing == running(lease_until=NOW + 30, updated_at=NOW, now=NOW, run_info=b"")


def test_a_lease_of_zero_abandons_at_once():
    parked = judge.renew(running(), RenewRequest(KEY, ANNA, 0), NOW)
    assert parked is not None
    assert parked.abandoned is True


@pytest.mark.parametrize("record", [running(), abandoned()])
def test_the_owner_completes_whether_or_not_its_lease_has_passed(record):
    done = judge.complete(record, CompleteRequest(KEY, ANNA, RESULT, 60.0), NOW)
    assert done == replace(
        record,
        state=State.SUCCEEDED,
        outcome=RESULT,
        lease_until=None,
        expires_at=NOW + 60,
        updated_at=NOW,
        now=NOW,
        run_info=b"",
    )


@pytest.mark.parametrize(("retryable", "keep"), [*product([True, False], repeat=2)])
def test_the_owner_fails_and_says_who_may_try_again(retryable, keep):
    failed = fail(running(), retryable=retryable, keep_fingerprint=keep)
    assert failed == replace(
        running(),
        state=State.FAILED,
        outcome=OTHER_RESULT,
        retryable=retryable,
        fingerprint=RED if keep else None,
        lease_until=None,
        expires_at=NOW + 60,
        updated_at=NOW,
        now=NOW,
        run_info=b"",
    )


def test_a_claim_that_never_ran_gives_its_number_back_once():
    given_back = fail(running(), ran=False)
    assert given_back is not None
    assert (given_back.number, given_back.fence) == (2, 77)
    assert fail(given_back, ran=False) is given_back


def test_a_repeated_end_changes_nothing():
    done, failed = ended(), ended(State.FAILED, retryable=True)
    assert judge.complete(done, CompleteRequest(KEY, ANNA, OTHER_RESULT, 9.0), NOW) is done
    assert fail(failed, retryable=False, keep_fingerprint=False) is failed


@pytest.mark.parametrize(
    "record",
    [None, running(owner=BERT), ended(owner=BERT), ended(State.FAILED, owner=BERT)],
)
def test_nobody_but_the_owner_writes(record):
    assert judge.renew(record, RenewRequest(KEY, ANNA, 30.0), NOW) is None
    assert judge.complete(record, CompleteRequest(KEY, ANNA, RESULT, 60.0), NOW) is None
    assert fail(record) is None


def test_an_attempt_ends_once():
    assert judge.complete(ended(State.FAILED), CompleteRequest(KEY, ANNA, RESULT, 9.0), NOW) is None
    assert fail(ended()) is None
    assert judge.renew(ended(), RenewRequest(KEY, ANNA, 30.0), NOW) is None


def test_the_owner_of_an_expired_record_is_refused():
    gone = ended(expires_at=NOW)
    assert judge.complete(gone, CompleteRequest(KEY, ANNA, RESULT, 9.0), NOW) is None
    assert fail(ended(State.FAILED, expires_at=NOW)) is None


# --- put, touch --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "number", "created_at"),
    [
        (None, 1, NOW),
        (ended(expires_at=NOW), 1, NOW),
        (abandoned(), 4, NOW - 20),
        (ended(State.FAILED, retryable=True), 4, NOW - 20),
    ],
)
def test_a_mark_is_put_where_nothing_runs_and_nothing_is_done(record, number, created_at):
    marked = judge.put(record, PutRequest(KEY, BERT, OTHER_RESULT, 60.0), NOW)
    assert marked == Record(
        identity=KEY,
        state=State.SUCCEEDED,
        owner=BERT,
        number=number,
        fence=1_000_000_000,
        hold=False,
        created_at=created_at,
        updated_at=NOW,
        expires_at=NOW + 60,
        outcome=OTHER_RESULT,
        now=NOW,
    )


@pytest.mark.parametrize("record", [running(), abandoned(hold=True), ended(), ended(State.FAILED)])
def test_a_mark_is_refused_where_something_runs_or_is_done_or_held(record):
    assert judge.put(record, PutRequest(KEY, BERT, RESULT, 60.0), NOW) is None


def test_a_mark_put_twice_changes_nothing():
    marked = ended(owner=BERT)
    assert judge.put(marked, PutRequest(KEY, BERT, OTHER_RESULT, 9.0), NOW) is marked


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_touch_moves_the_end_of_a_finished_record_and_nothing_else(state):
    assert judge.touch(ended(state), TouchRequest(KEY, 5.0), NOW) == ended(
        state, expires_at=NOW + 5, now=NOW
    )


@pytest.mark.parametrize("record", [None, running(), abandoned(), ended(expires_at=NOW)])
def test_touch_is_refused_without_a_finished_record(record):
    assert judge.touch(record, TouchRequest(KEY, 5.0), NOW) is None


@pytest.mark.parametrize("hold", [False, True])
def test_an_abandoned_attempt_changes_hands_and_nothing_else(hold):
    adopted = judge.adopt(abandoned(hold=hold), AdoptRequest(KEY, BERT, 5.0), NOW)
    assert adopted == running(
        hold=hold, owner=BERT, fence=1_000_000_000, lease_until=NOW + 5, updated_at=NOW, now=NOW
    )


def test_adopting_again_keeps_the_fence():
    adopted = judge.adopt(running(owner=BERT), AdoptRequest(KEY, BERT, 5.0), NOW)
    assert adopted == running(owner=BERT, lease_until=NOW + 5, updated_at=NOW, now=NOW)


@pytest.mark.parametrize("record", [None, running(), ended(), ended(State.FAILED, retryable=True)])
def test_only_an_abandoned_attempt_is_adopted(record):
    assert judge.adopt(record, AdoptRequest(KEY, BERT, 5.0), NOW) is None


# --- the table ---------------------------------------------------------------------------

EXAMPLES = [
    None,
    running(),
    running(owner=BERT),
    abandoned(),
    abandoned(hold=True),
    ended(),
    ended(owner=BERT),
    ended(State.FAILED),
    ended(State.FAILED, retryable=True),
]


def steps():
    """Every verb, by both owners and with both payloads, on a record of every kind."""
    for record, owner, payload in product(EXAMPLES, (ANNA, BERT), (RED, BLUE)):
        for loose in (False, True):
            yield record, "claim", judge.claim(record, ask(owner, payload, replace=loose), NOW)[1]
        yield record, "renew", judge.renew(record, RenewRequest(KEY, owner, 30.0), NOW)
        yield (
            record,
            "complete",
            judge.complete(record, CompleteRequest(KEY, owner, RESULT, 9), NOW),
        )
        yield record, "fail", fail(record, owner)
        yield record, "put", judge.put(record, PutRequest(KEY, owner, RESULT, 9.0), NOW)
        yield record, "touch", judge.touch(record, TouchRequest(KEY, 9.0), NOW)
        yield record, "adopt", judge.adopt(record, AdoptRequest(KEY, owner, 30.0), NOW)


def test_the_table_says_exactly_what_the_law_does():
    done: dict[State | None, dict[str, State | None]] = {None: {}}
    for state in State:
        done[state] = {"forget": None}  # stores remove by themselves, there is nothing to judge
    for before, verb, after in steps():
        if after is not None:
            state = None if before is None else before.state
            assert done[state].setdefault(verb, after.state) is after.state
    assert done == judge.NEXT
