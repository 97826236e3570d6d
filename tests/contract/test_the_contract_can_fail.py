"""A contract that nothing can break proves nothing: each broken store is caught, by name."""

from __future__ import annotations

import inspect
from contextlib import closing

import pytest

from contract import broken_stores as broken
from contract.reference_store import DictStore
from semel.stores.memory import MemoryStore
from semel.testing import FakeClock, StoreContract, StoreDriver
from semel.testing.contract.given import fail

pytestmark = pytest.mark.usefixtures("not_measured")

CAUGHT_BY = [
    (
        broken.CompleteIgnoresTheOwner,
        "test_a_late_owner_is_refused_after_takeover_and_the_new_attempt_is_untouched",
    ),
    (
        broken.FailFreesWhoeverRuns,
        "test_a_late_owner_is_refused_after_takeover_and_the_new_attempt_is_untouched",
    ),
    (
        broken.RenewRefusesAPassedLease,
        "test_a_paused_owner_that_nobody_replaced_may_still_renew",
    ),
    (
        broken.CompleteRefusesAPassedLease,
        "test_a_paused_owner_that_nobody_replaced_may_still_complete",
    ),
    (broken.ClaimChecksThenActs, "test_one_of_many_simultaneous_claims_is_claimed"),
    (
        broken.RepeatedClaimIsBusy,
        "test_a_claim_sent_twice_is_claimed_again_as_the_same_attempt",
    ),
    (
        broken.AnEndedOwnerIsGivenANewClaim,
        "test_a_late_claim_of_an_owner_that_failed_is_finished",
    ),
    (
        broken.BusyHidesAMismatch,
        "test_another_payload_while_the_first_runs_is_a_mismatch_and_changes_nothing",
    ),
    (
        broken.SecondCompleteIsRefused,
        "test_complete_sent_twice_gives_the_same_answer_and_keeps_the_first_result",
    ),
    (
        broken.SecondCompleteOverwrites,
        "test_complete_sent_twice_gives_the_same_answer_and_keeps_the_first_result",
    ),
    (broken.ExpiresOnlyByPurge, "test_an_expired_success_is_a_first_request_again"),
    (broken.RetentionStartsWithTheClaim, "test_retention_starts_when_the_operation_ends"),
    (broken.FenceRestarts, "test_the_fence_grows_over_every_kind_of_new_claim"),
    (
        broken.FenceIsTheClock,
        "test_the_fence_grows_when_the_clock_was_set_back",
    ),
    (
        broken.CompleteChecksThenActs,
        "test_a_late_complete_and_a_takeover_at_the_same_moment_never_both_succeed",
    ),
    (
        broken.TakeoverWeakensHold,
        "test_a_caller_that_would_take_over_cannot_weaken_a_held_record",
    ),
    (
        broken.CallersHoldIsIgnored,
        "test_a_caller_that_holds_does_not_take_over_a_record_that_does_not",
    ),
    (broken.RenewForgetsWhoRuns, "test_a_renewal_without_it_keeps_it"),
    (broken.ParkingDoesNotSayWhy, "test_parking_replaces_it_and_says_why"),
    (broken.ATakeoverNamesThePreviousProcess, "test_a_takeover_says_who_took_over"),
    (broken.ARepeatedClaimForgetsWhy, "test_a_repeated_claim_of_its_owner_keeps_it"),
    (broken.WhoRanItStaysInASuccess, "test_a_success_drops_it"),
    (broken.OnlySingleClaimsSayWhoRuns, "test_a_batch_carries_that_of_each_claim"),
    (broken.ListingsDoNotSayWhoRuns, "test_listings_show_who_runs_what"),
    (broken.ReplaceInterrupts, "test_a_new_payload_never_interrupts_a_live_attempt"),
    (broken.SupersededIsForgotten, "test_a_late_retry_of_the_replaced_payload_is_refused"),
    (broken.OnlyTheOldestSupersededIsRefused, "test_each_remembered_payload_is_refused"),
    (broken.PutForgetsSuperseded, "test_put_keeps_the_replaced_payloads_refused"),
    (
        broken.PayloadIsAlwaysErased,
        "test_mismatch_comes_before_a_retry_that_would_be_allowed",
    ),
    (broken.AClaimThatNeverRanCounts, "test_a_claim_that_never_ran_gives_its_number_back"),
    (
        broken.ANumberIsGivenBackTwice,
        "test_a_number_is_given_back_once_however_often_that_is_sent",
    ),
    (broken.AReplacementIsCountedOn, "test_the_attempts_of_a_replaced_payload_do_not_count"),
    (broken.IdentitiesAreJoined, "test_two_identities_never_meet"),
    (broken.CaseIsIgnored, "test_two_identities_never_meet"),
    (broken.EmptyResultIsLost, "test_a_result_comes_back_as_it_went_in"),
    (broken.UpdatedAtStands, "test_renew_and_takeover_keep_the_time_of_creation"),
    (
        broken.NothingIsKeptForNoTime,
        "test_what_is_touched_to_be_kept_for_no_time_is_gone_at_once",
    ),
    (broken.TouchEndsWhatRuns, "test_what_runs_or_is_abandoned_cannot_be_touched_away"),
    (
        broken.PutOverwrites,
        "test_put_by_another_owner_does_not_change_what_is_done",
    ),
    (
        broken.BatchAnswersInAnotherOrder,
        "test_each_claim_of_a_batch_has_its_own_answer_in_order",
    ),
    (
        broken.RequestsOfABatchDoNotSeeEachOther,
        "test_one_of_several_owners_in_a_batch_gets_the_key",
    ),
    (
        broken.RequestsOfABatchDoNotSeeEachOther,
        "test_different_requests_about_one_record_are_carried_out_one_after_another",
    ),
    (
        broken.SendRaisesTheErrorOfOneRequest,
        "test_the_error_of_one_request_takes_no_answer_from_the_others",
    ),
    (
        broken.TheUnreadableIsAbsent,
        "test_a_record_that_cannot_be_read_is_an_error_and_never_a_first_request",
    ),
    (broken.PrefixIsAPattern, "test_a_prefix_is_taken_literally"),
    (broken.PurgeTakesHeldRecords, "test_purge_removes_abandoned_attempts_that_nobody_holds"),
    (broken.TheAuditTrailIsListed, "test_the_audit_trail_is_listed_only_when_it_is_named"),
    (broken.TheAuditTrailIsCounted, "test_the_audit_trail_is_not_counted"),
    (
        broken.PurgeCountsTheAuditTrail,
        "test_purge_removes_entries_of_the_audit_trail_that_expired_and_does_not_count_them",
    ),
    (
        broken.PurgeLeavesTheAuditTrail,
        "test_purge_removes_entries_of_the_audit_trail_that_expired_and_does_not_count_them",
    ),
    (broken.AdoptInterrupts, "test_a_live_attempt_is_not_given_away"),
    (broken.AdoptForgetsTheHold, "test_an_abandoned_attempt_is_given_to_a_resolver"),
    (
        broken.AdoptForgetsWhoRan,
        "test_a_resolver_keeps_what_the_record_says_about_the_attempt",
    ),
    (broken.AdoptKeepsTheFence, "test_an_abandoned_attempt_is_given_to_a_resolver"),
    (
        broken.ParkingRestartsTheAge,
        "test_a_resolver_that_does_not_know_gives_the_attempt_back_with_its_age",
    ),
    (broken.StuckIsUnsorted, "test_stuck_shows_abandoned_attempts_oldest_first"),
]

