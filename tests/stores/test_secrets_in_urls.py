"""A password with raw @, /, ? or # in it: no part of it is shown, whatever a URL is taken for."""

from __future__ import annotations

import contextlib

import pytest

from semel import open_async_store, open_store
from semel.core.records import Identity
from semel.errors import ConfigError, IdempotencyError
from semel.stores.redis.clients import parse_url
from semel.stores.sql.mysql.addresses import parse
from semel.stores.sql.postgres.settings import settings

SCHEMES = ("postgresql", "mysql", "redis", "redis+cluster", "redis+sentinel")
PASSWORDS = (
    "s3@cret", "s3/cret", "s3#cret", "s3?cret", "s3:cret", "s3@cr/cret", "s3/cr@cret", "12/cret",
    "12?cret", "12#cret", "s3?cr@cret", "s3#cr@cret", "1@s3/cret", "1@s3?cret", "s3@cret,s3", "s3[cret",
    "s3?table=cret", "s3?db=cret",
)  # fmt: skip


def use(url: str) -> None:
    """Open the store and ask it something; nobody listens there."""
    with contextlib.closing(open_store(url, timeout=0.2)) as store:
        store.get(Identity("scope", "key"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("place", ["127.0.0.1:1/5", "127.0.0.1:1/5/0"])
def test_no_part_of_a_raw_password_is_shown(scheme, password, place):
    with pytest.raises(IdempotencyError) as caught:
        use(f"{scheme}://s3user:{password}@{place}")
    shown = str(caught.value)
    assert "s3" not in shown
    assert "cr" not in shown


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_way_out_is_named(opener, scheme):
    with pytest.raises(ConfigError, match="written %40, %2F, %3F and %23"):
        opener(f"{scheme}://user:12/cret@host/db")


def test_the_last_at_ends_the_login_in_every_url():
    url = "://joe@shop:p@ss@host:1/5"
    assert parse_url(f"redis{url}").options == {
        "username": "joe@shop",
        "password": "p@ss",
        "db": 5,
    }
    address, _ = parse(f"mysql{url}", {})
    assert (address.user, address.password) == ("joe@shop", b"p@ss")
    read = settings(f"postgresql{url}", {}, 5.0)
    assert "user=joe@shop" in read.conninfo
    assert "password=p@ss" in read.conninfo
    assert read.place == "the PostgreSQL database 5 at host:1"


@pytest.mark.parametrize(
    "scheme", [*SCHEMES, "rediss", "rediss+cluster", "rediss+sentinel", "postgres", "mariadb"]
)
@pytest.mark.parametrize(
    "login", ["joe:s3cret", ":s3cret", "joe:12s3cret", "joe@x:s3cret", "[s3cret"]
)
@pytest.mark.parametrize("rest", ["", "/0", "/shop", "?db=0", ",host:7000", "/12?s3=cret"])
def test_a_login_without_a_host_is_not_shown_as_a_port(scheme, login, rest):
    with pytest.raises(ConfigError) as caught:
        open_store(f"{scheme}://{login}{rest}")
    assert "s3c" not in str(caught.value)
    assert "12s3" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://joe:12/cret", "redis://joe:12/0?db=cret"])
def test_a_password_that_looks_like_a_port_and_a_path_is_not_shown(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "cret" not in str(caught.value)


def test_no_representation_of_what_was_read_from_a_url_has_its_password():
    """Neither Python's own nor that of rich, which asks the fields of a Struct."""
    read = (
        parse_url("redis://joe:s3cret@host/0"),
        parse("mysql://joe:s3cret@host/shop", {})[0],
        settings("postgresql://joe:s3cret@host/shop", {}, 5.0),
    )
    for each in read:
        assert "s3cret" not in f"{each!r} {each} {each.__rich_repr__()}"
        assert "host" in f"{each.__rich_repr__()}"
