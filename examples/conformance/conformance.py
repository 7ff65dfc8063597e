"""Runs the cases of this folder against a pipeline: the runner for Python. README.md says what a runner does.

pip install confluent-kafka
KAFKA=localhost:9092 PIPELINE=demo GATEWAY=http://localhost:8000 MODEL=demo python conformance.py cases/*.json
"""

import base64
import json
import os
import sys
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

from confluent_kafka import Consumer, Producer

KAFKA, PIPELINE = os.environ["KAFKA"], os.environ["PIPELINE"]
GATEWAY, MODEL = os.environ["GATEWAY"], os.environ["MODEL"]
TIMEOUT_S = 120
MISSING = "nothing came"


def load_case(path: Path, request_id: str) -> dict:
    """Return a case with its names filled in."""
    text = path.read_text("utf-8")
    for name, value in (("{id}", request_id), ("{pipeline}", PIPELINE), ("{model}", MODEL)):
        text = text.replace(name, value)
    return json.loads(text)


def encode_value(produce: dict) -> bytes:
    """Return the bytes of a case's message."""
    text = produce["text"] if "text" in produce else json.dumps(produce["value"])
    return base64.b64decode(produce.get("prefix_base64", "")) + text.encode()


def produce_messages(producer: Producer, produce: dict, request_id: str) -> None:
    """Produce a case's message, as often as it says, and return once Kafka has acknowledged it."""
    failed = []
    headers = [(name, text.encode()) for name, text in produce.get("headers", {}).items()]
    headers += [(name, base64.b64decode(text)) for name, text in produce.get("headers_base64", {}).items()]
    for _ in range(produce.get("times", 1)):
        producer.produce(
            f"penstock.{PIPELINE}.requests.{produce['class']}",
            key=produce.get("key", request_id),
            value=encode_value(produce),
            headers=headers,
            on_delivery=lambda error, message: failed.append(error) if error else None,
        )
    if producer.flush(TIMEOUT_S) or failed:
        raise RuntimeError(f"not acknowledged: {failed or 'no answer'}")


def follow_stream(post: dict) -> tuple[str, str]:
    """Post a request and follow its stream to the end, over two connections if the case says so. Return its id and
    text.
    """
    body = json.dumps(post["body"]).encode()
    asked = urllib.request.Request(GATEWAY + post["path"], body, {"Content-Type": "application/json"})
    stream_id, text, last_id, seen = "", "", "", set()
    for most in (post.get("leave_after", 0), 0):
        count = 0
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    if value in seen:
                        raise AssertionError(f"the event {value} came twice")
                    seen.add(value)
                    last_id = value
                elif name == "data" and value == "[DONE]":
                    return stream_id, text
                elif name == "data":
                    event = json.loads(value)
                    stream_id = event["id"]
                    text += "".join(choice["text"] for choice in event["choices"])
                elif line == b"\n" and (count := count + 1) == most:
                    break
        asked = urllib.request.Request(f"{GATEWAY}/v1/streams/{stream_id}", headers={"Last-Event-ID": last_id})
    raise AssertionError(f"the stream {stream_id} has no end")


def matches_expected(expected: object, found: object) -> bool:
    """Return whether all that is expected is in what was found."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            matches_expected(value, found.get(name)) for name, value in expected.items()
        )
    return expected == found


def check_dead_letter(expected: dict, value: bytes, letters: list) -> str:
    """Return why there is not one dead letter with the value, and with headers that begin as expected."""
    found = [dict(headers) for letter, headers in letters if letter == value]
    if len(found) != 1:
        return f"{len(found)} dead letters" if found else MISSING
    holds = all(found[0].get(name, b"").decode().startswith(begins) for name, begins in expected.items())
    return "" if holds else f"other headers: {found[0]}"


def read_outcomes(is_open: Callable[[], bool], results: dict, letters: list) -> None:
    """Read results and dead letters from the beginning for as long as something is missing, two minutes at most."""
    settings = {"bootstrap.servers": KAFKA, "group.id": f"conformance-{uuid.uuid4()}", "auto.offset.reset": "earliest"}
    # Messages of aborted transactions are not results.
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    consumer.subscribe([f"penstock.{PIPELINE}.results", f"penstock.{PIPELINE}.dead"])
    until = time.monotonic() + TIMEOUT_S
    while is_open() and time.monotonic() < until:
        message = consumer.poll(1.0)
        if message is None or message.error():
            continue
        if message.topic().endswith(".dead"):
            letters.append((message.value(), message.headers() or []))
        else:
            result = json.loads(message.value())
            results[result["id"]].append(result)
    consumer.close()


def main() -> int:
    """Run all cases; return 1 if one does not hold."""
    producer = Producer({"bootstrap.servers": KAFKA, "acks": "all", "enable.idempotence": True})
    cases, problems = {}, {}
    for path in map(Path, sys.argv[1:]):
        request_id = f"py-{uuid.uuid4()}"
        case = load_case(path, request_id)
        try:
            if "produce" in case:
                produce_messages(producer, case["produce"], request_id)
            else:
                request_id, case["text"] = follow_stream(case["post"])
        except Exception as error:
            problems[path.stem] = repr(error) + (error.read().decode() if isinstance(error, HTTPError) else "")
        cases[path.stem] = request_id, case
    results, letters = defaultdict(list), []

    def find_problem(request_id: str, case: dict) -> str:
        if "dead_letter" in case["expect"]:
            return check_dead_letter(case["expect"]["dead_letter"], encode_value(case["produce"]), letters)
        found = results[request_id]
        if len(found) != 1:
            return f"{len(found)} results" if found else MISSING
        is_same = "text" not in case or found[0]["text"] == case["text"]
        return "" if is_same and matches_expected(case["expect"]["result"], found[0]) else f"another result: {found[0]}"

    sent = [case for name, case in cases.items() if name not in problems]
    read_outcomes(lambda: any(find_problem(*case) == MISSING for case in sent), results, letters)
    for name, case in cases.items():
        problem = problems.get(name) or find_problem(*case)
        print(json.dumps({"case": name, "ok": not problem} | ({"problem": problem} if problem else {})))
        problems[name] = problem
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
