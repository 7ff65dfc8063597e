"""`python -m tools.asyncapi [FILE]`: the AsyncAPI 3.0 document of a pipeline, from the message models.

A release runs it; the document is not checked in. Topics and keys come from `names.Pipeline`, schemas from `messages`.
docs/protocol.md says the same in prose.
"""

import inspect
import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from penstock import names
from penstock.messages import MAX_REQUEST_BYTES, VERSION, EndEvent, Job, Request, Result, TokenEvent, Wire
from penstock.names import CLASSES, Pipeline, Stage
from tools.settings_doc import read_field_docs, write_text

MODELS: tuple[type[Wire], ...] = (Request, Job, Result, TokenEvent, EndEvent)
Json = dict[str, Any]

_NAMES = Pipeline("PIPELINE")
_PARAMETERS: Json = {
    "pipeline": {"description": "The pipeline: one model, one set of topics.", "default": "demo"},
    "class": {"description": "Interactive work goes first.", "enum": list(CLASSES)},
    "tag": {"description": "The request's id in braces (a Redis Cluster hash tag).", "examples": ["{r-1}"]},
}
_HEADERS: dict[str, Json] = {
    names.VERSION_HEADER: {"description": "The message's version, as in its `v`.", "const": str(VERSION)},
    names.TENANT_HEADER: {"description": "Whose request it is, as in the message."},
    names.KEY_HEADER: {"description": "The id of the API key that the request came with.", "maxLength": 128},
    names.CARD_HEADER: {
        "description": "What gateways know of the stream, where there are regions.",
        "maxLength": 32768,
    },
    names.REPLY_TO_HEADER: {
        "description": "The topic in which the result is wanted; of results without text, the one that has it.",
        "maxLength": 249,
    },
    names.REPLY_REFUSED_HEADER: {"description": "Of results: the topic that was wanted, and why it is not there."},
    names.REPLY_TOPIC_HEADER: {"description": "As `penstock-reply-to`, as Spring writes it.", "maxLength": 249},
    names.REPLY_PARTITION_HEADER: {"description": "A partition of that topic: 4 bytes, big-endian."},
    names.CORRELATION_HEADER: {
        "description": "Bytes by which a requester knows its reply; results have those of their request.",
        "maxLength": 1024,
    },
    names.CLASS_HEADER: {"description": "As in the topic's name.", "enum": list(CLASSES)},
    names.DEADLINE_HEADER: {
        "description": "The message's `deadline`, as decimal text.",
        "pattern": r"^[0-9]+(\.[0-9]+)?$",
    },
    names.ATTEMPT_HEADER: {
        "description": "Dead-letter topic: how often it was tried since it last events something.",
        "pattern": "^[0-9]{1,9}$",
    },
    names.FORM_HEADER: {
        "description": "Of requests of Penstock's clients: the JSON is as they write it, and is compared as it is.",
        "const": names.CANONICAL_FORM,
    },
    names.OPERATION_HEADER: {
        "description": "Of jobs: what was asked for, as figures call it.",
        "enum": ["chat", "text_completion", "embeddings"],
    },
    names.ORIGIN_HEADER: {"description": "Dead-letter topic: the topic it was in."},
    names.REASON_HEADER: {"description": "Dead-letter topic: why it is there."},
    names.STACK_HEADER: {"description": "Dead-letter topic: where in the workers' code it failed, if that is known."},
    names.BURIED_HEADER: {
        "description": "Dead-letter topic: since when, in milliseconds since the epoch.",
        "pattern": "^[0-9]{1,15}$",
    },
    names.TRUNCATED_HEADER: {
        "description": "Dead-letter topic: the message was cut to fit, and had this many bytes.",
        "pattern": "^[0-9]{1,15}$",
    },
    **{
        f"{names.CONNECT_PREFIX}{name}": {"description": f"Dead-letter topic: {words}, as Kafka Connect names it."}
        for name, words in (
            ("topic", "the topic it was in"),
            ("partition", "its partition there"),
            ("offset", "its offset there"),
            ("exception.message", "why it is there"),
        )
    },
    "traceparent": {
        "description": "W3C trace context.",
        "pattern": "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
    },
    "tracestate": {"description": "W3C trace context."},
}
_TOKENS = ((302, "God"), (17, " created"), (4, " the"))


