"""A model over one pool of KV blocks: it computes the steps of an engine."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.engine.memory.storage import KVStorage
from penstock.engine.steps import hooks
from penstock.engine.steps.native_step import NativeParts, NativeStep
from penstock.engine.steps.rows import RowsApart
from penstock.engine.steps.step import SingleSequenceStep, Step
from penstock.engine.steps.step_batch import StepBatch


class ModelRunner:
    """Computes steps with torch, over rows gathered from the pool, but for what the native kernels compute.

    One thread calls its methods.
    """

    def __init__(
        self, module: Any, storage: KVStorage, native: NativeParts | None, rows: RowsApart | None = None
    ) -> None:
        """`rows` keeps them apart in the whole step, in place of what does so where need be."""
        self.storage = storage
        """The memory of the pool's blocks."""
        self.is_row_exact = native is not None and (native.body is not None or native.keeps_rows_apart)
        """Whether a token's logits are the same to the last bit whatever else is in the batch."""
        self._module, self._native = module, native
        self._rows = rows or (RowsApart() if native is not None and native.has_uneven_rows else None)
        self._gathers = native is None or native.layers != storage.keys.keys()
        self.hidden = torch.empty(0)
        """What the head has read in the last step whose batch `keeps_hidden`: [rows, hidden size], as the logits."""
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        if not storage.layout.attends_internally:
            module.set_attn_implementation(hooks.ATTENTION_NAME)

    def run_step(self, batch: StepBatch) -> Tensor:
        """Write the KV of the batch to the pool, and return the logits of the last tokens and drafts.

        Returns [at least as many rows, vocabulary], valid until the next step.
        """
        if self._gathers and batch.partial_new_blocks:
            # Gathered blocks are read as a whole, so rows that were never written are read behind a mask.
            self.storage.zero_blocks(batch.partial_new_blocks)
        if self.storage.layout.attends_internally:
            return self._run_each_sequence(batch)
        if self._native is None:
            return self._compute_kept_logits(Step(batch, self.storage))
        step = NativeStep(batch, self.storage, self._native.library, self._native.layers)
        if self._native.body is None:
            return self._compute_kept_logits(step)
        logits = self._native.body.compute_batch(step)
        self.hidden = self._native.body.hidden
        return logits

    def _run_each_sequence(self, batch: StepBatch) -> Tensor:
        """Compute the sequences of the batch one after the other, by a model that attends by itself, as `run_step`."""
        assert not batch.keeps_hidden, "no such model computes vectors"
        sampled: list[Tensor] = []
        prompts: list[Tensor] = []
        for seq, num in batch.plan:
            # Nothing is drafted where rows are not exact.
            part = StepBatch([(seq, num)], batch.block_size, batch.device)
            part.snapshot_rows = batch.snapshot_rows
            logits = self._compute_kept_logits(SingleSequenceStep(part, self.storage))
            sampled.append(logits[: part.num_sampled_rows])
            prompts.append(logits[part.num_sampled_rows : part.num_kept_rows])
        return torch.cat(sampled + prompts)

    def _compute_kept_logits(self, step: Step) -> Tensor:
        """Run the model's forward pass and return the logits that the step's batch keeps: [rows, vocabulary]."""
        rows = step.batch.logits_to_keep
        keep = {"logits_to_keep": rows} if self._keeps_logits else {}
        apart = None if step.batch.num_tokens == 1 else self._rows
        if apart is not None:
            step.rows, step.is_within_rows, apart.num_rows = apart, True, step.batch.num_tokens
        with apart or nullcontext(), self._keep_hidden(rows) if step.batch.keeps_hidden else nullcontext():
            logits: Tensor = hooks.run_module(self._module, step, **keep).logits[0]
        if logits.device.type == "cuda":
            torch.cuda.synchronize(logits.device)  # else the step's time would count as that of a later one
        return logits if keep else logits[rows]

    @contextmanager
    def _keep_hidden(self, rows: Tensor) -> Iterator[None]:
        """Keep what the module's head reads within the context; of all tokens where it cannot be told which."""

        def keep(_: Any, given: tuple[Tensor, ...]) -> None:
            self.hidden = given[0][0] if self._keeps_logits else given[0][0, rows]

        handle = self._module.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()
