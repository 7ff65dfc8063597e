"""The errors that Penstock raises.

PenstockError
├── RequestError             a request cannot be answered; becomes its result (`code` goes on the wire)
│   ├── InvalidRequest         not JSON, not UTF-8, unknown field, bad value, empty prompt
│   ├── UnsupportedVersion     a message version this build does not know
│   ├── UnknownModel           the pipeline does not serve that model
│   ├── PromptTooLong          the prompt does not fit the model's context
│   ├── RequestTooLarge        the message has more bytes than a request may have
│   ├── RequestLost            its message was deleted before a worker read it
│   ├── IdConflict             the id was used before with another body
│   ├── DeadlineExceeded       its deadline passed
│   ├── Cancelled              a client cancelled it
│   ├── UnsupportedSchema      a JSON schema asks for something that cannot be enforced exactly
│   ├── GrammarFailed          an answer cannot go on in its grammar
│   ├── AnswerInterrupted      an endpoint's or an adapter's answer was cut, and cannot be continued
│   ├── PictureGone            a picture of it is not in the store any more
│   ├── PicturesNeeded         a row of a picture is to be computed by a worker without its pixels
│   ├── ContentErased          the key of its tenant, with which it is encrypted, was dropped
│   ├── AttemptsExhausted      its workers were lost too often, without progress
│   ├── OutOfMemory            computing it takes more memory than there is
│   ├── StoreUnreachable       its stored data cannot be read or written
│   ├── ModelError             computing it fails
│   └── InternalError          a bug or a fault of the machine; the message says what is known
├── StreamError              reading a token stream
│   ├── StreamDiverged         the log has other tokens than the reader saw
│   ├── StreamExpired          the log is gone: its time was over, or the id was never used
│   └── StreamTimeout          nothing came within the reader's timeout
├── BusError                 Kafka or Redis Streams
│   ├── BusUnavailable         not reachable now; another attempt may succeed
│   │   ├── AcceptanceUnknown    a message may be in the topic: it must not be sent anew under another id
│   │   └── TopicsMissing        a tenant's own topics have not been made yet; the message says how to
│   ├── ReplyRefused           a reply topic does not take a result; `reasons` says which, and why
│   ├── DeliveryLost           the delivery belongs to another member now; `deliveries` says which
│   └── MemberFenced           a newer member has this one's name, or it was away too long; it joins anew
├── ModelLoadError           a model cannot be loaded; the message says why
│   ├── ModelUnavailable       it cannot be loaded now; a later start may load it
│   └── EngineCheckFailed      it loads, but gives other tokens than `generate()`
├── KVStoreError             a tier of the KV store cannot work as it is set up, or does not answer a tool
│   └── DamagedBlock           a stored block is incomplete, or of another version
├── StorageUnavailable       the object store cannot be reached now; another attempt may succeed
├── SequenceFailed           a step of the engine failed because of one sequence; `error` is for its request
├── PlanError                a trace that cannot be read, or a load that no number of workers can carry
├── AdoptionRefused          a region may live, or another one may have adopted it
├── TenantKeyMissing         content is encrypted, and its tenant's key is not here yet; the message says which
├── DeadLetterError          a dead letter that does not exist, or that cannot be put back
├── SettingsError            an unknown or bad setting
├── ServersDiffer            this process's list of Redis servers is not the pipeline's
├── ClusterMode              a stream server is in cluster mode; the message says which, and what to use
├── ServerEvicts             a stream server may delete records and logs; the message says which, and what to set
├── AccessRefused            a server refuses this client; the message says why, and which setting to check
├── NameTaken                another process has this worker's name; the message says where it runs
├── DirectoryTaken           another process's server has its data in a directory; the message says where it runs
├── ArithmeticDiffers        the pipeline's workers round otherwise than this one; the message says how both do
├── StateMismatch            a key in Redis has another type than this build writes; the message says what to do
├── InvalidName              a pipeline, request or event id that cannot be one
└── DependencyMissing        a program or package that is not installed; the message says what to install
"""

import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

_VALIDATION_WORDS = (
    (re.compile(r"^(Value error, |Assertion failed, )"), ""),
    (re.compile(r"^Extra inputs are not permitted$"), "unknown field"),
    (re.compile(r"^Field required$"), "it is missing"),
    (re.compile(r"^\w+ should "), "must "),
    (re.compile(r"^must be a valid dictionary( or instance of \w+)?"), "must be an object"),
    (re.compile(r"^Input tag .* does not match any of the expected tags: "), "must be one of "),
    (re.compile(r"^Unable to extract tag using discriminator (.*)$"), r"\1 is missing"),
    (re.compile(r" after validation(, not more)?"), ""),
)
"""Pydantic's words for a bad value, and the words that users read instead."""


def reword_validation(message: str) -> str:
    """Return a message of pydantic's in this project's words."""
    for pattern, words in _VALIDATION_WORDS:
        message = pattern.sub(words, message)
    return message


