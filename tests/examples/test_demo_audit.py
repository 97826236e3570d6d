"""The demo's check, on books that were made wrong by hand: it finds each kind of wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from semel import Idempotency, current_attempt

NO_ATTEMPT = SimpleNamespace(number=0, fence=0)


@pytest.fixture
def books(project, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(project))
    return Books(tmp_path)


class Books:
    """One payment, and who knows what of it."""

    def __init__(self, folder):
        from examples.demo import audit, clients, network, place, staff, storm, worker

        self.place = place.Place(folder)
        self.request = storm.storm(40, seed=1)[0].again()
        self.clients = clients.Clients([self.request])
        self.receipt = network.Receipt(charge=1, cents=self.request.payment.cents)
        self.demo = {"audit": audit, "network": network, "staff": staff, "worker": worker}

    def record(self, effect):
        """Let semel run the payment with this effect."""
        scope, payment = self.demo["worker"].SCOPE, self.request.payment
        with Idempotency(self.place.store) as idem:
            idem.execute(self.request.key, effect, scope=scope, payload=payment)

    def charge(self, token):
        with self.demo["network"].call(self.place.ledger) as network:
            return network.charge(self.request, token, current_attempt() or NO_ATTEMPT)

    def tell(self, result, request=None):
        """Answer a client."""
        answer = self.demo["worker"].Answer(request or self.request, result, ())
        self.clients.answers[self.request.key].append(answer)

    def refuse(self):
        self.tell(self.demo["worker"].Refused("payload_mismatch"))

    def end_worker(self, exit_code):
        self.clients.kills.append(self.demo["staff"].Kill(self.request, 1234, exit_code))

    @property
    def problems(self):
        audit = self.demo["audit"].Audit(self.place, self.clients)
        found = [
            *audit.of_key(self.request.key),
            *audit.of_strangers(),
            *audit.of_kills(),
        ]
        return [problem.split(f" {self.request.key}")[0] for problem in found]


def test_right_books_are_right(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    assert books.problems == []


def test_a_payment_that_was_recorded_and_never_charged_is_lost(books):
    books.record(lambda: books.receipt)
    books.tell(books.receipt)
    assert books.problems == ["LOST"]


def test_two_charges_for_one_key_are_found(books):
    books.record(lambda: [books.charge("one"), books.charge("two")])
    books.tell(books.receipt)
    assert books.problems == ["CHARGED 2 TIMES"]


def test_a_charge_that_came_again_without_a_takeover_is_found_though_no_money_moved(books):
    books.record(lambda: [books.charge("token"), books.charge("token")])
    books.tell(books.receipt)
    assert books.problems == ["REPEATED"]


def test_a_charge_without_a_record_is_found(books):
    books.charge("token")
    books.tell(books.receipt)
    assert books.problems == ["NO RECORD"]


def test_a_charge_by_another_attempt_than_the_recorded_one_is_found(books):
    books.charge("token")
    books.record(lambda: books.receipt)
    books.tell(books.receipt)
    assert books.problems == ["NO EFFECT"]


def test_a_client_that_was_refused_what_was_charged_is_found(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    books.refuse()
    assert books.problems == ["TOLD WRONGLY"]


def test_a_receipt_for_another_amount_than_asked_for_is_found(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    books.tell(books.receipt, books.request.changed())
    assert books.problems == ["TOLD WRONGLY"]


def test_a_charge_that_no_client_knows_of_is_found(books):
    books.record(lambda: books.charge("token"))
    assert books.problems == ["UNTOLD"]


def test_a_record_that_nobody_asked_for_is_found(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    books.clients.keys.clear()
    assert books.problems == ["UNKNOWN"]


def test_a_dead_worker_whose_key_nobody_took_over_is_found(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    books.end_worker(exit_code=-9)
    assert books.problems == ["NOT TAKEN OVER"]


def test_a_worker_that_was_not_really_killed_is_found(books):
    books.record(lambda: books.charge("token"))
    books.tell(books.receipt)
    books.end_worker(exit_code=0)
    assert books.problems == ["NOT KILLED: worker 1234 ended with 0", "NOT TAKEN OVER"]
