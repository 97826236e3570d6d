"""What a store is told: URLs, options, values. What is wrong is named, and no password is shown."""

from __future__ import annotations

import re

import pytest

from semel import open_async_store, open_store
from semel.core.records import Claimed, Encoded, Identity
from semel.errors import (
    ConfigError,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    ValueRejected,
)
from semel.stores.sql.mysql import AsyncMySQLStore, MySQLStore
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.mysql.errors import translate
from servers.mariadb import mariadb_server
from servers.redis import Certificates
from stores.mysql_given import IDENTITY, KINDS, RESULT, ask, driven, new_owner

URL = "mysql://user:secret@db.example/semel"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# --- URLs -----------------------------------------------------------------------------------


def test_a_url_says_where_the_server_is_and_how_to_get_in():
    address, options = parse("mariadb://us%40er:p%C3%A4ss%2F@[::1]:3307/my%20db?table=t", {})
    assert (address.host, address.port, address.user) == ("::1", 3307, "us@er")
    assert address.password == "p\u00e4ss/".encode()
    assert (address.database, address.tls, address.unix_socket) == ("my db", None, None)
    assert options == {"table": "t"}


def test_a_url_may_leave_things_out():
    address, options = parse("mysql://user@/semel", {})
    assert (address.host, address.port, address.password) == ("localhost", 3306, b"")
    assert options == {}


def test_nobody_is_shown_the_password():
    address, _ = parse(URL, {})
    for text in (repr(address), str(address), f"{address}", address.place):
        assert "secret" not in text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://user:secret@host", "name the database"),
        ("mysql://user:secret@host/", "name the database"),
        ("mysql://user:secret@host/a/b", "name the database"),
        ("mysql://host/semel", "name the user"),
        ("mysql://user:secret@host:port/semel", "cannot be read"),
        ("mysql://user:secret@host:99999/semel", "cannot be read"),
        ("mysql://user:secret@[host/semel", "cannot be read"),
        ("mysql://user:secret/@host/semel", "written %40"),
        (URL + "?tabel=x", "does not know the option tabel"),
        (URL + "?table=a&table=b", "table twice"),
        (URL + "?table=semel_schema", "remembers versions"),
        (URL + "?table=Payments", "lower-case letters"),
        (URL + "?table=a-b", "lower-case letters"),
        (URL + "?table=" + "t" * 60, "at most 48"),
        (URL + "?max_size=0", "max_size must be"),
        (URL + "?timeout=soon", "timeout must be"),
        (URL + "?timeout=-1", "timeout must be"),
        (URL + "?autocreate=maybe", "autocreate is on or off"),
        (URL + "?ssl_ca=/does/not/exist", "certificates"),
        (URL + "?ssl=perhaps", "ssl is on or off"),
        (URL + "?columns=x", "columns is a mapping of functions: give it by name"),
    ],
)
@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_a_wrong_url_is_named_before_anything_is_opened(opener, url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        opener(url)
    assert "secret" not in str(caught.value)


def test_options_come_by_name_or_in_the_url_not_both():
    with pytest.raises(ConfigError, match="in its URL and by name"):
        open_store(URL + "?table=a", table="b")


@pytest.mark.parametrize("store", [MySQLStore, AsyncMySQLStore])
def test_a_store_takes_a_url_or_a_function_that_connects(store):
    with pytest.raises(ConfigError, match="one of them"):
        store()
    with pytest.raises(ConfigError, match="one of them"):
        store(URL, connect=lambda: None)
    with pytest.raises(ConfigError, match="does not know the option ssl_ca"):
        store(connect=lambda: None, ssl_ca="x")


def test_a_prefix_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match="prefix has 129 characters"):
        open_store(URL, prefix="p" * 129)


async def test_a_function_may_open_the_connections_of_an_async_store(mysql_url):
    from asyncmy.connection import Connection

    address, _ = parse(mysql_url, {})
    opened = []

    async def connect():
        connection = Connection(
            host=address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            database=address.database,
        )
        await connection.connect()
        opened.append(connection)
        return connection

    store = AsyncMySQLStore(connect=connect)
    assert isinstance(await store.claim(ask()), Claimed)
    await store.close()
    (connection,) = opened
    assert not connection.connected


