"""Compare-and-set updates on real databases, through every kind of connection."""

from __future__ import annotations

import sqlite3
import sys
import threading
from contextlib import closing, contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from psycopg.types.json import Json
from sqlalchemy.orm import Session

from semel import ConfigError
from semel.guards import (
    AlreadyApplied,
    Applied,
    Condition,
    Conflict,
    StateGuard,
    VersionGuard,
    _as_mysql,
    transition,
    update_if_version,
)

TABLE = """
CREATE TABLE accounts (
    id INTEGER PRIMARY KEY, version INTEGER NOT NULL, state VARCHAR(20), note VARCHAR(50),
    amount DECIMAL(10, 2)
)
"""
ROW = "INSERT INTO accounts VALUES (7, 3, 'new', NULL, 1.50)"


@contextmanager
def connect_sqlite(request):
    path = request.getfixturevalue("tmp_path") / "business.db"
    with closing(sqlite3.connect(path)) as connection:
        yield connection


@contextmanager
def connect_postgres(request):
    with psycopg.connect(request.getfixturevalue("postgres_url")) as connection:
        yield connection


def mysql_place(url):
    place = urlsplit(url)
    return {
        "host": place.hostname,
        "port": place.port,
        "user": unquote(place.username),
        "password": unquote(place.password or ""),
        "database": place.path[1:],
    }


@contextmanager
def connect_mysql(request):
    with pymysql.connect(**mysql_place(request.getfixturevalue("mysql_url"))) as connection:
        yield connection


@contextmanager
def connect_sqlalchemy(request):
    engine = sa.create_engine(f"sqlite:///{request.getfixturevalue('tmp_path') / 'business.db'}")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def connect_session(request):
    url = request.getfixturevalue("postgres_url").replace("postgresql://", "postgresql+psycopg://")
    engine = sa.create_engine(url)
    with Session(engine) as session:
        yield session
    engine.dispose()


KINDS = {
    "sqlite": connect_sqlite,
    "postgres": connect_postgres,
    "mysql": connect_mysql,
    "sqlalchemy on sqlite": connect_sqlalchemy,
    "session on postgres": connect_session,
}


def run(connection, sql):
    if isinstance(connection, Session):
        connection = connection.connection()
    if isinstance(connection, sa.Connection):
        result = connection.exec_driver_sql(sql)
        return result.fetchone() if result.returns_rows else None
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


@pytest.fixture(params=KINDS)
def connection(request):
    """A connection of each kind, with one row in a table."""
    with KINDS[request.param](request) as opened:
        run(opened, TABLE)
        run(opened, ROW)
        yield opened


def update(connection, expected, **changes):
    return update_if_version(connection, "accounts", 7, expected, changes)


# --- versions ----------------------------------------------------------------------------


def test_an_update_of_the_expected_version_is_applied(connection):
    assert update(connection, 3, note="changed", amount="2.50") == Applied(4)
    row = run(connection, "SELECT version, note, amount FROM accounts")
    assert tuple(row) == (4, "changed", pytest.approx(Decimal("2.50")))


def test_the_same_update_again_is_already_applied(connection):
    for expected in (Applied(4), AlreadyApplied(4), AlreadyApplied(4)):
        assert update(connection, 3, note="changed", amount="2.50") == expected
    assert run(connection, "SELECT version FROM accounts")[0] == 4


def test_null_is_a_value_like_any_other(connection):
    assert update(connection, 3, note=None, state=None) == Applied(4)
    assert update(connection, 3, note=None, state=None) == AlreadyApplied(4)
    assert update(connection, 3, note=None, state="new") == Conflict(4)


def test_another_change_of_the_same_version_is_a_conflict(connection):
    assert update(connection, 3, note="anna") == Applied(4)
    assert update(connection, 3, note="bert") == Conflict(4)
    assert run(connection, "SELECT note FROM accounts")[0] == "anna"


def test_a_change_long_ago_is_a_conflict(connection):
    for version in (3, 4):
        update(connection, version, note="again")
    assert update(connection, 3, note="again") == Conflict(5)
    assert update(connection, 9, note="again") == Conflict(5)


