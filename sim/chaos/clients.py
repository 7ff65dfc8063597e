"""Clients that send requests steadily and read every stream to its end. They write all they see into the history."""

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Literal, Self

from penstock.bus.connect import connect_bus
from penstock.client.core import prepare_message
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable, Cancelled, DeadlineExceeded, RequestError, StreamError, StreamTimeout
from penstock.grammar.tools import CALL_CLOSE, CALL_OPEN
from penstock.messages import (
    ChatMessage,
    EndEvent,
    GrammarSpec,
    Request,
    Sampling,
    Text,
    TokenEvent,
    Vectors,
    encode_request,
    now_s,
)
from penstock.names import Pipeline, piece_token
from penstock.prefill_worker.tokenize import PromptTokenizer
from sim.chaos.checker import ROUNDED, name_vectors
from sim.chaos.history import History
from sim.chaos.poison import POISON, name_poison, poison_request
from sim.chaos.system import RETENTION_S
from sim.conversations import make_chat_bodies, make_chat_request, parse_answer
from sim.endpoint import NUM_TOLD, write_arguments
from sim.workload import (
    ExpectedAnswer,
    ModelLoader,
    compute_answers,
    compute_vectors,
    encode_texts,
    load_demo_model,
    load_split_model,
    load_state_model,
    load_tool_model,
    load_vector_model,
    make_requests,
    make_seeing_requests,
)

NUM_KNOWN_REQUESTS = 16
NUM_AGENTS, RESULT_TOKENS = 4, 40
"""Agents, and the tokens of a tool's result."""
LONG_ANSWER_TOKENS, SHORT_ANSWER_TOKENS = 48, 4
"""Tokens of a long answer, and of a short one."""
RESEND_DELAY_S = 0.2
"""Wait before a request that was not acknowledged is sent again."""
NUM_PRODUCERS = 2
"""Clients that send, each with what it knows of the workers."""
NUM_SESSIONS = 5
NUM_TENANTS = 7
"""Requests of one tenant share KV, so that part of the work is found in the store."""


Load = Literal["text", "tools", "agents", "forms", "states", "vectors", "encoder", "pictures", "endpoint", "poison"]
"""What is asked: texts of the demo model, calls of the tool model, turns of agents that call tools, texts of the demo
model that are computed with other weights than their prompts, texts of a model whose layers keep states, texts and
vectors of texts of a model that gives both, vectors of texts of an encoder, chats with pictures of a model that sees
them, numbers of servers that count, or texts of the demo model where a poisonous request stands in the middle of every
second hundred.
"""
_MODELS: dict[str, ModelLoader] = {
    "text": load_demo_model, "tools": load_tool_model, "forms": load_split_model, "states": load_state_model,
    "vectors": load_vector_model, "poison": load_demo_model,
}  # fmt: skip
_GRAMMAR = GrammarSpec(kind="regex", source=r'\{"said":"([A-Za-z ,]{1,6}\\["n\\]){4,12}"\}')
"""JSON whose text is full of escapes: a worker that goes on inside of one must go on in the same state."""


@cache
def prepare_known_requests(max_tokens: int, load: Load) -> list[tuple[Request, ExpectedAnswer]]:
    """Return requests that are sent repeatedly under other ids, with their answers.

    With the load `vectors` every second has texts. Of the others every eighth has one token, every third a grammar, and
    every third asks that its KV is retained; with the load `tools` all others offer tools. Of those to servers that
    count every third offers tools, and none has a grammar.
    """
    if load == "agents":
        return _make_agents(max_tokens)
    if load == "endpoint":
        return [_count_numbers(number, max_tokens) for number in range(NUM_KNOWN_REQUESTS)]
    if load == "encoder":
        return [_ask_for_vectors(number, encode_texts, is_rounded=True) for number in range(NUM_KNOWN_REQUESTS)]
    if load == "pictures":
        return make_seeing_requests(NUM_KNOWN_REQUESTS, max_tokens)
    work = (
        _make_tool_requests(max_tokens) if load == "tools" else make_requests(NUM_KNOWN_REQUESTS, "chaos", max_tokens)
    )
    for number in range(1, NUM_KNOWN_REQUESTS, 3):
        sampling = work[number].sampling.model_copy(update={"grammar": _GRAMMAR, "special_text": None})
        work[number] = work[number].model_copy(update={"sampling": sampling})
    work[2::3] = [request.model_copy(update={"retain_s": RETENTION_S}) for request in work[2::3]]
    short = [work[n].sampling.model_copy(update={"max_tokens": 1}) for n in range(0, NUM_KNOWN_REQUESTS, 8)]
    work[::8] = [request.model_copy(update={"sampling": one}) for request, one in zip(work[::8], short, strict=True)]
    answers = compute_answers(work, _MODELS[load])
    known = list(zip(work, answers.values(), strict=True))
    if load == "vectors":
        known[::2] = [_ask_for_vectors(number, compute_vectors) for number in range(0, NUM_KNOWN_REQUESTS, 2)]
    return known


