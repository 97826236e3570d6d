"""Whose fault it is that a task's message cannot be read: the message's, or the program's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.exceptions import InvalidTaskError
from celery.worker.request import Request

from semel.adapters.celery_worker import _request_class


class OfAnApplication:
    settings: dict[str, str] = {}  # noqa: RUF012 - nothing is added

    def __init__(self, message, **_):
        self.tenant = self.settings["TENANT"]


class OfAnotherVersion:
    def __init__(self):
        """Take no message."""


class Fine:
    def __init__(self, message, **_):
        self.request_dict = {"properties": {}}


def test_a_mistake_of_the_program_rejects_no_message():
    with pytest.raises(KeyError, match="TENANT"):
        _request_class(OfAnApplication)(SimpleNamespace())
    with pytest.raises(TypeError, match="positional argument"):
        _request_class(OfAnotherVersion)(SimpleNamespace())


def test_a_message_that_celery_cannot_read_is_rejected():
    with pytest.raises(InvalidTaskError, match="a message cannot be read"):
        _request_class(Request)(SimpleNamespace(), app=None)


@pytest.mark.parametrize("payload", ["abc", 5, ([], {}), ([], [], {}), ("text", {}, {})])
def test_a_body_that_is_no_task_is_rejected(payload):
    message = SimpleNamespace(payload=payload, content_type="application/json")
    with pytest.raises(InvalidTaskError, match="a message cannot be read"):
        _request_class(Fine)(message)


@pytest.mark.parametrize(("payload", "decoded"), [(([], {}, {}), False), ("not read", True)])
def test_a_body_that_is_a_task_is_taken(payload, decoded):
    message = SimpleNamespace(payload=payload, content_type="application/json")
    assert _request_class(Fine)(message, decoded=decoded).request_dict["properties"] == {
        "content_type": "application/json"
    }
