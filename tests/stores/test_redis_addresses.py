"""URLs and addresses: what is accepted, and how a mistake is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import ConfigError
from semel.stores.redis import open_async_store, open_store
from semel.stores.redis.clients import Kind, parse_addresses, parse_url

GOOD = {
    "a:1": [("a", 1)],
    "a": [("a", 6379)],
    "a:1,b:2": [("a", 1), ("b", 2)],
    "a:1;b:2;c:3": [("a", 1), ("b", 2), ("c", 3)],
    "a:1, b:2": [("a", 1), ("b", 2)],
    "[::1]:6380": [("::1", 6380)],
    "[fe80::1]": [("fe80::1", 6379)],
    "10.0.0.1:65535": [("10.0.0.1", 65535)],
}

BAD = [
    "", "a:1,", ";a:1", "a:", ":1", "a:x", "a:0", "a:65536", "a:-1", "a:1:2", "::1", "[::1", "[::1]6379",
    "a:1,b:2 x", "a b:1", "a:٣", "a:1/0", "user@a:1",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GOOD.items())
def test_addresses_are_read(text, expected):
    assert parse_addresses(text) == expected


@pytest.mark.parametrize("text", BAD)
def test_a_bad_address_is_named_by_its_place(text):
    with pytest.raises(ConfigError, match=r"address [12] of the URL is wrong") as caught:
        parse_addresses(text)
    assert repr(text) not in str(caught.value), "it may be a login whose @ is missing"


def test_only_the_bad_one_of_many_is_named():
    with pytest.raises(ConfigError, match="address 2 of the URL is wrong: what follows"):
        parse_addresses("a:1;b:x;c:3")


@given(st.text(max_size=40))
def test_no_text_at_all_surprises_the_parser(text):
    try:
        for host, port in parse_addresses(text):
            assert host
            assert 0 < port < 65536
    except ConfigError:
        pass


URLS = {
    "redis://": (Kind.SINGLE, False, (("localhost", 6379),), {}),
    "redis://h": (Kind.SINGLE, False, (("h", 6379),), {}),
    "redis://h:1/2": (Kind.SINGLE, False, (("h", 1),), {"db": 2}),
    "redis://h/?db=3": (Kind.SINGLE, False, (("h", 6379),), {"db": 3}),
    "rediss://u:p%40ss@h:1/0": (Kind.SINGLE, True, (("h", 1),), {"username": "u", "password": "p@ss", "db": 0}),
    "redis://:secret@[::1]:1": (Kind.SINGLE, False, (("::1", 1),), {"password": "secret"}),
    "redis://u@h": (Kind.SINGLE, False, (("h", 6379),), {"username": "u"}),
    "redis+cluster://a:1,b:2": (Kind.CLUSTER, False, (("a", 1), ("b", 2)), {}),
    "redis+cluster://a:1;b:2/0": (Kind.CLUSTER, False, (("a", 1), ("b", 2)), {"db": 0}),
    "rediss+cluster://u:p@a:1": (Kind.CLUSTER, True, (("a", 1),), {"username": "u", "password": "p"}),
    "redis+sentinel://a,b:2/main": (Kind.SENTINEL, False, (("a", 26379), ("b", 2)), {}),
    "rediss+sentinel://a:1/main/4": (Kind.SENTINEL, True, (("a", 1),), {"db": 4}),
    "redis://h?max_connections=5&socket_keepalive=no&client_name=x&socket_timeout=1.5": (
        Kind.SINGLE, False, (("h", 6379),),
        {"max_connections": 5, "socket_keepalive": False, "client_name": "x", "socket_timeout": 1.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("url", "expected"), URLS.items())
def test_urls_are_read(url, expected):
    address = parse_url(url)
    assert (address.kind, address.tls, address.hosts, address.options) == expected


def test_a_unix_url_names_the_socket_file():
    address = parse_url("redis+unix://:pw@/run/a%20b/redis.sock?db=1")
    assert (address.kind, address.path) == (Kind.UNIX, "/run/a b/redis.sock")
    assert address.options == {"password": "pw", "db": 1}


def test_a_sentinel_url_names_the_service():
    assert parse_url("redis+sentinel://a:1/my%20service").service == "my service"


MISTAKES = {
    "redis://h:1/x": "database must be a number",
    "redis://h:1/0/1": "database must be a number",
    "redis://h?db=x": "option 'db' .* bad value",
    "redis://h?retrys=3": "unknown option 'retrys'",
    "redis://h?credential_provider=x": "redis-py's others are given by name",
    "redis://h?timeout=2": "timeout is an option of open_store, and the setting store_timeout",
    "redis://h?socket_keepalive=maybe": "option 'socket_keepalive' .* bad value",
    "redis://h?decode_responses=1": "unknown option 'decode_responses'",
    "redis://h?max_connections=0": "max_connections must be a positive number, got 0",
    "redis://a:1,b:2": r"takes one server, got 2.*redis\+cluster",
    "redis+cluster://": "address 1 of the URL is wrong: no host name",
    "redis+cluster://a:1/3": "one database only",
    "redis+cluster://a:1?db=3": "one database only",
    "redis+sentinel://a:1": "needs the name of the service",
    "redis+sentinel://a:1/": "needs the name of the service",
    "redis+sentinel://a:1/main/x": "database must be a number",
    "redis+unix://": "needs a socket file",
    "redis+unix://host/run/redis.sock": "needs a socket file",
}


@pytest.mark.parametrize(("url", "message"), MISTAKES.items())
@pytest.mark.parametrize("open_it", [open_store, open_async_store])
def test_a_mistake_in_a_url_is_named_when_the_store_is_opened(url, message, open_it):
    with pytest.raises(ConfigError, match=message):
        open_it(url)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis+cluster://h:1", "redis+sentinel://h:1/main", "redis+unix:///s"]
)
@pytest.mark.parametrize("open_it", [open_store, open_async_store])
def test_an_option_that_redis_py_does_not_know_is_named_when_the_store_is_opened(url, open_it):
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        open_it(url, colour="red")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cr/et@h:1", "redis://u:s3cr?et@h", "redis://u:s3cret@h:x", "redis://u:s3cret@h/db",
        "redis+cluster://u:s3cret@h:1,", "redis+sentinel://u:s3cret@h:1", "redis://h?password=s3cret&db=x",
        "redis+unix://u:s3cret@host/x",
    ],
)  # fmt: skip
def test_no_error_shows_a_password(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:s3cret@h:1/2", "redis h:1"),
        ("redis://:s3cret@[::1]:1", "redis [::1]:1"),
        ("redis+unix://:s3cret@/run/r.sock", "redis /run/r.sock"),
        ("redis+cluster://u:s3cret@a:1,b:2", "redis cluster a:1,b:2"),
        ("redis+sentinel://u:s3cret@a:1/main", "redis 'main' (sentinels a:1)"),
    ],
)
def test_a_store_shows_where_it_is_but_no_password(url, shown):
    store = open_store(url, prefix="p:")
    assert repr(store) == f"<RedisStore {shown} prefix='p:'>"
    assert "s3cret" not in repr(parse_url(url))
    store.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ConfigError, match="timeout must be a positive number"):
        open_store("redis://h", timeout=timeout)


@pytest.mark.parametrize("prefix", ["{", "}", "a{b}", "idem:{tag}:"])
def test_a_brace_in_the_prefix_is_refused(prefix):
    with pytest.raises(ConfigError, match="has a brace"):
        open_store("redis://h", prefix=prefix)
