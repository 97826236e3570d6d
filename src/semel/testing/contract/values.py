"""The contract of results and errors: bytes come back as they went in, with their codec's name."""

from __future__ import annotations

import pytest

from semel.core.records import Encoded, Finished
from semel.testing.contract.given import ANNA, BERT, KEY, LONG, StoreUnderTest, ask, record_of
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


class ValueContract(StoreUnderTest):
    """Stores never look inside an outcome."""

    @pytest.mark.parametrize("name", VALUES)
    def test_a_result_comes_back_as_it_went_in(self, driven: StoreDriver, name: str) -> None:
        driven.claim(ask(ANNA))
        assert driven.complete(KEY, ANNA, VALUES[name], LONG) is True
        assert record_of(driven).outcome == VALUES[name]
        finished = driven.claim(ask(BERT))
        assert isinstance(finished, Finished)
        assert finished.outcome == VALUES[name]

    @pytest.mark.parametrize("name", VALUES)
    def test_an_error_comes_back_as_it_went_in(self, driven: StoreDriver, name: str) -> None:
        driven.claim(ask(ANNA))
        driven.fail(KEY, ANNA, VALUES[name], retryable=False, keep_fingerprint=True, ttl=LONG)
        assert record_of(driven).outcome == VALUES[name]

    @pytest.mark.parametrize("name", VALUES)
    def test_a_mark_comes_back_as_it_went_in(self, driven: StoreDriver, name: str) -> None:
        driven.put(KEY, VALUES[name], LONG, owner=ANNA)
        assert record_of(driven).outcome == VALUES[name]
