"""Several processes want the same keys, and some of them are killed.

Each key has one effect, counted in a file, and every answer to it is the same, also the answers
that a process gave before it was killed. None is killed between its effect and its save.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections import Counter, defaultdict

import pytest

from faults.children import child

pytestmark = pytest.mark.usefixtures("not_measured")

KEYS = 50
EXECUTIONS = 200
SURVIVORS = 2
MOMENTS = ("before claim", "after complete", "after being claimed")


@pytest.mark.parametrize("seed", [1, 2])
def test_every_key_has_one_effect_and_one_answer_whoever_is_killed(
    kind, shared_url, ledger, tmp_path, seed
):
    chance = random.Random(seed)
    results = tmp_path / "results"
    with contextlib.ExitStack() as stack:

        def start(die: str | None = None):
            return stack.enter_context(
                child(
                    "contender.py",
                    kind=kind,
                    url=shared_url,
                    ledger=str(ledger.path),
                    results=str(results),
                    keys=KEYS,
                    executions=EXECUTIONS,
                    seed=chance.random(),
                    policy={"lease": 0.5},
                    die=die,
                    at=chance.randrange(1, 4),
                )
            )

        survivors = [start() for _ in range(SURVIVORS)]
        victims = [start(die) for die in MOMENTS]
        for contender in (*survivors, *victims):
            contender.hear("waiting")
        for contender in (*survivors, *victims):
            contender.go()
        assert {survivor.ended() for survivor in survivors} == {0}
        ends = [victim.ended() for victim in victims]
    assert -signal.SIGKILL in ends, "nobody was killed"
    if ends[-1] == -signal.SIGKILL:
        assert any(entry.number == 2 for entry in ledger.entries()), "its claim was not taken over"

    effects = Counter(entry.key for entry in ledger.entries())
    assert set(effects.values()) == {1}
    answers = defaultdict(set)
    for line in results.read_text().splitlines():
        key, result = line.split()
        answers[key].add(result)
    assert all(len(results) == 1 for results in answers.values())
    assert set(answers) <= set(effects)
    authors = {(entry.key, f"{entry.key}-by-{entry.pid}") for entry in ledger.entries()}
    assert {(key, *results) for key, results in answers.items()} <= authors
