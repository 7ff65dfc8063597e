"""The own region and its peers: what each tells each second, whether it is there, and how far away it is.

Three states: `ready`; `unavailable`: its gateway says that it stops, or connections are refused; `unknown`: it has
never told anything, or not for `STALE_S`. No new work goes by choice to a region that is not ready.
"""

import logging
import math
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Literal

import httpx2
from pydantic import BaseModel, TypeAdapter

from penstock.config.settings import RegionSettings
from penstock.errors import BusUnavailable
from penstock.ingest.regions.choosing import RegionAsk, RegionChoice, RegionChooser, RegionView
from penstock.ingest.regions.limits import SharedLimits
from penstock.ingest.regions.state import ModelState, RegionState, StateReader
from penstock.ingest.search_loop import SearchLoop
from penstock.regions import PEER_HEADER
from penstock.telemetry import catalog
from penstock.telemetry.meters import Meters, Reading

log = logging.getLogger(__name__)

Readiness = Literal["ready", "unavailable", "unknown"]
LOOK_S = 1.0
"""How often regions are asked."""
ANSWER_S = 2.0
"""How long a peer may take to answer."""
STALE_S = 5.0
"""After so long without an answer a region is unknown."""
MAX_REFUSED = 3
"""After so many refused connections one after the other a region is unavailable."""
NUM_ROUND_TRIPS = 10
"""The least of so many is the round trip: the others met something on their way."""
STATE_PATH = "/v1/penstock/region"


class SeenModel(ModelState):
    """One model in a region, as a gateway sees it."""

    differs: bool
    """Whether it is another model than that of this name here: neither region stands in for the other."""


class SeenRegion(BaseModel):
    """A region, as a gateway sees it."""

    name: str
    state: Readiness
    reason: str
    """Why the region is not ready; empty where it is."""
    round_trip_s: float | None
    models: dict[str, SeenModel]
    adopted: list[str]


SEEN_REGIONS = TypeAdapter(list[SeenRegion])


class _Region:
    """What is known of one region."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: RegionState | None = None
        """What it told last."""
        self.at_s = -math.inf
        """When it told that."""
        self.problem = ""
        """Why it told nothing the last time; empty where it did."""
        self.num_refused = 0
        self.round_trips = deque[float](maxlen=NUM_ROUND_TRIPS)
        self.fingerprints = dict[str, str]()
        """The last ones told, by model: a region whose workers are all away has them still."""
        self.different = set[str]()
        """The models of which the log says that they are others than here."""

    def note_state(self, state: RegionState) -> None:
        """Note what the region told just now."""
        self.state, self.at_s, self.num_refused = state, time.monotonic(), 0
        told = {name: model.fingerprint for name, model in state.models.items()}
        self.fingerprints |= {name: found for name, found in told.items() if found is not None}

    def note_problem(self, problem: str) -> None:
        """Note why the region told nothing, or that it told something; say what is new in the log."""
        if problem != self.problem:
            log.warning("region %s: %s", self.name, problem or "it answers again")
        self.problem = problem

    def judge_state(self, now_s: float) -> tuple[Readiness, str]:
        """Return the region's state, and the reason where it is not ready."""
        if self.num_refused >= MAX_REFUSED:
            return "unavailable", self.problem
        if self.state is None or now_s - self.at_s > STALE_S:
            return "unknown", self.problem or "it has not answered yet"
        return ("unavailable", "its gateway stops") if self.state.is_stopping else ("ready", "")