def test_a_row_that_is_missing_is_told(connection):
    guard = VersionGuard("accounts")
    assert guard.update(connection, 8, 3, {"note": "x"}) == Conflict(None, found=False)


def test_own_names_of_columns(connection):
    guard = VersionGuard("accounts", id_column="version", version_column="id")
    assert guard.update(connection, 3, 7, {"note": "x"}) == Applied(8)


# --- values that the database converts ---------------------------------------------------

MOMENT = datetime.fromisoformat("2026-01-01T01:01:01.600000")

POSTGRES_TYPES = {
    "json": (Json({"a": 1}), '{"a": 1.0}'),
    "jsonb": ('{"b":1,   "a":1}', '{"a": 1}'),
    "integer[]": ([1, 2], [2, 1]),
    "real": (0.1, 0.1000001),
    "timestamp(0)": (MOMENT, MOMENT + timedelta(seconds=1)),
    "timestamptz": ("2026-01-01 01:01:01.5", "2026-01-01 01:01:01.6"),
    "numeric(6,2)": (Decimal("1.005"), Decimal("1.02")),
    "char(10)": ("abc", "Abc"),
    "varchar(10)": ("abc", "abc "),
    "text": ("5", 6),
    "point": ("(1,2)", "(2,1)"),
}
MYSQL_TYPES = {
    "varchar(30)": ("abc", "ABC"),
    "char(10)": ("abc ", "Abc"),
    "text": ("strasse", "straße"),
    "varchar(31)": ("abc", "abc  "),
    "varchar(32)": (0, "hello"),
    "enum('a','b')": ("a", "b"),
    "varbinary(10)": (b"abc", b"ABC"),
    "json": ('{"a": 1}', '{"a": 2}'),
    "int": ("5", 6),
    "bigint unsigned": (2**64 - 1, 2**64 - 2),
    "decimal(6,2)": (Decimal("1.004"), Decimal("1.02")),
    "float": (1234567.9, 1234569.0),
    "double": ("0.1", 0.2),
    "datetime": (MOMENT, MOMENT + timedelta(seconds=1)),
    "datetime(3)": (MOMENT + timedelta(microseconds=1), MOMENT + timedelta(milliseconds=1)),
    "time": (timedelta(seconds=1.5), timedelta(seconds=3)),
    "date": (date(2026, 1, 1), date(2026, 1, 2)),
}
SQLITE_TYPES = {
    "TEXT COLLATE NOCASE": ("abc", "ABC"),
    "TEXT COLLATE RTRIM": ("abc", "abc "),
    "INTEGER": ("5", "6"),
    "REAL": (1, 2),
    "TEXT": (0, "hello"),
    "": ("5", 5),
}
TYPED = [
    *(("postgres", *each) for each in POSTGRES_TYPES.items()),
    *(("mysql", *each) for each in MYSQL_TYPES.items()),
    *(("sqlite", *each) for each in SQLITE_TYPES.items()),
]


@pytest.mark.parametrize(("database", "kind", "values"), TYPED)
def test_a_retry_is_known_by_its_exact_values(request, database, kind, values):
    ours, anothers = values
    with KINDS[database](request) as connection:
        run(connection, f"CREATE TABLE typed (id INTEGER PRIMARY KEY, version INTEGER, v {kind})")
        run(connection, "INSERT INTO typed (id, version) VALUES (7, 3)")
        guard = VersionGuard("typed")
        assert guard.update(connection, 7, 3, {"v": ours}) == Applied(4)
        assert guard.update(connection, 7, 3, {"V": ours}) == AlreadyApplied(4)
        assert guard.update(connection, 7, 3, {"v": anothers}) == Conflict(4)
        assert guard.update(connection, 7, 4, {"v": anothers}) == Applied(5)
        assert guard.update(connection, 7, 4, {"v": ours}) == Conflict(5)


def test_a_text_is_not_the_number_that_mysql_makes_of_it(request):
    with KINDS["mysql"](request) as connection:
        run(connection, TABLE)
        run(connection, "INSERT INTO accounts VALUES (7, 4, 'new', NULL, 0)")
        assert update(connection, 3, amount="hello") == Conflict(4)


