"""Which models are served by which pipelines, from the heartbeats of all workers, and which were served before.

A gateway notes in Redis what it sees served. Requests for a model are accepted while it has no worker, also by a
gateway that was started meanwhile, and wait for the next worker. An operator has a model
forgotten (`penstock models forget`).
"""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import redis.asyncio
from pydantic import ValidationError

from penstock.errors import BusUnavailable
from penstock.ingest.errors import ApiError, unknown_model_error
from penstock.ingest.openai.answer_parser import import_response_parser
from penstock.ingest.openai.endpoint import Task
from penstock.names import MODELS_KEY, WORKERS_KEY, pipeline_of_worker
from penstock.pictures.tokens import PICTURE_TOKENS, PictureTokens
from penstock.redis.client import translate_outages

MODELS_TTL_S = 1.0
"""How long what was read is used."""
CARD_FIELDS = (
    "parent",
    *("task", "dimensions", "matryoshka", "pooling", "prompts", "default_prompt"),
    *("sees", "picture_tokens"),
)
"""What workers say of a model that is an adapter of another, computes vectors or scores, or sees pictures."""
ADAPTER_FIELDS = ("stage", "since", "model_source", "max_model_len", "response_template")
"""What a worker says of its model that holds for the model's adapters, too: they generate text and see no pictures."""
Beat = dict[str, Any]
"""A heartbeat, or the fields of one by which a model is noted."""


@dataclass
class ServedModel:
    """A model that is served."""

    name: str
    source: str
    """Where its files are, `demo`, a directory or a name of the hub. Callers may ask for it by this, too."""
    pipeline: str
    since_s: float
    """Since when, as far as its workers know."""
    max_model_len: int | None = None
    """The most tokens of prompt and answer that all its workers accept; None: not reported."""
    response_template: dict[str, Any] | None = None
    """How calls and reasoning are told from an answer's text, as in the model's tokenizer; None: they cannot be."""
    card: Beat = field(default_factory=dict)
    """What its workers say of the vectors or scores that it computes, and of pictures; empty where it has neither."""
    is_endpoint: bool = False
    """Whether its workers ask endpoints."""
    is_read: bool = field(default=False, compare=False)
    """Whether a worker that reads requests is known, which alone says whether the model sees."""

    @property
    def task(self) -> Task:
        """What it does, as `/v1/models` says it."""
        return cast("Task", self.card.get("task", "generate"))

    @property
    def sees(self) -> bool:
        """Whether all its workers take pictures."""
        return bool(self.card.get("sees"))

    @property
    def picture_tokens(self) -> PictureTokens | None:
        """The rule by which a picture's tokens are counted; None where its workers tell none that is known here."""
        with suppress(ValidationError):  # a newer worker's
            return PICTURE_TOKENS.validate_python(self.card.get("picture_tokens"))
        return None

    def does_task(self, task: Task) -> bool:
        """Return whether it does what is asked of it: one that generates text may compute vectors as well."""
        return task == self.task or (task == "embed" and self.task == "generate" and "dimensions" in self.card)

    @property
    def note(self) -> Beat:
        """The note of this model, with the fields of a heartbeat."""
        return {
            "model": self.name,
            "model_source": self.source,
            "since": self.since_s,
            "max_model_len": self.max_model_len,
            "response_template": self.response_template,
            **({"stage": "endpoint"} if self.is_endpoint else {}),
            **self.card,
        }


