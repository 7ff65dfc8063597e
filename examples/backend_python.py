"""A backend that asks a pipeline through Kafka alone: a producer, a consumer of results, and a table of its own.

    pip install confluent-kafka
    KAFKA=localhost:9092 PIPELINE=demo python backend_python.py questions.db

1  A question is a row of the backend's own table, with the id that it keeps for good.
2  What has no answer is produced. Acknowledged by Kafka, it ends in exactly one result.
3  Results are read. The first of an id becomes the answer of its row; other backends' ids have no row here.
4  The consumer's place is committed.

A crash after 1 or 2: the next start produces the question again, the same id with the same body, and it is answered
once. After 3: the result is read again, and its row has an answer already.
"""

import json
import os
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator

from confluent_kafka import Consumer, Producer

KAFKA, PIPELINE = os.environ["KAFKA"], os.environ.get("PIPELINE", "demo")
PATIENCE_S = 120
ASKED_AGAIN = {"deadline_exceeded", "store_unreachable"}
"""Errors after which the same question, with a new id, may have an answer."""


def questions(tenant: str = "shop") -> list[dict]:
    """One that somebody waits for, one that has time, and one that nobody can answer."""
    common = {"v": 1, "tenant": tenant, "deadline": time.time() + PATIENCE_S}
    greedy = {"temperature": 0, "max_tokens": 16}
    return [
        common
        | {"id": f"ask-{uuid.uuid4()}", "class": "interactive", "prompt": "In the beginning", "sampling": greedy},
        common | {"id": f"ask-{uuid.uuid4()}", "class": "batch", "prompt": "And God said", "sampling": greedy},
        common | {"id": f"ask-{uuid.uuid4()}", "class": "interactive", "prompt": "The LORD", "model": "no-such-model"},
    ]


def produce(requests: list[dict]) -> None:
    """Returns when all are accepted. Raises when that is not known of one: produce the same again."""
    producer = Producer(
        {"bootstrap.servers": KAFKA, "acks": "all", "enable.idempotence": True, "message.max.bytes": 16777216}
    )
    failed = []
    for request in requests:
        producer.produce(
            f"penstock.{PIPELINE}.requests.{request['class']}",
            key=request["id"],
            value=json.dumps(request),
            headers={  # for tools and filters that do not read the message
                "penstock-version": str(request["v"]),
                "penstock-tenant": request["tenant"],
                "penstock-class": request["class"],
                "penstock-deadline": str(request["deadline"]),
            },
            on_delivery=lambda error, message: failed.append(error) if error else None,
        )
    if producer.flush(30) or failed:
        raise RuntimeError(f"not acknowledged: {failed or 'no answer'}")


def results(group: str) -> Iterator[dict]:
    """The results of a pipeline, from where the group was before; a place is committed when the next is asked for."""
    consumer = Consumer(
        {
            "bootstrap.servers": KAFKA,
            "group.id": group,
            "isolation.level": "read_committed",  # what an aborted transaction wrote is no result
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([f"penstock.{PIPELINE}.results"])
    heard = time.monotonic()
    try:
        while time.monotonic() - heard < PATIENCE_S:
            message = consumer.poll(1.0)
            if message and not message.error():
                yield json.loads(message.value())
                consumer.commit(message, asynchronous=False)
                heard = time.monotonic()
    finally:
        consumer.close()
    raise TimeoutError(f"no result within {PATIENCE_S} s")


def told(result: dict) -> str:
    """A result in a line for people."""
    if result["finish_reason"] != "error":
        tokens = result["usage"]["completion_tokens"]
        return f"{result['finish_reason']} after {tokens} tokens: {result['text']!r}"
    error = result["error"]
    again = "ask again" if error["code"] in ASKED_AGAIN else "asking again does not help"
    return f"{error['code']} ({again}): {error['message']}"


def main() -> None:
    """Ask what has no answer, and wait for the answers."""
    table = sqlite3.connect(sys.argv[1])
    table.execute("CREATE TABLE IF NOT EXISTS questions (id TEXT PRIMARY KEY, request TEXT, answer TEXT)")
    if table.execute("SELECT count(*) FROM questions").fetchone() == (0,):
        rows = [(request["id"], json.dumps(request)) for request in questions()]
        with table:
            table.executemany("INSERT INTO questions (id, request) VALUES (?, ?)", rows)

    def unanswered() -> list[dict]:
        return [json.loads(row[0]) for row in table.execute("SELECT request FROM questions WHERE answer IS NULL")]

    if not unanswered():
        return
    produce(unanswered())
    for result in results("questions"):
        row = (json.dumps(result), result["id"])
        with table:
            written = table.execute("UPDATE questions SET answer = ? WHERE id = ? AND answer IS NULL", row)
        if written.rowcount:
            print(result["class"], result["id"], told(result), flush=True)
        if not unanswered():
            return


if __name__ == "__main__":
    main()
