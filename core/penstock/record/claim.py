"""The outcomes of claiming a request: the claim, or the reason why there is none."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal

from penstock.messages import EndEvent, Logprobs, TokenEvent
from penstock.names import Stage, roll_hash
from penstock.sealing import Sealer

GOOD_PROGRESS = 256
"""An attempt that makes more tokens (or pieces of text) than this resets the count of attempts."""


@dataclass(eq=False)
class Claim:
    """A request that this worker holds, until there is a claim with a later epoch.

    `num_tokens` and `rolling_hash` are those of the log, and move on with each token that is sent.
    """

    id: str
    stage: Stage
    epoch: int
    num_tokens: int
    rolling_hash: str
    is_ended: bool
    """The log has its end. The worker with the bound message settles the result from the log. No worker holds the
    request."""
    is_cancelled: bool
    attempts: int
    """Claims since one made more of the answer than each before it, this one included (see `append.lua`)."""
    is_exhausted: bool
    """There were too many attempts: append the end (`attempts_exhausted`) instead of trying again."""
    append_head: bytes = field(repr=False, default=b"")
    """The part of an append's wire bytes that does not change, see `encode_append_head`."""
    log: list[TokenEvent | EndEvent] = field(repr=False, default_factory=list)
    """In decode the events in the log when the request was claimed. From then on only this worker writes to it."""
    damage: str = ""
    """The reason why the record or the log cannot be read; then `log` is empty, and the worker ends the request."""
    lock: Literal["", "missing", "erased"] = ""
    """Why the log cannot be decrypted: its key is not here yet, or was dropped. Then there is `damage`, too."""
    sealer: Sealer | None = field(repr=False, default=None)
    """Encrypts what is written to the log, if its tenant has a key."""
    is_unbound: bool = False
    """It has ended, and no message is bound: a job has to settle the result."""
    most_tokens: int = 0
    """The most tokens that a claim before this one made, and no more than `GOOD_PROGRESS`."""
    num_returns: int = 0
    """How often decode gave the request back to prefill, as it lacked KV inside a picture."""
    is_read_raw: bool = False
    """A worker of an older version began the log: control tokens in the prompt's texts of users are control tokens."""
    num_found_tokens: int = field(init=False)
    """The number of tokens in the log when the request was claimed."""

    def __post_init__(self) -> None:
        self.num_found_tokens = self.num_tokens

    @property
    def may_be_sent_on(self) -> bool:
        """Whether an earlier claim may have handed the request off, or sent it to be tried again.

        The request's own message may then be settled already. This worker's delivery of it may be lost, without a
        notice of the bus so far.
        """
        return self.num_found_tokens > 0 or self.attempts > 1

    @property
    def attempts_in_vain(self) -> int:
        """The number of claims since one that made more tokens than each before it; 0 if this claim does."""
        return self.attempts if self.num_tokens - self.num_found_tokens <= self.most_tokens else 0

    def next_event(
        self, token_id: int, text: str, logprobs: Logprobs | None = None, before: TokenEvent | None = None
    ) -> TokenEvent:
        """Return the event of the next token, at the next position and with the next rolling hash.

        It follows `before`, an event that has not been sent yet, or else the event that was sent last.
        """
        position, rolling_hash = self.num_tokens, self.rolling_hash
        if before is not None:
            place, _, rolling_hash = before.id.partition("-")
            position = int(place) + 1
        return TokenEvent.at_position(position, roll_hash(rolling_hash, token_id), token_id, text, logprobs)


@dataclass(frozen=True)
class TakenOver:
    """A free request that was taken over, and its message. Another member has, or will get, the delivery."""

    claim: Claim
    message: bytes


@dataclass(frozen=True)
class Busy:
    """Another session holds the request, or it has to wait: claim it again after `wait_s`."""

    wait_s: float
    epoch: int = 0
    """The epoch of the last claim of the request. It is 0 where no worker has claimed it, or its server is away."""


@dataclass(frozen=True)
class Bound:
    """Another, durable message settles the request: settle this delivery without output."""


@dataclass(frozen=True)
class Conflict:
    """The id belongs to a request with another body."""


class AppendOutcome(IntEnum):
    """The outcome of appending one token, or an end. The values are the replies of `append.lua` and `finish.lua`."""

    FENCED = 0
    """Not written: another worker holds the request now. Forget the claim."""
    OK = 1
    CANCELLED = 2
    """Not written: the request was cancelled. The claim holds; append the end."""
    REFUSED = 3
    """Not written: the key of this request's record or log holds another type. End the request."""


class ClaimEvent(Enum):
    """A change of a request that a worker holds, made by others."""

    LOST = "lost"
    """The session that claimed the request has ended."""
    CANCELLED = "cancelled"
    """The request was cancelled."""
