"""The endpoints of a worker: their addresses and weights, how much each has to do, and whether it can be asked.

An endpoint that fails is left alone for a time that doubles with each further failure, and then tried with one request.
One that says that it is busy is left alone for as long as it says. Nothing here does I/O, and only the loop calls it.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.errors import SettingsError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""How long an endpoint is left alone after its first failure, and at most after many."""
MAX_DOUBLINGS = 10
"""How often the pause doubles at most: by then it is `MAX_PAUSE_S`, and `2**n` of many failures fits no float."""
MAX_TOLD_PAUSE_S = 3600.0
"""The longest time that an endpoint may ask to be left alone."""
VARIABLE = "PENSTOCK_ENDPOINT_URLS"


@dataclass(eq=False)
class Endpoint:
    """A server that is asked. Times are by the monotonic clock."""

    url: str
    """Its base address, with the path before `/completions`."""
    weight: float = 1.0
    max_requests: int = 32
    num_running: int = 0
    num_failures: int = 0
    """Failures since it last answered."""
    failed_at_s: float = -math.inf
    """When the last failure was counted."""
    paused_until_s: float = -math.inf
    problem: str = ""
    """Why it is left alone, or was last; empty once it has answered."""
    continues_chats: bool | None = None
    """Whether it goes on with the last turn of a chat; None until it was asked."""

    def count_free(self, now_s: float) -> int:
        """Return how many more requests it can be given. After a failure that is one, until it has answered."""
        if now_s < self.paused_until_s:
            return 0
        return max(0, (1 if self.num_failures else self.max_requests) - self.num_running)

    def note_answer(self) -> None:
        """Note that it answers."""
        self.num_failures, self.problem = 0, ""

    def note_failure(self, problem: str, asked_s: float, now_s: float) -> None:
        """Note that a request failed that was sent at `asked_s`.

        Requests that were under way together fail together, and count as one failure.
        """
        if asked_s > self.failed_at_s:
            pause_s = min(FIRST_PAUSE_S * 2 ** min(self.num_failures, MAX_DOUBLINGS), MAX_PAUSE_S) * random.uniform(
                0.8, 1.0
            )
            self.num_failures += 1
            self.failed_at_s, self.problem = now_s, problem
            self.paused_until_s = max(self.paused_until_s, now_s + pause_s)

    def note_busy(self, problem: str, wait_s: float, now_s: float) -> None:
        """Note that it wants to be left alone for `wait_s`. That is no failure."""
        self.problem = problem
        self.paused_until_s = max(self.paused_until_s, now_s + min(wait_s, MAX_TOLD_PAUSE_S))


@dataclass
class Endpoints:
    """All endpoints of a worker."""

    all: Sequence[Endpoint]
    clock: Callable[[], float] = field(default=time.monotonic)

    def count_free(self) -> int:
        """Return how many more requests all together can be given now."""
        return sum(endpoint.count_free(self.clock()) for endpoint in self.all)

    def choose(self) -> Endpoint | None:
        """Return the endpoint with the least to do for its weight; None where none can be asked now."""
        now_s = self.clock()
        free = [endpoint for endpoint in self.all if endpoint.count_free(now_s) > 0]
        return min(free, key=lambda one: (one.num_running + 1) / one.weight, default=None)

    @property
    def current_problem(self) -> str:
        """Why no endpoint can be asked now; empty where one can, or has only as much to do as it may."""
        now_s = self.clock()
        if any(now_s >= endpoint.paused_until_s and not endpoint.num_failures for endpoint in self.all):
            return ""
        return "; ".join(f"{endpoint.url}: {endpoint.problem}" for endpoint in self.all if endpoint.problem)


def parse_urls(text: str, max_requests: int) -> list[Endpoint]:
    """Return the endpoints of a setting: `http://host:8000,https://other/openai/v1#2`. Raises `SettingsError`."""
    found = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        parts = urlsplit(one)
        try:
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            weight = float(parts.fragment or 1)
        except ValueError:
            is_valid, weight = False, 1.0
        if not is_valid or parts.query or parts.username or not 0 < weight < math.inf:
            raise SettingsError(
                f"{VARIABLE}: {one!r} is not http://HOST:PORT or https://HOST/PATH, with #WEIGHT or not"
            )
        path = parts.path.rstrip("/") or "/v1"
        found.append(Endpoint(f"{parts.scheme}://{parts.netloc}{path}", weight, max_requests))
    if not found:
        raise SettingsError(f"{VARIABLE} names no server: http://HOST:8000")
    if len({endpoint.url for endpoint in found}) < len(found):
        raise SettingsError(f"{VARIABLE} names a server twice; #WEIGHT at its end gives it more requests")
    return found
