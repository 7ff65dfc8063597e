"""A region that comes back, or has lived on, ends here what a peer has adopted of it.

A gateway asks each peer, at its start and once a second, what that has adopted of this region:

    1  ask    each peer: nothing, not finished yet, or finished, with the ids
    2  end    these ids in this region's record: their messages are stale from then on, and settle nothing
    3  join   give a permission in Redis by which workers may begin (`REGION_JOINED_KEY`)

A crash before 3 leaves workers waiting for the next gateway; 2 may be repeated. Workers begin when all peers say that
they have adopted nothing, or one has finished: only then its list has all ids, as what it published before it noted
the id (`adopting.py`, 4 and 5) would be answered twice. A gateway that has joined does not wait for peers that fall
silent, and asks those alone whose state says that they have adopted this region.

Each permission is another one, and counts for workers that waited when it was given, as an operator's does: none
outlives the region's death. A gateway listens before it asks (`http/server.py`), so a peer that adopts meanwhile finds
it there.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import httpx2
import redis.asyncio
from pydantic import BaseModel, ValidationError

from penstock.config.settings import RegionSettings
from penstock.ingest.regions.peers import Peers
from penstock.names import FINGERPRINTS_KEY, REGION_JOINED_KEY
from penstock.redis.client import translate_outages
from penstock.regions import CHOICE, PEER_HEADER

ADOPTED_PATH = "/v1/penstock/region/adopted/{name}"
LOOK_S = 1.0
JOINED_LASTS_S = 10


class AdoptedIds(BaseModel):
    """What a region has adopted of another one."""

    state: Literal["none", "publishing", "finished"]
    done_s: float = 0.0
    """When it had finished."""
    ids: dict[str, list[str]] = {}
    """By pipeline; empty for who knows them from that time."""


EndIds = Callable[[str, str, Sequence[str]], Awaitable[None]]
"""Ends ids of a pipeline that a region answers: `end(region, pipeline, ids)`."""


class RegionReturn:
    """Asks what peers have adopted of this region. For one gateway."""

    def __init__(self, settings: RegionSettings, client: "redis.asyncio.Redis", peers: Peers, end_ids: EndIds) -> None:
        self._settings, self._client, self._peers, self._end_ids = settings, client, peers, end_ids
        self.ended = dict[str, float]()
        """By peer that has adopted this region, the time of the list of ids that was ended here."""
        self._taken = dict[str, set[str]]()
        """By peer, these ids, without choices."""
        self._has_joined = False
        self._fingerprints = dict[str, str]()
        """By region, its models' fingerprints as they are in Redis."""

    async def look(self) -> None:
        """Do all steps once. Raises `BusUnavailable`."""
        peers = self._settings.list_peers()
        answers = dict(zip(peers, await asyncio.gather(*map(self._ask, peers)), strict=True))  # 1
        for name, answer in answers.items():
            if answer is not None and answer.state == "finished" and self.ended.get(name) != answer.done_s:
                for pipeline, ids in answer.ids.items():
                    await self._end_ids(name, pipeline, ids)  # 2
                self._taken[name] = {CHOICE.sub("", one) for ids in answer.ids.values() for one in ids}
                self.ended[name] = answer.done_s
            elif answer is not None and answer.state == "none":  # it has given them back
                self._taken.pop(name, None)
                self.ended.pop(name, None)
        self._has_joined = may_join(answers, has_joined=self._has_joined)
        if self._has_joined:
            with translate_outages():
                await self._client.set(REGION_JOINED_KEY, uuid.uuid4().hex, ex=JOINED_LASTS_S)  # 3
        await self._note_fingerprints()

    def find_taker(self, request_id: str) -> str | None:
        """Return the peer that has taken a request of this region over, as far as that was heard."""
        return next((peer for peer, ids in self._taken.items() if CHOICE.sub("", request_id) in ids), None)

    async def _note_fingerprints(self) -> None:
        """Keep in Redis which models the regions have: who adopts one cannot ask it any more."""
        client: Any = self._client
        for region in self._peers.describe_regions():
            found = {name: model.fingerprint for name, model in region.models.items() if model.fingerprint}
            text = json.dumps(found, sort_keys=True)
            if found and self._fingerprints.get(region.name) != text:
                with translate_outages():
                    await client.hset(FINGERPRINTS_KEY, region.name, text)
                self._fingerprints[region.name] = text

    async def _ask(self, peer: str) -> AdoptedIds | None:
        """Return what a peer has adopted of this region; None where it does not say."""
        is_ready = self._peers.find_state(peer) == "ready"
        if self._has_joined and is_ready and peer not in self._peers.list_adopters(self._settings.name):
            return AdoptedIds(state="none")
        url = self._peers.find_url(peer) + ADOPTED_PATH.format(name=self._settings.name)
        with suppress(httpx2.HTTPError, ValidationError):
            answer = await self._peers.http.get(
                url, params={"known": self.ended.get(peer, 0.0)}, headers={PEER_HEADER: self._settings.secret}
            )
            if answer.status_code == 200:
                return AdoptedIds.model_validate_json(answer.content)
        return None


def may_join(answers: Mapping[str, AdoptedIds | None], *, has_joined: bool) -> bool:
    """Return whether workers of this region may begin, by what its peers say."""
    states = {None if answer is None else answer.state for answer in answers.values()}
    if "publishing" in states:
        return False
    return "finished" in states or states == {"none"} or has_joined