class _Schemas(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def make_document() -> Json:
    """The whole document."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Penstock",
            "version": str(VERSION),
            "description": "Durable, disaggregated LLM inference: a pipeline's topics and token streams. "
            "With the embedded bus the topics are Redis Streams; see docs/protocol.md.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            kind: {
                "host": "{address}",
                "protocol": kind,
                "variables": {"address": {"default": address, "description": description}},
            }
            for kind, address, description in (
                ("kafka", "127.0.0.1:9092", "Bootstrap servers."),
                ("redis", "127.0.0.1:7379", "The Redis of logs and claims."),
            )
        },
        "channels": _make_channels(),
        "operations": _make_operations(),
        "components": {"messages": _make_messages(), "parameters": _PARAMETERS, "schemas": make_schemas()},
    }


def _make_channels() -> Json:
    priority_class = CLASSES[0]
    return {
        "requests": _make_topic_channel(
            _NAMES.request_topic(priority_class),
            "Requests. Durable here means accepted. A tenant whose data stays has this one, and all others, alone, "
            "with `.t-` and the first 16 hex digits of the SHA-256 of its name behind the address.",
            [Request],
            priority_class,
        ),
        "jobs": _make_topic_channel(
            _NAMES.job_topic(priority_class),
            "From prefill to decode: keys of KV blocks, never tensors.",
            [Job],
            priority_class,
        ),
        "results": _make_topic_channel(
            _NAMES.results_topic, "One result for each request. Read with read_committed.", [Result]
        ),
        "dead": _make_topic_channel(
            _NAMES.dead_letter_topic, "Messages that cannot be answered, as they came.", [Request, Job]
        ),
        "log": _make_stream_channel(
            _NAMES.log_key("ID"), "A Redis stream, field `e`: token p is entry p-1, the end after n tokens n-2."
        ),
        "live": _make_stream_channel(
            _NAMES.live_channel("ID"), "Pub/sub: the same events as they are appended to the log."
        ),
    }


def _make_topic_channel(topic: str, description: str, models: list[type[Wire]], priority_class: str = "") -> Json:
    address = topic.replace("PIPELINE", "{pipeline}")
    limits = {"topicConfiguration": {"max.message.bytes": 2 * MAX_REQUEST_BYTES}, "bindingVersion": "0.5.0"}
    channel = _make_channel(
        address.removesuffix(priority_class) + "{class}" if priority_class else address, "kafka", description, models
    )
    return channel | {"bindings": {"kafka": limits}}


def _make_stream_channel(key: str, description: str) -> Json:
    address = key.replace("PIPELINE", "{pipeline}").replace("{ID}", "{tag}")
    return _make_channel(address, "redis", description, [TokenEvent, EndEvent])


def _make_channel(address: str, server: str, description: str, models: list[type[Wire]]) -> Json:
    return {
        "address": address,
        "description": description,
        "servers": [{"$ref": f"#/servers/{server}"}],
        "parameters": {
            name: {"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS if f"{{{name}}}" in address
        },
        "messages": {model.__name__: {"$ref": f"#/components/messages/{model.__name__}"} for model in models},
    }


def _make_operations() -> Json:
    answer = {"channel": {"$ref": "#/channels/results"}, "messages": [{"$ref": "#/channels/results/messages/Result"}]}
    return {
        "accept": _make_operation("receive", "requests", [Request], "Workers take requests.", "prefill")
        | {"reply": answer},
        "handOff": _make_operation("send", "jobs", [Job], "Prefill workers leave job references."),
        "takeJob": _make_operation("receive", "jobs", [Job], "Workers that decode take job references.", "decode"),
        "answer": _make_operation("send", "results", [Result], "Decode workers leave the one result."),
        "log": _make_operation("send", "log", [TokenEvent, EndEvent], "Workers append each token, then the end."),
        "stream": _make_operation("send", "live", [TokenEvent, EndEvent], "Each append is published by the same call."),
        "bury": _make_operation("send", "dead", [Request, Job], "Workers give up on what cannot be answered at all."),
    }


def _make_operation(
    action: str, channel: str, models: list[type[Wire]], summary: str, stage: Stage | None = None
) -> Json:
    operation: Json = {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "summary": summary,
        "messages": [{"$ref": f"#/channels/{channel}/messages/{model.__name__}"} for model in models],
    }
    if stage is not None:
        group = _NAMES.consumer_group(stage).replace("PIPELINE", "<pipeline>")
        kafka = {"groupId": {"type": "string", "description": f"`{group}`"}, "bindingVersion": "0.5.0"}
        operation["bindings"] = {"kafka": kafka}
    return operation


def _make_messages() -> Json:
    found = {}
    for model in MODELS:
        name, by_kafka = model.__name__, "v" in model.model_fields
        message: Json = {
            "name": name,
            "summary": inspect.cleandoc(model.__doc__ or "").split("\n\n")[0],
            "payload": {"$ref": f"#/components/schemas/{name}"},
            "examples": [
                {"name": example, "payload": payload} | ({"headers": _make_headers(payload)} if by_kafka else {})
                for example, payload in make_examples()[name].items()
            ],
        }
        if by_kafka:
            message["headers"] = {"$ref": "#/components/schemas/Headers"}
            message["correlationId"] = {"location": "$message.payload#/id"}
            key = {"type": "string", "description": "The request's id."}
            message["bindings"] = {"kafka": {"key": key, "bindingVersion": "0.5.0"}}
        found[name] = message
    return found


def _make_headers(payload: Json) -> Json:
    priority_class = payload.get("class", CLASSES[0])
    return {
        names.VERSION_HEADER: str(VERSION),
        names.TENANT_HEADER: payload.get("tenant", "default"),
        names.CLASS_HEADER: priority_class,
    }


def make_examples() -> dict[str, dict[str, Json]]:
    """Payloads by message and name: requests as producers write them, the others as workers do."""
    events, rolled = [], names.START_HASH
    for position, (token, text) in enumerate(_TOKENS):
        rolled = names.roll_hash(rolled, token)
        events.append(TokenEvent.at_position(position, rolled, token, text))
    answer = {"text": "".join(event.text for event in events), "token_ids": [event.token for event in events]}
    stages = ("published", "prefill_started", "first_token", "handed_off", "decode_started", "finished")
    timings = {stage: 1767225600.0 + step / 64 for step, stage in enumerate(stages)}
    usage = {"prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": len(events)}
    end = {"finish_reason": "length", "usage": usage, "timings": timings}
    error = {"code": "prompt_too_long", "message": "This model's maximum context length is 4096 tokens. However, …"}
    first, second, third = ({"v": VERSION, "id": f"r-{number}"} for number in (1, 2, 3))
    prompt = {"token_ids": [11, 302, 9, 2]}
    stored = {"fingerprint": "5a" * 32, "last_block": "c3" * 32, "cached_tokens": 0}
    job = {"job": "4be0643f1d98573b97cdca98a65347dd", "class": CLASSES[0]}
    sampling = {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["\n\n"],
        "logit_bias": {"17": -5},
    }
    likely = {"logprob": -0.105361, "text": events[0].text}
    logprobs = likely | {"top": [likely | {"token": events[0].token}]}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    all_fields = {"sampling": sampling, "class": "batch", "tenant": "acme", "deadline": 1767229200.0}
    requests: dict[str, dict[str, Json]] = {
        "Request": {
            "prompt": first | {"prompt": "In the beginning"},
            "chat": second | {"messages": turns, "sampling": {"temperature": 0}},
            "tokens": third | prompt | all_fields,
        }
    }
    ours: dict[type[Wire], dict[str, Json]] = {
        Job: {
            "stored": first | job | prompt | stored | {"timings": timings},
            "refused": second | job | {"error": error},
        },
        Result: {
            "answered": first | {"class": CLASSES[0], "model": "demo"} | answer | end,
            "refused": second | {"finish_reason": "error", "error": error},
        },
        TokenEvent: {f"token{position}": event.model_dump() for position, event in enumerate(events)}
        | {"logprobs": events[0].model_dump() | {"logprobs": logprobs}},
        EndEvent: {"complete": end, "failed": {"finish_reason": "error", "error": error}},
    }
    return requests | {
        model.__name__: {name: json.loads(model.model_validate(payload).encode()) for name, payload in payloads.items()}
        for model, payloads in ours.items()
    }


def make_schemas(ref_template: str = "#/components/schemas/{model}") -> Json:
    """Return the schemas of all messages, of their parts, and of `Headers`, by name."""
    _, found = models_json_schema(
        [(model, "validation") for model in MODELS],
        ref_template=ref_template,
        schema_generator=_Schemas,
    )
    schemas: Json = found["$defs"]
    for model in _with_parts(MODELS):
        properties = schemas[model.__name__]["properties"]
        for name, text in read_field_docs(model).items():
            properties[model.model_fields[name].alias or name]["description"] = text
        if "v" in properties:
            schemas[model.__name__]["required"] = ["v", *schemas[model.__name__].get("required", [])]
    for name, limit in (("prompt", "minLength"), ("messages", "minItems"), ("token_ids", "minItems")):
        schemas["Request"]["properties"][name]["anyOf"][0][limit] = 1
    schemas["Request"]["oneOf"] = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("prompt", "messages", "token_ids")
    ]
    headers = {name: {"type": "string", **rest} for name, rest in _HEADERS.items()}
    return {"Headers": {"type": "object", "properties": headers}} | schemas


def _with_parts(models: tuple[type[Wire], ...]) -> list[type[BaseModel]]:
    """The models and the models they are made of."""
    todo: list[type[BaseModel]] = list(models)
    for model in todo:
        for schema in model.model_fields.values():
            parts = (schema.annotation, *getattr(schema.annotation, "__args__", ()))
            todo += [
                part for part in parts if isinstance(part, type) and issubclass(part, BaseModel) and part not in todo
            ]
    return todo


if __name__ == "__main__":
    write_text(json.dumps(make_document(), indent=1, ensure_ascii=False) + "\n", sys.argv[1:])
