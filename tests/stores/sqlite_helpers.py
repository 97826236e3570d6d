"""What the tests of the SQLite store ask it, in their own process and in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import time
import warnings
from collections import Counter

from semel.core.records import Claimed, ClaimRequest, Encoded, Identity

RESULT = Encoded("json", b"1")

spawn = multiprocessing.get_context("spawn")
forked = multiprocessing.get_context("fork")


def identity(key, scope="orders"):
    return Identity(scope, str(key))


def ask(key, owner=b"owner-------", *, lease=30.0, hold=False, fingerprint=None, run_info=b""):
    return ClaimRequest(identity(key), owner, fingerprint, lease, 60.0, hold, run_info=run_info)


def finish(store, key, owner=b"owner-------", result=RESULT, ttl=60.0):
    assert isinstance(store.claim(ask(key, owner)), Claimed)
    assert store.complete(identity(key), owner, result, ttl)


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Statements:
    """Counts the statements a store runs, by their first word."""

    def __init__(self):
        self.seen = Counter()

    def __call__(self, sql):
        self.seen[sql.split()[0]] += 1


@contextlib.contextmanager
def write_lock(path):
    """Hold the write lock of the file, as another connection."""
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield holder
    finally:
        holder.close()


@contextlib.contextmanager
def ordinary_user():
    """Give up root's right to ignore file permissions."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def in_a_fork(work):
    """Run `work` in a forked child and return its answer, as text."""
    answers, child_end = forked.Pipe(duplex=False)
    child = start_fork(_report, work, child_end)
    answer = answers.recv()
    child.join()
    return answer


def start_fork(work, *args):
    child = forked.Process(target=work, args=args)
    with warnings.catch_warnings():
        # Python 3.12 warns when there are threads; they are the point of these tests.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    return child


def _report(work, parent):
    try:
        parent.send(str(work()))
    except BaseException as error:
        parent.send(repr(error))
