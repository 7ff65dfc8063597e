"""An engine that answers by a formula: any worker that continues a request gives the same tokens.

It keeps the contract of `penstock.engine.contract.InferenceEngine`, and takes time for each step. Its blocks are
numbers: where they are too few for all requests, the last ones wait. Only of prompts with pictures it has KV: what is
seen in the place of each token of a block, which engines share by the block's hash.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoTokenizer

from penstock.engine.contract import Ended, EngineLimits, Loaded, Outcome, SequenceProgress, StepShare, Stored
from penstock.engine.pictures.rows import Pictures, PromptPicture, SeenPicture
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.sequence import State
from penstock.engine.vectors import Floats, TextReader, TextRequest, VectorCard
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import RequestError, SequenceFailed
from penstock.kvstore.block import BlockHasher, PromptBlocks, Span
from penstock.messages import Logprobs, Text, Vectors
from penstock.names import CLASSES, PriorityClass, Stage
from penstock.worker_speed import WorkerSpeed

if TYPE_CHECKING:  # only a model that sees needs torch
    from penstock.engine.pictures.reader import PictureReader

BLOCK_SIZE = 16
MAX_BATCH, MAX_STEP_TOKENS, MAX_LENGTH = 16, 128, 4096
STEP_S = (0.002, 0.02)
"""The shortest and the longest usual step."""
EVENT_WAIT_S = 0.02
END_TOKEN = 1
"""The token that ends an answer of the demo model's tokenizer. The formula never gives it."""


@cache
def load_tokenizer() -> Any:
    """Return the tokenizer of the demo model."""
    return AutoTokenizer.from_pretrained(str(DEMO_MODEL))


VECTOR_SIZE = 8
"""How many numbers a vector has."""


