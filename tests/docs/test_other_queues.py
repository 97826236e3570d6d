"""The loops that a page writes by hand: failures come again, wrong messages go to dead letters."""

from __future__ import annotations

import os
import subprocess
import sys

from docs.test_examples import (
    LOCAL_KAFKA,
    LOCAL_NATS,
    LOCAL_REDIS,
    NOBODYS_AWS,
    ROOT,
    blocks,
    script,
)

SCENARIO = '''
attempts = []


def send_receipt(body):
    order = json.loads(body)["order"]
    attempts.append(order)
    if attempts.count(order) == 1:
        raise ConnectionError("the first attempt of each order fails")
    sent.append(order)


def messages(first):
    """An order, another one with the key of the first, a third one."""
    wrong = json.dumps({"order": first, "other": True}).encode()
    yield f"order-{first}", json.dumps({"order": first}).encode()
    yield f"order-{first}", wrong
    yield f"order-{first + 1}", json.dumps({"order": first + 1}).encode()


def gone_once(first):
    assert sent[-2:] == [first, first + 1] and attempts[-4:] == [first] * 2 + [first + 1] * 2


# Kafka: in order, and nothing is left for the next consumer
for key, body in messages(31):
    producer.produce("orders", body, key="customer-1", headers={"idempotency-key": key})
producer.flush()
consume_kafka(lambda: 32 in sent)
gone_once(31)
dead = Consumer({"bootstrap.servers": KAFKA, "group.id": "dead", "auto.offset.reset": "earliest"})
dead.subscribe(["orders.dead"])
found = None
while found is None:
    found = dead.poll(1)
assert json.loads(found.value())["other"] and dict(found.headers())["idempotency-key"] == b"order-31"
dead.close()
left_alone = len(attempts)
until = time.monotonic() + 6
consume_kafka(lambda: time.monotonic() > until)
assert len(attempts) == left_alone

# SQS: in any order
sqs = boto3.client("sqs")
receive = sqs.receive_message
sqs.receive_message = lambda **given: receive(**given | {"WaitTimeSeconds": 0})  # moto polls badly
for key, body in messages(41):
    attribute = {"DataType": "String", "StringValue": key}
    sqs.send_message(
        QueueUrl=ORDERS, MessageBody=body.decode(), MessageAttributes={"idempotency-key": attribute}
    )
consume_sqs(lambda: left() == 0)
assert {41, 42} <= set(sent)
[found] = sqs.receive_message(QueueUrl=DEAD, MessageAttributeNames=["All"])["Messages"]
assert found["MessageAttributes"]["idempotency-key"]["StringValue"] == "order-41"
sqs.close()


async def with_nats():
    connection = await nats.connect(NATS)
    stream = connection.jetstream()
    for key, body in messages(51):
        await stream.publish("orders.placed", body, headers={"idempotency-key": key})
    dead = await stream.pull_subscribe("orders.dead", durable="dead")
    await consume_nats(connection, lambda: {51, 52} <= set(sent))
    [found] = await dead.fetch(1, timeout=5)
    assert found.headers["idempotency-key"] == "order-51", found.headers
    assert (await stream.consumer_info("ORDERS", "receipts")).num_ack_pending == 0
    await connection.close()


asyncio.run(with_nats())
idem.close()
records.close()
database.dispose()
'''


def test_a_failed_message_comes_again_and_a_wrong_one_goes_to_the_dead_letters(
    tmp_path, redis_url, kafka_address, nats_url, sqs_url
):
    page = (ROOT / "docs" / "protect" / "other-queues.md").read_text(encoding="utf-8")
    shown = script(blocks(page)[:-1])  # the last one closes what the others opened
    auto_commit = '"enable.auto.commit": False,'
    # The mock cluster takes a closed consumer for one that is paused, until its session ends.
    shown = shown.replace(auto_commit, f'{auto_commit} "session.timeout.ms": 6000,')
    source = f"{shown}\nNATS = {LOCAL_NATS!r}\n{SCENARIO}"
    source = LOCAL_REDIS.sub(redis_url.removesuffix("/0"), source)
    source = source.replace(LOCAL_KAFKA, kafka_address).replace(LOCAL_NATS, nats_url)
    example = tmp_path / "page_other_queues.py"
    example.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        env={**os.environ, **NOBODYS_AWS, "AWS_ENDPOINT_URL": sqs_url},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
