"""A consumer dies between its work and its word to the broker.

| # | expected |
|---|---|
| 7 crash after complete, before the message is acknowledged | replayed and acknowledged, one effect |
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from semel import Idempotency

fault = pytest.mark.fault

CONSUMER = """
import os, signal, sys
from semel import Idempotency

url, effects = sys.argv[1:]

def handle():
    with open(effects, "a") as file:
        file.write("handled\\n")

assert Idempotency(url).consume("msg:17", handle) is True
os.kill(os.getpid(), signal.SIGKILL)  # the broker was not told
"""


@fault(7)
@pytest.mark.parametrize("store", ["sqlite", "redis", "postgres", "mysql"])
def test_a_message_that_was_handled_but_not_acknowledged_is_acknowledged_when_it_comes_again(
    store, request, tmp_path
):
    url, effects = request.getfixturevalue(f"{store}_url"), tmp_path / "effects"
    consumer = subprocess.run([sys.executable, "-c", CONSUMER, url, effects], check=False)
    assert consumer.returncode == -signal.SIGKILL
    with Idempotency(url) as idem:
        assert idem.consume("msg:17", lambda: effects.open("a").write("again")) is False
    assert effects.read_text() == "handled\n"
