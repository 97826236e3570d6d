"""The scripts decide plain cases first: the answers must be those of the whole script."""

from __future__ import annotations

import random
import struct

import pytest
import redis

from semel.core.records import ClaimRequest, Encoded, FailRequest, Identity
from semel.stores.redis import commands
from semel.stores.redis.commands import Commands, KeyLayout

CASES = 1500
NOW = "{'1700000000', '123456'}"
LEASE_ENDS = 1_700_000_000_123_456

IDENTITY = Identity("s", "k")
KEYS = KeyLayout("plain:")
VERBS = Commands(KEYS)
OWNERS = [b"a" * 12, b"b" * 12]
PRINTS = [b"1" * 16, b"2" * 16, b"3" * 16]
SOMETIMES = (None, None, *PRINTS)

READ = "local found = redis.call('GET', KEYS[1])\n"
BEGINNING = """
local BEGINNING = 65536
if found and #found > BEGINNING and string.byte(found, 2) % 4 ~= 0 then
  found = string.sub(found, 1, BEGINNING)
end
"""
IF_ANY = READ + "if not found then return 0 end\n"


def whole(name: str, opening: str) -> str:
    """The script without its plain cases."""
    return opening + commands.load("semel.stores.redis", "record", name).text


PAIRS = {
    "claim": (commands.CLAIM.text, whole("claim", READ + BEGINNING)),
    "end": (commands.END.text, whole("end", IF_ANY)),
}


def record(dice: random.Random) -> bytes | None:
    """Any record: of every state and flag, and now and then none, odd or cut short."""
    if dice.random() < 0.1:
        return None
    state = dice.choice([0, 0, 0, 1, 1, 2, 3])
    # Most combinations of flags are never written; they must be judged alike all the same.
    odd = dice.random() < 0.2
    hold, retryable, waited = (dice.choice([0, bit]) for bit in (4, 8, 32))
    retryable = retryable if state == 2 or odd else 0
    waited = waited if state == 0 or odd else 0
    fingerprint = dice.choice([b"", *PRINTS])
    superseded = [dice.choice(PRINTS) for _ in range(dice.choice([0, 0, 0, 1, 3, 8, 9]))]
    flags = state | hold | retryable | waited | (16 if fingerprint else 0)
    flags |= 64 if odd and dice.random() < 0.5 else 0
    head = struct.pack(">BBBI", dice.choice([1] * 20 + [2]), flags, len(superseded), 7)
    times = b"".join(number.to_bytes(size) for number, size in ((9, 7), (10, 6), (11, 6)))
    lease_until = LEASE_ENDS + dice.choice([-5_000_000, 5_000_000])
    running = lease_until.to_bytes(7) + (60_000).to_bytes(6)
    running += dice.choice([b"", b"", b"\x02{}", b"\x02{}more of a later release", b"\xffcut"])
    long = dice.choice([0] * 20 + [65_000, 65_536, 65_537, 100_000])
    raw = head + times + dice.choice(OWNERS) + fingerprint + b"".join(superseded)
    raw += running if state == 0 else b"\x01" + b'"value"'
    raw += b"x" * (long - len(raw))
    return raw[: dice.randrange(len(raw) + 1)] if dice.random() < 0.1 else raw


def claim(dice: random.Random):
    lease = dice.choice([0.0, 30.0])
    ttl = dice.choice([0.0, 60.0]) if lease else 60.0  # else it is gone before it can be looked at
    return VERBS.claim(
        ClaimRequest(
            IDENTITY,
            dice.choice(OWNERS),
            dice.choice(SOMETIMES),
            lease,
            ttl,
            dice.random() < 0.3,
            dice.random() < 0.3,
            dice.choice([None, None, 1, 9]),
            dice.choice([b"", b'{"by":"web-1:4711"}']),
        )
    )


def end(dice: random.Random):
    terms = {"retryable": dice.random() < 0.5, "keep_fingerprint": dice.random() < 0.7}
    ttl = dice.choice([-1.0, 0.0, 60.0, 60.0])
    return VERBS.fail(
        FailRequest(IDENTITY, dice.choice(OWNERS), Encoded("failure", b"{}"), ttl=ttl, **terms)
    )


@pytest.mark.parametrize(("verb", "make"), [("claim", claim), ("end", end)])
def test_a_plain_case_is_answered_as_the_whole_script_would(redis_of_this_worker, verb, make):
    plain, full = (text.replace("redis.call('TIME')", NOW) for text in PAIRS[verb])
    assert NOW in plain
    dice = random.Random(verb)
    answers = set()
    with redis_of_this_worker.client() as client:
        for _ in range(CASES):
            raw, call = record(dice), make(dice)
            keys = call.keys if dice.random() < 0.9 else call.keys[:1]  # its slot is on the move
            arguments = (*call.args, *call.last_args)
            first, second = (run(client, text, raw, keys, arguments) for text in (plain, full))
            assert first == second, (raw, call)
            answers.add(str(first[0])[:12])
    assert verb != "claim" or "[b'large', b" in answers
    assert len(answers) > (8 if verb == "claim" else 4), "too few kinds of answers to mean anything"


def run(client, text, raw, keys, arguments):
    """Run a script on a record; what it answers, and what it leaves behind."""
    name, index = KEYS.record_and_index(IDENTITY)
    client.delete(name, index)
    if raw is not None:
        client.set(name, raw, px=600_000)
        client.zadd(index, {IDENTITY.encoded: 5})
    try:
        answer = client.eval(text, len(keys), *keys, *arguments)
    except redis.ResponseError as error:  # an answer, too
        answer = str(error).split("script:")[0]
    if isinstance(answer, list) and answer[0] in {b"finished", b"large"}:
        answer[2] = answer[2] > 0  # milliseconds go by
    left = client.pttl(name)
    kept_for = left if left < 0 else round(left / 10_000)
    return answer, client.get(name), kept_for, client.zrange(index, 0, -1, withscores=True)
