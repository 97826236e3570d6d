"""What only requests has: files as bodies, and sessions that are pickled."""

from __future__ import annotations

import io
import pickle

import pytest
import requests

from adapters.scripted import answer, scripted_server
from semel.adapters.requests import IdempotentAdapter


@pytest.fixture
def server():
    with scripted_server() as started:
        yield started


def session(**options):
    opened = requests.Session()
    opened.trust_env = False
    opened.mount("http://", IdempotentAdapter(backoff=0.001, **options))
    return opened


def test_a_file_is_rewound_for_each_try(server):
    server.says(answer(503), answer(503))
    file = io.BytesIO(b"skipped, then sent")
    file.seek(len(b"skipped, then "))
    with session() as opened:
        assert opened.post(server.url, data=file).status_code == 200
    assert [received.body for received in server.received] == [b"sent"] * 3


def test_a_file_that_can_no_longer_be_rewound_is_an_error(server):
    class Torn(io.BytesIO):
        def seek(self, *args):
            if self.tell() > 0:
                raise OSError("torn")
            return super().seek(*args)

        def __len__(self):
            return 4

    server.says(answer(503))
    with session() as opened, pytest.raises(requests.exceptions.UnrewindableBodyError):
        opened.post(server.url, data=Torn(b"sent"))
    assert len(server.received) == 1


def test_the_request_of_an_answer_is_another_call_when_it_is_sent_again(server):
    with session() as opened:
        opened.send(opened.post(server.url).request)
    assert server.keys[0] != server.keys[1]


def test_a_session_can_be_pickled(server):
    server.says(answer(503))
    with session(app="shop", retries=1) as opened:
        copied = pickle.loads(pickle.dumps(opened))  # noqa: S301 - our own
    with copied:
        copied.trust_env = False
        answered = copied.post(server.url)
        assert answered.status_code == 200
        assert pickle.loads(pickle.dumps(answered)).status_code == 200  # noqa: S301 - our own
    assert len(server.received) == 2
    assert all(key.startswith('"shop-') for (key,) in server.keys)
