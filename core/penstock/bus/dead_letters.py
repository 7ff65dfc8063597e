"""Builds dead letters. They are the same on both buses.

A dead letter is the message as it came. Its headers name the topic that it came from (`ORIGIN_HEADER`), how often it
was tried (`ATTEMPT_HEADER`), and the reason (`REASON_HEADER`). They also have the stack of the error (`STACK_HEADER`),
and when it became a dead letter (`BURIED_HEADER`, milliseconds since the epoch). Tools for the dead letters of Kafka
Connect find topic, partition, offset and reason in the headers that Connect has for them (`CONNECT_PREFIX`).
"""

import time

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.messages import replace_surrogates
from penstock.names import (
    ATTEMPT_HEADER,
    BURIED_HEADER,
    CONNECT_PREFIX,
    ORIGIN_HEADER,
    REASON_HEADER,
    STACK_HEADER,
    TRUNCATED_HEADER,
    Pipeline,
)
from penstock.sealing import is_sealed

MAX_REASON_CHARS = 1000
MAX_STACK_CHARS = 6000
"""A longer stack is cut at its beginning: its end shows where the error was raised."""


def build_dead_letter(
    pipeline: Pipeline, delivery: Delivery, reason: str, stack: str = "", attempts: int = 1
) -> Outgoing:
    """Return the message for the dead-letter topic. `attempts` is how often the delivery was tried."""
    headers = dict(delivery.headers)
    if is_sealed(delivery.value):  # they may quote it
        reason, stack = reason.partition(":")[0], ""
    if stack:
        headers[STACK_HEADER] = replace_surrogates(stack[-MAX_STACK_CHARS:])
    headers[ORIGIN_HEADER] = delivery.topic
    headers[REASON_HEADER] = replace_surrogates(reason[:MAX_REASON_CHARS])
    headers[ATTEMPT_HEADER] = str(attempts)
    headers[BURIED_HEADER] = str(int(time.time() * 1000))
    headers[f"{CONNECT_PREFIX}topic"] = delivery.topic
    headers[f"{CONNECT_PREFIX}exception.message"] = headers[REASON_HEADER]
    partition, colon, offset = delivery.position.partition(":")
    if colon:  # Redis Streams have no partitions
        headers |= {f"{CONNECT_PREFIX}partition": partition, f"{CONNECT_PREFIX}offset": offset}
    message = Outgoing(pipeline.dead_letter_topic, delivery.value, delivery.key, headers)
    return message if message.num_bytes <= MAX_MESSAGE_BYTES else shorten_dead_letter(message)


def shorten_dead_letter(message: Outgoing) -> Outgoing:
    """Return a dead letter of half the size: the beginning of the value, and the most important headers."""
    kept = {
        name: message.headers[name][:MAX_REASON_CHARS]
        for name in (ORIGIN_HEADER, REASON_HEADER, ATTEMPT_HEADER, BURIED_HEADER)
    }
    kept[TRUNCATED_HEADER] = message.headers.get(TRUNCATED_HEADER, str(len(message.value)))
    key = message.key if message.key is not None and len(message.key) <= MAX_REASON_CHARS else None
    return Outgoing(message.topic, message.value[: min(len(message.value), MAX_MESSAGE_BYTES) // 2], key, kept)
