"""Servers that die at any moment, on PostgreSQL and MariaDB: each key has one effect, one record.

| # | fault | expected with `session=` |
|---|---|---|
| 3 | crash after the claim, before the effect | rolled back, a retry runs |
| 4 | crash after the effect, before the record | rolled back, one effect in the end |
| 5 | crash inside the commit, or before its answer is sent | both or none; a retry tells which |
"""

from __future__ import annotations

import pytest

from adapters.session_kills import KILLED, Till

pytestmark = pytest.mark.usefixtures("not_measured")

KILLS = 5
"""For each database and kind of endpoint: twenty on each database."""


@pytest.mark.fault(3, 4, 5)
@pytest.mark.timeout(600)  # on a machine whose cores are busy a new server takes its time
@pytest.mark.parametrize("database", ["postgres_url", "mysql_url"])
@pytest.mark.parametrize("kind", KILLED, ids=str)
def test_servers_killed_at_random_leave_one_effect_and_one_record_for_each_key(
    request, database, kind
):
    till = Till(request.getfixturevalue(database), kind)
    till.run(KILLS, within=0.05)
    assert till.kills == KILLS
    assert till.check() > KILLS
    assert till.broken > 0, "no kill met a request"