class PenstockError(Exception):
    """The base class of all errors that Penstock raises."""

    exit_status: ClassVar[int] = 1
    """The exit status of a command that ends with this error."""


class RequestError(PenstockError):
    """A request that cannot be answered. Clients see the class's `code`."""

    code: ClassVar[str] = "request_error"
    stack: str = ""
    """The traceback of the failure, for the dead letter."""
    is_for_others = False
    """Whether another worker that lives can compute the request: it goes there, and the attempt does not count."""


class InvalidRequest(RequestError):
    """The message is not a valid request."""

    code = "invalid_request"


REFUSED_PROMPTS = "this pipeline's model generates no text: send `texts`, or ask a pipeline with another model"
REFUSED_PICTURES = "this pipeline's model sees no pictures: send texts alone, or ask a pipeline with another model"
REFUSED_TEXTS = "texts: this pipeline's model generates text; ask a pipeline whose model computes vectors or scores"
"""The words of `InvalidRequest` for texts where no vectors are computed."""


class UnsupportedVersion(RequestError):
    """The message's version is not one this build reads."""

    code = "unsupported_version"


class UnknownModel(RequestError):
    """The pipeline serves another model."""

    code = "unknown_model"


class PromptTooLong(RequestError):
    """Prompt, or prompt plus max_tokens, is over the model's context."""

    code = "prompt_too_long"


class RequestTooLarge(RequestError):
    """The message has more bytes than a request may have, or than its topic takes."""

    code = "request_too_large"


class RequestLost(RequestError):
    """The request's message was deleted from its topic before a worker read it."""

    code = "request_lost"


class IdConflict(RequestError):
    """The id belongs to a request with another body."""

    code = "id_conflict"


class DeadlineExceeded(RequestError):
    """The deadline passed before the answer was complete."""

    code = "deadline_exceeded"


class Cancelled(RequestError):
    """The request was cancelled."""

    code = "cancelled"


class UnsupportedSchema(RequestError):
    """A JSON schema asks for something that cannot be enforced exactly. `keyword` and `path` say which and where.

    `path` is a JSON pointer from the root of the schema, which is `#`. They are empty where only the message is known.
    """

    code = "unsupported_schema"
    keyword: str = ""
    path: str = ""
    reason: str = ""

    @classmethod
    def at_keyword(cls, keyword: str, path: str, reason: str) -> Self:
        """Return the error for a keyword."""
        error = cls(f"'{keyword}' at {path}: {reason}")
        error.keyword, error.path, error.reason = keyword, path, reason
        return error


class GrammarFailed(RequestError):
    """A grammar cannot continue: it does not allow a token of the log, or computing a mask exceeds its limits."""

    code = "grammar_failed"


class AnswerInterrupted(RequestError):
    """The answer was cut, and cannot be, or is not to be, continued: its endpoint or worker was lost, or no worker has
    the version of the adapter that began it.
    """

    code = "answer_interrupted"


class PictureGone(RequestError):
    """A picture of the request is not in the store any more."""

    code = "picture_gone"


class PicturesNeeded(RequestError):
    """A row of a picture is to be computed, its KV being lost, by a worker that has no pixels.

    Prefill computes it again. A request ends with this where its KV is lost time and again.
    """

    code = "pictures_needed"


class ContentErased(RequestError):
    """The key with which the request or its answer is encrypted was dropped. Nothing can bring it back."""

    code = "content_erased"


class AttemptsExhausted(RequestError):
    """The request was tried too often without progress, and all of its workers died."""

    code = "attempts_exhausted"


class OutOfMemory(RequestError):
    """Computing the request takes more memory than there is."""

    code = "out_of_memory"


class StoreUnreachable(RequestError):
    """The request's stored data cannot be read or written."""

    code = "store_unreachable"
    is_outage = False
    """Whether a server is away, so that the request waits for it, as for the bus."""


class ModelError(RequestError):
    """Computing the request fails."""

    code = "model_error"


class InternalError(RequestError):
    """A bug, or a fault of the machine."""

    code = "internal_error"


POISONOUS = tuple(kind.code for kind in (AttemptsExhausted, OutOfMemory, StoreUnreachable, ModelError, InternalError))
"""Codes of errors that an operator should examine: the message also goes to the dead-letter topic."""

REQUEST_ERRORS: dict[str, type[RequestError]] = {cls.code: cls for cls in RequestError.__subclasses__()}


class StreamError(PenstockError):
    """A token stream cannot be read on."""


class StreamDiverged(StreamError):
    """The log holds other tokens than the reader has seen."""


class StreamExpired(StreamError):
    """There is no log (any more) for this id."""


class StreamTimeout(StreamError):
    """Nothing came within the reader's timeout."""


class BusError(PenstockError):
    """An operation of the bus failed."""


class BusUnavailable(BusError):
    """The bus cannot be reached now."""


class AcceptanceUnknown(BusUnavailable):
    """The bus became unavailable while messages were being sent: they may be durable."""


