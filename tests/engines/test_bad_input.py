"""Bad input: one clear error each, with its cause and the way out, before anything runs or is
stored. Each line of the tables is tried on both engines."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from engines.facade import World, never
from semel import (
    AsyncIdempotency,
    ConfigError,
    Idempotency,
    InvalidKey,
    Policy,
    PreviousFailure,
    SerializationError,
    StoreError,
    StoreFull,
    StoreUnavailable,
    open_async_store,
    open_store,
)
from servers.redis import free_port, redis_server
from stores.sqlite_helpers import ordinary_user

MEGABYTE = "x" * 1_000_000


@contextlib.contextmanager
def refused(error, *words):
    """Expect this class of error, whose text is short and has these words."""
    with pytest.raises(error) as refusal:
        yield
    text = str(refusal.value)
    assert all(word in text for word in words), text
    assert len(text) < 1000


# --- calls ---------------------------------------------------------------------------------


def circular():
    loop = []
    loop.append(loop)
    return loop


BAD_NAMES = {
    "empty": ("", "is empty"),
    "a megabyte": (MEGABYTE, "has 1000000 characters, at most 255 are allowed"),
    "a space": ("a b", "has whitespace or a character that is not printable at position 1"),
    "a control character": ("ab\x00", "at position 2"),
    "a new line": ("a\n", "at position 1"),
    "none": (None, "must be a str, not NoneType"),
    "a number": (42, "must be a str, not int"),
    "bytes": (b"k", "must be a str, not bytes"),
    "a list": (["k"], "must be a str, not list"),
}

BAD_OPTIONS = {
    "policy: a dict": ({"policy": {"ttl": 5}}, ConfigError, "policy must be a Policy, not dict"),
    "policy: a name": ({"policy": "payment"}, ConfigError, "policy must be a Policy, not str"),
    "payload: an object": ({"payload": object()}, SerializationError, "no canonical form"),
    "payload: a deep one": (
        {"payload": {"items": [1, {"x": object()}]}},
        SerializationError,
        "(at payload['items'][1]['x'])",
    ),
    "payload: endless": (
        {"payload": circular()},
        SerializationError,
        "nested too deeply, or contains itself",
    ),
    "payload: missing": ({"policy": Policy.payment()}, ConfigError, "pass payload="),
}

METHODS = ("execute", "run", "consume", "attempt")


@pytest.fixture
def idem(memory_world):
    return memory_world.engine()


def call_by(idem, method, key, fn=never, **options):
    """Call one of the methods."""
    if method != "attempt":
        return getattr(idem, method)(key, fn, **options)
    context = idem.engine.attempt(key, **options)
    return idem._kind.finish(getattr(context, "__enter__", None) or context.__aenter__)


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_key_is_refused_before_the_store_is_asked(idem, method):
    for name, words in BAD_NAMES.values():
        with refused(InvalidKey, f"the key {words}" if "position" not in words else words):
            call_by(idem, method, name)
    assert idem.store.calls == []


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_scope_is_refused_before_the_store_is_asked(idem, method):
    for name, words in BAD_NAMES.values():
        with refused(InvalidKey, f"the scope {words}" if "position" not in words else words):
            call_by(idem, method, "k", scope=name)
    assert idem.store.calls == []


@pytest.mark.parametrize("verb", ["peek", "forget"])
def test_a_bad_name_is_refused_before_a_record_is_read_or_removed(idem, verb):
    for name, _ in BAD_NAMES.values():
        with refused(InvalidKey):
            getattr(idem, verb)(name)
        with refused(InvalidKey):
            getattr(idem, verb)("k", scope=name)
    assert idem.store.calls == []


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_option_is_refused_before_the_store_is_asked(idem, method):
    for options, error, words in BAD_OPTIONS.values():
        with refused(error, words):
            call_by(idem, method, "k", **options)
    assert idem.store.calls == []


def test_a_bad_ttl_is_refused_before_the_store_is_asked(idem):
    for ttl in (0, -1, "1h", float("nan")):
        with refused(ConfigError, "ttl must be"):
            idem.consume("k", never, ttl=ttl)
    assert idem.store.calls == []


def test_a_key_that_does_not_match_the_pattern_is_refused(memory_world):
    idem = memory_world.engine(key_pattern="[a-z]+-[0-9]+")
    assert idem.execute("order-42", lambda: 1) == 1
    with refused(InvalidKey, "does not match the pattern '[a-z]+-[0-9]+'"):
        idem.execute("order-42 ".strip() + "x", never)


def test_what_cannot_be_called_is_refused_before_the_store_is_asked(idem):
    for method in (idem.engine.execute, idem.engine.run, idem.engine.consume):
        for thing in (None, "f", 5):
            with refused(ConfigError, "a function without arguments is needed, not"):
                idem._kind.finish(method, "k", thing)
    assert idem.store.calls == []


async def asynchronous():
    raise AssertionError("this ran, and must not")


def test_an_async_function_needs_the_async_engine():
    with Idempotency("memory://") as idem:
        for method in (idem.execute, idem.run, idem.consume):
            with refused(ConfigError, "needs an AsyncIdempotency"):
                method("k", asynchronous)
        assert idem.peek("k") is None


# --- engines -------------------------------------------------------------------------------

ENGINES = {"threads": Idempotency, "asyncio": AsyncIdempotency}


async def listen(event):
    """A hook that would not be awaited."""


async def events_of(event):
    yield event


class Listener:
    async def __call__(self, event):
        """A hook that would not be awaited."""

    async def hear(self, event):
        """A hook that would not be awaited."""


BAD_ENGINES = {
    "an unknown scheme": (
        ("mongo://h",),
        {},
        "no store knows the scheme mongo://; known: memory://",
    ),
    "no URL": (("semel.db",), {}, "a store URL looks like sqlite:///semel.db"),
    "an empty URL": (("",), {}, "a store URL looks like"),
    "an object": ((object(),), {}, "such as RedisStore(client)); got object"),
    "a path": ((Path("semel.db"),), {}, "such as RedisStore(client)); got PosixPath"),
    "an unknown option": (("memory://?size=5",), {}, "does not know the option size; known:"),
    "a bad number": (("memory://?max_records=many",), {}, "max_records must be a whole number"),
    "an address in memory": (("memory://host",), {}, "memory:// has no address"),
    "two slashes": (("sqlite://semel.db",), {}, "write sqlite:///semel.db"),
    "no directory": (("sqlite:////no/such/place/s.db",), {}, "the directory of"),
    "a directory": (("sqlite:////tmp",), {}, "is a directory"),
    "a bad port": (("redis://localhost:port/0",), {}, "port"),
    "a bad database": (("redis://localhost/zero",), {}, "the database must be a number"),
    "a brace in the prefix": (("redis://localhost",), {"prefix": "a{b}"}, "prefix"),
    "prefix: a number": (("memory://",), {"prefix": 5}, "prefix: must be a string, not int"),
    "policy: a dict": (("memory://",), {"policy": {}}, "policy must be a Policy, not dict"),
    "scopes: a policy": (("memory://",), {"scopes": Policy()}, "a mapping from scope to Policy"),
    "scopes: of dicts": (("memory://",), {"scopes": {"a": {}}}, "a mapping from scope to Policy"),
    "hooks: a function": (("memory://",), {"hooks": print}, "a sequence of callables"),
    "hooks: of texts": (("memory://",), {"hooks": ["print"]}, "a sequence of callables"),
    "hooks: an async function": (("memory://",), {"hooks": [listen]}, "and listen is async"),
    "hooks: an async part": (("memory://",), {"hooks": [partial(listen)]}, "plain functions"),
    "hooks: an async object": (("memory://",), {"hooks": [Listener()]}, "and Listener is async"),
    "hooks: an async method": (
        ("memory://",),
        {"hooks": [Listener().hear]},
        "and Listener.hear is async",
    ),
    "hooks: an async generator": (("memory://",), {"hooks": [events_of]}, "and events_of is async"),
    "codecs: one codec": (("memory://",), {"codecs": object()}, "a sequence of codecs"),
    "codecs: of names": (("memory://",), {"codecs": ["json"]}, "a sequence of codecs"),
    "cache: a switch": (("memory://",), {"cache": True}, "the number of results to keep"),
    "cache: negative": (("memory://",), {"cache": -1}, "the number of results to keep"),
    "cache: a text": (("memory://",), {"cache": "10"}, "the number of results to keep"),
    "cache_ttl": (("memory://",), {"cache": 1, "cache_ttl": 0}, "cache_ttl must be more than zero"),
    "a bad pattern": (("memory://",), {"key_pattern": "("}, "not a regular expression"),
}


@pytest.mark.parametrize(("args", "options", "words"), BAD_ENGINES.values(), ids=BAD_ENGINES)
def test_an_engine_that_is_set_up_wrong_is_never_made(kind, args, options, words):
    with refused(ConfigError, words):
        ENGINES[kind](*args, **options)


def test_an_unknown_option_is_refused_by_the_name_that_was_called(kind):
    name = ENGINES[kind].__name__
    with refused(
        TypeError,
        f"{name}() got an unexpected keyword argument 'retention'",
        "known are policy, scopes, prefix, hooks, key_pattern, codecs, cache, cache_ttl, max_waiting, fingerprint_secret;",
    ):
        ENGINES[kind]("memory://", retention=5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("url", "the URL, or the store, is the first argument"),
        ("preset", "`preset` in semel.toml, or SEMEL_ENV"),
        ("disabled", "`disabled` in semel.toml, or SEMEL_DISABLED"),
        ("ttl", "policy=Policy(ttl=...)"),
    ],
)
def test_an_option_that_is_said_elsewhere_is_told_where(kind, name, words):
    with pytest.raises(TypeError) as caught:
        ENGINES[kind](**{name: "test"})
    assert words in str(caught.value)
    assert "open_store" not in str(caught.value)


def test_an_option_of_the_store_is_told_where_to_go(kind):
    opener = {"threads": "open_store", "asyncio": "open_async_store"}[kind]
    with refused(TypeError, "behind", f"semel.{opener}(url, ...)"):
        ENGINES[kind]("redis://localhost", behind="sqlite:///semel.db")


class Answering:
    """What answers requests, and is no store."""

    def send(self, requests):
        raise AssertionError


def test_a_store_of_ones_own_is_told_where_to_derive_from(kind):
    with refused(
        ConfigError,
        "got Answering. A store of your own derives from semel.stores.base.Store or AsyncStore",
    ):
        ENGINES[kind](Answering())


def test_a_store_of_the_other_kind_is_refused():
    with refused(ConfigError, "for an async one use AsyncIdempotency"):
        Idempotency(open_async_store("memory://"))
    with refused(ConfigError, "for one for threads use Idempotency"):
        AsyncIdempotency(open_store("memory://"))


WITHOUT = """
import asyncio, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if {{name, name.partition(".")[0]}} & {{*{packages!r}}}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import semel
try:
    {use}
