"""Stores are found by the scheme of their URL: ours, and those that others publish."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from semel import ConfigError, Idempotency, open_async_store, open_store
from semel.stores.memory import AsyncMemoryStore, MemoryStore

MODULE = """
from semel.stores.memory import AsyncMemoryStore, MemoryStore

def open_store(url, *, prefix, timeout, **options):
    return MemoryStore()

def open_async_store(url, *, prefix, timeout, **options):
    return AsyncMemoryStore()
"""


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A distribution as pip installs it, that publishes a store for the scheme shelf://."""
    info = tmp_path / "shelf_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[semel.stores]\nshelf = shelf_store\n")
    (tmp_path / "shelf_store.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("shelf_store", None)


@pytest.mark.usefixtures("published")
def test_a_store_of_somebody_else_is_found_by_its_entry_point():
    assert isinstance(open_store("shelf://"), MemoryStore)
    assert isinstance(open_async_store("shelf://"), AsyncMemoryStore)
    with Idempotency("shelf://") as idem:
        assert idem.execute("k", lambda: 1) == 1


@pytest.mark.usefixtures("published")
def test_a_store_of_somebody_else_that_is_not_for_asyncio_is_named(tmp_path):
    module = tmp_path / "shelf_store.py"
    module.write_text(MODULE.replace("def open_async_store", "def _not_yet"))
    with pytest.raises(ConfigError, match=r"shelf:// .* has no open_async_store"):
        open_async_store("shelf://")


@pytest.mark.usefixtures("published")
def test_an_unknown_scheme_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"no store knows the scheme lost://; known: memory://"):
        open_store("lost://")


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("postgresql+asyncpg://u:secret@h/d", "write postgresql:// (Idempotency and"),
        ("postgresql+psycopg://h/d", "write postgresql:// (Idempotency and"),
        ("postgres+psycopg2://h/d", "write postgres:// (Idempotency and"),
        ("mysql+pymysql://u@h/d", "write mysql:// (Idempotency and"),
        ("mysql+aiomysql://u@h/d", "write mysql:// (Idempotency and"),
        ("sqlite+aiosqlite:///semel.db", "write sqlite:// (Idempotency and"),
        ("redis+asyncio://localhost", "write redis:// (Idempotency and"),
        ("valkey://localhost", "write redis://; known"),
        ("valkeys://localhost", "write rediss://; known"),
        ("pgsql://h/d", "write postgresql://; known"),
        ("unix:///run/redis.sock", "write redis+unix://; known"),
        ("REDIS://localhost", "write it in small letters, redis://; known"),
        ("mongodb://localhost", "no store knows the scheme mongodb://; known"),
    ],
)
def test_a_url_of_another_library_gets_a_hint_which_one_to_write(opener, url, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)) as refused:
        opener(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["open", "AsyncStore"])
@pytest.mark.parametrize("database", ["mysql", "postgres"])
def test_a_name_that_a_package_of_stores_does_not_have_is_an_attribute_error(database, name):
    package = importlib.import_module(f"semel.stores.sql.{database}")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(package, name)


@pytest.mark.parametrize("opener", [open_store, open_async_store])
@pytest.mark.parametrize("name", ["prefix", "behind", "front_ttl", "front_timeout"])
@pytest.mark.parametrize(
    "url",
    ["memory://", "sqlite:///x.db", "mysql://u@h/d", "postgresql://h/d", "redis://h"],
)
def test_an_option_that_no_url_carries_is_asked_for_by_name(url, name, opener):
    with pytest.raises(ConfigError, match=f"{name} is an option of open_store.*: give it by name"):
        opener(f"{url}?{name}=1")


@pytest.mark.parametrize(
    "url", ["memory://?clock=1", "mysql://u@h/d?columns=x", "postgresql://h/d?columns=x"]
)
def test_a_function_is_asked_for_by_name(url):
    with pytest.raises(ConfigError, match=r"is a (mapping of )?functions?: give it by name"):
        open_store(url)


def test_a_fault_of_our_own_modules_is_not_taken_for_a_missing_extra(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'semel.lost'", name="semel.lost")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        open_store("redis://localhost")
