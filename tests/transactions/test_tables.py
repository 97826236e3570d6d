"""The table by other hands than ours: SQLAlchemy's metadata and a Django migration make the same."""

from __future__ import annotations

import contextlib
import io

import pytest
from sqlalchemy import MetaData, NullPool, create_engine, inspect

from semel import ConfigError, Idempotency
from semel.contrib.django.operations import statements
from semel.stores.sql.sqlalchemy_tables import add_tables, version_row
from transactions.conftest import DATABASES
from transactions.kinds import django_alias, sqlalchemy_url

DRIVERS = {"sqlite": "pysqlite", "postgresql": "psycopg", "mysql": "pymysql"}


@pytest.fixture(params=DATABASES)
def place(request):
    """The dialect and the URL of an empty database."""
    return request.param, request.getfixturevalue(DATABASES[request.param])


@contextlib.contextmanager
def opened(dialect, url):
    engine = create_engine(sqlalchemy_url(url, DRIVERS[dialect]), poolclass=NullPool)
    yield engine
    engine.dispose()


def said(value):
    """What SQLAlchemy found, in words that can be compared."""
    if isinstance(value, dict):
        return str(sorted((key, said(inner)) for key, inner in value.items()))
    return str(value)


def described(dialect, url):
    """Everything that the database says of the tables."""
    with opened(dialect, url) as engine:
        found = inspect(engine)
        return {
            table: (
                sorted(map(said, found.get_columns(table))),
                found.get_pk_constraint(table)["constrained_columns"],
                sorted(map(said, found.get_indexes(table))),
            )
            for table in ("idempotent_record", "semel_schema")
        }


def forget_tables(dialect, url):
    with opened(dialect, url) as engine, engine.begin() as connection:
        for table in ("idempotent_record", "semel_schema"):
            connection.exec_driver_sql(f"DROP TABLE {table}")


def made_by_the_store(dialect, url):
    with Idempotency(url) as idem:
        idem.execute("k", lambda: 1)
    ours = described(dialect, url)
    forget_tables(dialect, url)
    return ours


def works(url):
    with Idempotency(url) as idem:
        return [idem.run("k", lambda: "done").replayed for _ in range(2)] == [False, True]


def test_the_metadata_makes_the_table_that_the_store_would_make(place):
    dialect, url = place
    ours = made_by_the_store(dialect, url)
    metadata = MetaData()
    add_tables(metadata, "mariadb" if dialect == "mysql" else dialect)
    with opened(dialect, url) as engine:
        metadata.create_all(engine)
    assert described(dialect, url) == ours
    assert works(url)


def test_the_django_migration_makes_the_table_and_takes_it_back(place):
    dialect, url = place
    ours = made_by_the_store(dialect, url)
    alias = django_alias(dialect, url)

    from django.core.management import call_command
    from django.db import connections

    def migrate(*target):
        call_command("migrate", "semel", *target, database=alias, verbosity=0)

    with contextlib.closing(connections[alias]):
        migrate()
        assert described(dialect, url) == ours
        assert works(url)
        shown = io.StringIO()
        call_command("sqlmigrate", "semel", "0001", database=alias, stdout=shown)
        assert "Bring idempotent_record to version 1" in shown.getvalue()
        assert "CREATE TABLE" in shown.getvalue()
        migrate("zero")
        with opened(dialect, url) as engine:
            assert not inspect(engine).has_table("idempotent_record")


def test_a_database_that_semel_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="oracle"):
        add_tables(MetaData(), "oracle")
    with pytest.raises(ConfigError, match="oracle"):
        statements("oracle", 1)


def test_a_table_name_that_could_be_more_than_a_name_is_refused():
    with pytest.raises(ConfigError, match="name of a table"):
        version_row("x'); DROP TABLE account; --")