except (semel.ConfigError, ImportError) as error:
    print(type(error).__name__, getattr(error, "name", ""), error)
"""


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("redis", "redis", "semel.Idempotency('redis://localhost')"),
        ("redis", "redis", "semel.AsyncIdempotency('redis://localhost')"),
        ("pymysql", "mysql", "semel.Idempotency('mysql://u@h/d')"),
        ("asyncmy", "mysql", "semel.AsyncIdempotency('mariadb://u@h/d')"),
        ("psycopg", "postgres", "semel.Idempotency('postgresql://h/d')"),
        ("psycopg_pool", "postgres", "semel.Idempotency('postgresql://h/d')"),
        ("asyncpg", "postgres", "semel.AsyncIdempotency('postgres://h/d')"),
        ("psycopg", "postgres", "semel.AsyncIdempotency('postgres://h/d')"),
        ("cryptography", "encryption", "semel.EncryptedCodec(keys={'a': b'k' * 16}, primary='a')"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, extra, use):
    script = WITHOUT.format(packages=(package,), use=use)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    told = f"needs the package {package}: pip install 'semel[{extra}]'"
    assert done.stdout.startswith("ConfigError")
    assert told in done.stdout


@pytest.mark.parametrize(
    ("package", "install", "module"),
    [
        ("fastapi", "semel[fastapi]", "semel.adapters.fastapi"),
        ("flask", "semel[flask]", "semel.adapters.flask"),
        ("django", "semel[django]", "semel.adapters.django"),
        ("httpx", "semel[httpx]", "semel.adapters.httpx"),
        ("requests", "semel[requests]", "semel.adapters.requests"),
        ("apscheduler", "semel[apscheduler]", "semel.adapters.apscheduler"),
        ("celery", "semel[celery]", "semel.adapters.celery_beat"),
        ("sqlalchemy", "semel[sqlalchemy]", "semel.observe.sqlalchemy"),
        ("sqlalchemy", "semel[sqlalchemy]", "semel.stores.sql.sqlalchemy_tables"),
        ("pymysql", "semel[mysql]", "semel.stores.sql.mysql.MySQLStore"),
        ("asyncmy", "semel[mysql]", "semel.stores.sql.mysql.AsyncMySQLStore"),
        ("psycopg", "semel[postgres]", "semel.stores.sql.postgres.PostgresStore"),
        ("asyncpg", "semel[postgres]", "semel.stores.sql.postgres.AsyncPostgresStore"),
        ("pytest", "pytest", "semel.testing.StoreContract"),
    ],
)
@pytest.mark.parametrize("others", [(), ("anyio", "starlette", "werkzeug", "urllib3")])
def test_an_integration_without_its_package_names_the_command_that_installs_it(
    package, install, module, others
):
    package_of, _, name = module.rpartition(".")
    use = f"from {package_of} import {name}"
    script = WITHOUT.format(packages=(package, *others), use=use)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        f"ModuleNotFoundError {package} "
        f"{module} needs the package {package}: pip install '{install}'"
    )


@pytest.mark.parametrize(
    ("missing", "package", "install", "use"),
    [
        ("redis", "redis", "semel[redis]", "from semel.stores.redis import RedisStore"),
        ("redis", "redis", "semel[redis]", "from semel.stores.redis import AsyncRedisStore"),
        ("grpc", "grpcio", "semel[grpc]", "import semel.adapters.grpc"),
        ("google", "protobuf", "semel[grpc]", "import semel.adapters.grpc"),
        ("google.protobuf", "protobuf", "semel[grpc]", "import semel.adapters.grpc"),
    ],
)
def test_the_package_is_named_that_brings_the_module(missing, package, install, use):
    script = WITHOUT.format(packages=(missing,), use=use)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        f"ModuleNotFoundError {missing} {use.split()[1]} needs the package {package}: "
        f"pip install '{install}'"
    )


def test_an_endpoint_with_a_session_names_the_command_that_installs_sqlalchemy():
    use = "from semel.adapters.starlette import Idempotent; Idempotent('memory://', session=list)"
    script = WITHOUT.format(packages=("sqlalchemy",), use=use)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "ModuleNotFoundError sqlalchemy @idempotent(session=...) needs the package sqlalchemy: "
        "pip install 'semel[sqlalchemy]'"
    )


@pytest.mark.parametrize(
    ("missing", "use"),
    [
        ("asyncmy", "semel.Idempotency('mysql://u@h/d')"),
        ("pymysql", "semel.AsyncIdempotency('mysql://u@h/d')"),
        ("asyncpg", "semel.Idempotency('postgresql://h/d')"),
        ("asyncmy", "import semel.transactions.drivers, semel.transactions.dialects"),
        ("pymysql", "import semel.transactions.drivers, semel.transactions.dialects"),
        ("asyncpg", "import semel.transactions.drivers, semel.transactions.dialects"),
    ],
)
def test_an_engine_needs_the_driver_of_its_own_kind_alone(missing, use):
    script = WITHOUT.format(packages=(missing,), use=f"{use}; print('opened')")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "opened"


def test_every_name_of_semel_is_there_without_any_extra():
    use = "from semel import *; print(hasattr(semel, 'EncryptedCodec'), EncryptedCodec.__name__)"
    script = WITHOUT.format(packages=("cryptography",), use=use)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "EncryptedCodec"]


# --- stores that cannot do their work ------------------------------------------------------


@pytest.fixture
def open_directory():
    """A directory that every user may enter."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


