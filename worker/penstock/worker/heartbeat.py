"""The heartbeat: a worker's state, written to Redis while it lives, and its lease on its name.

With several stream servers the first one alone has the heartbeats, and so decides on names.

One thread keeps a process alive, from its start on. It writes the heartbeats, renews the session of the worker object
that the process has (`penstock.record.session`), and looks whether the loop stands still (`penstock.worker.watch`). It
does nothing that may wait for longer than for Redis, whose calls have a time limit.
"""

import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import redis

from penstock.errors import ArithmeticDiffers, NameTaken, PenstockError
from penstock.names import WORKERS_KEY, Pipeline, WorkerKind
from penstock.record import Session
from penstock.redis.client import is_away, learn_pace, redis_client
from penstock.redis.scripts import ScriptCall, load_script
from penstock.telemetry.seconds import Work
from penstock.worker.account import SecondsAccount
from penstock.worker.watch import DEFAULT_STALL_LIMIT_S, LoopWatch

log = logging.getLogger(__name__)

BEAT = load_script("penstock.worker", "beat")
DECODING_KINDS: tuple[WorkerKind, ...] = ("decode", "auto")
TAKE_PAUSE_S = 0.1
"""How long a process waits before it tries to take a name again."""
GOODBYE_TTL_S = 60.0
"""How long Redis remembers that a worker left in good order and was not lost."""