class ServedModels:
    """Models and their pipelines. If two pipelines serve one name, `preferred` gets it, else the first by name.

    A pipeline whose workers ask endpoints has a name only if no other pipeline has or had it, unless it is `preferred`.
    Beside another one it is that one's fallback.
    """

    def __init__(self, client: "redis.asyncio.Redis", preferred: str) -> None:
        self._client, self._preferred = client, preferred
        self._known: dict[str, ServedModel] = {}
        """By what callers may ask for: names, and sources that are no name. Two models of one name differ in source."""
        self._by_pipeline: dict[tuple[str, str], ServedModel] = {}
        """Also those that do not get their name, by what callers may ask for and pipeline."""
        self._fallbacks: dict[str, ServedModel] = {}
        """By what callers may ask for: what endpoints can answer now, beside another pipeline."""
        self._notes: dict[str, Beat] = {}
        """The models that were served, by their fields in Redis, which may lose them."""
        self._read_at = -MODELS_TTL_S
        self._refresh_task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Cancel a look-up that is under way: it would open a closed connection again."""
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)

    async def list_models(self) -> list[ServedModel]:
        """Return all models by name, those of the preferred pipeline first.

        Raises `BusUnavailable` if nothing was ever read.
        """
        await self._refresh_models()
        if not self._known:  # the first worker may have reported since
            await self._refresh_models(max_age_s=0.0)
        found = [model for asked, model in sorted(self._known.items()) if asked == model.name]
        return sorted(found, key=lambda model: model.pipeline != self._preferred)

    async def list_pipelines(self) -> set[str]:
        """Return all pipelines that serve a model, those of fallbacks too. Raises as `list_models`."""
        await self.list_models()
        return {pipeline for _, pipeline in self._by_pipeline}

    async def read_names(self) -> list[str] | None:
        """Return all names and sources of models, read now; None if none is known, so that it is open which exist."""
        with suppress(BusUnavailable):
            await self._refresh_models(max_age_s=0.0)
        return sorted(self._known) or None

    async def find_model(self, name: str) -> ServedModel:
        """Return a model. Raises `ApiError`: 404 if no worker serves it, 503 while no worker serves any."""
        await self._refresh_models()
        if name not in self._known or not self._known[name].is_read:  # its first worker may have reported since
            await self._refresh_models(max_age_s=0.0)
        if name in self._known:
            return self._known[name]
        if not self._known:
            raise ApiError(503, "no worker is ready yet", code="unavailable", headers={"Retry-After": "1"})
        raise unknown_model_error(name, (model.name for model in self._known.values()))

    def find_fallback(self, name: str) -> ServedModel | None:
        """Return the model of this name that endpoints can answer now beside another pipeline, as last read."""
        return self._fallbacks.get(name)

    def find_pipelines(self, name: str) -> set[str]:
        """Return the pipelines that serve this name or did so, as last read."""
        return {pipeline for asked, pipeline in self._by_pipeline if asked == name}

    def find_at(self, name: str, pipeline: str) -> ServedModel | None:
        """Return the model of this name at a pipeline, as last read."""
        return self._by_pipeline.get((name, pipeline))

    async def _refresh_models(self, max_age_s: float = MODELS_TTL_S) -> None:
        """Read the heartbeats again if that was longer ago than `max_age_s`, once for all callers that wait."""
        if time.monotonic() < self._read_at + max_age_s:
            return
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._read_models())
        await asyncio.shield(self._refresh_task)

    async def _read_models(self) -> None:
        now = time.monotonic()
        try:
            with translate_outages():
                beats, told = await self._read_heartbeats(), await self._read_notes()
        except BusUnavailable:
            if not self._known:
                raise
            return  # what is known is good enough: publishing will tell
        notes = {field: note for field, note in (self._notes | told).items() if note}
        beats.sort(key=self._rank_pipeline)
        live = {_name_field(pipeline, beat["model"]) for pipeline, beat in beats}
        away = [(field.partition(":")[0], note) for field, note in notes.items() if field not in live]
        beats += sorted(away, key=self._rank_pipeline)
        # A tenant's request does not leave for endpoints because the own workers are away.
        beats.sort(key=lambda one: one[0] != self._preferred and one[1].get("stage") == "endpoint")
        found: dict[tuple[str, str], ServedModel] = {}
        templates: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
        names, blind, ready = {beat["model"] for _, beat in beats}, set[tuple[str, str]](), set[tuple[str, str]]()
        for pipeline, beat in beats:
            name = beat["model"]
            noted = notes.get(_name_field(pipeline, name), beat)
            source, since_s = beat.get("model_source") or name, min(float(beat["since"]), float(noted["since"]))
            for asked in {name} if "parent" in beat else {name, *({source} - names)}:
                card = {told: beat[told] for told in CARD_FIELDS if beat.get(told) is not None}
                place, is_endpoint = (asked, pipeline), beat.get("stage") == "endpoint"
                made = ServedModel(name, source, pipeline, since_s, card=card, is_endpoint=is_endpoint)
                served = found.setdefault(place, made)
                served.since_s = min(served.since_s, since_s)
                if beat.get("stage") != "decode":  # those read no requests; of the others any may
                    served.is_read = True
                    blind |= set() if beat.get("sees") else {place}
                    served.card |= {told: card[told] for told in ("sees", "picture_tokens") if told in card}
                lengths = [length for length in (served.max_model_len, beat.get("max_model_len")) if length is not None]
                served.max_model_len = min(lengths, default=None)
                templates.setdefault(place, []).append(beat.get("response_template"))
                ready |= {place} if beat.get("state") == "ready" else set()
        for place in blind:
            found[place].card.pop("sees", None)
        for place, reported in templates.items():
            # While workers are replaced one after the other, they may report different ones.
            same = all(one == reported[0] for one in reported)
            found[place].response_template = reported[0] if same else None
        known = dict[str, ServedModel]()
        for (asked, _), served in found.items():
            known.setdefault(asked, served)
        fallbacks = {
            asked: served
            for (asked, pipeline), served in reversed(found.items())
            if served.is_endpoint and not known[asked].is_endpoint and (asked, pipeline) in ready
        }
        if any(one.response_template for one in found.values()):
            await asyncio.to_thread(import_response_parser)  # now, as it would hold up the first answer for a second
        self._notes = notes | {_name_field(one.pipeline, one.name): one.note for one in found.values()}
        await self._write_notes({field: note for field, note in self._notes.items() if told.get(field) != note})
        self._known, self._by_pipeline, self._fallbacks, self._read_at = known, found, fallbacks, now

    def _rank_pipeline(self, one: tuple[str, Beat]) -> tuple[bool, str]:
        """Return a key that sorts what this gateway's own pipeline serves before the rest."""
        return one[0] != self._preferred, one[0]

    async def _read_notes(self) -> dict[str, Beat]:
        """Return the notes of models in Redis; an empty one for each that was forgotten."""
        told = cast("dict[bytes, bytes]", await cast(Any, self._client.hgetall(MODELS_KEY)))
        return {field.decode(): json.loads(note or b"{}") for field, note in told.items()}

    async def _write_notes(self, notes: dict[str, Beat]) -> None:
        """Write notes into Redis. While that takes no writes this process alone has them, and tries again."""
        if notes:
            with suppress(redis.RedisError):
                words: dict[Any, Any] = {field: json.dumps(note) for field, note in notes.items()}
                await cast(Any, self._client.hset(MODELS_KEY, mapping=words))

    async def _read_heartbeats(self) -> list[tuple[str, Beat]]:
        """Return pipeline and last heartbeat of each live worker that reports a model. Dead workers are taken off the
        list.
        """
        keys = sorted(cast("set[bytes]", await cast(Any, self._client.smembers(WORKERS_KEY))))
        values = cast("list[bytes | None]", await self._client.mget(keys)) if keys else []
        beats = dict(zip(keys, values, strict=True))
        if gone := [key for key, value in beats.items() if value is None]:  # one that lives is back with its next beat
            await cast(Any, self._client.srem(WORKERS_KEY, *gone))
        live = {key: json.loads(value) for key, value in beats.items() if value is not None}
        told = [(pipeline_of_worker(key.decode()), beat) for key, beat in live.items() if beat.get("model") is not None]
        # An adapter is a model of its own, whose files besides its weights are those of the model.
        adapters = [
            (
                pipeline,
                {field: beat[field] for field in ADAPTER_FIELDS if field in beat}
                | {"model": name, "parent": beat["model"]},
            )
            for pipeline, beat in told
            for name in beat.get("adapters") or ()
        ]
        return [*told, *adapters]


def _name_field(pipeline: str, name: str) -> str:
    """Return the field of a model's note."""
    return f"{pipeline}:{name}"
