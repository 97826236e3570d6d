"""A held request that a person resolves: its retries get exactly the answer that was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from semel import Idempotency, State
from semel.cli import main
from web.client import Answer, Client
from web.handlers import Folder
from web.serve import FORMS, FRAMEWORKS, STACKS
from web.workers import Workers

BODY = b'{"amount": 5}'
DAYS = 3 * 86400
ADDED = {"connection", "date", "server", "vary"}
"""Header lines that servers, and the layers around an integration, add to every answer."""

IN_TRANSACTIONS = {
    "fastapi-session": "fastapi",
    "starlette-session": "starlette",
    "django-atomic": "django-view",
}
"""Forms that leave no held record, as it is rolled back: another one, of before, has left it."""
REPEATING = [name for name in FRAMEWORKS if STACKS[name].repeats_lines]


def given(answer: Answer) -> list[tuple[str, str]]:
    """The header lines of an answer that a person gave, or we added, in order."""
    lines = ((name.decode().lower(), value.decode("latin-1")) for name, value in answer.lines)
    return [line for line in lines if line[0] not in ADDED]


@pytest.fixture
def held(
    workers: Workers, key: str, run: str, folder: Folder
) -> Callable[[str], Callable[[], Answer]]:
    """Leave a request held on a stack; its retries are sent by what this returns."""

    def leave(stack: str) -> Callable[[], Answer]:
        told = {"key": key, "body": BODY, "run": run}
        holding: Client = workers.first(IN_TRANSACTIONS.get(stack, stack)).client("payment")
        assert holding.post("/raise", **told).status == 500
        client = workers.first(stack).client("payment")
        assert client.post("/raise", **told).code == "outcome_unknown"
        return lambda: client.post("/raise", **told)

    return leave


@pytest.fixture
def resolve(
    folder: Folder, key: str, run: str, tmp_path, monkeypatch
) -> Iterator[Callable[..., None]]:
    """Type `semel resolve http KEY ...`; in the end, the handler has run once."""
    monkeypatch.chdir(tmp_path)

    def decide(*words: str) -> None:
        assert main(["--url", folder.store("sqlite"), "resolve", "http", key, *words]) == 0
        with Idempotency(folder.store("sqlite")) as engine:
            record = engine.peek(key, scope="http")
        assert record.state is State.SUCCEEDED
        assert record.remaining == pytest.approx(DAYS, abs=60), "as the policy says"

    yield decide
    assert folder.runs(run) == 1


@pytest.mark.parametrize("stack", [*STACKS, *FORMS])
def test_a_retry_gets_exactly_the_answer_that_a_person_gave(stack, held, resolve):
    retry = held(stack)
    resolve(
        *("--status", "201", "--header", "Location: /o/7", "--body", '{"id": 7}'),
        *("--header", "Content-Type: application/json"),
    )
    for answer in (retry(), retry()):
        assert (answer.status, answer.body, answer.rest) == (201, b'{"id": 7}', b"")
        assert sorted(given(answer)) == [
            ("content-length", "9"),
            ("content-type", "application/json"),
            ("idempotent-replayed", "true"),
            ("location", "/o/7"),
        ]


@pytest.mark.parametrize("stack", FRAMEWORKS)
def test_a_body_of_any_bytes_comes_from_a_file(stack, held, resolve, tmp_path):
    body = bytes(range(256)) * 3
    (tmp_path / "receipt.bin").write_bytes(body)
    retry = held(stack)
    resolve("--status", "402", "--header", "Content-Type:", "--body", "@receipt.bin")
    answer = retry()
    assert (answer.status, answer.body) == (402, body)
    assert sorted(given(answer)) == [("content-length", "768"), ("idempotent-replayed", "true")]


@pytest.mark.parametrize("stack", FRAMEWORKS)
def test_an_answer_may_be_nothing_but_a_status(stack, held, resolve):
    retry = held(stack)
    resolve("--status", "204")
    answer = retry()
    assert (answer.status, answer.body, answer.rest) == (204, b"", b"")
    assert given(answer) == [("idempotent-replayed", "true")]


@pytest.mark.parametrize("stack", REPEATING)
def test_header_lines_of_one_name_come_back_in_their_order(stack, held, resolve):
    retry = held(stack)
    resolve(
        "--status", "303", "--header", "Link: </a>", "--header", "X-B: b", "--header", "Link: </c>"
    )
    lines = [line for line in given(retry()) if line[0] in {"link", "x-b"}]
    assert lines == [("link", "</a>"), ("x-b", "b"), ("link", "</c>")]