class Heartbeat:
    """A Redis key with this worker's state, renewed by a thread. It expires soon after the process dies.

    A beat that is due about when the session's renewal is goes with it in one round trip.

    The value is a JSON object: stage, name, host, pid, token (tells apart containers with one host name and process
    id), model (the name by which callers ask for it), model_source (its directory or hub name, where its tokenizer is
    found), max_model_len (tokens of prompt and answer together), adapters (the digest of each LoRA adapter by name),
    response_template (of the model's tokenizer, if it has one), kafka (the brokers it reads from, empty on Redis
    Streams), state (`loading`, `ready`, `degraded`, `draining`), reason (why it is degraded), progress (0 to 1, while
    loading), running, waiting, load (in tokens, see `load.py`), arithmetic (how a worker with a model of its own
    rounds, see `declare_arithmetic`), fingerprint (of the model's weights and that; `… and the batch` where tokens
    depend on what is computed beside them, too), pool and kv (blocks), retention (see `report_retentions`),
    resident_bytes (of a process with a model), recent (see `penstock.telemetry.recent`), since (seconds since the epoch
    by the clock of Redis, as hosts' clocks may be changed), lease_ms (for how long it was written: with the key's time
    to live this says how old it is, by one clock).
    """

    def __init__(
        self,
        url: str,
        pipeline: Pipeline,
        stage: str,
        name: str,
        interval_s: float,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
    ) -> None:
        self.watch = LoopWatch(stall_limit_s)
        self._redis, self._pipeline, self._stage = redis_client(url), pipeline, stage
        self._interval_s, self._token = interval_s, uuid.uuid4().hex
        self._since_s: float | None = None
        self._status: dict[str, object] = {
            "stage": stage, "host": socket.gethostname(), "pid": os.getpid(),
            "token": self._token, "state": "loading", "progress": 0.0,
        }  # fmt: skip
        self.state = "loading"
        """The state of the last beat, whether it could be written or not."""
        self.kinds_decoding: frozenset[WorkerKind] = frozenset()
        """The kinds of the other workers that decode, as of the last beat. Known where this one may hand requests to
        them."""
        self._logged = ("", -1)
        self._load: Callable[[], dict[str, object]] = dict
        self._account: SecondsAccount | None = None
        self._wake = threading.Event()
        self._writing = threading.Lock()
        """Held from when a beat's fields are read until it is written, so that no older beat follows a newer one."""
        self._due_s = 0.0
        """When the next beat is due, by the monotonic clock."""
        self._session: Session | None = None
        self._ended = self._is_written = False
        self._failure: NameTaken | None = None
        self._is_mix_accepted = False
        self._declared, self._answered = False, threading.Event()
        """Whether the arithmetic is in the heartbeat, and whether Redis has said if it may be."""
        self._different: _Different | None = None
        self._set_name(name)
        self._thread = threading.Thread(target=self._run, name="penstock-session", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def update_status(self, *, now: bool = False, **status: object) -> None:
        """Change fields of the heartbeat. With `now` it is written at once."""
        self._status.update(status)
        if now:
            self._due_s = 0.0
            self._wake.set()

    def keep_session(self, session: Session) -> None:
        """Renew a session on the first server until it is stopped. A worker has one session at a time."""
        self._session = session
        self._wake.set()

    def set_load_source(self, load: Callable[[], dict[str, object]]) -> None:
        """Call `load` at each beat for fields that change all the time. A ready worker with a `reason` is degraded."""
        self._load = load

    def keep_account(self, kind: WorkerKind, model: str, seconds: Callable[[], dict[Work, float]]) -> None:
        """Write down what this process's seconds are spent on, from now on; see `SecondsAccount`."""
        self._account = SecondsAccount(self._pipeline, kind, model, self._token, seconds)

    def report_progress(self, what: str, share: float) -> None:
        """Report the progress of a long load to the heartbeat and, every tenth of it, to the log."""
        if (what, int(share * 10)) != self._logged:
            self._logged = (what, int(share * 10))
            log.info("%s: %.0f%%", what, share * 100)
        self.update_status(doing=what, progress=round(share, 3))

    def take_name(self, *, next_free: bool = False) -> str:
        """Take the worker's name before anything is opened under it, and return it. The heartbeat is the lease on it.

            1  a name that nobody holds is taken at once
            2  one that is held is waited for, until its lease ends (its process was killed) or is renewed (it lives)
            3  where it lives, `next_free` takes the first name that is free, counting up: `prefill-0`, `prefill-1`, ...

        A crash after any of them costs a lease: then the name is free again. Raise `NameTaken` where the name's process
        lives, and `redis.RedisError`.
        """
        base, _, number = self.name.rpartition("-")
        self._wait_for_redis()
        holder = self._try_name()  # 1
        last_ms = holder.lease_ms if holder else 0
        while holder is not None and 0 <= holder.lease_ms <= last_ms:  # 2
            last_ms = holder.lease_ms
            time.sleep(min(last_ms / 1000 + 0.001, TAKE_PAUSE_S))
            first, holder = holder, self._try_name()
            if holder is not None and holder.token != first.token:
                break
        if holder is not None and not (next_free and base and number.isdecimal()):
            raise self._build_name_error(holder)
        slot = int(number) if number.isdecimal() else 0
        while holder is not None:  # 3
            slot += 1
            self._set_name(f"{base}-{slot}")
            holder = self._try_name()
        return self.name

    def declare_arithmetic(self, arithmetic: str, *, is_mix_accepted: bool = False) -> None:
        """Say in the heartbeat by which arithmetic this worker computes, once a beat has compared it with the others'.

            1  a beat with the words is written where no living worker of the pipeline has others, or one has the same
            2  else the one that has others is waited for, until its lease ends (its process was killed) or is renewed
            3  where it lives, this worker must not serve, unless the mix is accepted: then 1 is done, and logged

        A crash after any of them costs a lease: then the words are gone. The first beat decides between two workers
        that start at once. Heartbeats without words are of workers without a model, or of an older version: they differ
        from none. Raises `ArithmeticDiffers`, and `NameTaken` where another process has this worker's name by now.
        """
        self._is_mix_accepted = is_mix_accepted
        other = self._try_arithmetic(arithmetic)  # 1
        while other is not None:
            last = other
            time.sleep(min(last.lease_ms / 1000 + 0.001, TAKE_PAUSE_S))
            other = self._try_arithmetic(arithmetic)  # 2
            if other is not None and (other.token != last.token or other.lease_ms > last.lease_ms):
                raise ArithmeticDiffers(  # 3
                    f"{self.name} computes in {arithmetic}, and {other.name} of pipeline {self._pipeline.name} in "
                    f"{other.arithmetic}: an answer's tokens would depend on which of them goes on with it. Give both "
                    "the same PENSTOCK_ENGINE_DTYPE, …_WEIGHTS, …_PREFILL_WEIGHTS and …_KV_DTYPE; where processors "
                    "differ also a PENSTOCK_ENGINE_ISA that all have, or float32, whose tokens agree everywhere; or "
                    "accept it with PENSTOCK_ENGINE_MIXED=1"
                )

    def _try_arithmetic(self, arithmetic: str) -> "_Different | None":
        """Have a beat with the words written, and return None; return a worker that has others if that was refused."""
        self._answered.clear()
        self.update_status(now=True, arithmetic=arithmetic)
        self.raise_failure()  # without a name there are no more beats, and no answer comes
        self._answered.wait()
        self.raise_failure()
        return None if self._declared else self._different

    def _wait_for_redis(self) -> None:
        """Return when Redis answers: a worker may be started before its servers."""
        is_told = False
        while True:
            try:
                learn_pace(self._redis)
                return
            except redis.RedisError as error:
                if not is_away(error):
                    raise
                if not is_told:
                    log.warning("waiting until Redis answers: %s", error)
                is_told = True
                time.sleep(TAKE_PAUSE_S)

    def write_beat(self) -> None:
        """Write a beat now. Raises `redis.RedisError`, and `NameTaken` if another process has the name by now."""
        if (holder := self._try_name()) is not None:
            raise self._build_name_error(holder)

    def raise_failure(self) -> None:
        """Raise `NameTaken` if the heartbeat's thread found that another process has the name by now."""
        if self._failure is not None:
            raise self._failure

    def _set_name(self, name: str) -> None:
        self.name = name
        self._status["name"] = name
        pipeline, stage = self._pipeline, self._stage
        self._keys = [pipeline.worker_key(stage, name), WORKERS_KEY, pipeline.left_key(stage, name)]

    def _try_name(self) -> "_Holder | None":
        """Write a beat, and return None; return the name's holder if that is another process."""
        with self._writing:
            beat = self._build_beat()
            beat.run(self._redis)
            return self._read_holder(beat)

    def _build_beat(self) -> ScriptCall:
        """Return the call that writes a beat. Raises `redis.RedisError` until Redis has been asked for its time."""
        if self._since_s is None:
            seconds, microseconds = self._redis.time()
            self._since_s = seconds + microseconds / 1e6
        lease_ms = int(self._interval_s * 4000)
        status = self._status | {"since": self._since_s, "lease_ms": lease_ms} | self._load()
        if status["state"] == "ready" and status.get("reason"):
            status["state"] = "degraded"
        self.state = str(status["state"])
        counted = [self._pipeline.worker_key(kind, "") for kind in DECODING_KINDS] if self._stage == "auto" else []
        compared = self._pipeline.worker_prefix if "arithmetic" in status and not self._declared else ""
        is_accepted = int(self._is_mix_accepted)
        args: list[str | int] = [self._token, json.dumps(status), lease_ms, compared, is_accepted, *counted]
        return ScriptCall(BEAT, self._keys, args)

    def _read_holder(self, beat: ScriptCall) -> "_Holder | None":
        """Return the name's holder if a beat was refused. Raises `redis.RedisError` if it was not written."""
        reply = beat.read_reply()
        is_compared = beat.args[3] != ""
        if len(reply) == 3:
            other: dict[str, Any] = json.loads(reply[0])
            self._different = _Different(str(other["token"]), other["name"], other["arithmetic"], int(reply[1]))
            del self._status["arithmetic"]
            self._due_s = 0.0  # this beat was not written
            self._answered.set()
            return None
        self._is_written = isinstance(reply[0], list)
        if self._is_written:
            self.kinds_decoding = frozenset(
                kind for kind, count in zip(DECODING_KINDS, reply[0], strict=False) if count
            )
            if len(reply) > 1:
                other = json.loads(reply[1])
                log.warning(
                    "%s computes in %s, and %s in %s (PENSTOCK_ENGINE_MIXED): neither reads the other's KV, and an "
                    "answer's tokens depend on which of them goes on with it",
                    self.name, self._status["arithmetic"], other["name"], other["arithmetic"],
                )  # fmt: skip
            if is_compared:
                self._declared = True
                self._answered.set()
            return None
        other = json.loads(reply[0])
        return _Holder(str(other.get("token")), str(other.get("host")), int(other.get("pid", 0)), int(reply[1]))

    def _build_name_error(self, holder: "_Holder") -> NameTaken:
        return NameTaken(
            f"{self.name} of pipeline {self._pipeline.name} runs already, on {holder.host} with pid {holder.pid}: stop "
            "that worker, or choose another PENSTOCK_WORKER_NAME"
        )

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            self.watch.end_stalled_process()
            session, now_s = self._session, time.monotonic()
            if session is not None and session.is_stopped:
                session = None
            # A beat is written up to this much earlier or later, to go with a renewal.
            slack_s = 0.0 if session is None else min(session.interval_s, self._interval_s) / 2
            if session is not None and session.due_s <= now_s:
                self._keep_alive(session, is_beat_due=self._due_s <= now_s + slack_s)
            elif self._failure is None and self._due_s + slack_s <= now_s:
                self._keep_alive(None, is_beat_due=True)
            due_s = math.inf if self._failure is not None else self._due_s + slack_s
            due_s = due_s if session is None else min(due_s, session.due_s)
            self._wake.wait(min(self.watch.look_interval_s, max(0.0, due_s - time.monotonic())))
        self._write_account(is_last=True)
        if self._is_written:
            with suppress(redis.RedisError):  # else it runs out
                BEAT.run(self._redis, self._keys, [self._token, "", int(GOODBYE_TTL_S * 1000), ""])

    def _keep_alive(self, session: Session | None, *, is_beat_due: bool) -> None:
        """Renew the session, if one is given, and write a beat, if one is due: both in one round trip."""
        if not is_beat_due or self._failure is not None:
            if session is not None:
                session.renew()
            return
        beat: ScriptCall | None = None
        with self._writing:
            self._due_s = time.monotonic() + self._interval_s  # before the state is read, which may be changed
            with self._handle_errors():
                beat = self._build_beat()
            if session is not None:
                session.renew(beat)
            if beat is not None:
                with self._handle_errors():
                    if beat.reply is None:  # the session was not renewed: the loop stands still, or the server was away
                        beat.run(self._redis)
                    if (holder := self._read_holder(beat)) is not None:
                        raise self._build_name_error(holder)
        self._write_account()

    def _write_account(self, *, is_last: bool = False) -> None:
        """Write what the seconds were spent on. While Redis is away, it waits for the next time."""
        if self._account is not None and self._is_written:
            with suppress(redis.RedisError):
                self._account.write(self._redis, is_last=is_last)

    @contextmanager
    def _handle_errors(self) -> Iterator[None]:
        """Handle the errors of a beat: the thread goes on."""
        try:
            yield
        except redis.RedisError as error:
            if self._is_written:
                log.warning("the heartbeat cannot be written: %s", error)
            self._is_written = False
        except NameTaken as error:  # `raise_failure` raises it in the loop
            self._failure = error
            self._answered.set()
        except Exception:  # a bug in a figure: without heartbeats a worker that works would look lost
            log.exception("the heartbeat could not be built; the worker goes on, and tries the next one")


class _Holder(NamedTuple):
    """The process that has a name, and for how long its lease still lasts."""

    token: str
    host: str
    pid: int
    lease_ms: int


class _Different(NamedTuple):
    """A worker that computes by another arithmetic, and for how long its lease still lasts."""

    token: str
    name: str
    arithmetic: str
    lease_ms: int


def choose_worker_name(given: str) -> str:
    """Return the given name, or one made of host name, process id and a random part.

    The random part is needed as containers on their host's network may have equal process ids. A name that
    another process has is refused, see `Heartbeat.take_name`.
    """
    return given or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def pin_to_cores(cores: str) -> None:
    """Pin this process to cores (`0` or `0,1`). Raises `PenstockError` for cores that do not exist; does nothing where
    the system has no affinity.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (OSError, ValueError) as error:
            raise PenstockError(f"PENSTOCK_WORKER_CORES={cores}: {error}") from None
