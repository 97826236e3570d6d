"""The contract of identities: two that differ in anything never meet."""

from __future__ import annotations

from semel.core.records import OWNER_BYTES, Busy, Claimed, Encoded, Identity
from semel.testing.contract.given import ANNA, BERT, LONG, StoreUnderTest, ask, record_of
from semel.testing.driver import StoreDriver

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


def _owner(number: int) -> bytes:
    """Give each identity an owner of its own: the same one would be allowed to claim again."""
    return b"%d" % (10 ** (OWNER_BYTES - 1) + number)


class IdentityContract(StoreUnderTest):
    """The identity is what the caller gave, to the last character."""

    def test_two_identities_never_meet(self, driven: StoreDriver) -> None:
        owners = {each: _owner(number) for number, each in enumerate(DIFFERENT)}
        results = {each: Encoded("json", owner) for each, owner in owners.items()}
        for each, owner in owners.items():
            assert isinstance(driven.claim(ask(owner, identity=each)), Claimed), each
        for each, owner in owners.items():
            assert driven.complete(each, owner, results[each], LONG), each
        for each in DIFFERENT:
            assert record_of(driven, each).outcome == results[each], each
        for one, other in PAIRS.values():
            assert driven.forget(one) is True, one
            assert driven.get(one) is None, one
            assert record_of(driven, other).outcome == results[other], (one, other)
            # It is there again for the pairs that follow.
            assert driven.put(one, results[one], LONG, owner=owners[one]) is True, one

    def test_odd_keys_are_kept_as_they_are(self, driven: StoreDriver) -> None:
        identities = [Identity("odd", key) for key in ODD_KEYS]
        for identity in identities:
            assert isinstance(driven.claim(ask(ANNA, identity=identity)), Claimed)
        for identity in identities:
            assert record_of(driven, identity).identity == identity
            assert isinstance(driven.claim(ask(BERT, identity=identity)), Busy)

    def test_odd_scopes_are_kept_as_they_are(self, driven: StoreDriver) -> None:
        identities = [Identity(scope, "key") for scope in ODD_KEYS]
        for identity in identities:
            assert isinstance(driven.claim(ask(ANNA, identity=identity)), Claimed)
        for identity in identities:
            assert record_of(driven, identity).identity == identity
