"""What teams write by hand on MariaDB."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Any

import pymysql

from benchmarks.contenders.mysql_floors import connect
from benchmarks.contenders.postgres_floors import CONNECTIONS
from benchmarks.measuring import Contender, Go, Place, ThreadContender, calling

POLL = 0.05

CREATE = """
CREATE TABLE IF NOT EXISTS by_hand (
    name varchar(255) PRIMARY KEY, status varchar(16) NOT NULL, result longtext,
    expires_at datetime NOT NULL DEFAULT (now() + interval 1 day)
)
"""
CLAIM = "INSERT IGNORE INTO by_hand (name, status) VALUES (%s, 'running')"
DONE = "UPDATE by_hand SET status = 'done', result = %s WHERE name = %s"
LOOK = "SELECT status, result FROM by_hand WHERE name = %s"


@contextmanager
def _hand_threads(place: Place) -> Iterator[Go]:
    idle: LifoQueue[pymysql.Connection[Any]] = LifoQueue()
    for _ in range(CONNECTIONS):
        idle.put(connect(place.url))
    first = idle.get()
    with first.cursor() as cursor:
        cursor.execute(CREATE)
    idle.put(first)

    def execute(sql: str, *values: str) -> tuple[int, Any]:
        connection = idle.get()
        try:
            with connection.cursor() as cursor:
                return cursor.execute(sql, values), cursor.fetchone()
        finally:
            idle.put(connection)

    def call(key: str) -> Any:
        if execute(CLAIM, key)[0] == 1:
            value = place.work.run()
            execute(DONE, json.dumps(value), key)
            return value
        while True:
            found = execute(LOOK, key)[1]
            if found is not None and found[0] == "done":
                return json.loads(found[1])
            time.sleep(POLL)

    yield calling(call)
    while not idle.empty():
        idle.get().close()


MYSQL_HAND: ThreadContender = Contender(
    "by hand: insert ignore, PyMySQL", "alternative", _hand_threads, "PyMySQL"
)
