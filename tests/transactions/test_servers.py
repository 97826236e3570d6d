"""The private MariaDB of these tests is there for every one of them, whatever else the machine does."""

from __future__ import annotations

import contextlib

import pymysql

from servers import mariadb
from transactions.kinds import mysql_login


def test_a_port_that_another_server_got_first_is_exchanged_for_a_free_one(
    mariadb_of_this_worker, monkeypatch
):
    ports = [mariadb_of_this_worker.port, mariadb.free_port()]
    monkeypatch.setattr(mariadb, "free_port", lambda: ports.pop(0))
    with mariadb.mariadb_server() as server:
        assert ports == []
        assert server.execute("SELECT @@socket") == [(server.socket_path,)]


def test_no_server_starts_in_the_folder_of_anothers_temporary_tables(mariadb_of_this_worker):
    # A server removes those that it finds when it starts: an installation beside it would fail.
    folder = str(mariadb_of_this_worker.folder)
    assert mariadb_of_this_worker.execute("SELECT @@tmpdir LIKE %s", f"{folder}/%") == [(1,)]


def test_a_server_that_crashed_is_up_again_for_the_next_test():
    with mariadb.mariadb_server() as server:
        server.kill()
        with contextlib.closing(pymysql.connect(**mysql_login(server.database()))) as connection:
            assert connection.open
