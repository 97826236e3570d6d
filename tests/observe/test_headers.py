"""The running operation's key in the headers of messages."""

from __future__ import annotations

from semel import Idempotency, current_attempt
from semel.observe import message_headers


def test_a_message_carries_a_key_that_is_the_same_on_every_attempt():
    sent = []

    def pay():
        sent.append((message_headers("paid"), current_attempt().derive("paid")))
        if len(sent) == 1:
            raise ConnectionError("lost after it was sent")

    with Idempotency("memory://") as idem:
        try:
            idem.execute("order:42", pay, scope="orders")
        except ConnectionError:
            idem.execute("order:42", pay, scope="orders")
    (first, derived), (second, _) = sent
    assert first == second == {"idempotency-key": derived}


def test_the_header_can_have_another_name():
    with Idempotency("memory://") as idem:
        headers = idem.execute("order:42", lambda: message_headers("paid", "x-key"), scope="orders")
    assert list(headers) == ["x-key"]


def test_outside_of_an_attempt_there_is_no_key_to_carry():
    assert message_headers("paid") == {}