def _ask_for_vectors(
    number: int, compute: Callable[[Sequence[str]], Vectors], *, is_rounded: bool = False
) -> tuple[Request, ExpectedAnswer]:
    """Return a request with texts, and its answer, in which the vectors stand for a text."""
    chance = random.Random(number)
    words = ["and", "the", "king", "of", "Israel", "said", "unto", "his", "people", "LORD", "land", "go", "bread"]
    lengths = [1 + int(chance.expovariate(0.02)) for _ in range(chance.choice([1, 5, 40]))]
    texts = [" ".join(chance.choices(words, k=min(400, length))) for length in lengths]
    named = name_vectors(compute(texts), is_rounded=is_rounded)
    return Request(id=f"chaos-{number}", texts=list[Text](texts)), ExpectedAnswer([], named, "stop")


def _count_numbers(number: int, max_tokens: int) -> tuple[Request, ExpectedAnswer]:
    """Return a request to a server that counts, and its answer. Each piece of text stands for a token in the log."""
    if number % 3 == 0:
        return _ask_for_calls(number, max_tokens)
    count = 1 if number % 8 == 0 else max_tokens
    pieces = [f" {one}" for one in range(count)]
    request = Request(id=f"chaos-{number}", prompt=f"{number}|", sampling=Sampling(max_tokens=count, temperature=0.0))
    return request, ExpectedAnswer([piece_token(piece) for piece in pieces], "".join(pieces), "length")


def _ask_for_calls(number: int, max_tokens: int) -> tuple[Request, ExpectedAnswer]:
    """Return a request to a server that counts and then calls, and its answer. All calls are one piece."""
    names = ["first", "second"][: 1 + number % 2]
    calls = [f'{CALL_OPEN}{{"name": "{name}", "arguments": {write_arguments(name)}}}{CALL_CLOSE}' for name in names]
    pieces = [*(f" {one}" for one in range(NUM_TOLD)), "".join(calls)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    request = Request(
        id=f"chaos-{number}",
        messages=[ChatMessage(role="user", content=f"{number}|")],
        chat_template_kwargs={"tools": tools},
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, special_text=True),
    )
    return request, ExpectedAnswer([piece_token(piece) for piece in pieces], "".join(pieces), "stop")


def _make_tool_requests(max_tokens: int) -> list[Request]:
    """Return requests that offer tools; greedy and sampled in turn."""
    work = []
    for number, body in enumerate(make_chat_bodies(NUM_KNOWN_REQUESTS, "chaos")):
        sampling = {"temperature": 0.0} if number % 2 == 0 else {"temperature": 0.5, "seed": number}
        work.append(make_chat_request(f"chaos-{number}", {**body, **sampling, "max_tokens": max_tokens}))
    return work


