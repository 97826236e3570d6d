"""`manage.py semel`: the command on the store that a Django project's settings name."""

from __future__ import annotations

import adapters.django_project  # noqa: F401 - it tells Django its settings

# isort: split
import json

import pytest
from django.core.management import ManagementUtility, call_command
from django.test import override_settings

from semel import Idempotency, Policy
from semel.testing import crash

INSTALLED = ["semel.contrib.django"]


@pytest.fixture
def url(tmp_path) -> str:
    address = f"sqlite:///{tmp_path}/shop.db"
    with Idempotency(address, prefix="shop:") as idem:
        crash(idem, "order:1", scope="orders", policy=Policy(abandoned="hold"))
    return address


def manage(*words):
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "semel", *words]).execute()
    return ended.value.code


def test_the_command_asks_the_store_of_the_settings(url, capsys):
    with override_settings(
        INSTALLED_APPS=INSTALLED, SEMEL={"URL": url, "ENGINE": {"prefix": "shop:"}}
    ):
        assert manage("stuck", "--older-than", "0", "--json") == 1
        (stuck,) = json.loads(capsys.readouterr().out)
        assert (stuck["scope"], stuck["key"]) == ("orders", "order:1")
        assert manage("resolve", "orders", "order:1", "--failed", "no") == 0
        call_command("semel", "show", "orders", "order:1")
        assert "failed" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            call_command("semel", "show", "orders", "order:2")


def test_what_is_typed_wins_over_the_settings(url, tmp_path, capsys):
    with override_settings(INSTALLED_APPS=INSTALLED, SEMEL={"URL": f"sqlite:///{tmp_path}/no.db"}):
        assert manage("counts") == 2
        assert "no.db" in capsys.readouterr().err
        assert manage("--url", url, "--prefix", "shop:", "counts", "--json") == 0
        assert json.loads(capsys.readouterr().out)["abandoned"] == 1


def test_the_engine_of_the_command_has_the_policies_of_the_settings(url, capsys):
    engine = {"prefix": "shop:", "policy": Policy(failed_ttl=7200)}
    with override_settings(INSTALLED_APPS=INSTALLED, SEMEL={"URL": url, "ENGINE": engine}):
        words = ("resolve", "orders", "order:1", "--failed", "no", "--retryable")
        assert manage(*words) == 0
        assert "(2h0m)" in capsys.readouterr().out


def test_wrong_settings_and_help_are_answered_as_the_command_does(capsys):
    with override_settings(INSTALLED_APPS=INSTALLED, SEMEL={"ULR": "sqlite:///x"}):
        assert manage("stuck") == 2
        assert "there is no 'ULR'" in capsys.readouterr().err
    with override_settings(INSTALLED_APPS=INSTALLED, SEMEL={}):
        assert manage("--help") == 0
        assert "usage: semel" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            ManagementUtility(["manage.py", "help", "semel"]).execute()
        assert "usage: semel" in capsys.readouterr().out
