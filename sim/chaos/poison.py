"""Requests that harm whoever reads them, and messages that Penstock's clients never send, but that any program with
access to the topics can.
"""

import ctypes
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import confluent_kafka
import redis

from penstock.bus.contract import Outgoing
from penstock.config.addresses import Addresses, kafka_security_config
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import BusUnavailable
from penstock.messages import ChatMessage, Request
from penstock.names import Pipeline

INVALID_HEADER_NAME = b"\xff\xfe"
"""The name of a header that is not UTF-8."""
BOMB_MB = 100
FLUSH_TIMEOUT_S = 30.0
"""Shorter than librdkafka keeps trying to send a message: what it sent by then was acknowledged."""

POISON = {"panic": "internal_error", "endless": "invalid_request", "memory": "invalid_request"}
"""By the kind of a poisonous request: the code of the error with which it ends."""
PANIC = "a" * 40 + "b"
"""A text at which the pattern of the poisoned model's tokenizer runs away, and its library panics."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = "{{ ('x' * 2000000000) | length }}"
TEMPLATE = (
    f"{{% set text = messages[0].content %}}{{% if text == 'endless' %}}{ENDLESS}{{% elif text == 'memory' %}}{MEMORY}"
    "{% else %}{{ text }}{% endif %}"
)


@cache
def make_poisoned_model() -> Path:
    """Write the demo model with a tokenizer that panics at `PANIC`, and a chat template that never ends, or takes all
    memory, where a message says so; return its directory. Each process writes its own.
    """
    directory = Path(shutil.copytree(DEMO_MODEL, tempfile.mkdtemp(prefix="penstock-poison-"), dirs_exist_ok=True))
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    described = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(described | {"pre_tokenizer": pattern}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def name_poison(hundred: int) -> str:
    """Return the kind of the poison that stands in the middle of a hundred requests; empty for every second one."""
    return list(POISON)[hundred // 2 % len(POISON)] if hundred % 2 else ""


def poison_request(request: Request, kind: str) -> Request:
    """Return the request with a prompt that is poison of a kind."""
    messages = None if kind == "panic" else [ChatMessage(role="user", content=kind)]
    return request.model_copy(update={"token_ids": None, "prompt": None if messages else PANIC, "messages": messages})


def send_poisoned(addresses: Addresses, work: Sequence[Request]) -> None:
    """Send requests with a header whose name is no UTF-8.

    Raises `BusUnavailable` where it is not known to be durable.
    """
    pipeline = Pipeline(addresses.pipeline)
    for request in work:
        topic = pipeline.request_topic(request.priority_class or "interactive")
        message = Outgoing(topic, request.encode(), request.id)
        if addresses.kafka:
            produce_raw(
                {"bootstrap.servers": addresses.kafka, **kafka_security_config(addresses)}, message, INVALID_HEADER_NAME
            )
        else:
            _add_raw(addresses.stream_url, pipeline.stream_key(topic), message)


def _add_raw(url: str, stream: str, message: Outgoing) -> None:
    fields: dict[Any, Any] = {
        "value": message.value,
        "key": message.key or "",
        "headers": b'{"' + INVALID_HEADER_NAME + b'": "1"}',
    }
    with closing(redis.Redis.from_url(url, socket_timeout=2.0)) as client:
        try:
            client.xadd(stream, fields)
        except redis.RedisError as error:
            raise BusUnavailable(f"Redis: {error}") from error


def send_bomb(addresses: Addresses, request_id: str) -> None:
    """Send a request of a few kB that unpacks to far more than any message may have, by Kafka.

    Raises `BusUnavailable` where it is not known to be durable.
    """
    request = json.dumps({"v": 1, "id": request_id, "prompt": "a" * (BOMB_MB * 2**20)})
    settings = {
        "bootstrap.servers": addresses.kafka,
        **kafka_security_config(addresses),
        "log_level": 0,
        "compression.codec": "zstd",
        "message.max.bytes": 2 * BOMB_MB * 2**20,
        "queue.buffering.max.kbytes": 2 * BOMB_MB * 1024,
    }
    producer = confluent_kafka.Producer(settings)
    reports: list[object] = []
    topic = Pipeline(addresses.pipeline).request_topic("interactive")
    producer.produce(topic, request, request_id, on_delivery=lambda error, _: reports.append(error))
    producer.flush(FLUSH_TIMEOUT_S)
    if reports != [None]:
        producer.purge()
        raise BusUnavailable(f"Kafka: {reports or 'no acknowledgement'}")


# confluent_kafka takes no header whose name is not text; librdkafka takes any.

_TOPIC, _VALUE, _KEY, _HEADER, _END = 1, 4, 5, 9, 0  # rd_kafka_vtype_t
_PRODUCER = 0
_PURGE_ALL = 3


def _load_librdkafka() -> ctypes.CDLL:
    folder = Path(confluent_kafka.__file__).parent
    inside = folder.parent / "confluent_kafka.libs", folder / ".dylibs"
    (path,) = itertools.chain.from_iterable(one.glob("librdkafka*") for one in inside)
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_conf_set.argtypes = [ctypes.c_void_p, *[ctypes.c_char_p] * 3, ctypes.c_size_t]
    library.rd_kafka_new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.rd_kafka_flush.argtypes = library.rd_kafka_purge.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.rd_kafka_destroy.argtypes = [ctypes.c_void_p]
    return library


@contextmanager
def _open_producer(library: ctypes.CDLL, settings: dict[str, str]) -> Iterator[ctypes.c_void_p]:
    error = ctypes.create_string_buffer(512)
    conf = library.rd_kafka_conf_new()
    for name, value in settings.items():
        if library.rd_kafka_conf_set(conf, name.encode(), value.encode(), error, len(error)):
            raise ValueError(error.value.decode())
    handle = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, error, len(error)))
    if not handle:
        raise ValueError(error.value.decode())
    try:
        yield handle
    finally:
        library.rd_kafka_purge(handle, _PURGE_ALL)
        library.rd_kafka_destroy(handle)


def produce_raw(settings: dict[str, str], message: Outgoing, header: bytes) -> None:
    """Produce a message with a header of any name; raises `BusUnavailable` where it is not known to be durable."""
    library, key = _load_librdkafka(), (message.key or "").encode()
    settings = settings | {"acks": "all", "log_level": "0"}
    with _open_producer(library, settings) as handle:
        refused = library.rd_kafka_producev(
            handle,
            ctypes.c_int(_TOPIC), ctypes.c_char_p(message.topic.encode()),
            ctypes.c_int(_VALUE), ctypes.c_char_p(message.value), ctypes.c_size_t(len(message.value)),
            ctypes.c_int(_KEY), ctypes.c_char_p(key), ctypes.c_size_t(len(key)),
            ctypes.c_int(_HEADER), ctypes.c_char_p(header), ctypes.c_char_p(b"1"), ctypes.c_ssize_t(1),
            ctypes.c_int(_END),
        )  # fmt: skip
        if refused or library.rd_kafka_flush(handle, int(FLUSH_TIMEOUT_S * 1000)):
            raise BusUnavailable(f"Kafka: no acknowledgement of {message.key}")
