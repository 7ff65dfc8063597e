"""A delivery as a claim keeps it in Redis, for whoever has to go on without it."""

import json

from penstock.bus.contract import Delivery


def pack(delivery: Delivery) -> bytes:
    """A line of JSON about the message, then the message."""
    about = {
        "topic": delivery.topic,
        "key": delivery.key,
        "headers": dict(delivery.headers),
        "class": delivery.klass,
        "at": delivery.timestamp_s,
    }
    return json.dumps(about).encode() + b"\n" + delivery.value


def unpack(parcel: bytes) -> Delivery:
    """The message as a delivery that nobody holds: it cannot be settled."""
    line, value = parcel.split(b"\n", 1)
    about = json.loads(line)
    return Delivery(
        about["topic"], "", value, about["key"], about["headers"], about["class"], about["at"], is_held=False
    )
