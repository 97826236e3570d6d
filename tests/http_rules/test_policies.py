from __future__ import annotations

import pytest

from http_rules.given import as_an_engine
from semel.core.codec import JsonCodec
from semel.core.policy import Policy
from semel.core.stored_answers import AnswerCodec
from semel.http.options import Choices
from semel.http.rules import rules_of

OURS = AnswerCodec()


class Encrypting(JsonCodec):
    """A codec of an application, built on one of ours."""

    name = "sealed/1"


@pytest.mark.parametrize(
    ("given", "used"), [(JsonCodec(), OURS), ((own := Encrypting()), own), ("msgpack", OURS)]
)
def test_only_a_codec_that_would_wrap_bytes_is_replaced(given, used):
    chosen = Choices(policy=Policy(codec=given))
    assert rules_of(chosen, as_an_engine, envelope=0, codec=OURS).codec is used
