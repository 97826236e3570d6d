"""The table by other hands than ours: SQLAlchemy's metadata and a Django migration make the same."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import MetaData, NullPool, create_engine, inspect

from semel import ConfigError, Idempotency
from semel.contrib.django import migrations
from semel.contrib.django.migrations import statements
from semel.stores.sql.schema import LOCK
from semel.stores.sql.sqlalchemy_tables import add_tables, version_row
from servers.redis import wait_until
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


def change(dialect, url, *statements):
    with opened(dialect, url) as engine, engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def made_by_the_store(dialect, url):
    with Idempotency(url) as idem:
        idem.execute("k", lambda: 1)
    ours = described(dialect, url)
    change(dialect, url, "DROP TABLE idempotent_record", "DROP TABLE semel_schema")
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


def test_two_tables_of_records_share_the_table_of_versions():
    metadata = MetaData()
    tables = [add_tables(metadata, "sqlite", table=name) for name in ("one", "two")]
    assert {*metadata.tables} == {"one", "two", "semel_schema"}
    assert [table.name for table in tables] == ["one", "two"]


@contextlib.contextmanager
def django_on(dialect, url):
    """A project on this database; gives its alias, and what `manage.py migrate semel` does."""
    alias = django_alias(dialect, url)

    from django.core.management import call_command
    from django.db import connections

    def migrate(*target, **options):
        call_command("migrate", "semel", *target, database=alias, verbosity=0, **options)

    with contextlib.closing(connections[alias]):
        yield alias, migrate


def test_the_django_migration_makes_the_table_and_takes_it_back(place):
    dialect, url = place
    ours = made_by_the_store(dialect, url)

    from django.core.management import call_command

    with django_on(dialect, url) as (alias, migrate):
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


@pytest.mark.parametrize("options", [{}, {"fake_initial": True}], ids=["plain", "fake-initial"])
def test_the_django_migration_accepts_a_table_that_a_store_made_before(place, options):
    dialect, url = place
    with django_on(dialect, url) as (_, migrate):
        for _ in range(2):  # also after it was taken back
            assert works(url)
            ours = described(dialect, url)
            migrate(**options)
            assert described(dialect, url) == ours
            with Idempotency(url) as idem:
                assert idem.run("k", lambda: "again").replayed
            migrate("zero")


def test_the_django_migration_brings_an_older_table_up_to_date(place, monkeypatch):
    from django.db import connections

    dialect, url = place
    change_of = {
        version: (
            f"ALTER TABLE idempotent_record ADD COLUMN of_version_{version} INTEGER",
            f"UPDATE semel_schema SET version = {version}",
        )
        for version in (1, 2)
    }
    monkeypatch.setattr(migrations, "statements", lambda _, version: change_of[version])
    assert works(url)
    with django_on(dialect, url) as (alias, _):
        for version in (1, 2, 2):
            with connections[alias].schema_editor(atomic=True) as editor:
                migrations.RecordsVersion(version).database_forwards("semel", editor, None, None)
    columns = str(described(dialect, url)["idempotent_record"])
    assert "of_version_2" in columns
    assert "of_version_1" not in columns


def test_the_django_migration_takes_no_table_of_an_unknown_version(place):
    dialect, url = place
    assert works(url)
    change(dialect, url, "DELETE FROM semel_schema")
    with django_on(dialect, url) as (_, migrate):
        if dialect == "mysql":  # it may be half of a step, and every step may run twice
            migrate()
            assert not works(url), "the record is still there"
        else:
            with pytest.raises(ConfigError, match="semel_schema does not say of which version"):
                migrate()


def test_the_django_migration_makes_a_table_again_that_somebody_dropped(place):
    dialect, url = place
    assert works(url)
    change(dialect, url, "DROP TABLE idempotent_record")
    with django_on(dialect, url) as (_, migrate):
        migrate()
        assert works(url)


def test_a_django_migration_waits_for_a_store_that_is_making_the_table(postgres_url):
    with django_on("postgresql", postgres_url) as (alias, _):
        from django.db import connections

        def migrate():
            from django.core.management import call_command

            with contextlib.closing(connections[alias]):
                call_command("migrate", "semel", database=alias, verbosity=0)

        with (
            ThreadPoolExecutor(1) as aside,
            psycopg.connect(postgres_url) as maker,
            psycopg.connect(postgres_url, autocommit=True) as looker,
        ):
            maker.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
            for statement in statements("postgresql", 1):
                maker.execute(statement)
            migrating = aside.submit(migrate)
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            wait_until(lambda: looker.execute(waiting).fetchone() == (1,), "the migration to wait")
            maker.commit()
            migrating.result()
    assert works(postgres_url)


def test_no_store_writes_between_the_look_of_a_django_migration_and_its_step(tmp_path):
    def connect():
        return contextlib.closing(
            sqlite3.connect(tmp_path / "shop.db", isolation_level=None, timeout=0)
        )

    with connect() as ours, connect() as other:
        for _ in range(2):  # with and without the table of versions
            ours.execute("BEGIN")
            for statement in migrations._turn("sqlite"):
                ours.execute(statement)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            ours.execute("COMMIT")


def test_a_database_that_semel_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="oracle"):
        add_tables(MetaData(), "oracle")
    with pytest.raises(ConfigError, match="oracle"):
        statements("oracle", 1)


def test_a_table_name_that_could_be_more_than_a_name_is_refused():
    with pytest.raises(ConfigError, match="name of a table"):
        version_row("x'); DROP TABLE account; --")
