"""Bytes per finished record in Redis, everything counted; exits with 1 above the target.

Writes 100,000 finished records (100-byte result, 36-character key, scope `orders.create`, prefix
`idem:`) through the real store to a private server, and compares them, in the same run, with the
floor (empty strings under the same keys) and with the usual hash of fields.

    python benchmarks/redis_memory.py
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from semel.core.records import ClaimRequest, CompleteRequest, Encoded, Identity
from semel.stores.redis import open_store
from semel.stores.redis.keys import KeyLayout
from servers.redis import redis_server

RECORDS = 100_000
BATCH = 1_000
TARGET = 345
TTL = 86_400
RESULT = Encoded("json/1", b'"' + b"x" * 98 + b'"')

KEYS = KeyLayout("idem:")


def batches() -> Iterator[list[Identity]]:
    for _ in range(RECORDS // BATCH):
        yield [Identity("orders.create", str(uuid.uuid4())) for _ in range(BATCH)]


def semel_records(url: str) -> None:
    with contextlib.closing(open_store(url)) as store:
        for identities in batches():
            asks = [ClaimRequest(i, os.urandom(12), os.urandom(16), 30, TTL) for i in identities]
            store.claim_many(asks)
            done = store.complete_many(
                [CompleteRequest(ask.identity, ask.owner, RESULT, TTL) for ask in asks]
            )
            assert all(answer is True for answer in done)


def empty_strings(client) -> None:
    for identities in batches():
        pipeline = client.pipeline(transaction=False)
        for identity in identities:
            pipeline.set(KEYS.record(identity), b"", ex=TTL)
        pipeline.execute()


def hashes_of_fields(client) -> None:
    for identities in batches():
        pipeline = client.pipeline(transaction=False)
        for identity in identities:
            fields = {
                "state": "SUCCEEDED",
                "owner": os.urandom(12).hex(),
                "number": 1,
                "fence": 1_700_000_000_000_000,
                "fingerprint": os.urandom(16).hex(),
                "created_at": "1700000000.123456",
                "updated_at": "1700000000.223456",
                "codec": RESULT.codec,
                "result": RESULT.data,
            }
            pipeline.hset(KEYS.record(identity), mapping=fields)
            pipeline.expire(KEYS.record(identity), TTL)
        pipeline.execute()


def bytes_per_record(client, write) -> float:
    client.flushall()
    before = client.info("memory")["used_memory"]
    write()
    assert client.dbsize() == RECORDS
    return (client.info("memory")["used_memory"] - before) / RECORDS


def main() -> int:
    with redis_server() as server, contextlib.closing(server.client()) as client:
        semel_records(server.url)  # once before: buffers, pools and scripts are not records
        floor = bytes_per_record(client, lambda: empty_strings(client))
        packed = bytes_per_record(client, lambda: semel_records(server.url))
        fields = bytes_per_record(client, lambda: hashes_of_fields(client))
    print(f"{RECORDS:,} finished records, {len(RESULT.data)}-byte result, bytes per record:")
    print(f"  empty string (floor)  {floor:6.1f}")
    print(f"  semel, packed         {packed:6.1f}   target: at most {TARGET}")
    print(f"  hash of fields        {fields:6.1f}")
    return 0 if packed <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
