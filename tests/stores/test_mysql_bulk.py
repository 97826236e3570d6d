"""Claims whose rows travel apart from their statement, where a server takes that."""

from __future__ import annotations

import pytest
from asyncmy.connection import Connection as DriverConnection
from asyncmy.errors import NotSupportedError

from semel.core.records import Busy, Claimed, Identity
from semel.stores.sql.mysql import AsyncMySQLStore
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.mysql.statements import UNABLE, BatchStatements
from semel.stores.sql.mysql.tasks import Sender, connector
from servers.proxy import proxy_to
from stores.mysql_given import TABLE, ask, database_of, is_bulk, through

HASH = b"fingerprint"

pytestmark = pytest.mark.skipif(
    not hasattr(DriverConnection, "prepare"), reason="this asyncmy has no prepared statements"
)


@pytest.fixture
def server(mariadb_of_this_worker):
    return mariadb_of_this_worker


@pytest.fixture
async def store(mysql_url):
    store = AsyncMySQLStore(mysql_url)
    yield store
    await store.close()


def asks(keys, **more):
    return [ask(Identity("s", str(key)), **more) for key in keys]


def kinds_of(claims):
    return [type(claim) for claim in claims]


def prepared(server):
    """How many statements the server was given to prepare."""
    ((_, count),) = server.execute("SHOW GLOBAL STATUS LIKE 'Com_stmt_prepare'")
    return int(count)


async def test_batches_of_every_size_share_one_prepared_statement(store, server):
    await store.send(asks(["warm"]))
    before = prepared(server)
    for size in (2, 3, 5):
        claims = await store.send(asks(f"{size}-{member}" for member in range(size)))
        assert kinds_of(claims) == [Claimed] * size
    assert prepared(server) == before


@pytest.mark.parametrize("hashes", [[None, None], [HASH, HASH], [None, HASH], [HASH, None]])
async def test_fingerprints_are_kept_also_where_some_have_none(store, hashes):
    requests = [
        ask(Identity("s", str(number)), fingerprint=each) for number, each in enumerate(hashes)
    ]
    assert kinds_of(await store.send(requests)) == [Claimed, Claimed]
    records = await store.get_many([each.identity for each in requests])
    assert [record.fingerprint for record in records] == hashes


async def test_what_an_insert_made_is_told_from_what_it_met(store):
    old = asks("bd")
    await store.send(old)
    a, b, c, d, e = await store.send(requests := asks("abcde"))
    assert kinds_of([b, d]) == [Busy, Busy]
    records = await store.get_many([requests[place].identity for place in (0, 2, 4)])
    assert [(each.number, each.fence) for each in (a, c, e)] == [
        (each.number, each.fence) for each in records
    ]
    assert [(await store.get(each.identity)).owner for each in old] == [each.owner for each in old]


async def test_duplicates_after_duplicates_take_one_round_trip(server, mysql_url):
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await store.send(asks("abc"))
        trips = []
        for keys in ("abc", "abc", "def", "ghi"):
            before = proxy.requests
            await store.send(asks(keys))
            trips.append(proxy.requests - before)
        await store.close()
    assert trips == [2, 1, 1, 1], "only who expected new keys and met others had to ask again"


async def test_the_columns_of_the_application_are_written_by_the_text(server, mysql_url):
    store = AsyncMySQLStore(mysql_url, columns={"tenant": lambda claim: claim.identity.key})
    await store.migrate(columns={"tenant": "VARCHAR(20)"})
    before = prepared(server)
    assert kinds_of(await store.send(asks("b"))) == [Claimed]
    assert prepared(server) == before
    await store.close()


async def test_a_server_without_bulk_is_sent_the_text(server, mysql_url):
    address, _ = parse(mysql_url, {})
    connect = connector(address, 10.0)

    async def connect_to_mysql():
        connection = await connect()
        connection._bulk_supported = False  # what asyncmy notes of a server that is not MariaDB
        return connection

    store = AsyncMySQLStore(connect=connect_to_mysql)
    assert kinds_of(await store.send(asks("ab"))) == [Claimed, Claimed]
    before = prepared(server)
    assert kinds_of(await store.send(asks("cd"))) == [Claimed, Claimed]
    assert prepared(server) == before, "it is not asked again"
    await store.close()


async def test_a_server_that_prepares_no_more_is_sent_the_text(store, server):
    ((_, most),) = server.execute("SHOW GLOBAL VARIABLES LIKE 'max_prepared_stmt_count'")
    server.execute("SET GLOBAL max_prepared_stmt_count = 0")
    try:
        assert kinds_of(await store.send(asks("ab"))) == [Claimed, Claimed]
    finally:
        server.execute(f"SET GLOBAL max_prepared_stmt_count = {most}")


async def test_a_connection_that_is_lost_while_it_prepares_is_replaced(server, mysql_url):
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await store.counts()
        proxy.lose_reply(lambda sent: sent[4:5] == b"\x16")
        assert kinds_of(await store.send(asks("ab"))) == [Claimed, Claimed]
        assert proxy.lost == 1
        await store.close()


async def test_a_bulk_that_cannot_be_written_leaves_nothing(store, server, mysql_url):
    bad = ask(Identity("s", "\ud800"))
    await store.send(asks(["warm"]))
    *others, refused = await store.send([*asks("ab"), bad])
    assert kinds_of(others) == [Claimed, Claimed]
    assert isinstance(refused, Exception)
    select = "SELECT COUNT(*) FROM idempotent_record"
    assert server.execute(select, database=database_of(mysql_url)) == [(3,)]


class Connection:
    """What is prepared on it cannot be sent in bulk."""

    async def prepare(self, sql):
        return self

    async def execute_bulk(self, rows):
        raise NotSupportedError


async def test_a_statement_that_cannot_be_sent_in_bulk_is_not_tried_again():
    sender = Sender(Connection())
    bulk = BatchStatements(TABLE).claim_in_bulk({b"digest": ask()})
    assert await sender.send(bulk, 60.0) is UNABLE
    assert await sender.send(bulk, 60.0) is UNABLE


async def test_a_lost_reply_to_a_bulk_of_known_and_new_keys_is_answered_all_the_same(
    server, mysql_url
):
    with proxy_to(server.port) as proxy:
        store = AsyncMySQLStore(through(proxy, mysql_url))
        await store.send(asks("b"))
        proxy.lose_reply(is_bulk)
        claims = await store.send(asks("abc"))
        assert proxy.lost == 1
        assert kinds_of(claims) == [Claimed, Busy, Claimed]
        await store.close()
