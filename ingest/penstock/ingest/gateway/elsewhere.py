"""Which requests another region answers, decided before any route. This layer exists where peers are configured.

    1  an id in the path, or one that the body names (`previous_response_id`, an item, a batch's file): its home; where
       that was adopted, the adopting region, which sends on what it did not take over. So does the home that is back,
       with what was taken over
    2  a new request with an `Idempotency-Key`: the home of the key
    3  any other new request: the region that `Peers` chooses; if that cannot be reached or refuses it before anything
       was written, the next one, and this region as the last resort
    4  all else, lists too: this region

A request that came through two regions is answered here, or refused if only another region could.
"""

import asyncio
import re
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.bus.placement import chain_prompt
from penstock.errors import BusUnavailable, PenstockError
from penstock.ingest.endpoints import ENDPOINTS
from penstock.ingest.errors import to_api_error
from penstock.ingest.gateway.accept import MIN_THREAD_BYTES, measure_prompts
from penstock.ingest.gateway.inference import run_unless_gone
from penstock.ingest.gateway.state import Gateway, find_caller
from penstock.ingest.http.handlers import render_error
from penstock.ingest.http.metrics import REFUSAL_KEY, REGION_KEY, UNSENT_KEY
from penstock.ingest.openai import RESPONSES
from penstock.ingest.openai.body import read_json
from penstock.ingest.openai.endpoint import build_request
from penstock.ingest.openai.response_items import find_response_id
from penstock.ingest.regions.choosing import RegionAsk
from penstock.ingest.regions.forward import REFUSED_HEADER, Forwarder, Hop, NotAccepted, region_away_error
from penstock.ingest.tenants import Caller, list_allowed_regions
from penstock.regions import HOPS_HEADER, MAX_HOPS, PEER_HEADER, REGION_HEADER, choose_home, find_home, is_region_name
from penstock.telemetry.timeline import HOPS_ATTRIBUTE, REGION_ATTRIBUTE, REGION_WHY_ATTRIBUTE

_ID_PATH = re.compile(r"/v1/(?:streams|responses|files|batches|requests)/([^/]+)(?:/[a-z_]+)?")
_NAMING_PATHS = {*ENDPOINTS, f"{RESPONSES.path}/input_tokens", "/v1/batches"}
"""Paths of POSTs whose bodies may name an id."""
ELSEWHERE_CODES = frozenset({"overloaded", "busy", "over_share", "unavailable"})
"""Codes of refusals, before anything is written, that another region may not have."""


class _Target(NamedTuple):
    """Where a request is answered, and why there."""

    region: str
    why: str
    ask: RegionAsk | None = None
    """Given if another region may answer it as well."""
    may_repeat: bool = True
    """Whether it does no harm to send the request twice."""


