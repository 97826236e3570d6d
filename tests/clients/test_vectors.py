"""The scenarios of `clients/vectors.json`, against the service over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from clients.scenarios import JSON, MSGPACK, VECTORS, run_scenario, settings
from server.conftest import RunningService


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def port(request, tmp_path_factory) -> Iterator[int]:
    """A service with the rules of the scenarios, on stores that can and that cannot wake it."""
    folder = tmp_path_factory.mktemp("vectors")
    folder.joinpath("semel.toml").write_text(settings())
    url = f"sqlite:///{folder / 'semel.db'}"
    if request.param == "redis":
        url = request.getfixturevalue("redis_of_this_worker").url
    running = RunningService(folder, url, (), {})
    with contextlib.ExitStack() as stack:
        stack.callback(running.stop)
        yield running.port


@pytest.mark.parametrize("media_type", [JSON, MSGPACK])
@pytest.mark.parametrize("scenario", VECTORS["scenarios"], ids=lambda each: each["name"])
def test_python(scenario, media_type, port):
    run_scenario(scenario, port, media_type)
