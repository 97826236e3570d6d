"""Who can read the files of a SQLite store: their owner, unless the file was there before."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from semel import open_async_store, open_store
from semel.core.records import Encoded, Identity
from semel.errors import StoreError
from semel.testing import StoreDriver

RESULT = Encoded("json/1", b"1")


@pytest.fixture(autouse=True)
def generous():
    """A process whose files everybody may read."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(params=[open_store, open_async_store])
def use(request):
    def use(path):
        """Write a record; return the modes of the files while the store is open."""
        with closing(StoreDriver(request.param(f"sqlite:///{path}"))) as store:
            store.put(Identity("s", "k"), RESULT, 60, owner=b"owner".ljust(12))
            beside = [path, f"{path}-wal", f"{path}-shm"]
            return [stat.S_IMODE(Path(file).stat().st_mode) for file in beside]

    return use


def test_files_that_the_store_creates_are_their_owners_alone(use, tmp_path):
    assert use(tmp_path / "records.db") == [0o600] * 3


def test_a_file_that_was_there_keeps_its_mode(use, tmp_path):
    file = tmp_path / "records.db"
    file.touch(0o660)
    assert use(file) == [0o660] * 3


def test_a_link_to_a_file_that_is_not_there_creates_it_alike(use, tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "records.db")
    with pytest.raises(FileNotFoundError):  # SQLite has its log beside the file itself
        use(tmp_path / "link.db")
    assert stat.S_IMODE((tmp_path / "records.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("opener", [open_store, open_async_store])
def test_a_file_that_cannot_be_created_is_named_by_sqlite(opener, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with closing(StoreDriver(opener(f"sqlite:///{folder / 'records.db'}"))) as store:
        folder.rmdir()
        with pytest.raises(StoreError, match="unable to open database file"):
            store.get(Identity("s", "k"))
