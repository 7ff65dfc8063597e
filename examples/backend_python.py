"""A backend that uses a pipeline through Kafka alone: a producer, a consumer of results, and a table of its own.

    pip install confluent-kafka
    KAFKA=localhost:9092 PIPELINE=demo python backend_python.py questions.db

1  A question is a row of the backend's own table, with an id that never changes.
2  Questions without an answer are produced. Each that Kafka acknowledges ends in exactly one result.
3  Results are read, with REPLIES=TOPIC also replies in a topic of this backend's own. The first one of
   an id becomes the answer of its row; ids of other backends have no row here.
4  The consumer's offset is committed.

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
RESULTS, REPLIES = f"penstock.{PIPELINE}.results", os.environ.get("REPLIES", "")
"""The topic of all results, and where the answers are wanted, if not there."""
TIMEOUT_S = 120
RETRYABLE_ERRORS = {"deadline_exceeded", "store_unreachable"}
"""Errors after which the same question may succeed with a new id."""


def make_questions(tenant: str = "shop") -> list[dict]:
    """Return an interactive request, a batch request, and one that names an unknown model."""
    common = {"v": 1, "tenant": tenant, "deadline": time.time() + TIMEOUT_S}
    greedy = {"temperature": 0, "max_tokens": 16}
    return [
        common
        | {"id": f"ask-{uuid.uuid4()}", "class": "interactive", "prompt": "In the beginning", "sampling": greedy},
        common | {"id": f"ask-{uuid.uuid4()}", "class": "batch", "prompt": "And God said", "sampling": greedy},
        common | {"id": f"ask-{uuid.uuid4()}", "class": "interactive", "prompt": "The LORD", "model": "no-such-model"},
    ]


def produce_requests(requests: list[dict]) -> None:
    """Produce requests and return once all are accepted. After an error, produce the same requests again."""
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
            }
            | ({"penstock-reply-to": REPLIES} if REPLIES else {}),
            on_delivery=lambda error, message: failed.append(error) if error else None,
        )
    if producer.flush(30) or failed:
        raise RuntimeError(f"not acknowledged: {failed or 'no answer'}")


def read_results(group: str) -> Iterator[dict]:
    """Yield the results after the group's last offset, which is committed when the next result is requested."""
    consumer = Consumer(
        {
            "bootstrap.servers": KAFKA,
            "group.id": group,
            "isolation.level": "read_committed",  # messages of aborted transactions are not results
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    # What a topic of its own did not take is among all results, with the reason in the header penstock-reply-refused.
    consumer.subscribe([RESULTS, *([REPLIES] if REPLIES else [])])
    last_result_at = time.monotonic()
    try:
        while time.monotonic() - last_result_at < TIMEOUT_S:
            message = consumer.poll(1.0)
            if message and not message.error():
                if message.topic() == RESULTS and "penstock-reply-to" in dict(message.headers() or []):
                    continue  # a copy without text of a reply
                yield json.loads(message.value())
                consumer.commit(message, asynchronous=False)
                last_result_at = time.monotonic()
    finally:
        consumer.close()
    raise TimeoutError(f"no result within {TIMEOUT_S} s")


def describe_result(result: dict) -> str:
    """Return a result as one line for people."""
    if result["finish_reason"] != "error":
        tokens = result["usage"]["completion_tokens"]
        return f"{result['finish_reason']} after {tokens} tokens: {result['text']!r}"
    error = result["error"]
    again = "ask again" if error["code"] in RETRYABLE_ERRORS else "asking again does not help"
    return f"{error['code']} ({again}): {error['message']}"


def main() -> None:
    """Produce the questions without an answer, and wait for their answers."""
    table = sqlite3.connect(sys.argv[1])
    table.execute("CREATE TABLE IF NOT EXISTS questions (id TEXT PRIMARY KEY, request TEXT, answer TEXT)")
    if table.execute("SELECT count(*) FROM questions").fetchone() == (0,):
        rows = [(request["id"], json.dumps(request)) for request in make_questions()]
        with table:
            table.executemany("INSERT INTO questions (id, request) VALUES (?, ?)", rows)

    def unanswered() -> list[dict]:
        return [json.loads(row[0]) for row in table.execute("SELECT request FROM questions WHERE answer IS NULL")]

    if not unanswered():
        return
    produce_requests(unanswered())
    for result in read_results("questions"):
        row = (json.dumps(result), result["id"])
        with table:
            written = table.execute("UPDATE questions SET answer = ? WHERE id = ? AND answer IS NULL", row)
        if written.rowcount:
            print(result["class"], result["id"], describe_result(result), flush=True)
        if not unanswered():
            return


if __name__ == "__main__":
    main()
