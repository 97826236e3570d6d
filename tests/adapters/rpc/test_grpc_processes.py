"""Two servers on one store, one of which is killed in the middle of a call."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from adapters.rpc.shop import PAY, REFUND, Client, finished
from engines.facade import PATIENCE, wait_until
from semel.adapters.grpc import IdempotencyClientInterceptor

SERVING = Path(__file__).with_name("serving.py")


class Process:
    """A server that can be killed, and a client that talks to it."""

    def __init__(self, kind: str, url: str, ledger: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SERVING, kind, url, ledger],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HANGING": name},
        )
        self._closed = False

    def begin(self) -> None:
        self.port = int(self._process.stdout.readline())
        self.client = Client(self.port)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: nothing is closed, nothing is said."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.client.close()
        self.kill()
        self._process.stdout.close()


@pytest.fixture(
    params=[("threads", "sqlite"), ("asyncio", "redis"), ("asyncio", "postgres")],
    ids="-".join,
)
def servers(request, tmp_path) -> Iterator[tuple[Process, Process, Path]]:
    kind, store = request.param
    url, ledger = request.getfixturevalue(f"{store}_url"), tmp_path / "ledger"
    ledger.touch()
    with contextlib.ExitStack() as stack:
        both = [Process(kind, url, ledger, name) for name in ("one", "two")]
        for process in both:
            process.begin()
            stack.callback(process.close)
        yield (*both, ledger)


def test_a_server_that_is_killed_leaves_its_keys_to_the_other(servers):
    one, two, ledger = servers

    def runs(what: str) -> list[int]:
        lines = (line.partition(" ") for line in ledger.read_text().splitlines())
        return [int(pid) for pid, _, value in lines if value == what]

    first = one.client.pay("pay", "k1")
    assert first.value == f"pay by {one.pid}"
    replayed = two.client.pay("pay", "k1")
    assert replayed.data == first.data
    assert replayed.replayed

    hanging = one.client.start(PAY, "hang one", "k2")
    held = one.client.start(REFUND, "hang one", "k3")
    wait_until(lambda: len(runs("hang one")) == 2)
    assert two.client.pay("hang one", "k2").status == "concurrent-request"
    one.kill()
    for call in (hanging, held):
        assert finished(call).code is grpc.StatusCode.UNAVAILABLE

    # The retries of a client meet the dead one's lease, and then take over.
    retrying = IdempotencyClientInterceptor(retries=100)
    channel = grpc.intercept_channel(two.client.channel, retrying)
    pay = channel.unary_unary(PAY, StringValue.SerializeToString, StringValue.FromString)
    metadata = (("idempotency-key", "k2"),)
    answer = pay(StringValue(value="hang one"), metadata=metadata, timeout=PATIENCE)
    assert answer.value == f"hang one by {two.pid}"
    wait_until(lambda: two.client.call(REFUND, "hang one", "k3").status == "outcome-unknown")
    assert runs("hang one") == [one.pid, one.pid, two.pid]
    assert runs("pay") == [one.pid]
