"""Takes requests in: polls messages, reads them, claims their requests, and takes over requests that nobody holds.

It is the first part of a turn of the loop (`penstock.worker.worker`), which calls it and opens what it returns: a
request with its claim. Only the loop calls it, but for the methods that say otherwise. It reads which requests run, and
begins, ends and drops none of them; a message that nobody can answer it settles with a dead letter.

    1  poll     deferred and new messages, while there is capacity
    2  identify a short message at once; a long one on the reader's thread, so it is identified in a later turn
    3  claim    the identified requests, in one round trip for each stage
    4  open     the loop does that, with each claim that was granted

A request that was taken over has its claim first, and is then identified.

What a crash costs: before 3 the bus has the deliveries, and gives them to another worker. After 3 the session runs out,
and another worker takes the requests over.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from penstock.bus.contract import Delivery, Member, Settlement
from penstock.errors import IdConflict, InvalidRequest, RequestError, TenantKeyMissing
from penstock.failpoints import stage_failpoint
from penstock.names import (
    CLASSES,
    STAGES,
    WHOLE_KINDS,
    Pipeline,
    PriorityClass,
    Stage,
    add_tenant,
    find_shared_topic,
    split_topic,
)
from penstock.record import Bound, Busy, Claim, Conflict, Record, ShardedSession, TakenOver, UnclaimedMessage
from penstock.sealing import has_key_of
from penstock.telemetry.stage import StageMetrics
from penstock.worker.delivery_queue import POSTPONE_S, DeliveryQueue
from penstock.worker.failure import build_writable_dead_letter, confine_error, give_up_claim, try_for_request
from penstock.worker.load import WorkerLoad
from penstock.worker.message_reader import MessageReader, PendingMessage
from penstock.worker.rescue import PATIENCE_LEASES, Rescuer
from penstock.worker.settler import Settler
from penstock.worker.task import Role, Task
from penstock.worker.watch import LoopWatch

log = logging.getLogger(__name__)

KEY_DEFERRAL_S = 5.0
"""Wait before a message is tried again whose key is not here yet."""
SETTLING_DEFERRAL_S = 0.05
"""Wait before a delivery is tried again that is being settled."""
MAX_CAPACITY_TURNS = 8
"""The capacities are counted anew after this many turns in which no request came or went, as answers grow meanwhile."""


class Intake:
    """Takes requests in for one worker. `running` has the requests that the loop works on, by request id."""

    def __init__(
        self,
        role: Role,
        job_role: Role | None,
        pipeline: Pipeline,
        record: Record,
        member: Member,
        session: ShardedSession,
        settler: Settler,
        metrics: StageMetrics,
        load: WorkerLoad,
        watch: LoopWatch,
        running: Mapping[str, Task],
    ) -> None:
        """`job_role` treats jobs where the worker reads both requests and jobs; `role` treats all other messages."""
        self._role, self._pipeline, self._record, self._member, self._session = role, pipeline, record, member, session
        self._settler, self._metrics, self._load, self._running = settler, metrics, load, running
        self._job_roles = {} if job_role is None else dict.fromkeys(pipeline.input_topics("decode").values(), job_role)
        self.queue = DeliveryQueue(member)
        self.reader = MessageReader(self.identify_message, self.read_request, watch, role.engine.wake_waiter)
        stages = {topic: one.stage for topic, one in self._job_roles.items()}
        stages |= dict.fromkeys(pipeline.input_topics(role.kind).values(), role.stage)
        self.stages = list(dict.fromkeys(stages.values()))
        """The stages of the requests that this worker answers, those first that were begun before."""
        self.rescuer = Rescuer(
            record, stages, session, member, self.make_claim_request, self.reader.unclaimed_deliveries
        )
        self._counted_ids: list[str] = []
        """The requests that ran when the capacities were counted last, and those that were being read."""
        self._num_capacity_turns = 0
        """For how many more turns these capacities hold if no request comes or goes."""

    # 1. Poll.

    def poll_messages(self, *, is_idle: bool, wait_s: float) -> list[Delivery]:
        """Return the deliveries to begin. An idle worker waits for the first one for up to `wait_s`: it has nothing to
        claim or to run.
        """
        capacities = self._count_capacities()
        deliveries = self.queue.poll(capacities["batch"], capacities["interactive"], is_idle=is_idle, wait_s=wait_s)
        for _ in deliveries:
            stage_failpoint(self._role.kind, "prefill.1.polled", "decode.6.polled", "endpoint.1.polled")
        return deliveries

    def _count_capacities(self) -> Mapping[PriorityClass, int]:
        """Return how many more requests of each class to take.

        It is counted as requests come and go, where a class has no capacity, and every few turns: the engine looks at
        all its sequences for it. Kinds without stages count it each turn, as it changes with endpoints' health, and
        with each batch of texts.
        """
        ids = [*self._running, *(delivery.position for delivery in self.reader.pending_deliveries())]
        is_current = self._num_capacity_turns and ids == self._counted_ids and self._role.kind not in WHOLE_KINDS
        if is_current and all(self._load.capacities.values()):
            self._num_capacity_turns -= 1
        else:
            self._counted_ids, self._num_capacity_turns = ids, MAX_CAPACITY_TURNS
            self._load.capacities = {priority_class: self.free_capacity(priority_class) for priority_class in CLASSES}
        return self._load.capacities

    def free_capacity(self, priority_class: PriorityClass) -> int:
        """Return how many more requests of a class to take.

        Messages that are being read count as taken.
        """
        rank = CLASSES.index(priority_class)
        before = [task for task in self._running.values() if CLASSES.index(task.priority_class) <= rank]
        num_read = sum(CLASSES.index(delivery.priority_class) <= rank for delivery in self.reader.pending_deliveries())
        return max(0, self._role.free_capacity(priority_class, before, num_read, self._load))

    # 2. Identify.

    def identify_messages(self, deliveries: Iterable[Delivery]) -> list[Task]:
        """Return the requests of short messages, and have long ones decoded on a thread beside the engine's steps."""
        tasks = []
        for delivery in deliveries:
            if not has_key_of(delivery.value):
                self.await_key(delivery)
                continue
            with self._confine_message(delivery):
                if self.is_long(delivery):
                    self.reader.submit(delivery, None)
                else:
                    tasks += self._accept_task(delivery, partial(self.identify_message, delivery))
        return tasks

    def await_key(self, delivery: Delivery) -> None:
        """Try a message again later that is encrypted with a key which this worker does not have yet. It is not claimed
        meanwhile.
        """
        log.error("a message of %s waits for the key of its tenant: see PENSTOCK_TENANT_KEYS", delivery.topic)
        self.queue.defer(delivery, KEY_DEFERRAL_S)

    def accept_identified(self, reading: PendingMessage) -> list[Task]:
        """Return the request of a message that the reader has decoded and that has no claim yet."""
        with self._confine_message(reading.delivery):
            return self._accept_task(reading.delivery, reading.task.result)
        return []

    def identify_message(self, delivery: Delivery) -> Task | None:
        """Return the request of a message; None where not even an id can be read. Any thread may call this."""
        role = self._find_role(delivery)
        if (task := role.identify_request(delivery)) is not None:
            task.role, task.leaving_for = role, role.hands_off_for
        return task

    def read_request(self, task: Task, *, may_wait: bool = True) -> bool:
        """Read what a claimed request asks for. Where that fails it has an outcome. Any thread may call this.

        Return False for what takes time, unless this `may_wait`.
        """
        return try_for_request(task, partial(self._read_request, task, may_wait=may_wait))

    def _read_request(self, task: Task, *, may_wait: bool) -> bool:
        topic = task.delivery.topic
        _, own = split_topic(topic)
        if own and own != add_tenant("", task.tenant) and self._pipeline.find_stage(topic) == "prefill":
            raise InvalidRequest(f"a request of the tenant {task.tenant!r} in another's topic {topic}")
        return task.role.read_request(task, may_wait=may_wait)

    def is_long(self, delivery: Delivery) -> bool:
        """Return whether a message is decoded and read on a thread."""
        return len(delivery.value) > self._find_role(delivery).max_inline_bytes

    def _find_role(self, delivery: Delivery) -> Role:
        """Return what treats a message: that of its topic."""
        return self._job_roles.get(find_shared_topic(delivery.topic), self._role)

    def _accept_task(self, delivery: Delivery, identify: Callable[[], Task | None]) -> list[Task]:
        """Return the request of a message, which `identify` returns. Without one, send the message to the dead letters
        and return nothing; nor for one whose key has gone since it was looked for: it waits.
        """
        try:
            task = identify()
        except TenantKeyMissing:
            self.await_key(delivery)
            return []
        if task is None:
            self._send_dead_letter(delivery, "invalid_request: no request id can be read, in the message or its key")
        return [] if task is None else [task]

    def _confine_message(self, delivery: Delivery) -> confine_error:
        """Return the block in which an exception makes a message that is not claimed a dead letter."""
        where = f"at {delivery.position} of {delivery.topic}"
        return confine_error(where, lambda error: self._send_dead_letter(delivery, f"{error.code}: {error}"))

    def _send_dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Settle a delivery with a dead letter. If the delivery was lost, its new holder does so."""
        letter = build_writable_dead_letter(self._pipeline, delivery, reason)
        self._settler.settle(Settlement(delivery, [letter]))

    # 3. Claim.

    def make_claim_request(self, delivery: Delivery) -> UnclaimedMessage | None:
        """Return what a claim needs to know of a message that no worker has begun; None where it cannot be parked, also
        as its key is not here yet.

        Any thread may call this.
        """
        try:
            task = self._find_role(delivery).identify_request(delivery) if has_key_of(delivery.value) else None
        except TenantKeyMissing:
            return None
        waiting = None if task is None else task.to_claim_request()
        return waiting if waiting is not None and waiting.message else None

    def claim_messages(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Claim all requests that this worker may claim, in one round trip. Yield those that are to be opened."""
        asked: list[tuple[Task, UnclaimedMessage]] = []
        for task in tasks:
            if self._is_claimable(task.delivery):
                with self._confine_message(task.delivery):
                    asked.append((task, task.to_claim_request()))
        for task, claimed in self._ask_for_claims(asked):
            match claimed:
                case Busy(epoch=epoch) if (running := self._find_undelivered_task(task, epoch)) is not None:
                    running.delivery = task.delivery
                case Busy(wait_s=wait_s):
                    self.queue.defer(task.delivery, wait_s)
                case Bound():
                    self._settler.settle(Settlement(task.delivery))
                case Conflict():
                    error = IdConflict(f"the id {task.id!r} belongs to a request with another body")
                    self._send_dead_letter(task.delivery, f"{error.code}: {error}")
                case Claim():
                    stage_failpoint(task.role.kind, "prefill.2.claimed", "decode.6.claimed", "endpoint.1.claimed")
                    task.claim = claimed
                    yield task

    def _ask_for_claims(
        self, asked: Sequence[tuple[Task, UnclaimedMessage]]
    ) -> Iterator[tuple[Task, Claim | Busy | Bound | Conflict]]:
        """Yield the requests with what became of their claims, in a round trip for each stage that they are of."""
        for stage in STAGES:
            mine = [(task, message) for task, message in asked if task.role.stage == stage]
            claims = self._record.claim_all(stage, self._session.id, [message for _, message in mine]) if mine else []
            yield from zip([task for task, _ in mine], claims, strict=True)

    def _is_claimable(self, delivery: Delivery) -> bool:
        """Return whether the delivery is still this worker's and is not being settled.

        A message that came again while the delivery that was lost is being settled is deferred: the outcome decides.
        """
        if self._settler.is_settling(delivery):
            self.queue.defer(delivery, SETTLING_DEFERRAL_S)
            return False
        return self._member.is_holding(delivery)

    def _find_undelivered_task(self, task: Task, epoch: int) -> Task | None:
        """Return the running request of this message if it holds no delivery, and its claim is the one of `epoch`.

        The running request was taken over, or its delivery was lost and has come again. If its claim was lost, another
        worker has begun the request anew, and needs the message.
        """
        running = self._running.get(task.id)
        if running is None or running.claim.epoch != epoch or self._member.is_holding(running.delivery):
            return None
        return running if running.is_same_request(task) else None

    # Take over.

    def take_over(self, stage: Stage) -> Iterator[TakenOver]:
        """Take over requests of a stage that no worker holds. Their deliveries are with other workers, or come later.

        They have waited for longer than what is polled, which gets the capacity that they leave.
        """
        num_free = self._session.count_free(stage)
        capacity = max(self.free_capacity(priority_class) for priority_class in CLASSES) if num_free else 0
        if capacity <= 0 or self.reader.is_late(PATIENCE_LEASES * self._record.lease_s):
            return  # requests that the reader released to others would come back here, behind its other messages
        taken = self._record.take_over_free(stage, self._session.id, capacity)
        self._session.note_taken(stage, capacity if len(taken) == capacity else num_free)
        for claimed in taken:
            self._metrics.count_take_over()
            yield claimed

    def resume_request(self, delivery: Delivery, task: Task | None, claim: Claim) -> Task:
        """Return a request that was taken over, with its claim. Raise `InvalidRequest` where its message has no id."""
        if task is None:
            raise InvalidRequest(f"no request id can be read in a message of {delivery.topic}")
        stage_failpoint(task.role.kind, "prefill.2.taken", "decode.6.taken", "endpoint.1.taken")
        task.claim = claim
        return task

    def confine_claim(self, claim: Claim) -> confine_error:
        """Return the block in which an exception gives up a claim whose message this worker cannot read."""
        return confine_error(claim.id, partial(self._give_up_claim, claim))

    def _give_up_claim(self, claim: Claim, error: RequestError) -> None:
        """Give up a claim whose message this worker cannot read."""
        self._session.remove_claim(claim)
        give_up_claim(self._record, claim, error, claim.num_tokens if self._role.writes_pieces else None)

    def release_late(self) -> None:
        """Release the claims of requests that wait to be read for longer than messages wait before they are parked:
        they go to other workers as well.
        """
        for task in self.reader.take_late(PATIENCE_LEASES * self._record.lease_s):
            self._session.remove_claim(task.claim)
            self._record.release_claim(task.claim, delivered=False)
            self.queue.defer(task.delivery, POSTPONE_S)
