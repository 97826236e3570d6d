"""The running operation as a comment in SQL, on real databases, whatever the key holds."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import Idempotency
from semel.observe import CommentedCursor, commented, sql_comment

SAFE = re.compile(r"/\* semel scope=[\w.:@,=+~-]* key=[\w.:@,=+~-]* attempt=1 \*/", re.ASCII)

NASTY = [
    "*/DROP/**/TABLE/**/effects;--",
    "/*nested",
    "%s%(x)s%%",
    "?:name@x",
    ":name",
    "~2a",
    "'quoted\"`",
    "\\",
    "ключ",
    "$1;#",
    "!50000",
]


@pytest.fixture
def inside():
    """Run a function inside an attempt of a key."""
    with Idempotency("memory://") as idem:
        yield lambda fn, key="order:42": idem.execute(key, fn, scope="orders.create")


def test_there_is_no_comment_while_nothing_runs():
    assert sql_comment() == ""
    assert commented("SELECT 1") == "SELECT 1"


def test_the_comment_names_scope_key_and_attempt(inside):
    assert inside(sql_comment) == "/* semel scope=orders.create key=order:42 attempt=1 */"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1", "SELECT {} 1"),
        ("\n  insert\nINTO t VALUES (1)", "\n  insert {}\nINTO t VALUES (1)"),
        ("COMMIT", "COMMIT {}"),
        ("(SELECT 1)", "(SELECT 1) {}"),
        ("-- note\nSELECT 1", "-- note\nSELECT 1 {}"),
        ("", " {}"),
    ],
)
def test_the_comment_stands_behind_the_first_word(inside, sql, expected):
    comment = inside(sql_comment)
    assert inside(lambda: commented(sql), key="order:42-again").replace(
        "order:42-again", "order:42"
    ) == expected.format(comment)


@pytest.mark.parametrize("key", NASTY)
def test_no_key_breaks_out_of_the_comment(inside, key):
    assert SAFE.fullmatch(inside(sql_comment, key))


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=50))
def test_no_text_breaks_out_of_the_comment(key):
    with Idempotency("memory://") as idem:
        assert SAFE.fullmatch(idem.execute(key, sql_comment, scope="orders"))


def test_two_keys_never_look_alike(inside):
    comments = {inside(sql_comment, key) for key in [*NASTY, "*", "~", "~7e", "~~7e"]}
    assert len(comments) == len(NASTY) + 4


@pytest.mark.parametrize("key", NASTY)
def test_sqlite_takes_the_comment_and_its_parameters(inside, key):
    class Cursor(CommentedCursor, sqlite3.Cursor):
        pass

    seen = []
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.set_trace_callback(seen.append)
        cursor = connection.cursor(Cursor)

        def effect():
            cursor.execute("CREATE TABLE effects (number)")
            cursor.executemany("INSERT INTO effects VALUES (?)", [(1,), (2,)])
            return cursor.execute(
                "SELECT sum(number) FROM effects WHERE number > ?", (0,)
            ).fetchone()

        assert inside(effect, key) == (3,)
    assert len([sql for sql in seen if "/* semel " in sql]) == 4


@pytest.mark.parametrize("key", NASTY)
def test_postgresql_takes_the_comment_and_its_parameters(inside, postgres_url, key):
    class Cursor(CommentedCursor, psycopg.Cursor):
        pass

    with psycopg.connect(postgres_url, cursor_factory=Cursor) as connection:

        def effect():
            query = connection.execute(
                "SELECT query, %s FROM pg_stat_activity WHERE pid = pg_backend_pid()", ("100%",)
            )
            (shown, parameter) = query.fetchone()
            plain = psycopg.sql.SQL("SELECT {}").format(1)  # left as it is
            assert connection.execute(plain).fetchone() == (1,)
            return [shown, parameter]

        shown, parameter = inside(effect, key)
    assert SAFE.search(shown)
    assert parameter == "100%"


@pytest.mark.parametrize("key", NASTY)
def test_mariadb_takes_the_comment_and_its_parameters(inside, mysql_url, key):
    class Cursor(CommentedCursor, pymysql.cursors.Cursor):
        pass

    place = urlsplit(mysql_url)
    connection = pymysql.connect(
        host=place.hostname,
        port=place.port,
        user=unquote(place.username),
        password=unquote(place.password or ""),
        database=place.path[1:],
        cursorclass=Cursor,
    )
    with connection, connection.cursor() as cursor:

        def effect():
            cursor.execute("CREATE TEMPORARY TABLE effects (number INT, word TEXT)")
            cursor.executemany("INSERT INTO effects VALUES (%s, %s)", [(1, "100%"), (2, "%s")])
            bulk = cursor._executed
            cursor.execute(
                "SELECT info, %s FROM information_schema.processlist WHERE id = connection_id()",
                ("x",),
            )
            return [
                bulk.decode() if isinstance(bulk, bytes | bytearray) else bulk,
                *cursor.fetchone(),
            ]

        bulk, shown, parameter = inside(effect, key)
    assert SAFE.search(shown)
    assert parameter == "x"
    assert "(1, '100%'),(2, '%s')" in bulk, "many rows still go as one statement"
    assert len(SAFE.findall(bulk)) == 1
