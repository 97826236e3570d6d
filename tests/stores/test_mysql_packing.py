"""The packed read of a row: it gives what a read column by column gives, whatever the row holds."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.core.records import Busy, Claimed, Identity
from semel.errors import RecordUnreadable
from semel.stores.sql.mysql import MySQLStore
from semel.stores.sql.mysql.statements import (
    READ_COLUMNS,
    READ_NOW,
    BatchStatements,
    unpacked,
)
from semel.stores.sql.mysql.threads import send
from semel.stores.sql.mysql.verbs import MySQLVerbs
from semel.stores.sql.rows import COLUMNS
from semel.stores.sql.verbs import Reply
from stores.mysql_given import IDENTITY, KINDS, RESULT, TABLE, ask, database_of, driven, new_owner

TIMES = ("expire_at", "created_at", "updated_at", "lease_until")
MAY_BE_NULL = ("payload_hash", "result_payload", "expire_at", "codec", "lease_until", "superseded")

CHARSETS = ["utf8mb4", "utf8mb3", "latin1", "ascii", "gbk", "sjis"]
"""Of the client. A character that one does not have comes back as a question mark."""

PLAIN = {
    "payload_hash": b"h" * 32,
    "status": 1,
    "result_payload": b'{"id": 42}',
    "expire_at": "2026-11-17 12:00:00.000001",
    "created_at": "2026-11-17 11:00:00.999999",
    "updated_at": "2026-11-17 11:30:00",
    "codec": "json",
    "retryable": 0,
    "owner": b"o" * 12,
    "number": 1,
    "fence": 1_794_922_038_067_279,
    "hold": 0,
    "lease_until": "2026-11-17 11:31:00",
    "superseded": b"\x91\xc4\x01x",
    "format": 1,
}

# What UTF-8 and a column of 255 characters can hold.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=255)
moments = st.datetimes().map(str)
small, whole = st.integers(-128, 127), st.integers(-(1 << 63), (1 << 63) - 1)
rows = st.fixed_dictionaries(
    {
        "idem_key": texts,
        "biz_type": texts,
        "payload_hash": st.none() | st.binary(max_size=64),
        "status": small,
        "result_payload": st.none() | st.binary(max_size=300),
        "expire_at": st.none() | moments,
        "created_at": moments,
        "updated_at": moments,
        "codec": st.none() | texts,
        "retryable": small,
        "owner": st.binary(max_size=64),
        "number": whole,
        "fence": whole,
        "hold": small,
        "lease_until": st.none() | moments,
        "superseded": st.none() | st.binary(max_size=1024),
        "format": st.integers(-(1 << 31), (1 << 31) - 1),
    }
)


@pytest.fixture
def client(mariadb_of_this_worker, mysql_url):
    with closing(MySQLStore(mysql_url)) as store:
        store.counts()  # the table is there
    with closing(mariadb_of_this_worker.client(database=database_of(mysql_url))) as client:
        yield client


def write(client, **columns):
    """Write the one row of `IDENTITY`, whatever it says of itself."""
    values = {"idem_key": IDENTITY.key, "biz_type": IDENTITY.scope} | PLAIN | columns
    names = ", ".join(("digest", "prefix", *values))
    marks = ", ".join(["%s"] * (len(values) + 2))
    client.set_character_set("utf8mb4")
    with client.cursor() as cursor:
        # Any date may be there, also the one of zeros.
        cursor.execute("SET SESSION sql_mode = 'STRICT_ALL_TABLES'")
        cursor.execute(
            f"REPLACE INTO idempotent_record ({names}) VALUES ({marks})",  # noqa: S608 - ours
            (TABLE.digest(IDENTITY), TABLE.prefix, *values.values()),
        )


def assert_same(client, charset="utf8mb4"):
    """Compare the packed reads of one, and of many, with one that has a column for each."""
    client.set_character_set(charset)
    with client.cursor() as cursor:
        cursor.execute("SET timestamp = 1794922038.067279")  # the clock stands still
        cursor.execute(
            f"SELECT {READ_COLUMNS}, {READ_NOW}, 0 FROM idempotent_record"  # noqa: S608 - ours
        )
        (plain,) = cursor.fetchall()
    assert len(plain) == len(COLUMNS) + 2
    (alone,) = send(client, TABLE.read(IDENTITY)).rows
    assert typed(unpacked(alone)) == typed(plain)
    ((_, *among_many),) = send(client, BatchStatements(TABLE).read([TABLE.digest(IDENTITY)])).rows
    assert typed(unpacked(among_many)) == typed(plain)


def typed(row):
    return [(type(value), value) for value in row]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows)
def test_every_row_is_read_as_it_is_column_by_column(client, row):
    write(client, **row)
    assert_same(client)


@pytest.mark.parametrize("missing", MAY_BE_NULL)
def test_null_is_not_taken_for_empty(client, missing):
    for value in (None, PLAIN[missing] if missing in TIMES else b""):
        write(client, **{missing: value})
        assert_same(client)


@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize(
    "text",
    ["", "-", ",", "1,2,-,", "a, b", "it's \"\\%s%%\"", "x ", "\0\n", "K\u00e4ufer", "\u65e5\u672c", "\U0001f600" * 255],
    ids=ascii,
)  # fmt: skip
def test_keys_scopes_and_codecs_may_have_any_character(client, text, charset):
    for column in ("idem_key", "biz_type", "codec"):
        write(client, **{column: text})
        assert_same(client, charset)
    write(client, idem_key=text, biz_type=text, codec=text)
    assert_same(client, charset)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(
    "moment",
    ["0000-00-00", "0001-01-01", "1969-12-31 23:59:59.999999", "1970-01-01", "2242-03-16 12:56:31.5", "9999-12-31 23:59:59.999999"],
)  # fmt: skip
def test_times_of_every_century_are_read_to_the_microsecond(client, time, moment):
    write(client, **{time: moment})
    assert_same(client)


@pytest.mark.parametrize(
    "row",
    [
        (None, None),
        ("", None),
        (b"1,2 - 00 - abc", b""),
        ("1,2 - 00 - abc", b""),
        (f"x{',1' * 13} - 00 - abc", b""),
        (f"1{',1' * 13} - 0 - abc", b""),
    ],
    ids=["nothing", "empty", "bytes", "too few", "no number", "no bytes"],
)
def test_what_cannot_be_unpacked_is_a_damaged_record(row):
    with pytest.raises(RecordUnreadable, match="its row is damaged"):
        unpacked(row)


def test_a_damaged_member_of_a_batch_has_an_error_of_its_own():
    asks = [ask(Identity("orders", key)) for key in "ab"]
    verb = MySQLVerbs(TABLE).read_batch(asks).start()
    next(verb)
    with pytest.raises(StopIteration) as end:
        verb.send(Reply([(TABLE.digest(asks[0].identity), None, None)], 0))
    (answer,) = end.value.value.items()
    assert answer[0] == asks[0].identity
    assert isinstance(answer[1], RecordUnreadable)


# --- what an insert has just made is not read ------------------------------------------------


@pytest.fixture
def reads(client):
    """How often the server has looked for a row by its key."""

    def count():
        with client.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Handler_read_key'")
            return int(cursor.fetchone()[1])

    return count


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_claim_and_a_mark_read_no_row(client, mysql_url, reads, kind):
    with driven(kind, mysql_url) as store:
        store.get(IDENTITY)
        before = reads()
        claim = store.claim(ask())
        assert store.put(Identity("orders", "marked"), RESULT, 60.0, owner=b"o" * 12)
        assert reads() == before
        record = store.get(IDENTITY)
        assert claim == Claimed(1, record.fence)
        assert record.fence == round(record.created_at * 1e6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_knows_its_record_in_a_table_that_counts_its_rows(client, mysql_url, kind):
    with client.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE idempotent_record ADD counted BIGINT NOT NULL AUTO_INCREMENT UNIQUE"
        )
    with driven(kind, mysql_url) as store:
        for number in range(3):
            identity = Identity("orders", str(number))
            claim = store.claim(ask(identity))
            record = store.get(identity)
            assert claim == Claimed(1, record.fence)
            assert isinstance(store.claim(ask(identity)), Busy)
            marked = Identity("marked", str(number))
            assert store.put(marked, RESULT, 60.0, owner=b"o" * 12)
            assert not store.put(marked, RESULT, 60.0, owner=b"p" * 12)


def test_what_was_claimed_before_does_not_hide_a_record_from_a_look(mysql_url):
    with driven("threads", mysql_url, max_size=1) as store:
        owner = new_owner()
        store.claim(ask(owner=owner))
        assert store.get(IDENTITY).owner == owner
        assert store.claim(ask(owner=owner)) == Claimed(1, store.get(IDENTITY).fence)
        assert isinstance(store.claim(ask()), Busy)
