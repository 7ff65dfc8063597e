"""A request whose prompt is being computed."""

from dataclasses import dataclass, field, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span

from engine.sequence import Sequence, State
from kvstore.block import Name
from kvstore.store import Lack
from penstock import tracing
from penstock.bus.contract import Delivery
from penstock.messages import Request
from penstock.record import Claim
from penstock.worker import Held, is_suspect
from prefill_worker.intake import Intake, seed_of


@dataclass
class Prefill:
    """A request whose prompt is being computed."""

    intake: Intake
    claim: Claim
    seq: Sequence
    names: list[Name]
    """Of the prompt's blocks, a partial last one included."""
    span: Span
    lacks: dict[int, Lack] = field(default_factory=dict)
    """The prompt's blocks that are still to be written, and the tiers that lack them. Known when it was fetched."""
    lost: bool = False
    """Another worker holds the request now."""
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = tracing.within(self.span, self.intake.context)

    @property
    def delivery(self) -> Delivery:
        """What the request came with."""
        return self.intake.delivery

    def detach(self) -> None:
        """Go on without the delivery."""
        self.intake.delivery = replace(self.intake.delivery, is_held=False)

    def note_used(self) -> None:
        """Note how much of the prompt was computed or found until now."""
        self.intake.cached_tokens = self.seq.num_cached
        self.intake.prompt_tokens = min(self.seq.num_prompt, max(self.seq.num_cached, self.seq.num_computed))

    def held(self) -> Held:
        """What it stands for in the heartbeat."""
        return Held(
            self.delivery.klass,
            self.seq.state is State.RUNNING,
            0 if self.seq.state is State.DONE else self.seq.num_prompt - self.seq.num_computed,
            0 if self.intake.request is None else self.intake.request.sampling.max_tokens,
        )


def sequence_of(intake: Intake, request: Request, claim: Claim, prefix_keys: list[bytes]) -> Sequence:
    """What the engine is to compute: the prompt, and the first token."""
    return Sequence(
        intake.id,
        intake.token_ids,
        sampling=request.sampling,
        seed=seed_of(request),
        max_new=1,
        prefix_keys=prefix_keys,
        klass=intake.delivery.klass,
        tenant=request.tenant,
        weight=request.weight,
        suspect=is_suspect(claim),
    )