class TopicsMissing(BusUnavailable):
    """A tenant whose data stays has no topics of its own yet. Nothing was sent."""


class DeliveryLost(BusError):
    """Some deliveries belong to another member now. Nothing was settled."""

    def __init__(self, deliveries: Sequence[Any]) -> None:
        super().__init__(f"{len(deliveries)} deliveries belong to another member now")
        self.deliveries = list(deliveries)


class ReplyRefused(BusError):
    """Topics of requesters did not take their replies. Nothing was settled.

    `reasons` has a reason for each of the topics. If not `is_sure`, only some of the replies to them were refused.
    """

    def __init__(self, reasons: Mapping[str, str], *, is_sure: bool) -> None:
        super().__init__("; ".join(f"{topic}: {reason}" for topic, reason in sorted(reasons.items())))
        self.reasons, self.is_sure = dict(reasons), is_sure


class MemberFenced(BusError):
    """A newer member has this one's name, or it was away too long. A worker that still has its name joins again."""


class NameShared(MemberFenced):
    """Another process has this worker's name at the same Kafka, with other Redis servers, where names are taken."""


class ModelLoadError(PenstockError):
    """The model cannot be loaded. To start the process again with the same files and settings ends the same way."""

    exit_status = 78


class ModelUnavailable(ModelLoadError):
    """The model cannot be loaded now, as the hub, the memory or a device is missing. A later start may load it."""

    exit_status = 1


_LASTING_ERRNOS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
_DEVICE_WORDS = re.compile("CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|[Mm]emory|Engine core init")
"""Words of torch's and vLLM's errors about a device or memory, most of which have no class of their own."""


def choose_load_error(error: BaseException | None) -> type[ModelLoadError]:
    """Return the class in which a load raises an error of the system or of a library. Causes of the error count too.

    An error of a disk, a network, a device or the memory may be over at the next start. Any other error of a library
    about a file comes again at the next start.
    """
    while error is not None:
        if (
            isinstance(error, ModelUnavailable | MemoryError | ConnectionError | TimeoutError)
            or (isinstance(error, OSError) and error.errno is not None and error.errno not in _LASTING_ERRNOS)
            or (isinstance(error, RuntimeError | ValueError) and _DEVICE_WORDS.search(str(error)))
        ):
            return ModelUnavailable
        error = error.__cause__
    return ModelLoadError


def build_damage_error(what: str) -> ModelLoadError:
    """Return the error for a model's files that are damaged or do not belong together, with what would work."""
    return ModelLoadError(f"{what}: use the model's files as they were published")


class EngineCheckFailed(ModelLoadError):
    """The engine's tokens differ from `generate()`'s."""


class KVStoreError(PenstockError):
    """A tier of the KV store cannot be opened as it is set up."""


class DamagedBlock(KVStoreError):
    """A stored KV block is incomplete, or of another version. Readers treat it as a miss; only tools raise this."""


class StorageUnavailable(PenstockError):
    """The object store of files, batches, responses and large pictures cannot be reached now."""


class SequenceFailed(PenstockError):
    """A step of the engine failed because of one sequence. The step is undone, and the sequence is still scheduled."""

    def __init__(self, seq: Any, error: RequestError) -> None:
        super().__init__(f"{seq.id}: {error}")
        self.seq = seq
        self.error = error


class PlanError(PenstockError):
    """A trace cannot be read, rates are not known, or no number of workers can carry the load."""


class AdoptionRefused(PenstockError):
    """A region must not be adopted now, as it may live, or another region may have adopted it; or not be given back."""


class TenantKeyMissing(PenstockError):
    """Content is encrypted with a key that is not here, and that was not dropped: it can be read once the key is."""


class DeadLetterError(PenstockError):
    """There is no such dead letter, or it cannot be put back."""


class SettingsError(PenstockError):
    """An unknown or bad setting."""


class ServersDiffer(PenstockError):
    """Processes of one pipeline have different lists of Redis servers: they would answer requests twice."""


class NameTaken(PenstockError):
    """Another process has this worker's name."""


class DirectoryTaken(PenstockError):
    """Another process's server has its data in a directory, or the directory cannot be locked."""


class ArithmeticDiffers(PenstockError):
    """Workers of the pipeline compute by another arithmetic than this one: one answer would have tokens of both."""


class StateMismatch(PenstockError):
    """A key in Redis has another type than this build writes."""


class ServerEvicts(PenstockError):
    """A stream server deletes records and logs when its memory is full."""


class ClusterMode(PenstockError):
    """A stream server is in cluster mode."""


class AccessRefused(PenstockError):
    """A server refuses this client, or the client does not trust the server."""


class InvalidName(PenstockError):
    """A name or id of the wrong form."""


class DependencyMissing(PenstockError):
    """Something is not installed."""


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is a failure of the called code. A panic of a library in Rust is one.

    Such a panic is not an `Exception`, like the exceptions that end a process.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
