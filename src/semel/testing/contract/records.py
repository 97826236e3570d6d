"""The contract of what is kept: for how long, by marks, under which identity, and byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from semel.core.records import (
    OWNER_BYTES,
    Busy,
    Claimed,
    Encoded,
    Finished,
    GetRequest,
    Identity,
    Request,
    State,
    check_text,
)
from semel.errors import InvalidKey, RecordUnreadable
from semel.testing.contract.given import (
    ANNA,
    BERT,
    BLUE,
    CARL,
    KEY,
    LONG,
    OTHER,
    OTHER_RESULT,
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


class RetentionContract(StoreUnderTest):
    """Before any purge ran, an expired record is as if it had never been."""

    def test_an_expired_success_is_a_first_request_again(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ANNA, RED, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.get(KEY) is None
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE, max_attempts=1)))
        assert (claim.number, claim.takeover) == (1, False)
        record = record_of(driven)
        assert record.created_at == record.updated_at
        assert record.fingerprint == BLUE
        assert record.superseded == ()

    def test_an_expired_final_failure_is_a_first_request_again(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven, retryable=False, ttl=SHORT)
        sleep(2 * SHORT)
        claim = expect(Claimed, driven.claim(ask(BERT, BLUE)))
        assert claim.number == 1

    def test_the_owner_of_an_expired_record_is_refused_like_anyone(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is False
        assert fail(driven) is False
        assert driven.renew(KEY, ANNA, LONG) is False
        assert driven.get(KEY) is None

    def test_an_expired_record_cannot_be_touched_or_forgotten(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.touch(KEY, LONG) is False
        assert driven.forget(KEY) is False
        assert driven.get(KEY) is None

    def test_an_expired_record_can_be_put_anew(self, driven: StoreDriver, sleep: Sleep) -> None:
        succeed(driven, ttl=SHORT)
        sleep(2 * SHORT)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.number, record.outcome) == (1, OTHER_RESULT)

    def test_a_running_attempt_does_not_expire(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, RED, lease=LONG, ttl=SHORT))
        sleep(3 * SHORT)
        assert record_of(driven).owner == ANNA
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_a_renewed_attempt_does_not_expire(self, driven: StoreDriver, sleep: Sleep) -> None:
        driven.claim(ask(ANNA, RED, lease=SHORT, ttl=LONG))
        driven.renew(KEY, ANNA, LONG)
        sleep(3 * SHORT)
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_a_record_claimed_again_does_not_expire_by_its_old_retention(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA))
        fail(driven, ttl=4 * SHORT)
        claim = driven.claim(ask(BERT))
        sleep(6 * SHORT)
        assert isinstance(claim, Claimed)
        record = record_of(driven)
        assert record.owner == BERT
        assert record.expires_at is None

    def test_retention_longer_than_the_claim_said_is_kept(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        driven.claim(ask(ANNA, lease=LONG, ttl=SHORT))
        driven.complete(KEY, ANNA, RESULT, LONG)
        sleep(3 * SHORT)
        assert isinstance(driven.claim(ask(BERT)), Finished)


# --- marks: put, touch and forget ---------------------------------------------------------


class MarkContract(StoreUnderTest):
    """Marks write only where nothing runs and nothing is done."""

    def test_put_marks_an_unused_key_as_done(self, driven: StoreDriver) -> None:
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is True
        record = record_of(driven)
        assert record.state is State.SUCCEEDED
        assert record.owner == ANNA
        assert record.number == 1
        assert record.fence > 0
        assert record.fingerprint is None
        assert record.outcome == RESULT
        assert record.hold is False
        assert record.lease_until is None
        assert record.created_at == record.updated_at
        assert record.expires_at == pytest.approx(record.updated_at + LONG, abs=0.01)

    def test_a_put_key_is_finished_for_any_payload(self, driven: StoreDriver) -> None:
        driven.put(KEY, RESULT, LONG, owner=ANNA)
        finished = expect(Finished, driven.claim(ask(BERT, BLUE)))
        assert finished.outcome == RESULT

    def test_put_sent_twice_gives_the_same_answer_and_keeps_the_first_result(
        self, driven: StoreDriver
    ) -> None:
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is True
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=ANNA) is True
        assert record_of(driven).outcome == RESULT

    def test_put_by_another_owner_does_not_change_what_is_done(self, driven: StoreDriver) -> None:
        driven.put(KEY, RESULT, LONG, owner=ANNA)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        record = record_of(driven)
        assert (record.owner, record.outcome) == (ANNA, RESULT)

    def test_put_is_refused_beside_a_running_attempt(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is False
        assert driven.put(KEY, RESULT, LONG, owner=ANNA) is False
        assert record_of(driven).state is State.PROCESSING

    def test_put_is_refused_after_success_and_after_final_failure(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        driven.forget(KEY)
        driven.claim(ask(ANNA))
        fail(driven, retryable=False)
        assert driven.put(KEY, OTHER_RESULT, LONG, owner=BERT) is False
        assert record_of(driven).state is State.FAILED

    def test_put_ends_an_abandoned_attempt_and_its_owner_is_refused(
        self, driven: StoreDriver
    ) -> None:
        abandon(driven, ANNA, RED)
        before = record_of(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.state, record.owner, record.number) == (State.SUCCEEDED, BERT, 2)
        assert record.fence > before.fence
        assert record.created_at == before.created_at
        assert driven.complete(KEY, ANNA, OTHER_RESULT, LONG) is False
        assert record_of(driven).outcome == RESULT

    def test_put_raises_the_fence_when_the_clock_was_set_back(
        self, driven: StoreDriver, set_clock_back: Callable[[], None]
    ) -> None:
        driven.claim(ask(ANNA))
        set_clock_back()
        park(driven)
        before = record_of(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        assert record_of(driven).fence > before.fence

    def test_put_replaces_a_retryable_failure(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, RED))
        fail(driven)
        assert driven.put(KEY, RESULT, LONG, owner=BERT) is True
        record = record_of(driven)
        assert (record.state, record.outcome, record.number) == (State.SUCCEEDED, RESULT, 2)
        assert record.retryable is False

    def test_touch_keeps_a_finished_record_from_now(
        self, driven: StoreDriver, sleep: Sleep
    ) -> None:
        succeed(driven, ttl=4 * SHORT)
        assert driven.touch(KEY, LONG) is True
        sleep(6 * SHORT)
        record = record_of(driven)
        assert record.outcome == RESULT
        assert record.remaining is not None
        assert 0 < record.remaining <= LONG

    def test_touch_may_shorten_retention_too(self, driven: StoreDriver, sleep: Sleep) -> None:
        succeed(driven)
        driven.touch(KEY, SHORT)
        sleep(2 * SHORT)
        assert driven.get(KEY) is None

    def test_what_is_touched_to_be_kept_for_no_time_is_gone_at_once(
        self, driven: StoreDriver
    ) -> None:
        succeed(driven, ANNA, RED)
        assert driven.touch(KEY, 0.0) is True
        assert driven.get(KEY) is None
        assert driven.touch(KEY, 0.0) is False
        claimed = expect(Claimed, driven.claim(ask(BERT, BLUE)))
        assert claimed.number == 1

    def test_what_runs_or_is_abandoned_cannot_be_touched_away(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA, hold=True))
        assert driven.touch(KEY, 0.0) is False
        park(driven)
        assert driven.touch(KEY, 0.0) is False
        assert record_of(driven).state is State.PROCESSING
        assert driven.complete(KEY, ANNA, RESULT, LONG) is True

    def test_touch_is_refused_without_a_finished_record(self, driven: StoreDriver) -> None:
        assert driven.touch(KEY, LONG) is False
        driven.claim(ask(ANNA))
        assert driven.touch(KEY, LONG) is False
        assert record_of(driven).expires_at is None

    def test_touch_keeps_a_failure_too(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        fail(driven)
        assert driven.touch(KEY, 3 * LONG) is True
        remaining = record_of(driven).remaining
        assert remaining is not None
        assert 2 * LONG < remaining <= 3 * LONG

    def test_forget_removes_a_record_of_any_state(self, driven: StoreDriver) -> None:
        driven.claim(ask(ANNA))
        assert driven.forget(KEY) is True
        assert driven.get(KEY) is None
        succeed(driven, BERT)
        assert driven.forget(KEY) is True
        driven.claim(ask(CARL))
        fail(driven, CARL)
        assert driven.forget(KEY) is True
        assert driven.forget(KEY) is False

    def test_forget_leaves_other_keys_alone(self, driven: StoreDriver) -> None:
        succeed(driven)
        succeed(driven, identity=OTHER)
        driven.forget(KEY)
        assert driven.get(OTHER) is not None

    def test_a_forgotten_key_is_new_for_the_same_owner_too(self, driven: StoreDriver) -> None:
        succeed(driven, ANNA, RED)
        driven.forget(KEY)
        assert isinstance(driven.claim(ask(ANNA, BLUE)), Claimed)


# --- two identities that differ in anything never meet ------------------------------------


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"

PAIRS = {
    "a separator inside scope or key": (Identity("a:b", "c"), Identity("a", "b:c")),
    "scope and key swapped": (Identity("a", "b"), Identity("b", "a")),
    "the same key in two scopes": (Identity("orders", "1"), Identity("refunds", "1")),
    "digits that look like a length": (Identity("1", "1:1"), Identity("1:1", "1")),
    "upper and lower case": (Identity("s", "Abc"), Identity("s", "abc")),
    "upper and lower case in the scope": (Identity("S", "abc"), Identity("s", "abc")),
    "a trailing space": (Identity("s", "abc"), Identity("s", "abc ")),
    "a leading space": (Identity("s", "abc"), Identity("s", " abc")),
    "a trailing dot": (Identity("s", "abc"), Identity("s", "abc.")),
    "leading zeros": (Identity("s", "1"), Identity("s", "01")),
    "accents": (Identity("s", "cafe"), Identity("s", COMPOSED)),
    "forms of one accent": (Identity("s", COMPOSED), Identity("s", DECOMPOSED)),
    "sharp s": (Identity("s", "stra\u00dfe"), Identity("s", "strasse")),
    "wide letters": (Identity("s", "\uff21"), Identity("s", "A")),
    "letters beyond the basic plane": (Identity("s", "\U0001f600"), Identity("s", "\U0001f601")),
    "braces": (Identity("s", "{a}b"), Identity("s", "{a}c")),
    "empty braces": (Identity("s", "{}"), Identity("s", "{")),
    "wildcards": (Identity("s", "a%"), Identity("s", "a_")),
    "stars": (Identity("s", "*"), Identity("s", "?")),
    "quotes": (Identity("s", "a'b"), Identity("s", 'a"b')),
    "backslashes": (Identity("s", "a\\b"), Identity("s", "a\\\\b")),
    "the last of 255 characters": (Identity("s", "k" * 254 + "a"), Identity("s", "k" * 254 + "b")),
}

DIFFERENT = tuple(dict.fromkeys(each for pair in PAIRS.values() for each in pair))
"""All of them, each once: they are in one store at the same time."""

ODD_KEYS = [
    *("'; DROP TABLE idempotent_record; --", "%s", "$1", ":name", "?", "{0}", "\\x00", "\\"),
    *(
        "{",
        "}",
        "{}",
        "{{}}",
        "}{",
        "a{b}c{d}",
        "../../etc",
        "a b",
        "~",
        "\u00a0",
        "\u202e",
        "\u200b",
    ),
    *("k" * 255, "\u4e2d" * 255, "\U0001f600" * 255),
]


Kept = Callable[[Iterable[Identity]], list[Identity]]


def _is_usable(text: str) -> bool:
    try:
        check_text("text", text)
    except InvalidKey:
        return False
    return True


def _owner(number: int) -> bytes:
    """Return for each identity an owner of its own: the same one may claim again."""
    return b"%d" % (10 ** (OWNER_BYTES - 1) + number)


class IdentityContract(StoreUnderTest):
    """The identity is what the caller gave, to the last character."""

    @pytest.fixture
    def kept(self, driven: StoreDriver, rejects_texts: bool) -> Kept:
        """Return the identities that the store keeps, after it has rejected the others."""

        def kept(identities: Iterable[Identity]) -> list[Identity]:
            usable = []
            for identity in identities:
                if not rejects_texts or all(map(_is_usable, (identity.scope, identity.key))):
                    usable.append(identity)
                else:
                    with pytest.raises(InvalidKey):
                        driven.claim(ask(ANNA, identity=identity))
            return usable

        return kept

    def test_two_identities_never_meet(self, driven: StoreDriver, kept: Kept) -> None:
        different = kept(DIFFERENT)
        owners = {each: _owner(number) for number, each in enumerate(different)}
        results = {each: Encoded("json", owner) for each, owner in owners.items()}
        for each, owner in owners.items():
            assert isinstance(driven.claim(ask(owner, identity=each)), Claimed), each
        for each, owner in owners.items():
            assert driven.complete(each, owner, results[each], LONG), each
        for each in different:
            assert record_of(driven, each).outcome == results[each], each
        for one, other in PAIRS.values():
            if not {one, other} <= owners.keys():
                continue
            assert driven.forget(one) is True, one
            assert driven.get(one) is None, one
            assert record_of(driven, other).outcome == results[other], (one, other)
            # It is there again for the pairs that follow.
            assert driven.put(one, results[one], LONG, owner=owners[one]) is True, one

    def test_odd_keys_are_kept_as_they_are(self, driven: StoreDriver, kept: Kept) -> None:
        identities = kept(Identity("odd", key) for key in ODD_KEYS)
        for identity in identities:
            assert isinstance(driven.claim(ask(ANNA, identity=identity)), Claimed)
        for identity in identities:
            assert record_of(driven, identity).identity == identity
            assert isinstance(driven.claim(ask(BERT, identity=identity)), Busy)

    def test_odd_scopes_are_kept_as_they_are(self, driven: StoreDriver, kept: Kept) -> None:
        identities = kept(Identity(scope, "key") for scope in ODD_KEYS)
        for identity in identities:
            assert isinstance(driven.claim(ask(ANNA, identity=identity)), Claimed)
        for identity in identities:
            assert record_of(driven, identity).identity == identity


# --- results and errors come back as they went in -----------------------------------------


VALUES = {
    "empty": Encoded("json", b""),
    "one zero byte": Encoded("json", b"\x00"),
    "every byte": Encoded("raw", bytes(range(256))),
    "not text": Encoded("raw", b"\xff\xfe\x80"),
    "line ends": Encoded("raw", b"\r\n\r\n"),
    "looks like a number": Encoded("json", b"0"),
    "looks like null": Encoded("json", b"null"),
    "one mebibyte": Encoded("raw", bytes(range(256)) * 4096),
    "a codec of one letter": Encoded("j", b"1"),
    "a codec of 63 letters": Encoded("c" * 63, b"1"),
    "a codec with a suffix": Encoded("json+aesgcm/2", b"1"),
}

STORED = {Identity("values", name.replace(" ", "-")): value for name, value in VALUES.items()}


class ValueContract(StoreUnderTest):
    """Stores never look inside an outcome. All values are kept side by side in one store."""

    def test_a_result_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in STORED.items():
            driven.claim(ask(ANNA, identity=identity))
            assert driven.complete(identity, ANNA, value, LONG) is True, identity
        for identity, value in STORED.items():
            assert record_of(driven, identity).outcome == value, identity
            finished = driven.claim(ask(BERT, identity=identity))
            assert isinstance(finished, Finished), identity
            assert finished.outcome == value, identity

    def test_a_record_that_cannot_be_read_is_an_error_and_never_a_first_request(
        self, driven: StoreDriver, make_unreadable: Callable[[Identity], None]
    ) -> None:
        succeed(driven)
        make_unreadable(KEY)
        requests: list[Request[object]] = [GetRequest(KEY), ask(BERT), GetRequest(KEY)]
        for request in requests:
            with pytest.raises(RecordUnreadable):
                driven.ask(request)

    def test_an_error_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in STORED.items():
            driven.claim(ask(ANNA, identity=identity))
            driven.fail(identity, ANNA, value, retryable=False, keep_fingerprint=True, ttl=LONG)
        for identity, value in STORED.items():
            assert record_of(driven, identity).outcome == value, identity

    def test_a_mark_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in STORED.items():
            driven.put(identity, value, LONG, owner=ANNA)
        for identity, value in STORED.items():
            assert record_of(driven, identity).outcome == value, identity
