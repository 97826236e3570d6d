"""What `semel.testing` gives to its users, and what it does not ask of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest

import semel.testing
from semel.errors import ConfigError
from semel.testing import FakeClock

pytestmark = pytest.mark.usefixtures("not_measured")


def python(code, *args, cwd):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_every_public_name_is_there():
    for name in semel.testing.__all__:
        assert getattr(semel.testing, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="StoreContrat"):
        _ = semel.testing.StoreContrat


def test_the_tools_work_without_pytest(tmp_path):
    run = python(
        """
        import sys
        sys.modules["pytest"] = None  # as if it were not installed
        from semel.testing import FakeClock, FaultyStore, bypass
        assert FakeClock(5)() == 5
        try:
            from semel.testing import StoreContract
        except ImportError:
            print("only the contract needs it")
        """,
        cwd=tmp_path,
    )
    assert run.stdout == "only the contract needs it\n", run.stderr


def test_a_fake_clock_moves_when_told():
    clock = FakeClock(100.0)
    clock.advance(2.5)
    assert clock() == 102.5
    clock.advance(timedelta(minutes=1))
    assert clock() == 162.5
    clock.set_back(100)
    assert clock() == 62.5


@pytest.mark.parametrize("by", [-5, float("nan"), "5", None, timedelta(seconds=-1)])
def test_a_fake_clock_goes_back_only_by_its_own_word(by):
    clock = FakeClock(100.0)
    with pytest.raises(ConfigError, match="the time that passes must be"):
        clock.advance(by)
    with pytest.raises(ConfigError, match="what the clock is set back by must be"):
        clock.set_back(by)
    assert clock() == 100.0


def run_pytest(folder, *options):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_users_tests_get_an_engine_of_their_own(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["semel.testing.pytest_plugin"]\n')
    (tmp_path / "test_user.py").write_text(
        textwrap.dedent(
            """
            def test_one(idempotency):
                assert idempotency.execute("key", lambda: 1) == 1
                assert idempotency.execute("key", lambda: 2) == 1

            def test_other(idempotency):
                assert idempotency.execute("key", lambda: 3) == 3
            """
        )
    )
    run = run_pytest(tmp_path)
    assert "2 passed" in run.stdout, run.stdout


@pytest.mark.parametrize("plugin", ["asyncio", "anyio"])
def test_a_users_async_tests_get_an_engine_of_their_own(tmp_path, plugin):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["semel.testing.pytest_plugin"]\n')
    (tmp_path / "test_user.py").write_text(
        textwrap.dedent(
            f"""
            import pytest

            pytestmark = pytest.mark.{plugin}
            engines = []

            @pytest.fixture
            def anyio_backend():
                return "asyncio"

            async def pay():
                return len(engines)

            @pytest.mark.parametrize("number", [1, 2])
            async def test_each(async_idempotency, number):
                engines.append(async_idempotency)
                for _ in range(2):
                    assert await async_idempotency.execute("key", pay) == number
            """
        )
    )
    run = run_pytest(tmp_path, "-o", "asyncio_default_fixture_loop_scope=function", "-W", "error")
    assert "2 passed" in run.stdout, run.stdout


def test_a_contract_without_a_store_says_what_is_missing(tmp_path):
    (tmp_path / "test_user.py").write_text(
        "from semel.testing import StoreContract\n\nclass TestMine(StoreContract): pass\n"
    )
    run = run_pytest(tmp_path, "-x")
    assert "gives the fixture `store`" in run.stdout


def test_a_failing_contract_shows_both_sides(tmp_path):
    (tmp_path / "test_user.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from semel.core.records import RenewRequest
            from semel.stores.memory import MemoryStore
            from semel.testing import StoreContract

            class ForgetsWhatItDid(MemoryStore):
                def ask(self, request):
                    answer = super().ask(request)
                    return False if isinstance(request, RenewRequest) else answer

            class TestMine(StoreContract):
                @pytest.fixture
                def store(self):
                    return ForgetsWhatItDid()
            """
        )
    )
    run = run_pytest(tmp_path, "-k", "test_renew_sent_twice")
    assert "assert False is True" in run.stdout