@contextlib.contextmanager
def engine_at(kind, url, **options):
    """An engine by URL, as a user makes it."""
    with World(kind, "memory://") as world:
        engine = world.kind.engine(url, **options)
        try:
            yield partial(world.kind.call, engine.execute), partial(world.kind.call, engine.consume)
        finally:
            world.kind.finish(engine.close)


def nothing_runs(kind, url, error, *words):
    with engine_at(kind, url) as methods:
        for method in methods:
            with refused(error, *words):
                method("k", never)


def test_an_unreachable_server_is_named(kind):
    port = free_port()
    nothing_runs(kind, f"redis://127.0.0.1:{port}", StoreUnavailable, f"127.0.0.1:{port}")


def test_a_wrong_password_is_named_and_not_shown(kind):
    with redis_server(password="right") as server:
        url = server.url.replace("right", "hunter2")
        with engine_at(kind, url) as (execute, _), pytest.raises(StoreError) as refusal:
            execute("k", never)
        assert "password" in str(refusal.value)
        assert "hunter2" not in str(refusal.value)


def test_a_read_only_file_is_named(kind, open_directory):
    path = open_directory / "semel.db"
    with engine_at(kind, f"sqlite:///{path}") as (execute, _):
        assert execute("k", lambda: 1) == 1
    path.chmod(0o444)
    open_directory.chmod(0o555)
    with ordinary_user():
        nothing_runs(kind, f"sqlite:///{path}", StoreUnavailable, str(path), "cannot be")


