"""A private RabbitMQ for tests: free loopback ports, a temporary folder, stopped by pid.

The management plugin would double the time to start. What tests ask of the broker (a virtual
host of their own, the length of a queue, a policy, closed connections) is Erlang that the node
evaluates for them, sent to a port of its own on the loopback interface.

rabbitmq_server()         one broker; kill(), start() and restart() keep durable queues
server.virtual_host()     an empty virtual host with the URL that clients connect to
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from servers.redis import HOST, free_port

PATIENCE = 60.0
DEBIAN = Path("/usr/lib/rabbitmq/lib")  # its program on PATH changes the user first

# One scheduler and few threads: starting takes 3 s of one core. The name comes from the command
# line, else the node starts another Erlang only to get epmd running.
ARGUMENTS = (
    "+S 1:1 +SDcpu 1:1 +SDio 2 +stbt u -sname {node} -setcookie semel -start_epmd false "
    "-kernel inet_dist_use_interface {{127,0,0,1}} "
    '-eval file:eval("{folder}/control.erl")'
)
CONTROL = """
spawn(fun() ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {packet, 4}, {active, false},
                                        {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listener),
    ok = file:write_file("control.new", integer_to_list(Port)),
    ok = file:rename("control.new", "control.port"),
    Serve = fun Serve() ->
        {ok, Socket} = gen_tcp:accept(Listener),
        Answer = try
            {ok, Code} = gen_tcp:recv(Socket, 0),
            {ok, Tokens, _} = erl_scan:string(binary_to_list(Code)),
            {ok, Parsed} = erl_parse:parse_exprs(Tokens),
            {value, Value, _} = erl_eval:exprs(Parsed, []),
            rabbit_json:encode(#{value => Value})
        catch Class:Error ->
            Text = io_lib:format("~0p", [{Class, Error}]),
            rabbit_json:encode(#{error => iolist_to_binary(Text)})
        end,
        gen_tcp:send(Socket, Answer),
        gen_tcp:close(Socket),
        Serve()
    end,
    Serve()
end).
"""
SETTINGS = """
listeners.tcp.1 = {host}:{port}
log.console = true
log.console.level = warning
log.file = false
vm_memory_high_watermark.absolute = 1GB
disk_free_limit.absolute = 1MB
"""


class Depth(NamedTuple):
    """How many messages a queue has."""

    ready: int
    unacknowledged: int


def program() -> str:
    """The script that starts the broker, without what a distribution wraps around it."""
    found = [str(path) for path in sorted(DEBIAN.glob("*/sbin/rabbitmq-server"))]
    on_path = shutil.which("rabbitmq-server")
    if found or on_path:
        return found[-1] if found else str(on_path)
    message = "no rabbitmq-server: run `make servers`"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition; a broker that does not answer yet counts as "not yet"."""
    deadline = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience:g} s for {what}")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with socket.create_connection((HOST, port), 5):
        return True


class RabbitMQServer:
    """One running broker."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        names = free_port()
        node = f"semel{self.port}@localhost"
        (folder / "control.erl").write_text(CONTROL)
        (folder / "rabbitmq.conf").write_text(SETTINGS.format(host=HOST, port=self.port))
        (folder / "plugins").write_text("[].")
        # Quorum queues count their messages at every tick, of 5 s unless said.
        (folder / "advanced.config").write_text("[{rabbit, [{quorum_tick_interval, 200}]}].")
        self._environment = {
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/bin:/bin",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(names),
            "RABBITMQ_NODENAME": node,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ARGUMENTS.format(node=node, folder=folder),
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node: its pid is ours
        }
        self._epmd = subprocess.Popen(  # in the foreground: the node would leave a daemon behind
            ["epmd", "-address", HOST, "-port", str(names)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            # Before the node looks for it, which would start another one, and leave that behind.
            wait_until(lambda: _listens(names), "epmd to listen")
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Start the broker, with the durable queues that it had before."""
        (self.folder / "control.port").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program()], env=self._environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, "the broker to answer")

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text()[-4000:])
        with socket.create_connection((HOST, self.port), 5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            if not connection.recv(1):
                return False
        return bool(self.evaluate("rabbit:is_running()."))

    def kill(self) -> None:
        """End the broker without any notice (SIGKILL)."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """The same broker on the same port, after a crash; what was confirmed is still there."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop answering, without closing a connection, until resume()."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the broker for good; nothing of it is kept, so a crash is quickest."""
        for process in filter(None, (self.process, self._epmd)):
            process.kill()
            process.wait()

    def evaluate(self, code: str) -> Any:
        """Let the node evaluate Erlang expressions; the last one's value comes as JSON."""
        port = int((self.folder / "control.port").read_text())
        with socket.create_connection((HOST, port), 30) as connection:
            connection.sendall(len(code.encode()).to_bytes(4, "big") + code.encode())
            received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        if not received:
            raise ConnectionError("the broker ended while it was asked")
        answer = json.loads(received[4:])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def close_connections(self, reason: str = "closed by the test") -> int:
        """Close the connections of all clients, as an operator would; return how many."""
        return int(
            self.evaluate(
                "Open = rabbit_networking:connections(), "
                f'[rabbit_networking:close_connection(C, "{reason}") || C <- Open], length(Open).'
            )
        )

    @contextlib.contextmanager
    def virtual_host(self) -> Iterator[VirtualHost]:
        """An empty virtual host, deleted afterwards."""
        name = f"test-{uuid4().hex[:12]}"
        self.evaluate(
            f'rabbit_vhost:add(<<"{name}">>, <<"semel">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>, '
            '<<".*">>, <<".*">>, <<".*">>, <<"semel">>).'
        )
        try:
            yield VirtualHost(self, name)
        finally:
            if self.process.poll() is None:
                self.evaluate(f'rabbit_vhost:delete(<<"{name}">>, <<"semel">>).')


class VirtualHost:
    """Exchanges and queues that only one test uses."""

    def __init__(self, server: RabbitMQServer, name: str) -> None:
        self.server = server
        self.name = name

    @property
    def url(self) -> str:
        return self.url_at(self.server.port)

    def url_at(self, port: int) -> str:
        """The URL through a proxy's port."""
        return f"amqp://guest:guest@{HOST}:{port}/{self.name}"

    def add_user(
        self, name: str, configure: str = "^$", write: str = "^$", read: str = "^$"
    ) -> None:
        """Add a user with these permissions only; the password is the name."""
        patterns = (each.replace("\\", "\\\\") for each in (configure, write, read))
        allowed = ", ".join(f'<<"{each}">>' for each in patterns)
        self.server.evaluate(
            f'catch rabbit_auth_backend_internal:delete_user(<<"{name}">>, <<"semel">>), '
            f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{name}">>, <<"semel">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"{self.name}">>, '
            f'{allowed}, <<"semel">>), true.'
        )

    def depths(self) -> Mapping[str, Depth]:
        """The messages of every queue."""
        found = self.server.evaluate(
            "maps:from_list([{element(4, Name), [Ready, Unacknowledged]} || "
            "[{name, Name}, {messages_ready, Ready}, {messages_unacknowledged, Unacknowledged}] "
            f'<- rabbit_amqqueue:info_all(<<"{self.name}">>, '
            "[name, messages_ready, messages_unacknowledged])])."
        )
        return {name: Depth(*counts) for name, counts in found.items()}

    def depth(self, queue: str) -> Depth:
        """The messages of one queue; of one that does not exist, none."""
        return self.depths().get(queue, Depth(0, 0))

    def wait_for_depth(self, queue: str, ready: int = 0, unacknowledged: int = 0) -> None:
        """Wait until the queue has exactly so many messages."""
        expected = Depth(ready, unacknowledged)
        wait_until(lambda: self.depth(queue) == expected, f"{queue} to have {expected}")

    def consumers(self, queue: str) -> int:
        """How many consumers a queue has."""
        return int(
            self.server.evaluate(
                f'case rabbit_amqqueue:lookup(rabbit_misc:r(<<"{self.name}">>, queue, '
                f'<<"{queue}">>)) of {{ok, Q}} -> '
                "proplists:get_value(consumers, rabbit_amqqueue:info(Q, [consumers])); "
                "_ -> 0 end."
            )
        )

    def set_policy(self, pattern: str, definition: Mapping[str, str | int]) -> None:
        """Set a policy for the queues whose names match, e.g. a dead-letter exchange."""
        told = json.dumps(dict(definition)).replace("\\", "\\\\").replace('"', '\\"')
        self.server.evaluate(
            f'ok = rabbit_policy:set(<<"{self.name}">>, <<"{pattern}">>, <<"{pattern}">>, '
            f'rabbit_json:decode(<<"{told}">>), 1, <<"queues">>, <<"semel">>).'
        )


@contextlib.contextmanager
def rabbitmq_server() -> Iterator[RabbitMQServer]:
    """One private broker."""
    program()
    with tempfile.TemporaryDirectory(prefix="semel-rabbitmq-", ignore_cleanup_errors=True) as name:
        server = RabbitMQServer(Path(name))
        try:
            yield server
        finally:
            server.stop()
