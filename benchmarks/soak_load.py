"""The requests of `benchmarks.soak`, and their expected answers."""

import random
from collections import deque
from dataclasses import dataclass

from penstock.client.sync import Client
from penstock.errors import RequestError, StreamExpired, StreamTimeout
from penstock.messages import Request
from sim.workload import ExpectedAnswer, compute_answers, make_requests

NUM_TENANTS = 4
MAX_OPEN_REQUESTS = 6
PROMPT_TOKENS = (100, 300)
_KNOWN_SHARE = 0.4
"""The share of known requests."""
_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SentRequest:
    """An open request."""

    id: str
    expected: ExpectedAnswer | None


class SoakLoad:
    """Sends, reads and compares."""

    def __init__(self, num_known: int) -> None:
        """Compute the answers of so many requests, and of as many more that continue the first ones' answers."""
        self.num_answered = self.num_compared = self.num_stuck = 0
        self.mistakes: list[str] = []
        """Unexpected answers, as text."""
        self._chance = random.Random(11)
        self._under_way: deque[SentRequest] = deque()
        first = make_requests(num_known, "soak")
        answers = compute_answers(first)
        further = [_make_next_turn(request, answers[request.id], first[0]) for request in first]
        self._known = first + further
        self._answers = answers | compute_answers(further)

    def send_and_read(self, client: Client) -> None:
        """Send requests until enough are open; then read the oldest one to its end."""
        while len(self._under_way) < MAX_OPEN_REQUESTS:
            self._under_way.append(self._send_request(client))
        self._read_oldest(client)

    def read_rest(self, client: Client) -> None:
        """Read all open requests to their end."""
        while self._under_way:
            self._read_oldest(client)

    def _send_request(self, client: Client) -> SentRequest:
        chance, tenant = self._chance, f"tenant-{self._chance.randrange(NUM_TENANTS)}"
        if chance.random() < _KNOWN_SHARE:
            known = chance.choice(self._known)
            fields = known.sampling.model_dump(exclude_defaults=True)
            sent = client.submit(token_ids=list(known.token_ids or ()), tenant=tenant, **fields)
            return SentRequest(sent, self._answers[known.id])
        token_ids = [chance.randrange(3, 1000) for _ in range(chance.randint(*PROMPT_TOKENS))]
        return SentRequest(
            client.submit(token_ids=token_ids, tenant=tenant, max_tokens=16, temperature=0.8, seed=1), None
        )

    def _read_oldest(self, client: Client) -> None:
        sent = self._under_way.popleft()
        try:
            answer = client.result(sent.id, timeout_s=_ANSWER_TIMEOUT_S)
        except StreamTimeout:
            self.num_stuck += 1
            return
        except (RequestError, StreamExpired) as error:
            self.mistakes.append(f"{sent.id}: {type(error).__name__}: {error}")
            return
        self.num_answered += 1
        if sent.expected is not None:
            self.num_compared += 1
            if (answer.token_ids, answer.text) != (sent.expected.token_ids, sent.expected.text):
                self.mistakes.append(f"{sent.id}: {answer.token_ids} instead of {sent.expected.token_ids}")


def _make_next_turn(request: Request, answer: ExpectedAnswer, other: Request) -> Request:
    """Return the next turn: the prompt, its answer, and some more tokens."""
    more = list(other.token_ids or ())[:8] or [5]
    token_ids = [*(request.token_ids or ()), *answer.token_ids, *more]
    return Request(id=f"{request.id}-again", token_ids=token_ids, sampling=request.sampling, tenant=request.tenant)
