"""Lends lines of batches to idle regions, and answers those that are lent here.

    1  choose   the cheapest region that is idle at this moment and has room for batch work at this hour; after
                `PATIENCE_S` without any, the home
    2  lend     a POST there with the line; its requests are made in that region's pipeline, under their ids
    3  renew    the other region answers after `LEASE_S` at the latest. If the line is under way there, it is lent anew:
                its requests are joined. If no worker has begun it, it is cancelled and comes back
    4  return   the line's answer comes home, and is written there as any other's (`ingest/batch/answer.py`)

The home alone has the list of lines and writes them, so each is in the batch's files once, whatever happens. Only
answers come home: where a line fails, or is cancelled, in another region, the home asks it itself, and its word counts.

A crash of the other region's gateway in 2 or 3 breaks the connection: the line is lent to another region, or asked at
home. A silent one is given up `SILENT_S` after its lease. What it had computed is computed again. A crash of the home's
gateway costs what `answer.py` says: the next gateway lends the line again. The same region then joins its requests;
another one computes them again.
"""

import asyncio
import logging
import time
from contextlib import suppress

import httpx2
from pydantic import TypeAdapter

from penstock.ingest.batch.lines import FinishedRow, LentRow
from penstock.ingest.openai.tokens import CHARS_PER_TOKEN
from penstock.ingest.regions.choosing import RegionAsk
from penstock.ingest.regions.peers import LOOK_S, Peers

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""For how long a line is lent."""
PATIENCE_S = 60.0
"""For how long a line waits for an idle region until it waits in the home's own queue."""
SILENT_S = 5.0
"""How much later than its lease a line may come back."""
ROWS_PATH = "/v1/penstock/rows"
UNDER_WAY_STATUS = 202
_IS_JSON = {"content-type": "application/json"}
_LENT_ROW, _FINISHED_ROW = TypeAdapter(LentRow), TypeAdapter(FinishedRow)


class Lender:
    """Lends lines of this gateway's batches."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.num_regions = len(peers.names)
        self._places = dict[tuple[str, int], str]()
        """Where lines are that are lent, by batch and number."""

    async def answer_row(self, lent: LentRow, slots: asyncio.Semaphore) -> FinishedRow | None:
        """Return the line as another region has answered it, or None once one of `slots` is taken for it here."""
        content = _LENT_ROW.dump_json(lent)
        allowed = frozenset(self._peers.names) & (lent.terms.regions or frozenset(self._peers.names))
        num_tokens, patient_until = len(content) // CHARS_PER_TOKEN, time.monotonic() + PATIENCE_S
        while True:
            region = self._peers.choose_idle(RegionAsk(lent.row.body["model"], "batch", num_tokens, (), allowed))
            if region == self._peers.own or (region is None and time.monotonic() > patient_until):
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await slots.acquire()
                        return None
            elif region is None:
                await asyncio.sleep(LOOK_S)
            elif (finished := await self._lend_row(region, lent, content)) is not None:
                return finished
            else:
                allowed -= {region}

    async def cancel_row(self, lent: LentRow) -> None:
        """Cancel a line where it was lent to, if it was. A region that does not answer computes it to its end."""
        region = self._places.pop((lent.terms.name, lent.row.number), None)
        if region is not None:
            url = f"{self._peers.find_url(region)}{ROWS_PATH}/cancel"
            with suppress(httpx2.HTTPError):
                await self._peers.http.post(url, content=_LENT_ROW.dump_json(lent), headers=_IS_JSON)

    async def _lend_row(self, region: str, lent: LentRow, content: bytes) -> FinishedRow | None:
        """Steps 2 to 4. Return None if the line does not come back with an answer."""
        place, url = (lent.terms.name, lent.row.number), f"{self._peers.find_url(region)}{ROWS_PATH}"
        self._places[place] = region
        status = UNDER_WAY_STATUS
        try:
            while status == UNDER_WAY_STATUS:
                timeout = httpx2.Timeout(SILENT_S, read=LEASE_S + SILENT_S)
                answer = await self._peers.http.post(url, content=content, headers=_IS_JSON, timeout=timeout)
                status = answer.status_code
            if status == 200:
                finished = _FINISHED_ROW.validate_json(answer.content)
                del self._places[place]
                return finished
            problem = f"status {status}"
        except (httpx2.HTTPError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        del self._places[place]
        log.info("line %d of batch %s comes back from %s: %s", lent.row.number, lent.terms.name, region, problem)
        return None
