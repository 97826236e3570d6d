"""A record that an open transaction has is busy: the store is there, and says so."""

from __future__ import annotations

import psycopg
import pytest

from semel import ConcurrentRequest, Idempotency, Policy, WaitTimeout


@pytest.mark.parametrize(
    ("policy", "refusal"),
    [
        (Policy(store_error="open", concurrent="reject"), ConcurrentRequest),
        (Policy(store_error="open", wait_timeout=0.1), WaitTimeout),
    ],
)
def test_a_call_beside_an_open_transaction_never_runs_without_the_store(
    postgres_url, policy, refusal
):
    ran = []
    with Idempotency(postgres_url, policy=Policy(store_timeout=1.0)) as idem:
        idem.execute("warm", lambda: None)
        with psycopg.connect(postgres_url) as connection, connection.transaction():
            with idem.transaction(connection, "k") as attempt:
                attempt.result = "in the transaction"
            with pytest.raises(refusal):
                idem.execute("k", lambda: ran.append("beside"), policy=policy)
        assert not ran
        assert idem.execute("k", lambda: ran.append("after")) == "in the transaction"
    assert not ran
