"""The engine: sequences in, one token each a step out.

add() ─▶ waiting ─▶ [admit: blocks, cached prefix, imported KV] ─▶ running ─▶ step() … ─▶ remove()
            ▲                                                         │
            └───────────── [preempt: no blocks are left] ─────────────┘
"""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from engine import hooks
from engine.batch import Batch
from engine.cuda.decode import CudaRecorder, DecodeGraphs, Recorder
from engine.cuda.varlen import VarlenStep, parts_of
from engine.memory import keep_freed_memory
from engine.model import LoadedModel, Progress, load
from engine.pool import BlockPool
from engine.sampler import Draw, logprobs, sample
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.storage import KVStorage
from penstock.errors import InternalError, InvalidRequest, ModelLoadError, PromptTooLong
from penstock.messages import Logprobs
from penstock.names import PriorityClass
from penstock.settings import EngineSettings


class Sampled(NamedTuple):
    """A token that a step decided; it is in `seq.token_ids` already."""

    seq: Sequence
    token_id: int
    logprobs: Logprobs | None
    """Where its request asks for them."""


class Engine:
    """One model, one pool of KV blocks, and the sequences on them. One thread drives it."""

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self.model = model
        self.settings = settings
        num_blocks = settings.pool_mb * 2**20 // model.layout.block_bytes
        if num_blocks < 1:
            raise ModelLoadError(
                f"one KV block of {model.name!r} has {model.layout.block_bytes:,} bytes: "
                f"PENSTOCK_ENGINE_POOL_MB={settings.pool_mb} has no room for it"
            )
        self._set_threads()
        self.pool = BlockPool(num_blocks, settings.block_size)
        self.scheduler = Scheduler(self.pool)
        on_gpu = model.device.type == "cuda"
        # On a GPU one more: what pads a recorded step needs somewhere to write.
        self.storage = KVStorage(model.layout, num_blocks + on_gpu, model.device)
        self._cache = hooks.PagedCache(self.storage, model.direct)
        model.module.set_attn_implementation(hooks.NAME)
        # Rows that nobody wrote are met only where whole blocks are gathered, behind a mask.
        self._gathers = model.native is None or model.direct != self.storage.keys.keys()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        self._graphs = self._make_graphs(CudaRecorder(model.device)) if on_gpu else None

    @classmethod
    def open(cls, settings: EngineSettings, progress: Progress | None = None) -> "Engine":
        """Load the model, prove that the engine gives its tokens, and return the engine.

        Raises `ModelLoadError`; its `EngineCheckFailed` means that tokens differ from `generate()`'s.
        """
        from engine.check import check

        model = load(settings, progress)
        check(model, settings, progress)
        return cls(model, settings)

    def _make_graphs(self, recorder: Recorder) -> DecodeGraphs | None:
        """For a model of which every layer attends by `varlen_attn`."""
        if self.model.varlen.keys() != self.storage.keys.keys():
            return None
        return DecodeGraphs(
            self.storage,
            self.model.varlen,
            max_batch=self.settings.max_batch,
            max_blocks=min(self.pool.num_blocks, -(-self.model.context_length // self.settings.block_size)),
            spare=self.pool.num_blocks,
            recorder=recorder,
        )

    def _set_threads(self) -> None:
        """The kernels have threads of their own; torch's would spin beside them."""
        keep_freed_memory()
        native = self.model.native
        torch.set_num_threads(1 if native else self.settings.threads)
        if native is not None:
            native.set_threads(self.settings.threads)

    # What is in it

    @property
    def block_bytes(self) -> int:
        """Size of an exported block."""
        return self.model.layout.block_bytes

    @property
    def num_waiting(self) -> int:
        """Sequences added and not admitted, or preempted."""
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences admitted that still generate."""
        return self.scheduler.num_running

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a new sequence could have, those only kept as cache included."""
        return self.pool.num_free

    def room(self, klass: PriorityClass = "batch") -> int:
        """How many more sequences of a class would run soon if they were added: batch makes way for interactive."""
        return max(0, self.settings.max_batch - self.scheduler.num_before(klass))

    def has_work(self) -> bool:
        """Whether `step()` may have something to do."""
        return self.num_running + self.num_waiting > 0

    def cached_blocks(self, keys: list[bytes]) -> int:
        """How many of the leading prefix keys the pool holds now."""
        return self.pool.count_prefix(keys)

    # Sequences come and go

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. `PromptTooLong` if it can never run, `InvalidRequest` for unknown token ids."""
        length = seq.num_prompt + seq.max_new
        if length > self.model.context_length:
            raise PromptTooLong(
                f"{seq.num_prompt:,} prompt tokens and up to {seq.max_new:,} new ones are {length:,}; "
                f"the model's context has {self.model.context_length:,}"
            )
        needed = seq.blocks_needed(self.settings.block_size)
        if needed > self.pool.num_blocks:
            raise PromptTooLong(f"{length:,} tokens need {needed:,} KV blocks; the pool has {self.pool.num_blocks:,}")
        if min(seq.token_ids) < 0 or max(seq.token_ids) >= self.model.vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {self.model.vocab_size - 1}")
        if max(seq.sampling.logit_bias, default=0) >= self.model.vocab_size:
            raise InvalidRequest(f"logit_bias: the vocabulary has {self.model.vocab_size:,} tokens")
        for index, payload in seq.imported:
            if memoryview(payload).nbytes != self.block_bytes:
                raise InternalError(f"{seq.id}: imported block {index} has not {self.block_bytes} bytes")
        self.scheduler.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, finished or not, and free its blocks. A second time does nothing."""
        self.scheduler.remove(seq)

    def completed_blocks(self, seq: Sequence) -> int:
        """Full blocks of the sequence whose KV is in the pool; none again once it is preempted."""
        return seq.num_computed // self.settings.block_size

    def export_block(self, seq: Sequence, index: int) -> memoryview:
        """A copy of the sequence's `index`-th block, `block_bytes` long; rows not computed are zero."""
        num_rows = seq.num_computed - index * self.settings.block_size
        assert num_rows > 0, f"block {index} of {seq!r} holds nothing"
        return self.storage.read(seq.blocks[index], min(num_rows, self.settings.block_size))

    # The step

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Run one batch: a token for each decoding sequence, and a part of the prompts that wait for theirs.

        Returns the tokens decided; empty if nothing could run or only prompts were read.
        """
        plan = self.scheduler.schedule(self.settings.max_step_tokens, self.settings.max_batch)
        if not plan:
            return []
        for seq, _ in plan:
            if seq.imported:
                self._import(seq)
        batch = Batch(plan, self.settings.block_size, self.model.device)
        logits = self._forward(batch)
        for seq, num_tokens in batch.plan:
            seq.num_computed += num_tokens
        try:
            sampled = self._sample(batch, logits)
        except BaseException:
            for seq, num_tokens in batch.plan:  # as if the step had not been: it can be tried again
                seq.num_computed -= num_tokens
            raise
        for seq, num_tokens in batch.plan:
            self._publish(seq, seq.num_computed - num_tokens)
        for item in sampled:
            item.seq.append(item.token_id)
        return sampled

    def _sample(self, batch: Batch, logits: Tensor) -> list[Sampled]:
        """The tokens that the step decides; meanwhile a GPU's next step is prepared."""
        if self._graphs is not None:
            self._graphs.prepare(batch.sampled)
        draws = [Draw(seq.sampling, seq.seed, seq.num_output, seq.token_ids) for seq in batch.sampled]
        logits = logits[: len(draws)]
        tokens = sample(logits, draws)
        told = logprobs(logits, draws, tokens)
        return [Sampled(*entry) for entry in zip(batch.sampled, tokens, told, strict=True)]

    def _forward(self, batch: Batch) -> Tensor:
        """Logits [rows to keep, vocabulary]; the KV of all the batch's tokens is in the pool afterwards."""
        if batch.fresh_blocks and self._gathers:
            self.storage.clear(batch.fresh_blocks)
        if self._graphs is not None and self._graphs.suits(batch.plan):
            return self._graphs.run([seq for seq, _ in batch.plan], self._compute)
        if self.model.native is not None:
            batch.page(self.model.native, self.storage)
        if self.model.varlen:
            parts = parts_of(batch.plan, self.settings.block_size, self.model.device)
            batch.varlen = VarlenStep(self.storage, self.model.varlen, parts, batch.slots)
        if not self._keeps_logits:
            return self._compute(batch)[batch.logits_to_keep]
        return self._compute(batch, logits_to_keep=batch.logits_to_keep)

    def _compute(self, batch: Batch, **keep: Tensor) -> Tensor:
        """The model's forward pass over the batch: logits [rows to keep or all, vocabulary]."""
        token = hooks.current_batch.set(batch)
        try:
            output = (self.model.body or self.model.module)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                past_key_values=self._cache,
                use_cache=True,
                **keep,
            )
        finally:
            hooks.current_batch.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    def _import(self, seq: Sequence) -> None:
        """Copy what the worker fetched into the sequence's own blocks."""
        for index, payload in seq.imported:
            self.storage.write(seq.blocks[index], payload)
        seq.imported = []
        self._publish(seq, 0)

    def _publish(self, seq: Sequence, first_token: int) -> None:
        """Let others share the prompt blocks that became full, from the one `first_token` is in."""
        size = self.settings.block_size
        for index in range(first_token // size, min(seq.num_computed // size, len(seq.prefix_keys))):
            self.pool.publish(seq.blocks[index], seq.prefix_keys[index])
