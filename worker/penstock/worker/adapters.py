"""Which versions of LoRA adapters this worker computes, and which ones others do: an answer goes on in the version that
began it, and nowhere else.

A version is the digest of an adapter's files. It is in a request's log, at the first token, and in its job. A request
that this worker cannot compute goes to others while one of them can; else it ends with a typed error.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import AnswerInterrupted, RequestError, UnknownModel
from penstock.messages import Adapter
from penstock.names import Stage, find_stages
from penstock.worker.task import Task

BEATS_TTL_S = 1.0
"""How long what was read of other workers is used."""


class AdapterVersions:
    """The adapters of one worker, and by the heartbeats those of others. Any thread may ask."""

    def __init__(self, own: Mapping[str, str]) -> None:
        """`own`: by name, the digest of each."""
        self.own = own
        self.read_beats: Callable[[], list[dict[str, Any]]] | None = None
        """Reads the heartbeats of all workers of the pipeline; None where there is nobody to ask."""
        self._beats, self._read_at, self._reading = list[dict[str, Any]](), -BEATS_TTL_S, threading.Lock()

    def is_known(self, name: str) -> bool:
        """Return whether an adapter of this worker, or of another one, has a name. Raises `redis.RedisError`."""
        return name in self.own or any(name in beat["adapters"] for beat in self._read_beats())

    def find_version(self, task: Task, name: str | None) -> Adapter | None:
        """Return the version that computes a request: the one that began it, or this worker's. None where the name is
        the model's, or there is no version here of an answer that is not begun.
        """
        digest = self.own.get(name or "")
        if task.log_events:
            digest = task.log_events[0].adapter
        return None if name is None or digest is None else Adapter(name=name, digest=digest)

    def check_begun(self, task: Task, name: str | None) -> None:
        """Raise `AnswerInterrupted` for a request whose answer an adapter began that no worker has any more."""
        if name is not None and not self.is_known(name):
            raise AnswerInterrupted(f"no worker has the adapter {name!r} any more, which began the answer")

    def check_task(self, task: Task) -> None:
        """Raise `AnswerInterrupted` for a request whose answer was begun by other weights than those that are to go on,
        whose version this worker does not compute, or that no worker decodes. Raises `redis.RedisError`.
        """
        adapter, role = task.adapter, task.role
        if task.log_events and (task.log_events[0].adapter or "") != task.adapter_digest:
            raise AnswerInterrupted("another adapter, or version of it, began the answer than is asked for now")
        if adapter is None:
            return
        if adapter.digest not in self.own.values():
            told = f"the version of {adapter.name!r} that began the answer is not loaded any more"
            raise _send_elsewhere(AnswerInterrupted(told), is_there=self._is_elsewhere(adapter.digest, role.stage))
        is_new = role.hands_off_for != "" and not task.log_events
        if is_new and self.read_beats is not None and not self._is_elsewhere(adapter.digest, "decode"):
            told = f"no worker that decodes has this version of {adapter.name!r}"
            raise _send_elsewhere(AnswerInterrupted(told), is_there=True)  # it waits until one has

    def build_unknown_error(self, name: str) -> RequestError:
        """Return the error of a request for an adapter that other workers have, and this one lacks; or whose answer the
        model itself began under the name.
        """
        is_there = name not in self.own and self.is_known(name)
        return _send_elsewhere(UnknownModel(f"no adapter {name!r} is loaded here"), is_there=is_there)

    def _is_elsewhere(self, digest: str, stage: Stage) -> bool:
        return any(digest in beat["adapters"].values() for beat in self._read_others(stage))

    def _read_others(self, stage: Stage) -> list[dict[str, Any]]:
        """Return the heartbeats of workers of a stage that have adapters and take requests."""
        return [
            beat
            for beat in self._read_beats()
            if stage in find_stages(beat["stage"]) and beat["state"] in ("ready", "degraded")
        ]

    def _read_beats(self) -> list[dict[str, Any]]:
        """Return the heartbeats of all workers that have adapters, also of those that load their model."""
        with self._reading:
            if self.read_beats is not None and time.monotonic() >= self._read_at + BEATS_TTL_S:
                self._beats = [beat for beat in self.read_beats() if beat.get("adapters")]
                self._read_at = time.monotonic()
            return self._beats


def _send_elsewhere(error: RequestError, *, is_there: bool) -> RequestError:
    error.is_for_others = is_there
    return error
