"""The endpoints of a worker: their addresses and weights, the load of each, and whether it can be asked.

An endpoint rests when it cannot be reached, and when it has refused three different requests alike without an answer in
between. It rests for a time that doubles with each further failure, or for the pause that it asked for. After a failure
it is tried with one request. A refusal of one request proves nothing about the endpoint (`Refusal` in `engine.py`).
This module does no I/O, and only the loop changes its state.
"""

import math
import random
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.errors import SettingsError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Seconds that an endpoint rests after its first failure, and at most after many."""
MAX_DOUBLINGS = 10
"""The most doublings of the pause: by then it is `MAX_PAUSE_S`, and `2**n` of more failures would fit no float."""
MIN_REFUSED_REQUESTS = 3
"""The number of different requests, refused alike without an answer in between, that make it the endpoint's fault."""
MAX_TOLD_PAUSE_S = 3600.0
"""The longest time that an endpoint may ask to be left alone."""
MAX_TOLD_CHARS = 500
"""The most characters of an endpoint's message that the heartbeat repeats."""
UNREACHABLE = "unreachable"
"""The cause of a rest where no connection could be made."""
VARIABLE = "PENSTOCK_ENDPOINT_URLS"


@dataclass(eq=False)
class Endpoint:
    """A server that is asked. Times are by the monotonic clock."""

    url: str
    """Its base address, with the path before `/completions`."""
    weight: float = 1.0
    max_requests: int = 32
    key: str = field(default="", repr=False)
    """The API key that is sent to it; empty: none."""
    model: str = ""
    """The model's name there; empty: the one name that it has at all endpoints."""
    under_way: list[float] = field(default_factory=list)
    """The times at which the requests under way were sent to this endpoint."""
    answered_s: float = -math.inf
    """The time at which the newest request was sent that it has answered, at least in part."""
    refused: dict[str, dict[str, float]] = field(default_factory=dict)
    """By cause, the first requests that were refused since the last answer, each with the time at which it was sent."""
    num_failures: int = 0
    """Failures since it last answered."""
    failed_at_s: float = -math.inf
    """The time at which the last failure was counted."""
    paused_until_s: float = -math.inf
    cause: str = ""
    """The cause of its rest now, or of the last one, in one word: `unreachable`, or the cause of a refusal."""
    problem: str = ""
    """The cause in words, the endpoint's own if it gave any."""
    continues_chats: bool | None = None
    """Whether the endpoint continues the last turn of a chat; None until it was asked."""

    def count_free(self, now_s: float) -> int:
        """Return how many more requests the endpoint can get. After a failure it gets one, until it has answered."""
        if now_s < self.paused_until_s:
            return 0
        free = max(0, self.max_requests - len(self.under_way))
        is_tried = any(asked_s > self.failed_at_s for asked_s in self.under_way)
        return free if not self.num_failures else min(free, int(not is_tried))

    def note_answer(self, asked_s: float) -> None:
        """Note an answer to a request that was sent at `asked_s`: refusals before it were the fault of the requests."""
        self.answered_s = max(self.answered_s, asked_s)
        for cause, requests in list(self.refused.items()):
            self.refused[cause] = {one: at_s for one, at_s in requests.items() if at_s >= asked_s}
        if self.num_failures and not any(len(one) >= MIN_REFUSED_REQUESTS for one in self.refused.values()):
            self.num_failures = 0
            if self.cause != UNREACHABLE:
                self.paused_until_s = -math.inf

    def note_failure(self, cause: str, problem: str, asked_s: float, now_s: float) -> None:
        """Note that a request failed that was sent at `asked_s`.

        Requests that were under way together fail together, and count as one failure.
        """
        if asked_s > self.failed_at_s:
            self.paused_until_s = max(self.paused_until_s, now_s + draw_pause_s(self.num_failures))
            self.num_failures += 1
            self.failed_at_s, self.cause, self.problem = now_s, cause, problem

    def note_refusal(
        self, cause: str, problem: str, request_id: str, asked_s: float, now_s: float, wait_s: float | None = None
    ) -> None:
        """Note a refusal of a request that was sent at `asked_s`. The endpoint asked for a pause of `wait_s`, or none.

        If it refuses three different requests alike, and answers none that was sent between them, the fault is the
        endpoint's: the endpoint has failed, or is busy for as long as it says.
        """
        if self.cause == UNREACHABLE and asked_s > self.failed_at_s:
            self.num_failures = 0
        requests = self.refused.setdefault(cause, {})
        if asked_s >= self.answered_s and len(requests) < MIN_REFUSED_REQUESTS:
            requests.setdefault(request_id, asked_s)
        if len(requests) < MIN_REFUSED_REQUESTS:
            return
        first_s, last_s = min(requests.values()), max(requests.values())
        if any(first_s < other_s < last_s for other_s in self.under_way):
            return  # one of those may be answered yet
        if wait_s is None:
            self.note_failure(cause, problem, asked_s, now_s)
        else:  # that is no failure
            self.cause, self.problem = cause, problem
            self.paused_until_s = max(self.paused_until_s, now_s + wait_s)

    def is_resting(self, now_s: float) -> bool:
        """Return whether the endpoint rests, or is tried with one request."""
        return now_s < self.paused_until_s or self.num_failures > 0

    def describe_rest(self, now_s: float) -> dict[str, object]:
        """Return the address, and for a resting endpoint the cause and the seconds left; 0 while it is being tried."""
        if not self.is_resting(now_s):
            return {"url": self.url, "cause": "", "problem": "", "rests_s": 0.0}
        problem, rests_s = self.problem[:MAX_TOLD_CHARS], max(0.0, self.paused_until_s - now_s)
        return {"url": self.url, "cause": self.cause, "problem": problem, "rests_s": rests_s}