# --- TLS and sockets ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(certificates):
    with mariadb_server(
        f"--ssl-cert={certificates.certificate}",
        f"--ssl-key={certificates.key}",
        f"--ssl-ca={certificates.authority}",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def secure_url(secure):
    url = secure.database()
    secure.execute("SET GLOBAL require_secure_transport = 1")
    return url


@pytest.mark.parametrize("how", ["ssl_ca={}", "ssl_verify=off", "ssl=on&ssl_verify=off"])
def test_tls_is_asked_for_in_the_url(secure_url, certificates, kind, how):
    with driven(kind, f"{secure_url}?{how.format(certificates.authority)}") as store:
        assert store.put(IDENTITY, RESULT, 60, owner=new_owner()) in {True, False}


@pytest.mark.parametrize("how", ["", "?ssl=on", "?ssl=off"])
def test_a_server_that_cannot_be_trusted_or_wants_tls_is_not_spoken_to(secure_url, kind, how):
    with driven(kind, secure_url + how) as store, pytest.raises(StoreUnavailable) as caught:
        store.counts()
    assert "for tests" not in str(caught.value)


def test_a_certificate_that_will_never_do_is_refused_at_once(secure_url, kind):
    refused = pytest.raises(StoreRefused, match=r"does not agree .* on TLS; check ssl_ca")
    with driven(kind, f"{secure_url}?ssl=on", timeout=60) as store, refused:
        store.counts()


def test_a_server_without_tls_is_refused_at_once(mysql_url, kind):
    refused = pytest.raises(StoreRefused, match=r"does not agree .* on TLS")
    with driven(kind, f"{mysql_url}?ssl=on", timeout=60) as store, refused:
        store.counts()


def test_a_client_may_show_a_certificate_of_its_own(secure_url, certificates, kind):
    mine = f"ssl_ca={certificates.authority}&ssl_cert={certificates.certificate}"
    with driven(kind, f"{secure_url}?{mine}&ssl_key={certificates.key}") as store:
        assert store.counts() is not None


def test_a_unix_socket_may_be_named(mariadb_of_this_worker, mysql_url, kind):
    url = mysql_url.replace(f"127.0.0.1:{mariadb_of_this_worker.port}", "localhost:9")
    mariadb_of_this_worker.execute(
        f"CREATE USER {parse(url, {})[0].user}@localhost IDENTIFIED BY 'only for tests'"
    )
    database = parse(url, {})[0].database
    mariadb_of_this_worker.execute(f"GRANT ALL ON {database}.* TO {database}@localhost")
    socket = mariadb_of_this_worker.socket_path
    with driven(kind, f"{url}?unix_socket={socket}") as store:
        assert isinstance(store.claim(ask()), Claimed)


# --- values ---------------------------------------------------------------------------------


UNFIT = {
    "half a character": ask(Identity("s", "\ud800")),
    "a long key": ask(Identity("s", "k" * 256)),
    "a long scope": ask(Identity("s" * 256, "k")),
    "a long owner": ask(owner=b"o" * 65),
    "a long fingerprint": ask(fingerprint=b"f" * 65),
    "a lease beyond the calendar": ask(lease=1e12),
    "a lease that is no number": ask(lease=float("nan")),
    "a lease without end": ask(lease=float("inf")),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_value_that_does_not_fit_is_refused_and_never_cut(mysql_url, kind, unfit):
    with driven(kind, mysql_url) as store:
        with pytest.raises(StoreError, match="cannot take this"):
            store.claim(UNFIT[unfit])
        assert store.counts().processing == 0
        assert isinstance(store.claim(ask()), Claimed)


def test_a_retention_beyond_the_calendar_is_refused(mysql_url, kind):
    with driven(kind, mysql_url) as store:
        request = ask()
        store.claim(request)
        with pytest.raises(StoreError, match="cannot take this"):
            store.complete(IDENTITY, request.owner, RESULT, 1e12)
        assert store.get(IDENTITY).expires_at is None


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", bytes(range(256)), b"'\"\\%s%%;--", "\U0001f600".encode(), b"\xff" * 100_000],
    ids=len,
)
def test_results_come_back_to_the_last_byte(mysql_url, kind, data):
    with driven(kind, mysql_url) as store:
        request = ask()
        store.claim(request)
        assert store.complete(IDENTITY, request.owner, Encoded("raw", data), 60)
        assert store.get(IDENTITY).outcome == Encoded("raw", data)


# --- errors ---------------------------------------------------------------------------------


class _Driver(Exception):
    """Stands for a driver's."""

    __module__ = "pymysql.err"


@pytest.mark.parametrize(
    ("error", "kind_of_ours", "message"),
    [
        (_Driver(1021, "Disk full (/tmp/x)"), StoreFull, "no room left"),
        (_Driver(1030, "Got error 28 'No space left on device'"), StoreFull, "no room left"),
        (_Driver(1114, "The table is full"), StoreFull, "no room left"),
        (_Driver(1836, "Running in read-only mode"), StoreUnavailable, "takes no writes"),
        (_Driver(1047, "WSREP has not yet prepared node"), StoreUnavailable, "cannot commit"),
        (_Driver(1180, "Got error 5 during COMMIT"), StoreUnavailable, "cannot commit"),
        (_Driver(1180, "Got error 28 'No space left on device'"), StoreFull, "no room left"),
        (_Driver(3101, "Plugin instructed to rollback"), StoreUnavailable, "in favor of another"),
        (_Driver(1040, "Too many connections"), StoreUnavailable, "no connection left"),
        (_Driver(1153, "Got a packet bigger than"), ValueRejected, "cannot take this"),
        (_Driver(2013, "Lost connection"), StoreUnavailable, "was lost"),
        (_Driver(0, ""), StoreUnavailable, "was lost: closed"),
        (_Driver(9999, "something new"), StoreUnavailable, "failed"),
        (_Driver(), StoreUnavailable, "failed"),
        (ConnectionResetError(104, "reset"), StoreUnavailable, "was lost: reset"),
        (TimeoutError(), StoreUnavailable, "did not answer in time"),
        (RuntimeError("a bug"), StoreUnavailable, "failed.*a bug"),
    ],
)
def test_every_error_of_a_driver_becomes_one_of_ours(error, kind_of_ours, message):
    ours = translate(error, "the database semel at db.example:3306")
    assert type(ours) is kind_of_ours
    assert ours.__cause__ is error
    assert re.search(message, str(ours))
    assert "db.example" in str(ours)


def test_our_own_errors_pass_unchanged():
    ours = StoreFull("x")
    assert translate(ours, "anywhere") is ours
