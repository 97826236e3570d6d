"""The contract of results and errors: bytes come back as they went in, with their codec's name."""

from __future__ import annotations

from semel.core.records import Encoded, Finished, Identity
from semel.testing.contract.given import ANNA, BERT, LONG, StoreUnderTest, ask, record_of
from semel.testing.driver import StoreDriver

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

KEPT = {Identity("values", name): value for name, value in VALUES.items()}


class ValueContract(StoreUnderTest):
    """Stores never look inside an outcome. All values are kept side by side in one store."""

    def test_a_result_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in KEPT.items():
            driven.claim(ask(ANNA, identity=identity))
            assert driven.complete(identity, ANNA, value, LONG) is True, identity
        for identity, value in KEPT.items():
            assert record_of(driven, identity).outcome == value, identity
            finished = driven.claim(ask(BERT, identity=identity))
            assert isinstance(finished, Finished), identity
            assert finished.outcome == value, identity

    def test_an_error_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in KEPT.items():
            driven.claim(ask(ANNA, identity=identity))
            driven.fail(identity, ANNA, value, retryable=False, keep_fingerprint=True, ttl=LONG)
        for identity, value in KEPT.items():
            assert record_of(driven, identity).outcome == value, identity

    def test_a_mark_comes_back_as_it_went_in(self, driven: StoreDriver) -> None:
        for identity, value in KEPT.items():
            driven.put(identity, value, LONG, owner=ANNA)
        for identity, value in KEPT.items():
            assert record_of(driven, identity).outcome == value, identity
