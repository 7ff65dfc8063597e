"""The readers' side of the record: read the log and the status, and cancel. Also for asyncio."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import redis
import redis.asyncio
from pydantic import Field, TypeAdapter, ValidationError

from penstock.config.settings import RecordSettings
from penstock.errors import AnswerInterrupted, InvalidRequest, RequestError, StreamError
from penstock.messages import EndEvent, ErrorInfo, Timings, TokenEvent, now_s
from penstock.names import START_HASH, Pipeline
from penstock.redis.client import execute_all, raise_first_error
from penstock.redis.scripts import load_script
from penstock.sealing import is_sealed_event, open_event

CANCEL = load_script("penstock.record", "cancel")
IS_REMEMBERED = load_script("penstock.record", "ended", "is_remembered")
END_UNREAD = load_script("penstock.record", "unread")
GIVE_AWAY = load_script("penstock.record", "log_end", "give_away")
RecordStage = Literal["new", "prefill", "handed", "decode", "end"]
_FIELDS = ["epoch", "session", "stage", "bound", "body", "tokens", "attempts", "cancelled"]
_EVENT: TypeAdapter[TokenEvent | EndEvent] = TypeAdapter(
    Annotated[TokenEvent | EndEvent, Field(union_mode="left_to_right")]
)


def parse_event(payload: bytes, request_id: str = "") -> TokenEvent | EndEvent:
    """Return the event of a log entry or of a message of the live channel of a request: both hold the event's JSON,
    sealed if its tenant has a key.

    Raises `StreamError` for anything else; `ContentErased` or `TenantKeyMissing` without that key.
    """
    try:
        return _EVENT.validate_json(open_event(request_id, payload) if is_sealed_event(payload) else payload)
    except InvalidRequest as error:
        raise StreamError(f"the stream has an entry that cannot be opened: {error}") from None
    except ValidationError as error:
        raise StreamError(
            f"the stream has an entry that is no event of this version: {error.error_count()} errors"
        ) from None


@dataclass(frozen=True)
class RequestStatus:
    """A request's record. An empty string means: no session holds it, no job is bound, no worker saw its body."""

    epoch: int
    session: str
    stage: RecordStage
    bound: str
    body: str
    num_tokens: int
    attempts: int
    cancelled: bool

    @property
    def worker_name(self) -> str:
        """The name of the worker that holds the request, or an empty string."""
        return self.session.rpartition("/")[0]


class TokenLog:
    """Reads the token logs of requests, with a `redis.Redis` that does not decode."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, settings: RecordSettings) -> None:
        self._client = client
        self._pipeline = pipeline
        self._pending_ms = round(settings.pending_keep_s * 1000)

    def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        """Return the events after the token at `after_position`, at most `limit`. The end event is the last."""
        count = () if limit is None else ("COUNT", limit)
        command = ["XRANGE", self._pipeline.log_key(request_id), f"{after_position + 1}-0", "+", *count]
        return parse_entries(raise_first_error(execute_all(self._client, [command]))[0], request_id)

    def read_status(self, request_id: str) -> RequestStatus | None:
        """Return a request's record, or None where there is none."""
        return _parse_status(self._client.hmget(self._pipeline.record_key(request_id), _FIELDS))

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request, also before any worker has read it. Return False if it has ended already."""
        key, news = self._pipeline.record_key(request_id), self._pipeline.news_key("%s")
        return bool(CANCEL.run(self._client, [key], [self._pending_ms, request_id, news]))

    def end_unread(self, request_id: str, error: RequestError) -> bool:
        """End a request with an error if no worker has seen it, for as long as a message of it may wait. Return whether
        it was ended.
        """
        keys = [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]
        return bool(END_UNREAD.run(self._client, keys, [_encode_error_end(error), self._pending_ms]))


class AsyncTokenLog:
    """`TokenLog` for asyncio."""

    def __init__(self, client: "redis.asyncio.Redis", pipeline: Pipeline, settings: RecordSettings) -> None:
        self._client = client
        self._pipeline = pipeline
        self._pending_ms, self._keep_ms = round(settings.pending_keep_s * 1000), round(settings.keep_s * 1000)
        self._remember_days = settings.remember_days

    async def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        """Return the events after the token at `after_position`, at most `limit`. The end event is the last."""
        key = self._pipeline.log_key(request_id)
        entries: Any = await self._client.xrange(key, min=f"{after_position + 1}-0", count=limit)
        return [parse_event(fields.get(b"e", b""), request_id) for _, fields in entries]

    async def read_status(self, request_id: str) -> RequestStatus | None:
        """Return a request's record, or None where there is none."""
        return _parse_status(await cast(Any, self._client.hmget(self._pipeline.record_key(request_id), _FIELDS)))

    async def is_remembered(self, request_id: str) -> bool:
        """Return whether the request has ended and its record has expired, see `RecordSettings.remember_days`."""
        if self._remember_days == 0:
            return False
        args: list[str | int] = [request_id, self._pipeline.ended_key("%d", "%s"), self._remember_days]
        return bool(await IS_REMEMBERED.run_async(self._client, [self._pipeline.record_key(request_id)], args))

    async def cancel_request(self, request_id: str) -> bool:
        """Cancel a request, also before any worker has read it. Return False if it has ended already."""
        key = self._pipeline.record_key(request_id)
        args: list[str | int] = [self._pending_ms, request_id, self._pipeline.news_key("%s")]
        return bool(await CANCEL.run_async(self._client, [key], args))

    async def end_unread(self, request_id: str, error: RequestError) -> bool:
        """End a request with an error if no worker has seen it. Return whether it was ended."""
        keys = [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]
        return bool(await END_UNREAD.run_async(self._client, keys, [_encode_error_end(error), self._keep_ms]))

    async def give_away(self, request_id: str, region: str) -> bool:
        """End a request that a region answers which has adopted this one. Return whether it had not ended here."""
        error = AnswerInterrupted(f"the region {region} answers this request, as it has adopted this one")
        keys = [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]
        name, held = f"region@{region}", self._pipeline.held_key("%s")
        # As long as a message of it may wait.
        args: list[str | int | bytes] = [request_id, name, _encode_error_end(error), self._pending_ms, held, START_HASH]
        return int(await GIVE_AWAY.run_async(self._client, keys, args)) != 2


def _encode_error_end(error: RequestError) -> bytes:
    """Return the end of a log with an error, as of now."""
    end = EndEvent(finish_reason="error", timings=Timings(finished=now_s()), error=ErrorInfo.from_error(error))
    return end.encode()


def parse_entries(entries: Any, request_id: str) -> list[TokenEvent | EndEvent]:
    """Return the events in a range of a log's entries, as the server sends them. Raises as `parse_event`, and
    `StreamError` for an error in place of the entries.
    """
    if isinstance(entries, redis.ResponseError):
        raise StreamError(f"the log cannot be read: {entries}")
    return [parse_event(fields[1] if fields[0] == b"e" else b"", request_id) for _, fields in entries or ()]


def _parse_status(values: Any) -> RequestStatus | None:
    if all(value is None for value in values):
        return None
    epoch, session, stage, bound, body, tokens, attempts, cancelled = (
        "" if value is None else value.decode() for value in values
    )
    return RequestStatus(
        epoch=int(epoch or 0), session=session, stage=cast(RecordStage, stage or "new"), bound=bound, body=body,
        num_tokens=int(tokens or 0), attempts=int(attempts or 0), cancelled=cancelled == "1",
    )  # fmt: skip