class FormulaModel:
    """The model as workers see it. It generates text, computes vectors, and may see pictures."""

    sees = False
    """Whether it sees pictures here (`penstock.testing.pictures`)."""
    name, response_template, fingerprint = "formula", None, "ab" * 32
    eos_token_ids = frozenset([END_TOKEN])
    context_length = MAX_LENGTH
    adapters: Mapping[str, str] = MappingProxyType({})
    """By name: the digests of adapters, each of which has other tokens."""

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the demo model."""
        if not self.sees:
            return load_tokenizer()
        from penstock.testing.pictures import load_seeing_tokenizer

        return load_seeing_tokenizer()

    @cached_property
    def text_reader(self) -> TextReader:
        """Reads texts to compute vectors of."""
        card = VectorCard("embed", VECTOR_SIZE, MAX_LENGTH, self.vocab_size, "lasttoken", {}, "")
        return TextReader(card, self.tokenizer, normalizes=False, has_head=True, start_ids=(), end_ids=())

    @cached_property
    def picture_reader(self) -> "PictureReader | None":
        """Reads pictures, if it sees them."""
        if not self.sees:
            return None
        from penstock.testing.pictures import ColourReader

        return ColourReader()

    @cached_property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self.tokenizer)


class SeeingModel(FormulaModel):
    """The same, where it sees pictures."""

    sees = True


def compute_token(prompt: Sequence[int], seed: int, position: int) -> int:
    """Return the token of an answer at a position."""
    told = hashlib.blake2b(repr((tuple(prompt), seed, position)).encode(), digest_size=4).digest()
    return 300 + int.from_bytes(told, "little") % 700


def seed_adapter(seed: int, adapter: str) -> int:
    """Return the seed by which an adapter with this digest answers in place of the model: another for each digest."""
    return seed ^ int(adapter or "0", 16)


def compute_vector(token_ids: Sequence[int]) -> Floats:
    """Return the vector of a text."""
    told = hashlib.blake2b(repr(tuple(token_ids)).encode(), digest_size=VECTOR_SIZE).digest()
    return ((np.frombuffer(told, dtype=np.uint8) - 127.5) / 128).astype("<f4")


def compute_vectors(texts: Sequence[Text]) -> Vectors:
    """Return the vectors of texts."""
    tokenizer = load_tokenizer()
    ids = [tokenizer(one, add_special_tokens=False)["input_ids"] if isinstance(one, str) else one for one in texts]
    rows = [compute_vector(one) for one in ids]
    return Vectors.pack_floats(b"".join(one.tobytes() for one in rows), VECTOR_SIZE)


@dataclass(frozen=True)
class FormulaToken:
    """A token that a step sampled."""

    seq: EngineSequence
    token_id: int
    logprobs: Logprobs | None = None
    is_grammar_ended: bool = False


@dataclass(eq=False)
class FormulaEngine:
    """The engine of one worker process."""

    chance: Random
    pass_step: Callable[[], object] = lambda: None
    """Called in each step: it may take long."""
    model: FormulaModel = field(default_factory=FormulaModel)
    choose_token: Callable[[Sequence[int], int, int], int] = compute_token
    """Returns the token that follows a prompt, by the request's seed, at a position of the answer."""
    num_blocks: int = MAX_BATCH * MAX_LENGTH // BLOCK_SIZE
    """The most blocks that its requests may have together."""
    speed: WorkerSpeed | None = None
    """The speed that it tells."""
    blocks: MutableMapping[bytes, list[int]] = field(default_factory=dict)
    """By hash: what is seen in a block of a prompt with pictures. It may lose blocks at any time."""
    limits = EngineLimits(MAX_BATCH, MAX_STEP_TOKENS, MAX_LENGTH)

    def __post_init__(self) -> None:
        self._seqs: dict[str, EngineSequence] = {}
        self._texts: dict[str, TextRequest] = {}
        """By id: requests with texts that are not computed."""
        self._ended: list[Ended] = []
        self.step_shares: list[StepShare] = []
        self._loading: list[tuple[float, EngineSequence]] = []
        self._storing: list[tuple[float, EngineSequence, Future[float]]] = []
        self._seen: dict[str, list[int]] = {}
        """By id: the KV of a prompt with pictures, from its first token on."""
        self._unseen: list[tuple[EngineSequence, list[Future[SeenPicture]]]] = []
        """Requests that wait until pictures are seen."""
        self._eyes = ThreadPoolExecutor(1, "vision")  # starts no thread by itself
        self._wake = threading.Event()

    def free_capacity(self, priority_class: PriorityClass, num_tokens: int) -> int:
        """Return how many more requests fit."""
        return max(0, MAX_BATCH - len(self._seqs))

    def count_waiting_tokens(self, priority_class: PriorityClass, max_tokens: int) -> int:
        """Return the prompt tokens that are not computed."""
        ranks = CLASSES[: CLASSES.index(priority_class) + 1]
        return sum(
            min(seq.num_prompt_tokens, max_tokens)
            for seq in self._seqs.values()
            if seq.is_waiting and seq.priority_class in ranks
        )

    def hash_prompt(
        self, tenant: str, token_ids: Sequence[int], spans: Sequence[Span] = (), adapter: str = ""
    ) -> PromptBlocks:
        """Return the names of a prompt's blocks."""
        hasher = BlockHasher(bytes.fromhex(adapter) or bytes(32), bytes(16), BLOCK_SIZE, 0, len(token_ids), spans)
        hasher.hash_full_blocks(token_ids)
        return PromptBlocks(hasher, hasher.hash_tail_block(token_ids), len(token_ids) // BLOCK_SIZE)

    def make_pictures(
        self,
        tenant: str,
        token_ids: Sequence[int],
        pictures: Sequence[PromptPicture],
        read: Callable[[PromptPicture], Any],
    ) -> Pictures:
        """Return the pictures of a prompt. A model that sees reads each when it is asked for first."""
        if not self.model.sees:
            return Pictures(token_ids, pictures)
        from penstock.testing.pictures import look

        by_name = {picture.name: picture for picture in pictures}
        see = cache(lambda name: self._eyes.submit(look, read, by_name[name]))
        return Pictures(token_ids, pictures, see)

    def add_request(self, request: EngineSequence) -> None:
        """Load its blocks for a while, then compute it."""
        assert request.id not in self._seqs, f"{request.id}: added twice"
        self._seqs[request.id] = request
        self._loading.append((time.monotonic() + self.chance.expovariate(200.0), request))

    def add_texts(self, request: TextRequest, tenant: str, weight: float, *, is_suspect: bool = False) -> None:
        """Compute the vectors of its texts in the next steps."""
        self._texts[request.id] = request

    def remove_request(self, request_id: str) -> None:
        """Drop a request."""
        self._texts.pop(request_id, None)
        self._seen.pop(request_id, None)
        if (seq := self._seqs.pop(request_id, None)) is not None and seq.state is not State.DONE:
            seq.move_to(State.DONE)

    def lease_request(self, request_id: str, owner: str) -> None:
        """Note the lease: the job waits until the blocks are stored."""
        self._seqs[request_id].lease_owner = owner

    def finish_request(self, request_id: str, *, ends_in_call: bool = False) -> "Future[float] | None":
        """Store the blocks of a request that is handed off for a while."""
        seq = self._seqs[request_id]
        self._store_blocks(seq)
        self.remove_request(request_id)
        if not seq.lease_owner:
            return None
        future: Future[float] = Future()
        self._storing.append((time.monotonic() + self.chance.expovariate(100.0), seq, future))
        return future

    def release_leases(self, owner: str, blocks: PromptBlocks) -> None:
        """Do nothing: there are no leases."""

    def has_work(self) -> bool:
        """Return whether there are requests to compute."""
        return bool(self._texts) or any(seq.state is State.RUNNING for seq in self._seqs.values())

    def begin_step(self) -> bool:
        """Let requests wait for which no blocks are left, and return whether there is anything to compute."""
        num_free, is_first = self.num_blocks, True
        for seq in self._seqs.values():
            num_needed = len(seq.token_ids) // BLOCK_SIZE + 1
            fits = is_first or num_needed <= num_free
            if seq.state is State.RUNNING and not fits:
                seq.preempt()
                self._seen.pop(seq.id, None)
            elif seq.is_waiting and seq.num_preemptions and fits and all(seq is not one for one, _ in self._unseen):
                self._run(seq)
            if seq.state is State.RUNNING:
                num_free, is_first = num_free - num_needed, False
        return self.has_work()

    def _run(self, seq: EngineSequence) -> None:
        """Compute a request from now on. One with pictures reads what KV there is, and has those seen that it lacks."""
        if seq.pictures is not None:
            found = self._seen[seq.id] = list[int]()
            for key in seq.blocks.prompt_keys():
                if (block := self.blocks.get(key.hash)) is None:
                    break
                found += block
            del found[len(seq.token_ids) - 1 :]  # the last token is always computed
            if pictures := seq.pictures.see_behind(len(found)):
                self._unseen.append((seq, pictures))
                return
        seq.move_to(State.RUNNING)

    def _see_prompt(self, seq: EngineSequence) -> list[int]:
        """Return what is seen in the places of a prompt's tokens: those that are no rows of pictures are themselves.

        Raises `SequenceFailed` where a picture cannot be seen.
        """
        num, found = seq.num_prompt_tokens, self._seen.get(seq.id, [])
        if seq.pictures is None or len(found) == num:
            return found or seq.token_ids[:num]
        seen = found + seq.token_ids[len(found) : num]
        try:
            for first, part in seq.pictures.find_seen(len(found), num):
                seen[first : first + len(part.rows)] = part.rows.tolist()
        except RequestError as error:
            raise SequenceFailed(seq, error) from error
        self._seen[seq.id] = seen
        if not seq.lease_owner:
            self._store_blocks(seq)
        return seen

    def _store_blocks(self, seq: EngineSequence) -> None:
        """Store the KV of a prompt with pictures."""
        seen = self._seen.get(seq.id, [])
        if len(seen) < seq.num_prompt_tokens:
            return
        for index, key in enumerate(seq.blocks.prompt_keys()):
            self.blocks[key.hash] = seen[index * BLOCK_SIZE : index * BLOCK_SIZE + key.num_tokens]

    def finish_step(self) -> list[FormulaToken]:
        """Take the time of a step, and return a token of each request. Raises `SequenceFailed`."""
        running = [seq for seq in self._seqs.values() if seq.state is State.RUNNING]
        rows: list[tuple[SequenceProgress, Stage]] = [
            (seq, "decode" if seq.num_output_tokens else "prefill") for seq in running
        ]
        rows += [(request, "prefill") for request in self._texts.values()]
        self.step_shares = [(seq, stage, 1 / len(rows)) for seq, stage in rows]
        time.sleep(self.chance.uniform(*STEP_S))
        self.pass_step()
        self._compute_texts()
        running = [seq for seq in running if self._seqs.get(seq.id) is seq and seq.state is State.RUNNING]
        prompts = [self._see_prompt(seq) for seq in running]
        sampled = []
        for seq, prompt in zip(running, prompts, strict=True):
            seq.num_computed_tokens = len(seq.token_ids)
            token = self.choose_token(prompt, seed_adapter(seq.seed, seq.adapter), seq.num_output_tokens)
            seq.append_token(token)
            sampled.append(FormulaToken(seq, token))
        return sampled

    def _compute_texts(self) -> None:
        """Compute as many texts of each request as a step has tokens; one at least."""
        for request in list(self._texts.values()):
            num_left = MAX_STEP_TOKENS
            for place in range(len(request.found), len(request.rows)):
                request.found[place] = compute_vector(request.rows[place].token_ids)
                num_left -= len(request.rows[place])
                if num_left <= 0:
                    break
            if request.is_done:
                del self._texts[request.id]
                self._ended.append(Ended(request.context, Outcome.of_texts(request)))

    def store_full_blocks(self) -> bool:
        """Return False: there is no KV."""
        return False

    def collect_events(self) -> Iterator[Loaded | Stored | Ended]:
        """Yield what happened."""
        ended, self._ended = self._ended, []
        yield from ended
        now_s = time.monotonic()
        due = [entry for entry in self._loading if entry[0] <= now_s]
        self._loading = [entry for entry in self._loading if entry[0] > now_s]
        for due_s, seq in due:
            if self._seqs.get(seq.id) is seq:
                self._run(seq)
                num_blocks = seq.num_prompt_tokens // BLOCK_SIZE
                yield Loaded(seq.context, num_blocks, 0, 0, 0, due_s, due_s)
        unseen, self._unseen = self._unseen, []
        for seq, pictures in unseen:
            if self._seqs.get(seq.id) is seq and all(picture.done() for picture in pictures):
                seq.move_to(State.RUNNING)
            elif self._seqs.get(seq.id) is seq:
                self._unseen.append((seq, pictures))
        stored = [entry for entry in self._storing if entry[0] <= now_s]
        self._storing = [entry for entry in self._storing if entry[0] > now_s]
        for due_s, seq, future in stored:
            future.set_result(due_s)
            yield Stored(seq.context, 1, due_s, due_s)

    def is_moving_blocks(self) -> bool:
        """Return whether loads or stores are under way, or events were not collected."""
        return bool(self._loading or self._storing or self._ended or self._unseen)

    def wait_for_event(self) -> None:
        """Wait a moment."""
        due = [entry[0] for entry in self._loading] + [entry[0] for entry in self._storing]
        self._wake.wait(max(0.0, min([EVENT_WAIT_S, *(due_s - time.monotonic() for due_s in due)])))
        self._wake.clear()

    def wake_waiter(self) -> None:
        """End the wait."""
        self._wake.set()

    def report_state(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def prefill_tokens_per_s(self) -> float | None:
        """Return None."""
        return None

    def report_speed(self) -> WorkerSpeed | None:
        """Return the speed that it was given."""
        return self.speed

    def close(self) -> None:
        """Write what jobs wait for, and drop everything else."""
        for _, _, future in self._storing:
            future.set_result(time.monotonic())
        self.abandon()

    def abandon(self) -> None:
        """Drop everything."""
        for request_id in [*self._seqs, *self._texts]:
            self.remove_request(request_id)
        self._ended.clear()
        self._loading, self._storing, self._unseen = [], [], []


def list_tokens(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """Return an answer."""
    return [compute_token(prompt, seed, position) for position in range(count)]
