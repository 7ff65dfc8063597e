"""The role of an `auto` worker for requests: it decodes most of them where it read them, and hands off the others.

It is prefill's role, beside which the same worker has decode's for jobs. A request leaves at one of two moments, if
the `StayPolicy` (`stay.py`) has a cause: once its blocks are loaded, before its first token; between two tokens, if its
blocks went to others. It goes on as a job then, as each of a prefill worker does.
"""

from collections.abc import Collection

from penstock.engine.contract import InferenceEngine, Loaded, SampledToken
from penstock.engine.sequence import Sequence
from penstock.names import Pipeline
from penstock.prefill_worker.role import PrefillRole
from penstock.prefill_worker.stay import StayPolicy
from penstock.worker.load import WorkerLoad
from penstock.worker.model_role import ModelRole
from penstock.worker.task import Task


class StayingRole(PrefillRole):
    """The role of a worker that reads requests and decodes them too."""

    hands_off_for = ""

    def __init__(
        self, pipeline: Pipeline, engine: InferenceEngine, stays: StayPolicy, served_name: str = "", worker: str = ""
    ) -> None:
        """`stays` decides which requests are decoded here. `worker` is the worker's name."""
        super().__init__(pipeline, engine, None, served_name)
        self._stays, self.sender = stays, f"auto:{worker}"

    def note_loaded(self, task: Task, loaded: Loaded) -> None:
        """Decide whether a request is decoded here, now that it is known how much of its prompt is to be computed."""
        if task.blocks is None or not isinstance(task.seq, Sequence):
            return
        num_prompt, num_blocks = len(task.token_ids), loaded.num_pool_blocks + loaded.num_tier_blocks
        num_found = min(num_prompt, num_blocks * task.blocks.hasher.block_size)
        task.leaving_for = self._stays.judge_prompt(num_prompt - num_found)
        if task.hands_off:
            self.engine.lease_request(task.id, self.pipeline.lease_owner(task.id))

    def leaves_preempted(self, task: Task) -> bool:
        """Return whether a request leaves whose blocks went to others, where another worker decodes: its blocks are
        stored for that one.
        """
        task.leaving_for = self._stays.judge_preempted()
        if task.hands_off:
            self.engine.lease_request(task.id, self.pipeline.lease_owner(task.id))
            task.blocks_stored = self.engine.finish_request(task.id)
        return task.hands_off

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return how many tokens of answers there were."""
        return len(sampled)

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast prompts are computed and answers decoded, for the heartbeat."""
        return ModelRole.report_rates(self, load)
