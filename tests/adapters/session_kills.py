"""Servers of endpoints with `session=`, killed at random moments while clients send and retry.

Each request moves an amount: a row in the ledger, with a token that the endpoint made up. Nothing
in the table would stop a second one. The clients send every key until it is answered, whatever
happens to the server. In the end every key has one row and one finished record, and what a client
gets for a key, once and again, is the token of its row.
"""

import contextlib
import itertools
import random
import signal
import socket
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

import httpx
import uvicorn
from sqlalchemy import text
from sqlalchemy.orm import Session
from starlette.responses import JSONResponse, Response

from adapters.asgi_serving import keyed, replayed
from adapters.session_shop import Kind, Shop
from semel import Idempotency, current_attempt
from transactions.kinds import PATIENCE
from transactions.transfers import processes, start_forkserver

CLIENTS = 4

KILLED = [
    Kind("fastapi", False),
    Kind("fastapi", True, depends=True),
    Kind("starlette", False),
    Kind("starlette", True),
]
"""The kinds of endpoints whose servers are killed."""


# --- the server's process ------------------------------------------------------------------------


def move(session: Session) -> Response:
    attempt, token = current_attempt(), uuid4().hex
    assert attempt is not None
    for half in (1, 2):
        session.execute(
            text("INSERT INTO ledger VALUES (:entry, :half, :token)"),
            {"entry": attempt.key, "half": half, "token": token},
        )
    return JSONResponse({"token": token}, 201)


def serve(url: str, kind: Kind, told: Connection) -> None:
    """Serve until killed; tells its port."""
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    told.send(bound.getsockname()[1])
    shop = Shop(url, kind, create=False, poolclass=None, pool_size=CLIENTS)
    uvicorn.Server(uvicorn.Config(shop.app(move), log_config=None, lifespan="on")).run([bound])


# --- the clients' process ------------------------------------------------------------------------


class Till:
    """A database, the servers on it, and the clients that keep sending."""

    def __init__(self, url: str, kind: Kind) -> None:
        self.shop, self.url, self.kind = Shop(url, kind), url, kind
        self.shop.query("CREATE TABLE ledger (entry VARCHAR(40), half INTEGER, token VARCHAR(40))")
        with Idempotency(url) as idem:
            idem.peek("any")
        start_forkserver()
        self.kills = 0
        self.broken = 0
        """Requests that a kill met: they were sent, and their answers never came."""
        self.answers: dict[str, bytes] = {}
        self._numbers, self._port, self._over = itertools.count(), 0, threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._clients = [threading.Thread(target=self._send) for _ in range(CLIENTS)]

    def run(self, kills: int, within: float, deadline: float = float("inf")) -> None:
        """Kill one server after the other, then let the last one answer what is left."""
        for client in self._clients:
            client.start()
        try:
            while self.kills < kills and time.monotonic() < deadline:
                with self._serving() as server:
                    self._await_progress()
                    time.sleep(random.uniform(0, within))
                    server.kill()
                self.kills += 1
            with self._serving():
                self._over.set()
                for client in self._clients:
                    client.join(PATIENCE)
                self._replay()
        finally:
            self._over.set()
            self._port = -1  # a client that is still here gives up
            for client in self._clients:
                client.join(PATIENCE)

    @contextlib.contextmanager
    def _serving(self) -> Any:
        ours, theirs = processes.Pipe()
        # A daemon: it ends with us, also when we are interrupted before the kill.
        server = processes.Process(target=serve, args=(self.url, self.kind, theirs), daemon=True)
        server.start()
        try:
            assert ours.poll(PATIENCE), "the server did not start"
            self._port = ours.recv()
            yield server
        finally:
            server.kill()
            server.join(PATIENCE)
            assert server.exitcode == -signal.SIGKILL
            server.close()
            ours.close()
            theirs.close()

    def _await_progress(self) -> None:
        """Wait until this server has answered a new key: there is traffic to be met."""
        before, deadline = len(self.answers), time.monotonic() + PATIENCE
        while len(self.answers) == before:
            assert not self._errors, self._errors
            assert time.monotonic() < deadline, "no request was answered"
            time.sleep(0.002)

    def _send(self) -> None:
        try:
            with httpx.Client(timeout=PATIENCE, trust_env=False, verify=False) as client:  # noqa: S501 - nothing is encrypted here
                while not self._over.is_set():
                    key = f"key-{next(self._numbers)}"
                    self.answers[key] = self._answered(client, key).content
        except BaseException as error:
            self._errors.append(error)

    def _answered(self, client: httpx.Client, key: str) -> httpx.Response:
        """Send a key until it is answered."""
        deadline = time.monotonic() + 2 * PATIENCE
        while self._port >= 0:
            assert time.monotonic() < deadline, f"{key} was never answered"
            try:
                url = f"http://127.0.0.1:{self._port}/pay"
                answer = client.post(url, headers=keyed(key))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                pass
            except httpx.TransportError:
                with self._lock:
                    self.broken += 1
            else:
                if answer.status_code == 201:
                    return answer
                # A server that was killed is not yet missed by the database: the key is busy.
                assert answer.status_code in {409, 503}, answer.text
                assert "Retry-After" in answer.headers, answer.text
            time.sleep(0.01)
        raise RuntimeError("the servers are gone")

    def _replay(self) -> None:
        """Ask for answers once more; they must be the same. A few of very many will do."""
        asked = sorted(self.answers)
        with httpx.Client(timeout=PATIENCE, trust_env=False, verify=False) as client:  # noqa: S501 - nothing is encrypted here
            for key in random.sample(asked, min(len(asked), 50)):
                answer = self._answered(client, key)
                assert replayed(answer)
                assert answer.content == self.answers[key]

    def check(self) -> int:
        """Compare answers, effects and records; tells how many there are."""
        assert not self._errors, self._errors
        ledger = self.shop.query("SELECT entry, half, token FROM ledger")
        records = self.shop.query("SELECT idem_key, status FROM idempotent_record")
        effects = Counter((entry, half) for entry, half, _ in ledger)
        assert [effect for effect, count in effects.items() if count > 1] == []
        assert set(effects) == set(itertools.product(self.answers, (1, 2)))
        assert sorted(records) == sorted((key, 1) for key in self.answers)
        told = {key: f'{{"token":"{token}"}}'.encode() for key, _, token in ledger}
        assert told == self.answers
        return len(self.answers)
