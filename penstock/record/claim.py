"""What a worker gets when it asks for a request: the claim, or the reason why not."""

import hashlib
import json
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from penstock.messages import EndEvent, Logprobs, Request, TokenEvent
from penstock.names import Stage, roll_hash


@dataclass(eq=False)
class Claim:
    """A request held by this worker, until a claim with a later epoch.

    `num_tokens` and `hash` say where the log is: as it was found, moved on by each token sent.
    """

    id: str
    stage: Stage
    epoch: int
    num_tokens: int
    rolling_hash: str
    is_ended: bool
    """The log has its end: prefill hands off, decode settles the result from the log. Nobody holds it."""
    is_cancelled: bool
    attempts: int
    """Claims since the last new token, this one included."""
    is_exhausted: bool
    """Too many attempts: append the end (`attempts_exhausted`) instead of trying again."""
    append_head: bytes = field(repr=False, default=b"")
    """The part of an append's wire bytes that does not change (`Record.send_append`)."""
    log: list[TokenEvent | EndEvent] = field(repr=False, default_factory=list)
    """In decode: all that the log said when it was claimed; since then nobody else writes to it."""
    num_found_tokens: int = field(init=False)
    """How many tokens the log had."""

    def __post_init__(self) -> None:
        self.num_found_tokens = self.num_tokens

    @property
    def attempts_without_token(self) -> int:
        """Claims since the last new token, as of now: 0 if this one brought some."""
        return self.attempts if self.num_tokens == self.num_found_tokens else 0

    def next_event(self, token_id: int, text: str, logprobs: Logprobs | None = None) -> TokenEvent:
        """The event of the next token: at the next position, with the hash rolled on."""
        rolled = roll_hash(self.rolling_hash, token_id)
        return TokenEvent.at_position(self.num_tokens, rolled, token_id, text, logprobs)


@dataclass(frozen=True)
class TakenOver:
    """A request that nobody held, and the message that it came with. Somebody else has, or will get, the delivery."""

    claim: Claim
    message: bytes


@dataclass(frozen=True)
class Busy:
    """Another session holds the request, or it is to be left alone: ask again in `wait_s`."""

    wait_s: float


@dataclass(frozen=True)
class Bound:
    """Another message settles the request and is durable: this delivery is settled without output."""


@dataclass(frozen=True)
class Conflict:
    """The id belongs to a request with another body."""


class AppendOutcome(IntEnum):
    """What became of one appended token. Values are the replies of `append.lua`."""

    FENCED = 0
    """Not written: another worker holds the request now. Forget the claim."""
    OK = 1
    CANCELLED = 2
    """Not written: somebody asked for the end. The claim holds; finish it."""


class ClaimEvent(Enum):
    """What a worker hears of a request that it holds."""

    LOST = "lost"
    """The session that it was claimed with is over."""
    CANCELLED = "cancelled"
    """Somebody asked for the end."""


def compute_body_hash(request: Request) -> str:
    """SHA-256 (hex) of what a request asks.

    Not of how soon or where: sent again under its id, it may come with a new deadline or weight, in the other class
    or in another session. Nor of defaults: a worker that knows one more field than the last one still recognises the
    request.
    """
    body = request.model_dump(
        mode="json", by_alias=True, exclude={"deadline", "klass", "session", "weight"}, exclude_defaults=True
    )
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