class RegionLayer:
    """The layer around all routes of a gateway with peers."""

    def __init__(self, app: ASGIApp, gateway: Gateway, forwarder: Forwarder) -> None:
        self._app, self._gateway, self._peers, self._forwarder = app, gateway, forwarder.peers, forwarder

    # Bodies of other paths are not read here: a file goes to the store as it comes.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, here or elsewhere; or handle the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        hops = self._read_hops(request)
        try:
            is_read = request.method == "POST" and request.url.path in _NAMING_PATHS
            body = await request.body() if is_read else None
            target = await self._find_target(request, body, hops)
            why: str | None = target.why
            if target.region != self._peers.own:
                why = await run_unless_gone(request, self._send_on(scope, body or b"", target, hops, send))
        except ClientDisconnect:
            return
        except PenstockError as error:
            response = render_error(request, to_api_error(error))
            response.headers[REGION_HEADER] = f"{self._peers.own}; away"
            await response(scope, receive, send)
            return
        if why:
            await self._answer_here(scope, receive, send, body, why, hops)

    def _read_hops(self, request: Request) -> list[Hop]:
        """Return the regions that a request came through; none unless a peer says so."""
        if not self._gateway.is_peer(request.headers.get(PEER_HEADER, "")):
            return []
        told = [part.strip().partition(";") for part in request.headers.get(HOPS_HEADER, "").split(",")]
        return [Hop(region, why) for region, _, why in told if is_region_name(region)]

    async def _find_target(self, request: Request, body: bytes | None, hops: Sequence[Hop]) -> _Target:
        path, here = request.url.path, _Target(self._peers.own, "here")
        key, fields = request.headers.get("idempotency-key"), None
        try:
            if body is not None and path in _NAMING_PATHS:
                fields = read_json(body)
            for one in _list_named_ids(path, fields):
                if (home := find_home(one, self._peers.names)) is not None:
                    region = await self._find_answering(one, home, {hop.region for hop in hops})
                    if region != self._peers.own:
                        await find_caller(request, None, None)
                    why = "home" if region == home else f"adopted {home}"
                    return _Target(region, why, may_repeat=path not in ENDPOINTS or key is not None)
            if body is None or path not in ENDPOINTS:
                return here
            caller = await find_caller(request, None, None)
            allowed = list_allowed_regions(caller, self._peers.own) or frozenset(self._peers.names)
            if key is not None:
                keepers = allowed.intersection(self._peers.names)  # none: this region refuses it, and says why
                return _Target(choose_home(caller.tenant, key, keepers) if keepers else self._peers.own, "key")
            if len(hops) >= MAX_HOPS:
                return _Target(self._peers.own, "hops")
            describe = partial(_describe_request, path, fields, caller)
            ask = describe() if len(body) < MIN_THREAD_BYTES else await asyncio.to_thread(describe)
        except BusUnavailable:
            raise  # where it is answered is not known now
        except PenstockError:
            return here  # its route refuses it, and says why
        return self._choose(ask._replace(allowed=allowed - {hop.region for hop in hops}))

    async def _find_answering(self, named: str, home: str, passed: Set[str]) -> str:
        """Return the region that answers about an id: its home, or the region that has adopted its home, if that may
        have taken it over. What was not copied, and what the home accepts after it came back, only the home has: it
        knows by the list of what was taken over, the other one by its cards. What one sent to the other stays there.
        """
        if home == self._peers.own:
            taker = self._gateway.returning.find_taker(named)
            return home if taker is None or taker in passed else taker
        adopter = next(iter(self._peers.list_adopters(home)), home)
        is_to_be_looked_for = adopter == self._peers.own and home not in passed
        if is_to_be_looked_for and await self._gateway.stream_metas.find_meta(named) is None:
            return home
        return adopter

    async def _send_on(self, scope: Scope, body: bytes, target: _Target, hops: Sequence[Hop], send: Send) -> str:
        """Have another region answer; return "" then, and if the request is to be answered here, why.

        Raises `ApiError` where it can be answered nowhere now.
        """
        refusal: NotAccepted | None = None
        _note_route(scope)
        while target.region != self._peers.own:
            refusal = await self._try_region(scope, body, target, hops, send)
            if refusal is None:
                return ""
            if target.ask is None:
                break
            target = self._choose(target.ask._replace(allowed=(target.ask.allowed or frozenset()) - {target.region}))
        served = () if target.ask is None else await self._gateway.models.read_names() or ()
        if refusal is None or (target.ask is not None and target.ask.model in served):
            return target.why
        if refusal.answer is None:
            raise refusal.error
        for message in refusal.answer:
            await send(message)
        return ""

    async def _try_region(
        self, scope: Scope, body: bytes, target: _Target, hops: Sequence[Hop], send: Send
    ) -> NotAccepted | None:
        """Have a region answer, unless it certainly does not accept the request. Raises `ApiError`."""
        if len(hops) >= MAX_HOPS or target.region in {hop.region for hop in hops}:
            told = "does not take it for its own: is PENSTOCK_REGION_PEERS the same in all regions?"
            raise region_away_error(target.region, told)
        try:
            await self._forwarder.pass_on(target.region, target.why, hops, scope, body, send)
        except NotAccepted as refusal:
            return refusal
        except httpx2.HTTPError as error:
            told = f"gave no answer: {error or type(error).__name__}"
            told += "" if target.may_repeat else "; the request may have been accepted there"
            raise region_away_error(target.region, told, may_repeat=target.may_repeat) from None
        return None

    def _choose(self, ask: RegionAsk) -> _Target:
        choice = self._peers.choose_region(ask)
        return _Target(choice.region, choice.why, ask, may_repeat=False)

    async def _answer_here(
        self, scope: Scope, receive: Receive, send: Send, body: bytes | None, why: str, hops: Sequence[Hop]
    ) -> None:
        about = {REGION_ATTRIBUTE: self._peers.own, REGION_WHY_ATTRIBUTE: hops[0].why if hops else why}
        scope[REGION_KEY] = about | ({HOPS_ATTRIBUTE: ", ".join(hop.region for hop in hops)} if hops else {})
        unread = [] if body is None else [body]

        async def replay() -> Message:
            return {"type": "http.request", "body": unread.pop()} if unread else await receive()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {REGION_HEADER: f"{self._peers.own}; {why}"}
                if hops and (code := scope.get(REFUSAL_KEY, scope.get(UNSENT_KEY))) in ELSEWHERE_CODES:
                    added[REFUSED_HEADER] = code
                raw = [(name.encode(), value.encode()) for name, value in added.items()]
                message = {**message, "headers": [*message.get("headers", ()), *raw]}
            await send(message)

        await self._app(scope, replay, send_named)


def _list_named_ids(path: str, fields: Any) -> list[str]:
    """Return the ids that a path or a body names, those first that decide where it is answered."""
    if path not in _NAMING_PATHS and (found := _ID_PATH.fullmatch(path)):
        return [found[1]]
    if not isinstance(fields, dict):
        return []
    items = fields.get("input") if path.startswith(RESPONSES.path) else None
    named = [fields.get("input_file_id" if path == "/v1/batches" else "previous_response_id")]
    named += [
        find_response_id(item["id"])
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and item.keys() <= {"id", "type"} and isinstance(item.get("id"), str)
    ]
    return [one for one in named if isinstance(one, str)]


def _describe_request(path: str, fields: Any, caller: Caller) -> RegionAsk:
    """Return what the choice of a region needs to know of a body. Raises `PenstockError` for one that is refused."""
    endpoint = ENDPOINTS[path]
    body = endpoint.parse_body(fields)
    made = endpoint.make_requests(body, "x")
    args = made[0]
    args["tenant"] = caller.tenant
    measured = made if "texts" in args else [args]  # choices share their prompt
    num_tokens, links = measure_prompts(measured).num_tokens, chain_prompt(build_request(args)).links
    return RegionAsk(body.model, args.get("priority_class", "interactive"), num_tokens, links)


def _note_route(scope: Scope) -> None:
    """Note the route that would answer here: answers are counted by it."""
    routes = scope["app"].router.routes
    scope["route"] = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