PARAMETERS = {
    broken.RenewForgetsWhoRuns: {"lease": 600.0},
    broken.ParkingDoesNotSayWhy: {"lease": 0.0},
    broken.ATakeoverNamesThePreviousProcess: {"run_info": b"{}"},
    broken.WhoRanItStaysInASuccess: {"parked": False},
    broken.FenceIsTheClock: {"end": fail},
    broken.CompleteChecksThenActs: {"first": "complete"},
    broken.AnEndedOwnerIsGivenANewClaim: {"retryable": True},
    broken.AdoptForgetsTheHold: {"hold": True},
    broken.AdoptKeepsTheFence: {"hold": True},
    broken.ParkingRestartsTheAge: {"hold": True},
}
"""Which case of a test with several shows the fault."""


def run(test, kind, parameters):
    """Run one test of the contract on a store, as pytest would."""
    clock = FakeClock()
    method = getattr(StoreContract(), test)
    store = kind(clock=clock)
    with closing(StoreDriver(store)) as driver:
        offered = {
            "driven": driver,
            "scannable": driver,
            "repairing": driver,
            "sleep": clock.advance,
            "set_clock_back": lambda: clock.set_back(600),
            "make_unreadable": getattr(store, "make_unreadable", None),
            "kept": list,  # these stores reject no text
            **parameters,
        }
        method(**{name: offered[name] for name in inspect.signature(method).parameters})


def named(value):
    return value if isinstance(value, str) else value.__name__


@pytest.mark.parametrize(("kind", "test"), CAUGHT_BY, ids=named)
def test_a_broken_store_is_caught(kind, test):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(test, kind, PARAMETERS.get(kind, {}))


@pytest.mark.parametrize(("kind", "test"), CAUGHT_BY, ids=named)
def test_the_store_it_was_made_from_is_not(kind, test):
    honest = next(one for one in (MemoryStore, broken.OnItems, DictStore) if issubclass(kind, one))
    run(test, honest, PARAMETERS.get(kind, {}))


def test_every_broken_store_is_in_the_list():
    made_here = {
        value
        for value in vars(broken).values()
        if inspect.isclass(value) and value.__module__ == broken.__name__
    }
    assert made_here - {broken.Broken, broken.BrokenListing, broken.OnItems} == {
        kind for kind, _ in CAUGHT_BY
    }
