"""A few odd requests at every stack; `make fuzz-http` sends 10,000."""

from __future__ import annotations

from web.fuzz import check_keys, fuzz

FEW = 30


def test_odd_requests_break_nothing(worker, folder):
    assert fuzz(worker, FEW) >= FEW
    check_keys(worker, folder.store("sqlite"))