def test_a_type_that_needs_no_conversion_is_compared_as_it_is(request):
    with KINDS["mysql"](request) as connection:
        run(connection, "CREATE TABLE typed (id INTEGER PRIMARY KEY, version INTEGER, v YEAR)")
        run(connection, "INSERT INTO typed (id, version) VALUES (7, 3)")
        for expected in (Applied(4), AlreadyApplied(4)):
            assert update_if_version(connection, "typed", 7, 3, {"v": 2026}) == expected


def test_a_json_document_of_mysql_is_compared_as_a_document():
    # The tests' server is MariaDB, whose json is a text.
    assert _as_mysql("v", "json", "{}") == Condition("v = CAST({} AS JSON)", ("{}",))


def test_a_state_in_other_letters_is_another_state(request):
    with KINDS["mysql"](request) as connection:
        run(connection, TABLE)
        run(connection, "INSERT INTO accounts VALUES (7, 4, 'PAID', NULL, 0)")
        assert FLOW.transition(connection, 7, "paid") == Conflict("PAID")


# --- states ------------------------------------------------------------------------------

FLOW = StateGuard("accounts", {"paid": {"new"}, "shipped": ["paid"], "closed": ("paid", "shipped")})


def test_a_transition_is_applied_once(connection):
    assert FLOW.transition(connection, 7, "paid", changes={"note": "by card"}) == Applied("paid")
    assert FLOW.transition(connection, 7, "paid") == AlreadyApplied("paid")
    assert tuple(run(connection, "SELECT state, note FROM accounts")) == ("paid", "by card")


def test_a_transition_that_is_not_allowed_is_a_conflict(connection):
    assert FLOW.transition(connection, 7, "shipped") == Conflict("new")
    assert run(connection, "SELECT state FROM accounts")[0] == "new"


def test_several_states_may_lead_to_one(connection):
    FLOW.transition(connection, 7, "paid")
    assert FLOW.transition(connection, 7, "closed") == Applied("closed")
    assert FLOW.transition(connection, 7, "paid") == Conflict("closed")


def test_a_transition_of_a_row_that_is_missing_is_told(connection):
    assert transition(connection, "accounts", 8, "new", "paid") == Conflict(None, found=False)


def test_one_transition_without_a_guard(connection):
    assert transition(connection, "accounts", 7, "new", "paid") == Applied("paid")
    assert transition(connection, "accounts", 7, ("new", "open"), "paid") == AlreadyApplied("paid")


# --- concurrency -------------------------------------------------------------------------