class Peers:
    """The own region and its peers, for one gateway."""

    def __init__(self, settings: RegionSettings, reader: StateReader, limits: SharedLimits, meters: Meters) -> None:
        self.own, self._limits = settings.name, limits
        self._urls, self._reader = settings.list_peers(), reader
        self.names = [self.own, *self._urls]
        """All regions, the own one first."""
        self._regions = {name: _Region(name) for name in self.names}
        self._regions[self.own].round_trips.append(0.0)
        self._chooser, self._meters = RegionChooser(self.own), meters
        meters.add_source(self._read_gauges)
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log each look
        tls = ssl.create_default_context()
        every = httpx2.Limits()  # as many connections as requests that are sent on
        headers = {PEER_HEADER: settings.secret}
        self.http = httpx2.AsyncClient(headers=headers, verify=tls, trust_env=False, timeout=ANSWER_S, limits=every)
        """By this peers are asked; it has the secret."""
        looks: dict[str, Callable[[], Awaitable[None]]] = {self.own: self._look_home}
        looks |= {name: partial(self._look_away, name) for name in self._urls}
        self.loops = [SearchLoop(f"news of the region {name}", look, LOOK_S) for name, look in looks.items()]
        """They ask all regions, from when they are started. The caller starts and closes them, and closes `http`."""

    def find_url(self, name: str) -> str:
        """Return the address of a peer's gateways, without a slash at its end."""
        return self._urls[name]

    def find_state(self, name: str) -> Readiness:
        """Return whether a region is ready, unavailable or unknown."""
        return self._regions[name].judge_state(time.monotonic())[0]

    def list_adopters(self, name: str) -> list[str]:
        """Return the regions that have adopted another one, and are ready. The own one may be among them."""
        return [one.name for one, state in self._list_ready() if name in state.adopted]

    def choose_region(self, ask: RegionAsk) -> RegionChoice:
        """Choose where a new request goes, and count it as sent there. Raises as `RegionChooser.choose_region`."""
        choice = self._chooser.choose_region(ask, self._list_views(ask.model), time.monotonic())
        self._meters.get_counter(catalog.REGION_REQUESTS, choice.region, choice.why).add()
        return choice

    def choose_idle(self, ask: RegionAsk) -> str | None:
        """Choose where a line of a batch goes, as `RegionChooser.choose_idle`, and count it as sent there."""
        region = self._chooser.choose_idle(ask, self._list_views(ask.model), time.monotonic())
        if region is not None and region != self.own:
            self._meters.get_counter(catalog.REGION_REQUESTS, region, "idle").add()
        return region

    def _list_views(self, model: str) -> dict[str, RegionView]:
        return {
            region.name: RegionView(state.models[model], min(region.round_trips), region.at_s, state.batch)
            for region, state in self._list_ready()
            if model in state.models and not self._differs(region, model)
        }

    def tell_state(self) -> RegionState | None:
        """Return what this gateway tells its peers; None while it does not know its own region."""
        own = self._regions[self.own]
        return own.state if own.judge_state(time.monotonic())[0] == "ready" else None

    def describe_regions(self) -> list[SeenRegion]:
        """Return how this gateway sees all regions, the own one first."""
        now_s, seen = time.monotonic(), list[SeenRegion]()
        for region in self._regions.values():
            readiness, reason = region.judge_state(now_s)
            told = region.state if readiness != "unknown" else None
            models = {} if told is None else told.models
            seen.append(
                SeenRegion(
                    name=region.name,
                    state=readiness,
                    reason=reason,
                    round_trip_s=min(region.round_trips, default=None),
                    models={
                        name: SeenModel(**model.model_dump(), differs=self._differs(region, name))
                        for name, model in models.items()
                    },
                    adopted=[] if told is None else told.adopted,
                )
            )
        return seen

    def _list_ready(self) -> list[tuple[_Region, RegionState]]:
        now_s, regions = time.monotonic(), self._regions.values()
        return [(one, one.state) for one in regions if one.state is not None and one.judge_state(now_s)[0] == "ready"]

    def _differs(self, region: _Region, model: str) -> bool:
        """Return whether a region's model is known to be another one than that of its name here."""
        told, own = region.fingerprints.get(model), self._regions[self.own].fingerprints.get(model)
        return None not in (told, own) and told != own

    async def _look_home(self) -> None:
        own = self._regions[self.own]
        try:
            own.note_state(await self._reader.read_state())
            own.note_problem("")
            await self._reader.write_seen(SEEN_REGIONS.dump_json(self.describe_regions()))
        except BusUnavailable as error:
            own.note_problem(str(error))

    async def _look_away(self, name: str) -> None:
        region, began_s, problem = self._regions[name], time.monotonic(), ""
        try:
            answer = await self.http.get(self._urls[name] + STATE_PATH)
            taken_s = time.monotonic() - began_s
            if answer.status_code == 404:
                raise ValueError("it knows no such PENSTOCK_REGION_SECRET, which must be the same in all regions")
            state = RegionState.model_validate_json(answer.raise_for_status().content)
            if state.region != name:
                raise ValueError(f"PENSTOCK_REGION_PEERS has the address of the region {state.region} for it")
        except httpx2.ConnectError as error:
            region.num_refused, problem = region.num_refused + 1, f"no connection: {error}"
        except httpx2.HTTPError as error:
            region.num_refused, problem = 0, f"{type(error).__name__}: {error}"
        except ValueError as error:  # of what it told, too
            region.num_refused, problem = 0, str(error)
        else:
            if region.state is None or region.state.incarnation != state.incarnation:
                self._chooser.forget_sent(name)
            region.round_trips.append(taken_s)
            region.note_state(state)
            self._tell_different(region)
            await self._limits.settle_region(name, state.used)
        region.note_problem(problem)

    def _tell_different(self, region: _Region) -> None:
        """Say in the log, once each time that it begins, which models of a region are others than those here."""
        different = {model for model in region.fingerprints if self._differs(region, model)}
        for model in sorted(different - region.different):
            log.warning(
                "region %s: its model %r is another one than %r here (fingerprints %s and %s): neither region "
                "stands in for the other", region.name, model, model,
                region.fingerprints[model], self._regions[self.own].fingerprints[model],
            )  # fmt: skip
        region.different = different

    def _read_gauges(self) -> Iterator[Reading]:
        for seen in self.describe_regions():
            for state in ("ready", "unavailable", "unknown"):
                yield Reading(catalog.REGION_STATE, (seen.name, state), int(seen.state == state))
            if seen.round_trip_s is not None:
                yield Reading(catalog.REGION_ROUND_TRIP, (seen.name,), seen.round_trip_s)
            differing = sum(model.differs for model in seen.models.values())
            yield Reading(catalog.REGION_MODELS_DIFFER, (seen.name,), differing)