def test_a_file_that_is_no_database_is_named(kind, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, just notes. " * 100)
    nothing_runs(
        kind, f"sqlite:///{path}", StoreUnavailable, str(path), "is not an SQLite database"
    )


def test_a_directory_that_came_in_place_of_the_file_is_named(kind, tmp_path):
    path = tmp_path / "semel.db"
    with engine_at(kind, f"sqlite:///{path}") as (execute, _):
        path.mkdir()
        with refused(StoreUnavailable, str(path), "cannot be opened"):
            execute("k", never)


def fill(path):
    with path.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)


def test_a_full_disk_is_told_before_anything_runs(kind, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk is not allowed here")
    ran = []
    try:
        with engine_at(kind, f"sqlite:///{disk / 'semel.db'}") as (execute, _):
            assert execute("first", lambda: "x" * 1000) == "x" * 1000
            fill(disk / "ballast")
            with refused(StoreFull, "no room is left for the SQLite database"):
                for number in range(1000):
                    execute(f"k{number}", lambda number=number: ran.append(number))
            refused_key = f"k{len(ran)}"
            assert execute("first", never) == "x" * 1000, "what was done is still answered"
            (disk / "ballast").unlink()
            assert execute(refused_key, lambda: "now") == "now"
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_memory_store_refuses_new_keys_and_serves_the_others(kind):
    with engine_at(kind, "memory://?max_records=2") as (execute, consume):
        assert execute("a", lambda: 1) == 1
        assert consume("b", lambda: 1) is True
        for method in (execute, consume):
            with refused(StoreFull, "2 records"):
                method("c", never)
        assert execute("a", never) == 1
        assert consume("b", never) is False


def test_a_full_server_refuses_new_keys_and_serves_the_others(kind):
    with redis_server() as server, engine_at(kind, server.url) as (execute, _):
        assert execute("a", lambda: 1) == 1
        with server.client() as client:
            client.config_set("maxmemory", 1)
        with refused(StoreFull, "is full"):
            execute("b", never)
        assert execute("a", never) == 1


def test_a_store_that_is_down_never_hides_a_known_answer_behind_a_guess(kind, tmp_path):
    # Fail closed: also what was done before is not answered by running it again.
    path = tmp_path / "semel.db"
    with engine_at(kind, f"sqlite:///{path}", policy=Policy(failure="final")) as (execute, _):
        with pytest.raises(ZeroDivisionError):
            execute("k", lambda: 1 / 0)
        with pytest.raises(PreviousFailure):
            execute("k", never)
    path.write_text("overwritten " * 1000)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    nothing_runs(kind, f"sqlite:///{path}", StoreUnavailable, str(path))


def test_scopes_beyond_those_that_are_remembered_are_checked_each_time(monkeypatch):
    monkeypatch.setattr("semel.engine.setup.SCOPES_CACHED", 1)
    with Idempotency("memory://") as idem:
        for scope in ("one", "two", "three", "two"):
            assert idem.execute("k", lambda at=scope: at, scope=scope) == scope
        assert idem.internals.setup._known_scopes == {"one"}
        for bad in ("", "a b", "x" * 256):
            with pytest.raises(InvalidKey, match="scope"):
                idem.execute("k", lambda: 1, scope=bad)
