"""What a package does not promise to keep is looked up, and named when it is gone."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.metadata import version

import psycopg
import pymysql.connections
import pytest

from semel.core.optional import have, inside
from semel.errors import ConfigError
from semel.stores.urls import open_store


def test_what_is_there_is_given():
    assert inside("psycopg", "psycopg:Connection.connect") == psycopg.Connection.connect
    have("psycopg", psycopg, "Connection")


@pytest.mark.parametrize("name", ["psycopg:Connection.gone", "psycopg.gone:Thing"])
def test_what_is_gone_is_named_with_the_version_of_its_package(name):
    with pytest.raises(ConfigError) as missing:
        inside("psycopg", name)
    expected = f"psycopg {version('psycopg')} has no {name.replace(':', '.')}, which semel needs"
    assert str(missing.value).startswith(expected)


@pytest.fixture
def imported_anew():
    """Import a module once more; afterwards all is as before."""
    before = dict(sys.modules)

    def again(name):
        del sys.modules[name]
        return importlib.import_module(name)

    yield again
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("semel.adapters.fastapi", "fastapi.routing", "serialize_response"),
        ("semel.adapters.fastapi", "fastapi.utils", "is_body_allowed_for_status_code"),
        ("semel.adapters.starlette", "starlette._utils", "is_async_callable"),
        ("semel.adapters.fastapi", "fastapi.dependencies.utils", "get_typed_signature"),
    ],
)
def test_an_integration_names_what_its_framework_has_no_more(
    imported_anew, monkeypatch, module, owner, name
):
    importlib.import_module(module)
    monkeypatch.delattr(importlib.import_module(owner), name)
    with pytest.raises(ConfigError, match=f"has no {owner}.{name}, which semel needs"):
        imported_anew(module)


def test_the_postgres_store_names_what_psycopg_has_no_more(imported_anew, monkeypatch):
    importlib.import_module("semel.stores.sql.postgres.threads")
    for kind in psycopg.Connection.__mro__:
        if "_connect_gen" in vars(kind):
            monkeypatch.delattr(kind, "_connect_gen")
    with pytest.raises(ConfigError, match=r"psycopg .* has no psycopg\.Connection\._connect_gen"):
        imported_anew("semel.stores.sql.postgres.threads")


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("bodies", "django.http.response:HttpResponseBase", "_resource_closers"),
        ("atomic", "django.db.transaction:Atomic", "_from_testcase"),
    ],
)
def test_the_integration_of_django_names_what_it_has_no_more(
    imported_anew, monkeypatch, module, owner, name
):
    importlib.import_module(f"semel.adapters.django.{module}")
    kind = pkgutil.resolve_name(owner)
    whole = kind.__init__

    def without(self, *args, **options):
        whole(self, *args, **options)
        delattr(self, name)

    monkeypatch.setattr(kind, "__init__", without)
    with pytest.raises(ConfigError, match=rf"django .* has no .*\.{name}, which semel needs"):
        imported_anew(f"semel.adapters.django.{module}")


def test_the_mysql_store_names_what_pymysql_has_no_more(monkeypatch):
    whole = pymysql.connections.Connection.__init__

    def without(self, *args, **options):
        whole(self, *args, **options)
        del self._read_timeout

    monkeypatch.setattr(pymysql.connections.Connection, "__init__", without)
    with pytest.raises(ConfigError, match=r"pymysql .* has no .*\._read_timeout, which semel"):
        open_store("mysql://root@127.0.0.1:1/orders")