@dataclass
class Endpoints:
    """All endpoints of a worker."""

    all: Sequence[Endpoint]
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)

    def count_free(self) -> int:
        """Return how many more requests all together can be given now."""
        return sum(endpoint.count_free(self.clock()) for endpoint in self.all)

    def count_refusing(self) -> int:
        """Return how many endpoints rest because of their refusals, and not because they cannot be reached."""
        now_s = self.clock()
        return sum(endpoint.is_resting(now_s) and endpoint.cause != UNREACHABLE for endpoint in self.all)

    def choose(self, but_not: Container[Endpoint] = ()) -> Endpoint | None:
        """Return the endpoint with the least to do for its weight; None where none can be asked now."""
        now_s = self.clock()
        free = [endpoint for endpoint in self.all if endpoint not in but_not and endpoint.count_free(now_s) > 0]
        return min(free, key=lambda one: (len(one.under_way) + 1) / one.weight, default=None)

    @property
    def current_problem(self) -> str:
        """The reason why no endpoint can be asked now; empty if one can, or if one is only fully loaded."""
        rests = self.describe_rests()
        told = [f"{one['url']}: {one['problem']}" for one in rests if one["cause"]]
        return "; ".join(told) if len(told) == len(rests) else ""

    def describe_rests(self) -> list[dict[str, object]]:
        """Return the address of each endpoint, and why and for how long it rests. Any thread may call this."""
        return [endpoint.describe_rest(self.clock()) for endpoint in self.all]


def draw_pause_s(num_failures: int) -> float:
    """Return how long to wait after a failure, by the number of those before it."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures, MAX_DOUBLINGS), MAX_PAUSE_S) * random.uniform(0.8, 1.0)


def parse_urls(text: str, max_requests: int, keys: str = "", models: str = "") -> list[Endpoint]:
    """Return the endpoints of a setting: `http://host:8000,https://other/openai/v1#2`.

    `keys` is one key for all, or one for each in their order with commas between; so are `models`. Raises
    `SettingsError`.
    """
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
                f"{VARIABLE}: {one!r} is not http://HOST:PORT or https://HOST/PATH, optionally with #WEIGHT"
            )
        path = parts.path.rstrip("/") or "/v1"
        found.append(Endpoint(f"{parts.scheme}://{parts.netloc}{path}", weight, max_requests))
    if not found:
        raise SettingsError(f"{VARIABLE} names no server: write http://HOST:8000")
    if len({endpoint.url for endpoint in found}) < len(found):
        raise SettingsError(f"{VARIABLE} names a server twice; #WEIGHT at its end gives it more requests")
    for endpoint, key in zip(found, _split_keys(keys, len(found)), strict=True):
        endpoint.key = key
    if "," in models and len(found) > 1:
        names = _split_for_each("PENSTOCK_ENDPOINT_MODEL", models, len(found))
        if not all(names):
            raise SettingsError("PENSTOCK_ENDPOINT_MODEL has an empty name: write the model's name at each server")
        for endpoint, name in zip(found, names, strict=True):
            endpoint.model = name
    return found


def _split_keys(keys: str, count: int) -> list[str]:
    # What no header may have would fail each request, by an error of `http.client` with the key in its words.
    if not (keys.isascii() and keys.isprintable()):
        raise SettingsError("PENSTOCK_ENDPOINT_KEY has a line break or another character that no header may have")
    return _split_for_each("PENSTOCK_ENDPOINT_KEY", keys, count)


def _split_for_each(variable: str, text: str, count: int) -> list[str]:
    """Return the part of a setting that each of `count` servers has. Raises `SettingsError`, without the text."""
    if count == 1 or "," not in text:
        return [text] * count
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != count:
        raise SettingsError(
            f"{variable} has {len(parts)} parts for {count} servers: write one for all, or one for each in the order "
            f"of {VARIABLE}"
        )
    return parts
