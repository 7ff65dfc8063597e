"""Chooses the partition of a request: one that the worker reads which gives its first token soonest.

A worker's pool holds the KV of what it computed last. So a request costs a worker less that got its beginning a moment
ago, and a producer remembers what it sent where. The work that is left is what the worker's last heartbeat said, and
what this producer has sent there since. It counts in seconds, as long as this worker takes for it now: workers are not
equally fast, and what they decode slows prompts. Producers do not talk, and see nothing of what the others sent: a chat
has a home among the workers by a hash, the same for all producers, and stays there unless that costs much more.

This changes only the speed. The record in Redis decides which worker answers a request, in whatever partition it is. A
prefix that is in no pool is found in the tiers below, or computed. Where no fresh heartbeat is known, a hash over all
partitions chooses. `docs/protocol.md` has the rule for producers in other languages.
"""

import hashlib
import json
import math
import statistics
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.messages import ChatMessage, Request
from penstock.names import CLASSES, PriorityClass
from penstock.worker_speed import WorkerSpeed

PIECE_CHARS, PIECE_TOKENS = 256, 64
"""The first pieces of a prompt whose ends are links: of a text, and of token ids, at about four characters a token."""
PIECES_OF_A_LENGTH = 8
"""After so many pieces their length doubles: few links reach far into a long prompt."""
MAX_LINKS = 64
CHARS_PER_TOKEN = 4.0
"""Where no worker has told its mean."""
TOKEN_S = 0.001
"""Seconds of a prompt token where no worker has told any."""
SPEED_STEP = 1.5
"""Homes are shared by speed in powers of this. Measurements of equal workers differ by less: they count as equal, and
homes stay where they are when a worker measures anew."""
HOME_PROMPTS = 3
"""By how many prompts of its own length, as the best worker computes them, a request's home may be later before it goes
there: other producers sent the earlier turns home, and will look for this one there; and queues are known but from a
second ago, without what others sent since. With less, a chat that leaves has its prompt computed anew, which makes
queues that others leave."""
MEMORY_S = 120.0
"""For how long a worker is taken to have what was sent to it."""
MAX_REMEMBERED_LINKS = 2**16
MAX_SENT_S = 5.0
"""How long a request counts as sent where no heartbeat has come since."""
ON_THE_WAY_S = 0.1
"""How long before a heartbeat a request may have been sent that is not counted in it yet."""
MAX_TOLD_WORKERS = 16


class Link(NamedTuple):
    """A beginning of a prompt."""

    digest: bytes
    """The hash of all up to its end, and of the tenant."""
    length: int
    """In characters, or in tokens where the prompt is token ids."""


@dataclass(frozen=True)
class PromptChain:
    """The beginnings of a request's prompt, from the shortest to the longest. It is no part of the written message."""

    priority_class: PriorityClass
    home: bytes
    """Names a worker by a hash: that of the session, else of the prompt up to the end of the first user message; of a
    text, or of token ids, the first piece."""
    links: tuple[Link, ...]
    length: int
    """Characters or tokens of the whole prompt."""
    is_tokens: bool = False
    hash_key: bytes = b""
    """In place of home where no heartbeat is known, if it is not empty: the last link of a text or of token ids without
    a session, as many of these may begin alike and would all be in one partition."""
    explain: Callable[[str], object] | None = field(default=None, compare=False)
    """Is called with the JSON of what was chosen."""
    model: str = ""
    """The model that is asked for. Where it is an adapter, only workers that have it are considered."""


@dataclass(frozen=True)
class JobNeed:
    """What a job needs of the worker that goes on with its request. It is no part of the written message."""

    priority_class: PriorityClass
    num_blocks: int
    """KV blocks of its tokens."""
    sender: str = ""
    """The worker that hands it off, as its heartbeat is named, if it reads jobs too."""


