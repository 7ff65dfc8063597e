"""Dead letters, the same on both buses.

A dead letter is the message as it came. Its headers say where it came from (`ORIGIN`), how often it was tried
(`ATTEMPT`), why it is here (`REASON`), where that happened (`STACK`), and since when it is one (`BURIED`, milliseconds
since the epoch).
"""

import time

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.names import (
    ATTEMPT_HEADER,
    BURIED_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    STACK_HEADER,
    TRUNCATED_HEADER,
    Pipeline,
)

MAX_REASON_CHARS = 1000
MAX_STACK_CHARS = 6000
"""The end of a stack says most."""


def build_dead_letter(
    pipeline: Pipeline, delivery: Delivery, reason: str, stack: str = "", attempts: int = 1
) -> Outgoing:
    """What goes to the dead-letter topic for a delivery that was tried so often."""
    headers = dict(delivery.headers)
    if stack:
        headers[STACK_HEADER] = stack[-MAX_STACK_CHARS:]
    headers[ORIGIN_HEADER] = delivery.topic
    headers[REASON_HEADER] = reason[:MAX_REASON_CHARS]
    headers[ATTEMPT_HEADER] = str(attempts)
    headers[BURIED_HEADER] = str(int(time.time() * 1000))
    message = Outgoing(pipeline.dead_letter_topic, delivery.value, delivery.key, headers)
    return message if message.num_bytes <= MAX_MESSAGE_BYTES else _truncate_message(message)


def _truncate_message(message: Outgoing) -> Outgoing:
    """The beginning of a message that no topic takes whole, and what is known of it: a dead letter always fits."""
    kept = {
        name: message.headers[name][:MAX_REASON_CHARS]
        for name in (ORIGIN_HEADER, REASON_HEADER, ATTEMPT_HEADER, BURIED_HEADER)
    }
    kept[TRUNCATED_HEADER] = str(len(message.value))
    key = message.key if message.key is not None and len(message.key) <= MAX_REASON_CHARS else None
    return Outgoing(message.topic, message.value[: MAX_MESSAGE_BYTES // 2], key, kept)