def _make_agents(max_tokens: int) -> list[tuple[Request, ExpectedAnswer]]:
    """Return the turns of agents with their answers, each agent a tenant of its own.

    The first turns are chats that call tools. Each later prompt goes on with the one before, its answer and a tool's
    result; the last one retains nothing.
    """
    reader, found = PromptTokenizer(load_tool_model()), list[tuple[Request, ExpectedAnswer]]()
    turns = [one.model_copy(update={"tenant": one.id}) for one in _make_tool_requests(max_tokens)[:NUM_AGENTS]]
    for number in range(1, NUM_KNOWN_REQUESTS // NUM_AGENTS + 1):
        answers = compute_answers(turns, load_tool_model)
        found += [(request, answers[request.id]) for request in turns]
        is_last = number + 1 == NUM_KNOWN_REQUESTS // NUM_AGENTS
        prompts = [[*reader.tokenize_prompt(one), *answers[one.id].token_ids] for one in turns]
        turns = [
            Request(
                id=f"{request.tenant}-{number}", tenant=request.tenant, token_ids=[*prompt, *prompt[:RESULT_TOKENS]],
                retain_s=None if is_last else RETENTION_S,
                sampling=request.sampling.model_copy(update={"special_text": None}),
            )
            for request, prompt in zip(turns, prompts, strict=True)
        ]  # fmt: skip
    return found


@dataclass(frozen=True)
class ClientTask:
    """A request, and what the client does with it."""

    request: Request
    answer: ExpectedAnswer
    copies: int
    """How often it is sent: twice if the bus's first acknowledgement counts as lost."""
    cancel_after: int | None
    """Tokens after which it is cancelled."""
    reconnect_after: list[int]
    """After how many events each of the first reader's connections ends. The connection after those stays."""
    late_reader_s: float | None
    """After how many seconds a second reader starts; None: there is none."""
    error: str = ""
    """The code of the error with which it has to end; empty if it is answered."""

    @property
    def allowed_errors(self) -> list[str]:
        """Codes of errors with which the request may end."""
        if self.error:
            return [self.error]
        cancelled = [] if self.cancel_after is None else [Cancelled.code]
        return cancelled if self.request.deadline is None else [*cancelled, DeadlineExceeded.code]


def make_client_task(seed: int, number: int, load: Load = "text", max_tokens: int = LONG_ANSWER_TOKENS) -> ClientTask:
    """Return the task with this number. Equal seeds give equal tasks."""
    if load == "poison":
        return _make_task_beside_poison(number, max_tokens)
    chance = random.Random(f"{seed}/errand/{number}")
    request, answer = chance.choice(prepare_known_requests(max_tokens, load))
    update: dict[str, object] = {
        "id": f"e{number}",
        "tenant": request.tenant if load == "agents" else f"tenant-{chance.randrange(NUM_TENANTS)}",
        "priority_class": chance.choice(["interactive", "interactive", "batch"]),
        "session": f"chat-{number % NUM_SESSIONS}" if chance.random() < 0.5 else None,
    }
    if chance.random() < 0.06:
        update["deadline"] = now_s() + chance.choice([-1.0, 0.3, 1.0])
    return ClientTask(
        request.model_copy(update=update),
        answer,
        copies=2 if chance.random() < 0.08 else 1,
        cancel_after=chance.randrange(20) if chance.random() < 0.08 else None,
        reconnect_after=[chance.randint(1, 20) for _ in range(chance.choice([0, 0, 1, 3]))],
        late_reader_s=chance.uniform(0, 2) if chance.random() < 0.25 else None,
    )


def make_plain_task(
    request_id: str, number: int, max_tokens: int = SHORT_ANSWER_TOKENS, load: Load = "text"
) -> ClientTask:
    """Return a task that is sent once and read by at most one reader."""
    request, answer = prepare_known_requests(max_tokens, load)[number % NUM_KNOWN_REQUESTS]
    tenant = request.tenant if load == "agents" else f"tenant-{number % NUM_TENANTS}"
    named = request.model_copy(update={"id": request_id, "tenant": tenant})
    return ClientTask(named, answer, copies=1, cancel_after=None, reconnect_after=[], late_reader_s=None)


def _make_task_beside_poison(number: int, max_tokens: int) -> ClientTask:
    task, (hundred, place) = make_plain_task(f"e{number}", number, max_tokens, "poison"), divmod(number, 100)
    if place != 50 or not (kind := name_poison(hundred)):
        return task
    no_answer = ExpectedAnswer([], "", "error")
    return replace(task, request=poison_request(task.request, kind), answer=no_answer, error=POISON[kind])


class Clients:
    """Keeps `under_way` tasks running until it is stopped. `make` returns the task of each number from 0.

    `get_patience` returns how many seconds a reader waits for a token or a result at present.
    """

    def __init__(
        self,
        history: History,
        addresses: Addresses,
        make: Callable[[int], ClientTask],
        under_way: int,
        get_patience: Callable[[], float],
    ) -> None:
        self._history, self._make, self._get_patience = history, make, get_patience
        self._addresses, self._producers = addresses, [Client(addresses) for _ in range(NUM_PRODUCERS)]
        self._client = self._producers[0]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.num_begun = 0
        """Tasks begun."""
        self.num_done = 0
        """Tasks whose first reader has seen the end."""
        self.accepted_ids: set[str] = set()
        self._pool = ThreadPoolExecutor(3 * under_way, "client")
        self._outages = threading.Lock()
        self._past_outage_s = 0.0
        self._outage_since: float | None = None
        self._futures: list[Future[None]] = [self._pool.submit(self._run_tasks) for _ in range(under_way)]

    def stop_sending(self) -> None:
        """Begin no new tasks."""
        self._over.set()

    @property
    def is_idle(self) -> bool:
        """Whether all tasks that were begun have ended."""
        return all(future.done() for future in self._futures)

    @contextlib.contextmanager
    def count_outage(self) -> Iterator[None]:
        """Note that a server is away meanwhile: readers have patience for longer by that time. One outage at a time."""
        with self._outages:
            self._outage_since = time.monotonic()
        try:
            yield
        finally:
            with self._outages:
                self._past_outage_s += time.monotonic() - self._outage_since
                self._outage_since = None

    def _measure_uptime_s(self) -> float:
        """Return a clock that stands still while a server is away."""
        with self._outages:
            return (self._outage_since or time.monotonic()) - self._past_outage_s

    def raise_failure(self) -> None:
        """Raise the exception of a client that failed, if any did."""
        for future in self._futures:
            if future.done():
                future.result()

    def send_unread(self, tasks: Sequence[ClientTask], send: Callable[[list[Request]], None] | None = None) -> None:
        """Send requests at once without reading their streams; only their results are checked.

        `send` raises `BusUnavailable` where it is not known that they are durable. They are then sent again, until the
        clients are stopped.
        """
        for task in tasks:
            self._record_submitted(task)
        while not self._over.is_set():
            with contextlib.suppress(BusUnavailable):
                (send or self._publish_requests)([task.request for task in tasks])
                for task in tasks:
                    self._record_accepted(task)
                return
            time.sleep(RESEND_DELAY_S)

    def _publish_requests(self, work: list[Request]) -> None:
        pipeline = Pipeline(self._addresses.pipeline)
        with contextlib.closing(connect_bus(self._addresses, BusSettings()).create_publisher()) as publisher:
            publisher.publish([prepare_message(pipeline, encode_request(request))[1] for request in work])

    def _run_tasks(self) -> None:
        while not self._over.is_set():
            with self._lock:
                number, self.num_begun = self.num_begun, self.num_begun + 1
            self._run_task(self._make(number))
            with self._lock:
                self.num_done += 1

    def _run_task(self, task: ClientTask) -> None:
        request = task.request
        self._record_submitted(task)
        for _ in range(task.copies):
            self._submit_until_accepted(request)
        self._record_accepted(task)
        others = []
        if task.late_reader_s is not None:
            others.append(self._pool.submit(self._read_stream_late, task))
        self._read_stream("first", task)
        wait(others)
        for other in others:
            other.result()

    def _record_submitted(self, task: ClientTask) -> None:
        answer = task.answer
        fields = {
            "tokens": answer.token_ids,
            "text": answer.text,
            "calls": parse_answer(task.request, [answer.text]).calls,
            "finish": answer.finish_reason,
            "may": task.allowed_errors,
        }
        self._history.add_entry("submitted", id=task.request.id, **fields)

    def _record_accepted(self, task: ClientTask) -> None:
        self.accepted_ids.add(task.request.id)
        self._history.add_entry("accepted", id=task.request.id)

    def _submit_until_accepted(self, request: Request) -> None:
        """Submit a request until it is durable. Sending it again under the same id is safe."""
        while True:
            try:
                self._submit_request(request)
            except BusUnavailable:
                time.sleep(RESEND_DELAY_S)
            else:
                return

    def _submit_request(self, request: Request) -> None:
        fields = request.sampling.model_dump(exclude_defaults=True) | {
            "priority_class": request.priority_class or "interactive"
        }
        self._producers[zlib.crc32(request.id.encode()) % NUM_PRODUCERS].submit(
            prompt=request.prompt,
            token_ids=request.token_ids,
            texts=request.texts,
            messages=request.messages,
            chat_template_kwargs=request.chat_template_kwargs,
            id=request.id,
            tenant=request.tenant,
            session=request.session,
            retain_s=request.retain_s,
            deadline=request.deadline,
            **fields,
        )

    def _read_stream_late(self, task: ClientTask) -> None:
        self._over.wait(task.late_reader_s)
        with self._record_errors("late", task.request.id):
            self._read_connection("late", task, None, None, None, [])

    def _read_stream(self, reader: str, task: ClientTask) -> None:
        after: str | None = None
        texts: list[str] = []
        with self._record_errors(reader, task.request.id):
            for most in [*task.reconnect_after, None]:
                after, is_over = self._read_connection(reader, task, after, most, task.cancel_after, texts)
                if is_over:
                    return

    def _read_connection(
        self,
        reader: str,
        task: ClientTask,
        after: str | None,
        most: int | None,
        cancel_after: int | None,
        texts: list[str],
    ) -> tuple[str | None, bool]:
        """Read at most `most` events, and add their texts to those of the reader's connections before.

        Returns the last event id seen, and whether the stream has ended.
        """
        request_id = task.request.id
        for count, event in enumerate(self._read_events(request_id, after), start=1):
            texts.append(event.text)
            if isinstance(event, EndEvent):
                texts.append(name_vectors(event.vectors, is_rounded=task.answer.text.startswith(ROUNDED)))
                fields = {"finish": event.finish_reason, "count": event.num_events, "error": None}
                parts = {"text": "".join(texts), "calls": parse_answer(task.request, texts).calls}
                self._history.add_entry("end", id=request_id, reader=reader, **fields, **parts)
                return after, True
            after = event.id
            self._history.add_entry("token", id=request_id, reader=reader, event=event.id, token=event.token)
            if cancel_after is not None and int(event.id.partition("-")[0]) == cancel_after:
                with contextlib.suppress(BusUnavailable):
                    self._client.cancel(request_id)
            if count == most:
                return after, False
        raise AssertionError("a stream ends with its end")

    def _read_events(self, request_id: str, after: str | None) -> Iterator[TokenEvent | EndEvent]:
        """Yield a stream's events. Raises `StreamTimeout` when patience ends without one while all servers run."""
        quiet_since_s, patience_s = self._measure_uptime_s(), self._get_patience()
        while True:
            try:
                for event in self._client.stream(request_id, after, patience_s):
                    quiet_since_s = self._measure_uptime_s()
                    after = after if isinstance(event, EndEvent) else event.id
                    yield event
                return
            except StreamTimeout:
                patience_s = quiet_since_s + self._get_patience() - self._measure_uptime_s()
                if patience_s <= 0:
                    raise

    @contextlib.contextmanager
    def _record_errors(self, reader: str, request_id: str) -> Iterator[None]:
        """Record the errors with which a stream may end."""
        try:
            yield
        except RequestError as error:
            self._history.add_entry("end", id=request_id, reader=reader, finish="error", count=None, error=error.code)
        except StreamError as error:
            self._history.add_entry(
                "failed", id=request_id, reader=reader, error=type(error).__name__, story=str(error)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for producer in self._producers:
            producer.close()
        self._pool.shutdown(wait=error is None, cancel_futures=True)
