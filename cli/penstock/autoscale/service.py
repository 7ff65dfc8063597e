"""The controller's loop: look, decide, tell. Any number of processes run it, and one of them decides.

    1  elect    take or renew the lease; another one's decision is read where that holds it
    2  look     at topics and heartbeats
    3  decide   with the state that the last decision has, whoever made it
    4  tell     the decision and the state, in one step with the lease: who lost it meanwhile tells nothing

A crash after any of them costs a lease: then another controller goes on with the state of the last decision. One that
was cut off for longer reads that state anew. Between looks the loop waits for its stop; at zero it asks twice a second
whether something has arrived.
"""

import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable
from typing import Any

import redis

from penstock.autoscale.controller import Bounds, Controller, Decision
from penstock.autoscale.signals import SCALED_KINDS, Look, SignalWatch, choose_leaver, find_signals
from penstock.autoscale.sizing import Targets
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from penstock.ops.live import build_recent_json
from penstock.ops.scaling import ScalingLease, read_scaling
from penstock.redis.client import is_away, redis_client

log = logging.getLogger(__name__)

LOOK_S, LOOK_AT_ZERO_S = 5.0, 0.5
"""How often a controller decides, and how often it looks for arrivals where there is no worker."""
Json = dict[str, Any]


class AutoscaleService:
    """The controller of one pipeline. For one thread."""

    def __init__(
        self, addresses: Addresses, settings: BusSettings, targets: Targets, bounds: Bounds, block_size: int
    ) -> None:
        self._pipeline, self._targets, self._bounds = Pipeline(addresses.pipeline), targets, bounds
        self._block_size = block_size
        self._watch = SignalWatch(addresses, settings)
        self._redis = redis_client(addresses.first_url)
        self._lease = ScalingLease(self._redis, self._pipeline, uuid.uuid4().hex)
        self._controller: Controller | None = None
        """None while another process decides."""
        self._before: Look | None = None
        self._shown: Json = {}

    def look_and_decide(self) -> Json | None:
        """Decide, or return what another controller told; None where none has.

        Raises `BusUnavailable` or `redis.RedisError`.
        """
        if not self._lease.acquire_lease():
            self._controller = self._before = None
            return read_scaling(self._redis, self._pipeline)
        if self._controller is None:
            self._controller = self._resume()
            self._watch.expect_workers(self._controller.list_ready())
        look = self._watch.read_latest()
        seen = find_signals(look, self._before, self._pipeline, self._targets, self._block_size)
        decision = self._controller.decide_numbers(seen)
        told = build_told(decision, look) | {"state": self._controller.export_state()}
        self._before = look
        if not self._lease.publish_decision(told):
            self._controller = self._before = None
            return read_scaling(self._redis, self._pipeline)
        self._log_change(told)
        return told

    def _resume(self) -> Controller:
        """Return a controller that goes on with what the last one knew, if that can be read."""
        told = read_scaling(self._redis, self._pipeline) or {}
        with contextlib.suppress(TypeError, ValueError):  # of another version
            return Controller(self._targets, self._bounds, told.get("state"))
        return Controller(self._targets, self._bounds)

    def _log_change(self, told: Json) -> None:
        if told["workers"] != self._shown.get("workers") or told["alerts"] != self._shown.get("alerts"):
            for kind, reason in told["reasons"].items():
                log.info("%s workers: %d (%s)", kind, told["workers"][kind], reason)
            for alert in told["alerts"]:
                log.warning("%s", alert)
        self._shown = told

    def run_until_stopped(
        self, wait: Callable[[float], bool], follow_decision: Callable[[Json], None] = lambda told: None
    ) -> None:
        """Look every five seconds, or when something arrives where there is no worker.

        `wait` waits for so many seconds to be stopped, and returns whether it is. `follow_decision` gets what this
        process has decided.
        """
        is_away_told = False
        while not wait(0.0):
            told: Json | None = None
            try:
                told = self.look_and_decide()
                is_away_told = False
            except (BusUnavailable, redis.RedisError) as error:
                if isinstance(error, redis.RedisError) and not is_away(error):
                    raise
                if not is_away_told:
                    log.warning("no decision while the servers cannot be reached: %s", error)
                is_away_told = True
            if told is not None and self._controller is not None:
                follow_decision(told)
            self._wait_for_look(wait, told)

    def _wait_for_look(self, wait: Callable[[float], bool], told: Json | None) -> None:
        """Return when the next look is due, after a stop, or at zero after an arrival."""
        is_at_zero = told is not None and not any(told["workers"].values())
        until_s = time.monotonic() + LOOK_S
        while (left_s := until_s - time.monotonic()) > 0:
            if wait(min(left_s, LOOK_AT_ZERO_S) if is_at_zero else left_s):
                return
            if is_at_zero:
                with contextlib.suppress(BusUnavailable, redis.RedisError):
                    if any(self._watch.read_latest().unsettled.values()):
                        return

    def close(self) -> None:
        """Free the connections. Another controller decides once the lease has run out."""
        self._watch.close()
        self._redis.close()


def build_told(decision: Decision, look: Look) -> Json:
    """Return a decision as JSON: for KEDA, the page and the metrics."""
    predicted_s = decision.predicted_p99_s
    return {
        "at": decision.at_s,
        "workers": {kind: decision.numbers.get(kind, 0) for kind in SCALED_KINDS},
        "reasons": decision.reasons,
        "alerts": list(decision.alerts),
        "starting": decision.starting,
        "there": {kind: [one["name"] for one in look.beats if one["stage"] == kind] for kind in decision.numbers},
        "leave": {kind: choose_leaver(look.beats, kind) for kind in decision.numbers},
        "predicted_ttft_p99_s": predicted_s if predicted_s is not None and math.isfinite(predicted_s) else None,
        "observed_ttft_p99_s": build_recent_json(look.beats)["ttft_s"]["p99"],
    }
