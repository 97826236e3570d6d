"""Every page of an integration says how to find what is stuck there."""

from __future__ import annotations

import re

import pytest

PAGES = (
    "asgi",
    "celery",
    "django",
    "fastapi",
    "flask",
    "grpc",
    "http",
    "other-queues",
    "queues",
    "rabbitmq",
    "schedules",
    "sessions",
    "wsgi",
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_an_integration_says_what_is_stuck_and_how_to_decide(project, name):
    page = (project / "docs" / "protect" / f"{name}.md").read_text(encoding="utf-8")
    section = page.split("\n## What is stuck?\n")[1]
    assert re.search(r"^\$ .*\bsemel\b.* stuck", section, re.MULTILINE)
    assert "(../operate/repair.md" in section
