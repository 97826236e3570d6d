"""One row that cannot be read: the others are listed, it is named by its digest, and it can go."""

from __future__ import annotations

import contextlib
import sqlite3
import traceback
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest

from semel import Idempotency, open_async_store, open_store
from semel.core.records import Claimed, ClaimRequest, Encoded, Identity
from semel.errors import RecordUnreadable, StoreError
from semel.testing import StoreDriver

RESULT = Encoded("json", b"1")
KEYS = [Identity("orders", key) for key in "abcde"]
BAD = KEYS[2]
PAGES = {10: ["abde"], 3: ["ab", "de"], 1: ["a", "b", "", "d", "e"]}
EXPIRED = {
    "sqlite": "expire_at = 1",
    "postgresql": "expire_at = now() - interval '1 hour'",
    "mysql": "expire_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR",
}
FAR_AHEAD = 1 << 53
DAMAGES = {"status = 7": "row is damaged", "format = 9": "newer version"}


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def url(request) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=[open_store, open_async_store])
def store(request, url):
    with contextlib.closing(StoreDriver(request.param(url))) as driver:
        yield driver


@pytest.fixture(params=DAMAGES)
def damage(request) -> str:
    return request.param


def run(url: str, sql: str) -> None:
    """Run a statement behind the store's back."""
    parts = urlsplit(url)
    match parts.scheme:
        case "sqlite":
            connection = sqlite3.connect(parts.path.removeprefix("/"))
        case "postgresql":
            connection = psycopg.connect(url)
        case _:
            connection = pymysql.connect(
                host=parts.hostname,
                port=parts.port,
                user=parts.username,
                password=unquote(parts.password),
                database=parts.path[1:],
            )
    with contextlib.closing(connection):
        connection.cursor().execute(sql)
        connection.commit()


def spoil(url: str, damage: str) -> None:
    run(url, f"UPDATE idempotent_record SET {damage} WHERE idem_key = '{BAD.key}'")  # noqa: S608 - ours


def expire(url: str) -> None:
    spoil(url, EXPIRED[urlsplit(url).scheme])


def fill(store) -> None:
    for number, identity in enumerate(KEYS):
        assert store.put(identity, RESULT, 600, owner=number.to_bytes(12))


def pages(store, limit: int) -> list[list[str]]:
    found, cursor = [], None
    while True:
        page = store.scan(limit=limit, cursor=cursor)
        found.append([record.identity.key for record in page.records])
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", PAGES)
def test_a_listing_leaves_it_out_and_goes_on(store, url, damage, caplog, limit):
    fill(store)
    spoil(url, damage)
    assert pages(store, limit) == [list(page) for page in PAGES[limit]]
    assert BAD.digest.hex() in caplog.text
    assert DAMAGES[damage] in caplog.text


def test_it_does_not_hide_other_stuck_records(store, url, caplog):
    for number, identity in enumerate(KEYS):
        owner = number.to_bytes(12)
        store.claim(ClaimRequest(identity, owner, None, 600.0, 600.0))
        assert store.renew(identity, owner, 0.0)
    spoil(url, "format = 9")
    assert {record.identity.key for record in store.stuck()} == set("abde")
    assert BAD.digest.hex() in caplog.text


def test_it_is_refused_by_name_until_it_is_forgotten(store, url, damage):
    fill(store)
    spoil(url, damage)
    with pytest.raises(RecordUnreadable, match=DAMAGES[damage]):
        store.get(BAD)
    assert store.forget(BAD)
    assert not store.forget(BAD)
    assert store.get(BAD) is None
    assert store.put(BAD, RESULT, 600, owner=b"again".ljust(12))


def test_many_are_forgotten_with_it(store, url, damage):
    fill(store)
    spoil(url, damage)
    assert store.forget_many(KEYS) == [True] * len(KEYS)


@pytest.mark.parametrize("many", [False, True], ids=["alone", "in a batch"])
def test_once_expired_it_counts_as_absent(store, url, damage, many):
    fill(store)
    spoil(url, f"{damage}, fence = {FAR_AHEAD}")
    expire(url)
    assert store.get(BAD) is None
    assert not store.complete(BAD, (2).to_bytes(12), RESULT, 600)
    requests = [ClaimRequest(key, b"again".ljust(12), None, 600.0, 600.0) for key in KEYS[2:4]]
    claim = store.send(requests)[0] if many else store.claim(requests[0])
    assert claim == Claimed(1, FAR_AHEAD + 1)
    assert store.get(BAD).owner == b"again".ljust(12)


def test_once_expired_it_may_be_marked(store, url, damage):
    fill(store)
    spoil(url, damage)
    expire(url)
    assert store.put(BAD, RESULT, 600, owner=b"again".ljust(12))
    assert store.get(BAD).outcome == RESULT


def test_once_expired_it_is_forgotten_as_nothing_and_is_gone(store, url, damage):
    fill(store)
    spoil(url, damage)
    expire(url)
    assert not store.forget(BAD)
    spoil(url, "status = 1, format = 1, expire_at = NULL")
    assert store.get(BAD) is None


CARD = Identity("orders", "card-4111111111111111")
MISNAMED = {
    "postgresql": "digest = gen_random_uuid()",
    "mysql": "digest = unhex(md5('another'))",
}
"""Rows that have a key of ours and another digest: no statement of semel finds them, or may pass."""


def chain_of(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("database", ["postgres", "mysql"])
@pytest.mark.parametrize("opened", [open_store, open_async_store])
def test_a_row_under_another_digest_is_an_error_that_has_no_raw_key(request, database, opened):
    url = request.getfixturevalue(f"{database}_url")
    with contextlib.closing(StoreDriver(opened(url))) as store:
        assert store.put(CARD, RESULT, 600, owner=b"anna".ljust(12))
        run(url, f"UPDATE idempotent_record SET {MISNAMED[urlsplit(url).scheme]}")  # noqa: S608 - ours
        for verb in (
            lambda: store.claim(ClaimRequest(CARD, b"bob".ljust(12), None, 600.0, 600.0)),
            lambda: store.put(CARD, RESULT, 600, owner=b"bob".ljust(12)),
        ):
            with pytest.raises(StoreError) as caught:
                verb()
            said = "".join(traceback.format_exception(caught.value))
            assert "that semel did not write" in said or "that is not semel's" in said
            # What a traceback shows of each error: source lines of this file aside.
            assert all(CARD.key not in str(error) for error in chain_of(caught.value))


def test_an_engine_lists_the_others(url):
    with contextlib.closing(open_store(url)) as store:
        fill(store)
        spoil(url, "format = 9")
        assert [record.identity.key for record in Idempotency(store).records()] == list("abde")


def test_a_running_row_of_a_release_without_run_info_says_nothing(store, url):
    owner = b"anna".ljust(12)
    store.claim(ClaimRequest(BAD, owner, None, 600.0, 600.0, run_info=b"{}"))
    assert store.get(BAD).run_info == b"{}"
    spoil(url, "result_payload = NULL")
    assert store.get(BAD).run_info == b""
    assert store.renew(BAD, owner, 600.0)
    assert store.get(BAD).run_info == b""
    assert store.renew(BAD, owner, 0.0, b"[]")
    assert [record.run_info for record in store.stuck()] == [b"[]"]


def test_what_is_not_bytes_is_no_run_info(sqlite_url):
    with contextlib.closing(open_store(sqlite_url)) as store:
        store.claim(ClaimRequest(BAD, b"anna".ljust(12), None, 600.0, 600.0))
        for damage in ("42", "'a text'"):
            spoil(sqlite_url, f"result_payload = {damage}")
            assert store.get(BAD).run_info == b""