def test_of_many_who_have_seen_the_same_version_one_changes_it(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        run(connection, TABLE)
        run(connection, ROW)
    outcomes = []

    def change(name):
        with psycopg.connect(postgres_url) as own:
            outcomes.append(update(own, 3, note=name))

    threads = [threading.Thread(target=change, args=(f"thread {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(each).__name__ for each in outcomes) == ["Applied"] + ["Conflict"] * 7


def test_mysql_tells_what_is_there_now_and_not_what_the_transaction_saw(mysql_url):
    place = mysql_place(mysql_url)
    with pymysql.connect(**place) as slow, pymysql.connect(**place, autocommit=True) as quick:
        run(quick, TABLE)
        run(quick, ROW)
        assert run(slow, "SELECT version FROM accounts") == (
            3,
        )  # its view of the world from now on
        assert update(quick, 3, note="quick") == Applied(4)
        assert run(slow, "SELECT version FROM accounts") == (3,)
        assert update(slow, 3, note="slow") == Conflict(4)


# --- nothing is committed, nothing is let in ---------------------------------------------


def test_nothing_is_committed(tmp_path):
    with closing(sqlite3.connect(tmp_path / "business.db")) as connection:
        connection.execute(TABLE)
        connection.execute(ROW)
        connection.commit()
        assert update(connection, 3, note="x") == Applied(4)
        connection.rollback()
        assert update(connection, 3, note="y") == Applied(4)


@pytest.mark.parametrize("name", ["", "a b", "a;", "a--", "1a", "a.b.", "näh", None, "a'", "a\n"])
def test_names_that_could_be_more_than_names_are_refused(name):
    connection = sqlite3.connect(":memory:")
    for attempt in (
        lambda: VersionGuard(name),
        lambda: VersionGuard("t", id_column=name),
        lambda: VersionGuard("t", version_column=name),
        lambda: VersionGuard("t").update(connection, 1, 1, {name: 1}),
        lambda: StateGuard(name, {"paid": {"new"}}),
        lambda: StateGuard("t", {"paid": {"new"}}, state_column=name),
        lambda: FLOW.transition(connection, 1, "paid", changes={name: 1}),
    ):
        with pytest.raises(ConfigError, match="name"):
            attempt()
    connection.close()


def test_a_table_may_name_its_schema(tmp_path):
    with closing(sqlite3.connect(tmp_path / "business.db")) as connection:
        connection.execute(TABLE)
        connection.execute(ROW)
        assert update_if_version(connection, "main.accounts", 7, 3, {"note": "x"}) == Applied(4)


@pytest.mark.parametrize("changes", [{}, {"version": 9}, {"note": "x", "VERSION": 9}])
def test_a_change_must_change_something_else_than_the_version(changes):
    with pytest.raises(ConfigError, match=r"^changes must"):
        VersionGuard("t").update(None, 1, 1, changes)


@pytest.mark.parametrize("name", ["id", "ID"])
def test_the_id_of_a_row_is_not_changed(name):
    refused = rf"^changes must not hold {name}: the guard compares it$"
    with pytest.raises(ConfigError, match=refused):
        VersionGuard("t").update(None, 1, 1, {"note": "x", name: 9})
    with pytest.raises(ConfigError, match=refused):
        FLOW.transition(None, 1, "paid", changes={name: 9})


def test_the_state_is_changed_by_the_transition_alone():
    with pytest.raises(ConfigError, match="must not hold state"):
        FLOW.transition(None, 1, "paid", changes={"state": "shipped"})


def test_one_column_cannot_be_the_id_and_the_guard():
    with pytest.raises(ConfigError, match="id cannot be"):
        VersionGuard("t", version_column="ID", id_column="id")


# --- wrong arguments are called by their names -------------------------------------------


@pytest.mark.parametrize("version", [None, "3", 3.0, True])
def test_a_version_is_a_whole_number(version):
    with pytest.raises(ConfigError, match=r"^expected_version must be a whole number, not"):
        VersionGuard("t").update(None, 1, version, {"note": "x"})


@pytest.mark.parametrize("changes", ["note", ["note"], 5])
def test_changes_are_a_mapping(changes):
    with pytest.raises(ConfigError, match=r"^changes must be a mapping from column to value, not"):
        VersionGuard("t").update(None, 1, 1, changes)
    with pytest.raises(ConfigError, match=r"^changes must be a mapping"):
        FLOW.transition(None, 1, "paid", changes=changes)


def test_a_row_has_an_id():
    with pytest.raises(ConfigError, match=r"^row_id must be"):
        VersionGuard("t").update(None, None, 1, {"note": "x"})


@pytest.mark.parametrize("transitions", [None, {}, [("paid", "new")], "paid"])
def test_transitions_are_a_mapping(transitions):
    with pytest.raises(ConfigError, match=r"^transitions must be a mapping"):
        StateGuard("t", transitions)


@pytest.mark.parametrize("target", [None, "", 5, ["paid"]])
def test_a_target_is_the_name_of_a_state(target):
    with pytest.raises(ConfigError, match=r"^target must be the name of a state, not"):
        FLOW.transition(None, 1, target)
    with pytest.raises(ConfigError, match=r"^target must be"):
        transition(None, "t", 1, "new", target)


@pytest.mark.parametrize("source", [None, "", 5, ["new", 5], {"new", ""}])
def test_a_source_is_the_name_of_a_state_or_several(source):
    with pytest.raises(ConfigError, match=r"^source of 'paid' must be"):
        transition(None, "t", 1, source, "paid")


def test_a_mistyped_state_is_refused_where_all_are_known():
    states = ["new", "paid", "shipped"]
    StateGuard("t", {"paid": {"new"}, "shipped": "paid"}, states=states)
    for wrong in ({"paid": {"nwe"}}, {"piad": {"new"}}):
        with pytest.raises(ConfigError, match="is not among the states new, paid, shipped"):
            StateGuard("t", wrong, states=states)
    with pytest.raises(ConfigError, match=r"^states must be"):
        StateGuard("t", {"paid": "new"}, states=5)


@pytest.mark.parametrize("sources", [(), {"paid"}, ["new", "paid"], "paid"])
def test_a_state_that_leads_to_itself_or_from_nowhere_is_refused(sources):
    with pytest.raises(ConfigError, match="lead to"):
        StateGuard("t", {"paid": sources})


def test_a_target_without_a_transition_is_refused():
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(ConfigError):
        FLOW.transition(connection, 1, "new")


def test_an_id_that_names_several_rows_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "business.db")) as connection:
        connection.execute("CREATE TABLE t (id, version, note)")
        connection.execute("INSERT INTO t VALUES (1, 1, ''), (1, 1, '')")
        with pytest.raises(ConfigError, match="more than one row"):
            update_if_version(connection, "t", 1, 1, {"note": "x"})


def test_something_that_is_no_connection_is_refused():
    with pytest.raises(ConfigError, match="connection"):
        update(object(), 3, note="x")


# --- drivers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paramstyle", "module"),
    [("numeric", "acme_db"), ("named", "acme_db.driver"), ("qmark", "acme_db.driver")],
)
def test_every_paramstyle_is_spoken(tmp_path, monkeypatch, paramstyle, module):
    """sqlite3 stands for drivers that know only one style."""
    monkeypatch.setitem(sys.modules, "acme_db", SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(paramstyle=paramstyle))

    class Cursor(sqlite3.Cursor):
        def execute(self, sql, values=()):
            if paramstyle == "numeric":  # sqlite3 takes numbers for names, and warns of a sequence
                values = {f"{number}": value for number, value in enumerate(values, 1)}
            return super().execute(sql, values)

    class Connection:
        __module__ = module

        def cursor(self):
            return inner.cursor(Cursor)

    with closing(sqlite3.connect(tmp_path / "business.db")) as inner:
        inner.execute(TABLE)
        inner.execute(ROW)
        assert update(Connection(), 3, note="x") == Applied(4)
        assert update(Connection(), 3, note="x") == AlreadyApplied(4)


def test_a_connection_class_of_the_users_own_is_known_by_its_base(tmp_path):
    class Own(sqlite3.Connection):
        pass

    with closing(sqlite3.connect(tmp_path / "business.db", factory=Own)) as connection:
        connection.execute(TABLE)
        connection.execute(ROW)
        assert update(connection, 3, note="x") == Applied(4)


def test_a_transition_with_other_changes_is_a_conflict(connection):
    by_card = {"note": "by card"}
    assert FLOW.transition(connection, 7, "paid", changes=by_card) == Applied("paid")
    assert FLOW.transition(connection, 7, "paid", changes=by_card) == AlreadyApplied("paid")
    assert FLOW.transition(connection, 7, "paid", changes={"note": "cash"}) == Conflict("paid")


def test_the_database_compares_what_a_transition_has_changed(connection):
    """A text that became a decimal is the value that was written."""
    dear = {"amount": "2.50", "note": None}
    assert FLOW.transition(connection, 7, "paid", changes=dear) == Applied("paid")
    assert FLOW.transition(connection, 7, "paid", changes=dear) == AlreadyApplied("paid")
    cheap = {"amount": "2.00", "note": None}
    assert FLOW.transition(connection, 7, "paid", changes=cheap) == Conflict("paid")


def test_rows_may_come_as_dictionaries():
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = lambda cursor, row: {
            column[0]: value for column, value in zip(cursor.description, row, strict=True)
        }
        run(connection, TABLE)
        run(connection, ROW)
        assert FLOW.transition(connection, 7, "paid") == Applied("paid")
        assert FLOW.transition(connection, 7, "paid") == AlreadyApplied("paid")


def test_a_cursor_is_not_taken_for_a_connection():
    refused = pytest.raises(ConfigError, match="a connection is needed, not a Cursor of sqlite3")
    with closing(sqlite3.connect(":memory:")) as connection, refused:
        update_if_version(connection.cursor(), "accounts", 7, 3, {"note": "x"})
