"""The requests of `benchmarks.soak`, and what they should be answered."""

import random
from collections import deque
from dataclasses import dataclass

from penstock.client.sync import Client
from penstock.errors import RequestError, StreamExpired, StreamTimeout
from penstock.messages import Request
from sim.workload import ExpectedAnswer, compute_answers, make_requests

KNOWN = 20
"""Requests whose answer is worked out beforehand; so many again continue the first ones' answers."""
TENANTS = 4
UNDER_WAY = 6
NEW_TOKENS = (100, 300)
_OFTEN = 0.4
"""Share of the requests that are known ones."""
_STUCK_S = 60.0


@dataclass(frozen=True)
class Sent:
    """A request under way."""

    id: str
    expected: ExpectedAnswer | None


class Load:
    """Sends, reads and compares."""

    def __init__(self) -> None:
        self.answered = self.compared = self.stuck = 0
        self.wrong: list[str] = []
        """What was not as it should be, in words."""
        self._chance = random.Random(11)
        self._under_way: deque[Sent] = deque()
        first = make_requests(KNOWN, "soak")
        answers = compute_answers(first)
        further = [_continued(request, answers[request.id], first[0]) for request in first]
        self._known = first + further
        self._answers = answers | compute_answers(further)

    def keep_up(self, client: Client) -> None:
        """As many under way as there should be; then the end of the oldest one."""
        while len(self._under_way) < UNDER_WAY:
            self._under_way.append(self._send(client))
        self._take(client)

    def finish(self, client: Client) -> None:
        """The end of all."""
        while self._under_way:
            self._take(client)

    def _send(self, client: Client) -> Sent:
        chance, tenant = self._chance, f"tenant-{self._chance.randrange(TENANTS)}"
        if chance.random() < _OFTEN:
            known = chance.choice(self._known)
            fields = known.sampling.model_dump(exclude_defaults=True)
            sent = client.submit(token_ids=list(known.token_ids or ()), tenant=tenant, **fields)
            return Sent(sent, self._answers[known.id])
        token_ids = [chance.randrange(3, 1000) for _ in range(chance.randint(*NEW_TOKENS))]
        return Sent(client.submit(token_ids=token_ids, tenant=tenant, max_tokens=16, temperature=0.8, seed=1), None)

    def _take(self, client: Client) -> None:
        sent = self._under_way.popleft()
        try:
            answer = client.result(sent.id, timeout_s=_STUCK_S)
        except StreamTimeout:
            self.stuck += 1
            return
        except (RequestError, StreamExpired) as error:
            self.wrong.append(f"{sent.id}: {type(error).__name__}: {error}")
            return
        self.answered += 1
        if sent.expected is not None:
            self.compared += 1
            if (answer.token_ids, answer.text) != (sent.expected.token_ids, sent.expected.text):
                self.wrong.append(f"{sent.id}: {answer.token_ids} instead of {sent.expected.token_ids}")


def _continued(request: Request, answer: ExpectedAnswer, other: Request) -> Request:
    """The next turn: the prompt, what was answered, and something more."""
    more = list(other.token_ids or ())[:8] or [5]
    token_ids = [*(request.token_ids or ()), *answer.token_ids, *more]
    return Request(id=f"{request.id}-again", token_ids=token_ids, sampling=request.sampling, tenant=request.tenant)