def chain_prompt(request: Request, explain: Callable[[str], object] | None = None) -> PromptChain:
    """Return what a request begins with.

    A link ends each piece, and each message. Pieces have 256 characters, or 64 tokens, and double after every eighth
    link. Tenants share no KV, so they share no link.
    """
    digest, links, home, length = _begin_digest(request.tenant), list[Link](), b"", 0
    parts = _list_parts(request)
    for opening, content in parts:
        digest.update(opening)
        length, start = length + len(content), 0
        while start < len(content) and len(links) < MAX_LINKS:
            first = PIECE_CHARS if isinstance(content, str) else PIECE_TOKENS
            piece = content[start : start + (first << len(links) // PIECES_OF_A_LENGTH)]
            digest.update(piece.encode() if isinstance(piece, str) else struct.pack(f"<{len(piece)}I", *piece))
            links.append(Link(digest.copy().digest()[:16], (links[-1].length if links else 0) + len(piece)))
            start += len(piece)
        if not home and opening in (b"", USER_OPENING):
            home = links[0 if opening == b"" else -1].digest if links else b""
    if request.session is not None:
        session = _begin_digest(request.tenant)
        session.update(b"session" + request.session.encode())
        home = session.digest()[:16]
    home = home or digest.digest()[:16]
    is_tokens = not any(isinstance(content, str) for _, content in parts)
    is_alone = request.session is None and request.messages is None
    hash_key = links[-1].digest if is_alone and links else b""
    return PromptChain(
        request.priority_class or "interactive", home, tuple(links), length, is_tokens, hash_key, explain,
        request.model or "",
    )  # fmt: skip


def _name_links(links: Sequence[Link], adapter: str) -> tuple[Link, ...]:
    """Return the links of a prompt that an adapter computes: its KV is no other adapter's."""
    opening = _open_part(adapter)
    return tuple(Link(hashlib.sha256(opening + link.digest).digest()[:16], link.length) for link in links)


def _begin_digest(tenant: str) -> Any:
    return hashlib.sha256(b"penstock chain 1" + _open_part(tenant))


def _open_part(name: str) -> bytes:
    encoded = name.encode()
    return len(encoded).to_bytes(4, "big") + encoded


USER_OPENING = _open_part("user")


def _list_parts(request: Request) -> Collection[tuple[bytes, str | list[int]]]:
    if request.messages is not None:
        return [(_open_part(message.role), _write_content(message)) for message in request.messages]
    if request.texts is not None:
        return [(b"", text) for text in request.texts]
    return [(b"", request.prompt if request.token_ids is None else request.token_ids)]  # type: ignore[list-item]


def _write_content(message: ChatMessage) -> str:
    """Return a turn's content with the digest of each picture in its place."""
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else f"\n{part.digest}\n" for part in content)


def count_prompt_chars(request: Request) -> int:
    """Return the length of a prompt in characters, as its chain has it; 0 where it has token ids."""
    contents = [content for _, content in _list_parts(request)]
    return sum(map(len, contents)) if all(isinstance(content, str) for content in contents) else 0


@dataclass(frozen=True)
class WorkerBeat:
    """The heartbeat of a worker that reads requests, as far as a placer needs it."""

    worker: str
    at_s: float
    """When it was written, by the placer's clock."""
    stale_s: float
    """When it is too old to tell anything."""
    partitions: Mapping[PriorityClass, Sequence[int]]
    """Those that the worker reads."""
    waiting_tokens: Mapping[PriorityClass, int]
    """Prompt tokens left to compute, those of messages that wait in its partitions included."""
    chars_per_token: float | None = None
    speed: WorkerSpeed | None = None
    """None where it is not known."""
    jobs: "JobLoad | None" = None
    """None where it does not tell which jobs it reads."""
    mean_prompt_tokens: float | None = None
    """Of its interactive requests; None before the first one."""
    takes_requests: bool = False
    """Whether it takes interactive requests now, or soon."""
    adapters: Collection[str] = ()
    """The names of the adapters that it has."""


class JobLoad(NamedTuple):
    """What a heartbeat tells of jobs."""

    partitions: Mapping[PriorityClass, Sequence[int]]
    """Those that the worker reads."""
    num_waiting: int
    """Jobs that wait in them, or in the worker."""
    free_blocks: int
    """KV blocks of its pool that can be allocated."""


class Placement(NamedTuple):
    """The partition that was chosen, and why."""

    partition: int
    worker: str = ""
    """Empty where no worker's heartbeat was fresh: the hash has chosen."""
    home: str = ""
    """The worker that is chosen as long as it has not much more to do."""
    costs: Mapping[str, float] = {}
    """By worker that was considered: in how many seconds it would have computed this prompt, behind those before it."""
    num_cached: int = 0
    """How many of the prompt's tokens the worker should have."""

    def describe_choice(self) -> str:
        """Return it as JSON, with the least costs only where there are many."""
        if not self.worker:
            return json.dumps({"partition": self.partition, "why": "hash"})
        least = sorted(self.costs.items(), key=lambda one: one[1])[:MAX_TOLD_WORKERS]
        costs = {worker: float(f"{seconds:.4g}") for worker, seconds in least}
        why = "home" if self.worker == self.home else "least work left"
        return json.dumps(
            {"partition": self.partition, "worker": self.worker, "why": why, "home": self.home,
             "cached": self.num_cached, "costs": costs}
        )  # fmt: skip


class _SentTokens:
    """Uncached prompt tokens that were sent to one worker since its heartbeat."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, PriorityClass, int]] = deque()
        self.totals = dict.fromkeys(CLASSES, 0)

    def add_tokens(self, now_s: float, priority_class: PriorityClass, num_tokens: int) -> None:
        self._sent.append((now_s, priority_class, num_tokens))
        self.totals[priority_class] += num_tokens

    def drop_before(self, at_s: float) -> None:
        while self._sent and self._sent[0][0] < at_s:
            _, priority_class, num_tokens = self._sent.popleft()
            self.totals[priority_class] -= num_tokens


class PrefixMemory:
    """Remembers for a while which of several places was sent which beginnings of prompts. It is bounded."""

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._sent: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        """By link: when which place was sent requests that have it."""

    def find_hits(self, links: Sequence[Link], places: Collection[str], now_s: float) -> dict[str, int]:
        """Return by place, of those given, how much of a prompt it was sent, in the unit of the links."""
        hits = dict[str, int]()
        for digest, length in reversed(links):
            for place, sent_s in self._sent.get(digest, {}).items():
                if place not in hits and place in places and now_s - sent_s <= self._memory_s:
                    hits[place] = length
            if len(hits) >= len(places):
                break
        return hits

    def note_sent(self, links: Sequence[Link], place: str, places: Collection[str], now_s: float) -> None:
        """Note that a place is sent a prompt. Of places that are not among `places` any more, nothing is kept."""
        memory = self._sent
        for digest, _ in links:
            sent = memory.setdefault(digest, {})
            sent[place] = now_s
            memory.move_to_end(digest)
            if len(sent) > len(places):
                memory[digest] = {one: sent[one] for one in sent if one in places}
        while memory:
            oldest_s = max(next(iter(memory.values())).values())
            if len(memory) <= MAX_REMEMBERED_LINKS and now_s - oldest_s <= self._memory_s:
                break
            memory.popitem(last=False)


class _Pace(NamedTuple):
    """What a placer reckons with of a worker's speed."""

    token_s: float
    """Seconds of a prompt token now."""
    step_s: float
    """Seconds of a step now that has the worker's rows."""
    row_s: float
    """Seconds that one more row adds to it."""
    weight: float
    """Its share of the homes, beside those of other workers."""


def _compute_mean(values: Iterable[float | None], usual: float) -> float:
    """Return the mean of what is known; `usual` where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else usual


def _find_paces(speeds: Mapping[str, WorkerSpeed | None]) -> dict[str, _Pace]:
    """Return the paces of workers. Where one does not tell something, it is as with the others on the mean."""
    told = [speed for speed in speeds.values() if speed is not None]
    token_s = _compute_mean((speed.prompt_token_s for speed in told), TOKEN_S)
    step_s = _compute_mean((speed.estimate_step_s() for speed in told), 0.0)
    row_s = _compute_mean((speed.row_s for speed in told), TOKEN_S)
    usual_s = statistics.median_low([speed.idle_prompt_token_s for speed in told]) if told else 0.0
    paces = dict[str, _Pace]()
    for worker, speed in speeds.items():
        if speed is None:
            paces[worker] = _Pace(token_s, step_s, row_s, 1.0)
        else:
            power = round(math.log(usual_s / speed.idle_prompt_token_s, SPEED_STEP))
            own_step_s = speed.estimate_step_s()
            paces[worker] = _Pace(
                speed.prompt_token_s,
                step_s if own_step_s is None else own_step_s,
                speed.row_s or row_s,
                SPEED_STEP**power,
            )
    return paces


def average_token_s(speeds: Mapping[str, WorkerSpeed | None]) -> float | None:
    """Return the seconds of a prompt token now, on the mean over workers as often as homes are theirs; None where no
    worker tells any.
    """
    if not any(speeds.values()):
        return None
    paces = _find_paces(speeds).values()
    return sum(pace.weight * pace.token_s for pace in paces) / sum(pace.weight for pace in paces)


class Placer:
    """Chooses the partitions of one producer's requests. The caller locks, and gives the time of any steady clock."""

    def __init__(self) -> None:
        self._beats: dict[str, WorkerBeat] = {}
        self._paces: dict[str, _Pace] = {}
        self._sent: dict[str, _SentTokens] = {}
        self._sent_jobs: dict[str, deque[tuple[float, int]]] = {}
        """By worker: when jobs were sent there since its heartbeat, and the blocks of each."""
        self._chars_per_token = CHARS_PER_TOKEN
        self._memory = PrefixMemory()

    def note_beats(self, beats: Iterable[WorkerBeat]) -> None:
        """Note the last heartbeats of all workers. They have what was sent before them."""
        self._beats = {beat.worker: beat for beat in beats}
        readers = {worker: any(beat.partitions.values()) for worker, beat in self._beats.items()}
        self._paces = {}
        for reads in (False, True):  # a worker that decodes alone is no measure for those that read requests
            alike = {worker: self._beats[worker].speed for worker in readers if readers[worker] == reads}
            self._paces |= _find_paces(alike)
        self._sent = {worker: self._sent.get(worker) or _SentTokens() for worker in self._beats}
        sent_jobs, self._sent_jobs = self._sent_jobs, {}
        for worker, beat in self._beats.items():
            since_s = beat.at_s - ON_THE_WAY_S
            self._sent[worker].drop_before(since_s)
            self._sent_jobs[worker] = deque(one for one in sent_jobs.get(worker, ()) if one[0] >= since_s)
        told = [beat.chars_per_token for beat in self._beats.values() if beat.chars_per_token]
        self._chars_per_token = sum(told) / len(told) if told else CHARS_PER_TOKEN

    def choose_job_partition(self, job: JobNeed, key: str, partitions: Sequence[int], now_s: float) -> int | None:
        """Choose one of `partitions` for a job, and count the job as sent there; return None where the hash of its key
        decides: no heartbeat is fresh, or one is of a version that does not tell of jobs.

        Among the workers whose pools have room for its blocks, or among all where none has, it is the one whose steps
        take least with the job in them; jobs that wait there, and those that were sent there since, count as rows. The
        job does not return to its sender where another worker reads jobs.
        """
        fresh = {worker: beat.jobs for worker, beat in self._beats.items() if now_s < beat.stale_s}
        if None in fresh.values():
            return None
        readable, costs, read = frozenset(partitions), dict[str, tuple[bool, float, bytes]](), dict[str, set[int]]()
        for worker, load in fresh.items():
            assert load is not None
            if mine := readable.intersection(load.partitions[job.priority_class]):
                sent = self._sent_jobs[worker]
                while sent and sent[0][0] < now_s - MAX_SENT_S:
                    sent.popleft()
                is_full = load.free_blocks - sum(num_blocks for _, num_blocks in sent) < job.num_blocks
                pace, num_more = self._paces[worker], load.num_waiting + len(sent) + 1
                chance = hashlib.sha256(f"{key} {worker}".encode()).digest()
                costs[worker], read[worker] = (is_full, pace.step_s + num_more * pace.row_s, chance), set(mine)
        if not costs:
            return None
        if len(costs) > 1:  # its heartbeat may tell of room that it had before it handed the job off
            costs.pop(job.sender, None)
        chosen = min(costs, key=costs.__getitem__)
        self._sent_jobs[chosen].append((now_s, job.num_blocks))
        return choose_by_hash(key.encode(), sorted(read[chosen]))

    def choose_partition(self, chain: PromptChain, partitions: Sequence[int], now_s: float) -> Placement:
        """Choose one of `partitions`, which are those that can be written, and count the request as sent there.

        A request for an adapter goes to a worker that has it, where one tells so, and shares no link with others. A
        worker's cost is the seconds that it takes for a step with the answers that it decodes, for the work of this
        class and those above that it has left, and for the tokens of this prompt that it does not have. The home is
        chosen unless it costs more than another worker by more than the other one takes for `HOME_PROMPTS` such
        prompts; else the least cost, of equal ones the worker that the home's hash names first.
        """
        readable = frozenset(partitions)
        read = {
            worker: mine
            for worker, beat in self._beats.items()
            if now_s < beat.stale_s and (mine := readable.intersection(beat.partitions[chain.priority_class]))
        }
        if not read:
            return Placement(choose_by_hash(chain.hash_key or chain.home, partitions))
        links = chain.links
        if having := [worker for worker in read if chain.model in self._beats[worker].adapters]:
            read = {worker: read[worker] for worker in having}
            links = _name_links(links, chain.model)
        ratio = 1.0 if chain.is_tokens else self._chars_per_token
        hits = self._memory.find_hits(links, read, now_s)
        classes = CLASSES[: CLASSES.index(chain.priority_class) + 1]
        costs = dict[str, float]()
        order = sorted(read, key=lambda worker: rank_worker(chain.home, worker, self._paces[worker].weight))
        for worker in order:
            self._sent[worker].drop_before(now_s - MAX_SENT_S)
            waiting, sent = self._beats[worker].waiting_tokens, self._sent[worker].totals
            left = sum(waiting[priority_class] + sent[priority_class] for priority_class in classes)
            left += round((chain.length - hits.get(worker, 0)) / ratio)
            costs[worker] = self._paces[worker].step_s + left * self._paces[worker].token_s
        home, best = order[0], min(order, key=costs.__getitem__)
        limit_s = HOME_PROMPTS * round(chain.length / ratio) * self._paces[best].token_s
        chosen = home if costs[home] - limit_s <= costs[best] else best
        hit = hits.get(chosen, 0)
        self._sent[chosen].add_tokens(now_s, chain.priority_class, round((chain.length - hit) / ratio))
        self._memory.note_sent(links, chosen, self._beats, now_s)
        return Placement(choose_by_hash(chain.home, sorted(read[chosen])), chosen, home, costs, round(hit / ratio))


def rank_worker(home: bytes, worker: str, weight: float) -> tuple[float, bytes]:
    """Return a worker's rank for a home: the least one has it, which is by chance and as often as the weights say.

    Among equal weights the order is that of the hashes. A worker that comes takes homes from all in proportion, and one
    that goes leaves its own; all others stay where they are.
    """
    digest = hashlib.sha256(home + worker.encode()).digest()
    return -math.log1p(-int.from_bytes(digest[:6], "big") / 2**48) / weight, digest


def choose_by_hash(home: bytes, partitions: Iterable[int]) -> int:
    """Return the partition that a home comes to by rendezvous hashing. It is the same in every process.

    A partition that is added takes its part of the homes, and one that is lost gives up its own; all others stay where
    they are.
    """
    return min(partitions, key=lambda partition: hashlib.sha256(home + partition.to_bytes(4, "big")).digest())
