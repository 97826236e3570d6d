"""The log and the file of decisions: who decided what, when, on which record."""

from __future__ import annotations

import json
import logging
import os
import socket

from engines.facade import never
from semel import State
from semel.repair import AuditFile, Succeeded, Unknown

PLACE = f"{socket.gethostname()}:{os.getpid()}"


def test_every_decision_is_logged_with_its_fields(memory_workshop, caplog):
    caplog.set_level(logging.INFO, "semel.audit")
    identity = memory_workshop.abandon("a-secret-key")
    memory_workshop.run(
        memory_workshop.reconciler({"orders": lambda _: Succeeded(1)}, name="night")
    )
    (entry,) = (each for each in caplog.records if each.name == "semel.audit")
    record = memory_workshop.record(identity)
    assert entry.semel == {
        "decision": "Resolved",
        "scope": "orders",
        "key_digest": identity.digest.hex(),
        "number": 1,
        "fence": record.fence,
        "by": f"night@{PLACE}",
        "at": entry.semel["at"],
        "verdict": "succeeded",
        "kept_until": entry.semel["kept_until"],
    }
    assert entry.semel["at"].endswith("+00:00")
    assert entry.semel["kept_until"].endswith("+00:00")
    assert entry.semel["kept_until"] > entry.semel["at"]
    assert "a-secret-key" not in caplog.text
    assert f"by=night@{PLACE}" in entry.getMessage()


def test_no_text_passes_for_another_field_or_line_of_the_log(memory_workshop, caplog):
    memory_workshop.abandon("a")
    forged = "no answer\ndecision=Resolved"
    reconciler = memory_workshop.reconciler(
        {"orders": lambda _: Unknown(forged)}, name="anna verdict=succeeded"
    )
    memory_workshop.run(reconciler)
    (entry,) = [each for each in caplog.records if each.name == "semel.audit"]
    assert f'by="anna verdict=succeeded@{PLACE}"' in entry.getMessage()
    assert 'reason="no answer\\ndecision=Resolved"' in entry.getMessage()
    assert entry.semel["reason"] == forged


def test_decisions_are_appended_to_a_file(memory_workshop, tmp_path):
    path = tmp_path / "audit.jsonl"
    memory_workshop.abandon("a")
    memory_workshop.abandon("b", scope="parcels")
    for answer in (Unknown("no answer"), Succeeded(1)):
        memory_workshop.run(
            memory_workshop.reconciler(
                {"orders": lambda _, answer=answer: answer}, audit=AuditFile(path)
            )
        )
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    decided = [(each["decision"], each["scope"], each.get("reason")) for each in entries]
    nobody = ("Unresolved", "parcels", "no resolver is registered for its scope")
    assert decided == [
        nobody,
        ("Unresolved", "orders", "no answer"),
        nobody,
        ("Resolved", "orders", None),
    ]
    assert {each["by"] for each in entries} == {PLACE}


def test_a_file_that_cannot_be_written_undoes_nothing(memory_workshop, tmp_path, caplog):
    identity = memory_workshop.abandon("card-4711")
    reconciler = memory_workshop.reconciler(
        {"orders": lambda _: Succeeded("found out")}, audit=AuditFile(tmp_path)
    )
    assert memory_workshop.run(reconciler).resolved == 1
    assert memory_workshop.record(identity).state is State.SUCCEEDED
    assert memory_workshop.engine.execute("card-4711", never, scope="orders") == "found out"
    assert "not written to the audit log" in caplog.text
    assert identity.key_digest in caplog.text
    assert "card-4711" not in caplog.text, "no log has a key"
