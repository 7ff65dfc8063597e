"""Two regions, each with a Redis and a gateway of its own: what one sends on to the other, and what both read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from penstock.ingest.tenants import TenantEntry
from penstock.local.valkey import ValkeyServer
from penstock.names import ADOPTED_REGIONS_KEY, CLASSES, Pipeline, rate_key, stream_meta_key
from penstock.redis.client import execute_all
from penstock.regions import HOPS_HEADER, PEER_HEADER, REGION_HEADER, choose_home, find_home
from sim.chaos.proxy import Proxy
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.gateways import GatewayProcess, ScriptedPipeline, write_keys

SECRET = "of all regions, and long"
NAMES = ("eu", "us")
SENT_ON = {PEER_HEADER: SECRET, HOPS_HEADER: "eu;sooner"}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "In the beginning", "max_tokens": 64}
FAST = 1e9
"""Prompt tokens a second."""


class Region:
    """A region whose workers the test plays. Its peers reach its gateway by the proxy."""

    def __init__(self, name: str, folder: Path, exits: ExitStack) -> None:
        self.name, self.folder = name, folder
        self.server = exits.enter_context(ValkeyServer(folder / f"valkey-{name}"))
        self.scripted = exits.enter_context(ScriptedPipeline(self.server.url, Pipeline("p"), "m"))
        self.tell_speed(FAST)
        self.way = exits.enter_context(ExitStack())
        self.headers = dict[str, str]()
        self.proxy = self.way.enter_context(Proxy(0))

    def tell_speed(self, tokens_per_s: float) -> None:
        """Have the worker say how fast it reads prompts of a thousand tokens: so many as wait."""
        none = ("requests", "jobs", "in_place", "running", "prompt_tokens", "output_tokens", "waiting_tokens")
        held: dict[str, Any] = {**dict.fromkeys(none, 0), "partitions": [0], "job_partitions": [0]}
        held |= {"waiting_jobs": 0, "capacity": 100}
        told: dict[str, Any] = {one: {**held, "mean_prompt_tokens": 1000, "mean_output_tokens": 1} for one in CLASSES}
        told |= {"prompt_tokens_per_s": tokens_per_s, "output_tokens_per_s": FAST, "chars_per_token": 4.0}
        told |= {"speed": {"prompt_token_s": 1e-9, "idle_prompt_token_s": 1e-9, "num_rows": 0}}
        self.scripted.report(stage="auto", load=told, pool={"total": 1000, "used": 0})

    def start_gateway(self, exits: ExitStack, more: Mapping[str, str] = MappingProxyType({}), **peers: int) -> None:
        settings = {
            "REGION_NAME": self.name, "REGION_SECRET": SECRET, "BATCH_STORE": str(self.folder / f"files-{self.name}"),
            "REGION_PEERS": ", ".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items()),
            "TESTING": json.dumps({"gateway": {"keep_alive_s": 1.0}}),
            **more,
        }  # fmt: skip
        self.gateway = exits.enter_context(GatewayProcess(self.scripted.addresses, self.folder, settings))
        self.proxy.target_port = self.gateway.port
        self.url = self.gateway.url

    def see(self, name: str) -> dict[str, Any]:
        """Return how its gateway sees a region."""
        seen = httpx.get(f"{self.url}/v1/penstock/regions", headers=self.headers, timeout=None).json()["regions"]
        return next(one for one in seen if one["name"] == name)

    def list_ids(self) -> list[str]:
        return [request.id for request in self.scripted.read_requests()]


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Region, Region]]:
    with ExitStack() as exits:
        eu, us = (Region(name, tmp_path_factory.mktemp(name), exits) for name in NAMES)
        eu.start_gateway(exits, us=us.proxy.port)
        us.start_gateway(exits, eu=eu.proxy.port)
        wait_until_ready(eu, us)
        yield eu, us


def wait_until_ready(eu: Region, us: Region) -> None:
    wait_for(lambda: eu.see(us.name)["state"] == us.see(eu.name)["state"] == "ready", "both are ready")


@contextmanager
def busy(region: Region, peer: Region) -> Iterator[None]:
    """Let new requests wait for about ten seconds in a region, as both gateways know."""

    def read_waits() -> list[float]:
        return [one.see(region.name)["models"]["m"]["wait_s"]["interactive"] or 0.0 for one in (region, peer)]

    def can_take_over() -> bool:
        model = region.see(peer.name)["models"]["m"]
        return model["wait_s"]["interactive"] is not None and model["coverage"] > 0

    if not region.list_ids():
        post(region, PROMPT, **{"idempotency-key": pick_key(region.name)})
    region.tell_speed(100.0 * len(region.list_ids()))
    try:
        wait_for(lambda: min(read_waits()) > 5, "it is known that requests wait")
        wait_for(can_take_over, "it is known that the peer has room")
        yield
    finally:
        region.tell_speed(FAST)
        wait_for(lambda: max(read_waits()) < 1, "it is known that none waits")


def pick_key(home: str, name: str = "key") -> str:
    keys = (f"{name}-{number}" for number in range(1000))
    return next(key for key in keys if choose_home("default", key, NAMES) == home)


def post(region: Region, body: dict[str, Any] = PROMPT, path: str = "/v1/completions", **headers: str) -> str:
    """Send a request whose answer is streamed, and return its id when it is accepted."""
    with httpx.stream("POST", region.url + path, json={**body, "stream": True}, headers=headers, timeout=None) as got:
        assert got.status_code == 200, got.read()
        return got.headers["x-request-id"]


def read_stream(region: Region, request_id: str, last_id: str = "") -> bytes:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    return httpx.get(f"{region.url}/v1/streams/{request_id}", headers=headers, timeout=None).content


@pytest.mark.proof
def test_a_request_overflows_to_the_other_region_and_is_read_anywhere(
    regions: tuple[Region, Region], terminal: Terminal
) -> None:
    eu, us = regions
    near = httpx.stream("POST", f"{eu.url}/v1/completions", json={**PROMPT, "stream": True}, timeout=None)
    with near as answer:
        assert answer.headers[REGION_HEADER] == "eu; nearest"
    with busy(eu, us):
        before = eu.list_ids()
        body = {**PROMPT, "stream": True}
        with httpx.stream("POST", f"{eu.url}/v1/completions", json=body, timeout=None) as answer:
            assert answer.headers[REGION_HEADER] == "us; sooner"
            request_id = answer.headers["x-request-id"]
            assert request_id.endswith("-us")
            us.scripted.finish(request_id, 8)
            streamed = answer.read()
    assert (eu.list_ids(), us.list_ids()[-1]) == (before, request_id)
    assert streamed == read_stream(us, request_id) == read_stream(eu, request_id)
    ids = [line[4:] for line in streamed.decode().splitlines() if line.startswith("id: ")]
    for last_id in ids[1:-1:3]:
        rest = read_stream(eu, request_id, last_id)
        assert rest == read_stream(us, request_id, last_id)
        assert rest.count(b"data: ") < streamed.count(b"data: ")
    home = {"PENSTOCK_STREAM_URL": us.server.url, "PENSTOCK_PIPELINE": "p"}
    told = "us, which had the first token sooner; it came through eu"
    wait_for(lambda: told in terminal("explain", request_id, **home).stdout, "its spans are written")


def read_last_error(stream: bytes) -> str:
    """Return the code of the error in which a stream ends. It stands behind a whole event, and has no id."""
    *_, last = stream.decode().strip().split("\n\n")
    opening, _, data = last.partition("data: ")
    assert opening.endswith("event: error\n")
    assert "id: " not in opening
    return str(json.loads(data)["error"]["code"])


def test_a_request_is_cancelled_from_the_other_region(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    first, second = post(us), post(us)
    told = httpx.post(f"{eu.url}/v1/streams/{first}/cancel", timeout=None)
    assert (told.json()["cancelled"], told.headers[REGION_HEADER]) == (True, "us; home")
    assert httpx.delete(f"{eu.url}/v1/streams/{second}", timeout=None).json()["cancelled"]
    for one in (first, second):
        status = us.scripted.record.read_status(one)
        assert status is not None
        assert status.cancelled


def test_who_leaves_a_request_that_was_sent_on_has_left_it_at_home(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    with busy(eu, us):
        for body in ({"stream": True}, {"stream": False}):
            request_id = leave_answer(eu, us, PROMPT | body)

            def is_cancelled(request_id: str = request_id) -> bool:
                status = us.scripted.record.read_status(request_id)
                return status is not None and status.cancelled

            wait_for(is_cancelled, "it is cancelled at home")


def leave_answer(eu: Region, us: Region, body: dict[str, Any]) -> str:
    """Ask to cancel on leaving, leave once the home has the request, and return its id."""
    known = set(us.list_ids())
    headers = {"x-penstock-cancel-on-disconnect": "true"}
    with httpx.Client(timeout=httpx.Timeout(PATIENCE_S, read=1.0)) as http:
        try:
            with http.stream("POST", f"{eu.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status_code == 200
        except httpx.ReadTimeout:
            assert not body["stream"]
    wait_for(lambda: set(us.list_ids()) - known, "the home has it")
    (request_id,) = set(us.list_ids()) - known
    return request_id


def test_a_region_that_refuses_a_request_leaves_it_to_the_next_one(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    with busy(eu, us), busy(us, eu):
        eu.tell_speed(50.0 * len(eu.list_ids()))
        wait_for(lambda: eu.see("eu")["models"]["m"]["wait_s"]["interactive"] > 15, "more waits here than there")
        headers = {"x-penstock-reject-if-busy": "1"}
        there = httpx.post(f"{us.url}/v1/completions", json=PROMPT, headers=headers | SENT_ON, timeout=None)
        assert (there.status_code, there.headers["x-penstock-refused"]) == (429, "busy")
        answer = httpx.post(f"{eu.url}/v1/completions", json=PROMPT, headers=headers, timeout=None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "busy")
        assert answer.headers[REGION_HEADER] == "eu; only", "it came back from us"


def test_a_region_that_cannot_write_leaves_a_request_to_the_next_one(regions: tuple[Region, Region]) -> None:
    eu, us = regions

    def let_gateways(*rights: str) -> None:
        execute_all(us.scripted.server, [("ACL", "SETUSER", "default", *rights)])

    with busy(eu, us):
        try:
            let_gateways("-set")
            there = httpx.post(f"{us.url}/v1/completions", json=PROMPT, headers=SENT_ON, timeout=None)
            assert (there.status_code, there.headers["x-penstock-refused"]) == (503, "unavailable")
            before = us.list_ids()
            body = {**PROMPT, "stream": True}
            with httpx.stream("POST", f"{eu.url}/v1/completions", json=body, timeout=None) as answer:
                assert (answer.status_code, answer.headers[REGION_HEADER]) == (200, "eu; only"), answer.read()

            let_gateways("+@all", "-xadd")
            there = httpx.post(f"{us.url}/v1/completions", json=PROMPT, headers=SENT_ON, timeout=None)
            assert (there.status_code, there.json()["error"]["code"]) == (503, "unavailable")
            assert "x-penstock-refused" not in there.headers, "it may be in the stream"
            mine = eu.list_ids()
            answer = httpx.post(f"{eu.url}/v1/completions", json=PROMPT, timeout=None)
            assert (answer.status_code, answer.headers[REGION_HEADER]) == (503, "us; sooner")
            assert (eu.list_ids(), us.list_ids()) == (mine, before)
        finally:
            let_gateways("+@all")


def test_posts_with_one_key_join_at_any_gateway(regions: tuple[Region, Region]) -> None:
    for home in NAMES:
        headers = {"idempotency-key": pick_key(home, "joins")}
        first, second = (post(region, PROMPT, **headers) for region in regions)
        assert first == second
        assert find_home(first, NAMES) == home
        other = {**PROMPT, "prompt": "another", "stream": True}
        for region in regions:
            answer = httpx.post(f"{region.url}/v1/completions", json=other, headers=headers, timeout=None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_a_response_that_is_kept_a_file_and_a_batch_are_used_at_any_gateway(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    body = {"model": "m", "input": "hello", "background": True}
    made = httpx.post(f"{us.url}/v1/responses", json=body, timeout=None).json()
    assert made["id"].endswith("-us")
    us.scripted.finish(made["id"])
    url = f"{eu.url}/v1/responses"
    wait_for(lambda: httpx.get(f"{url}/{made['id']}", timeout=None).json()["status"] == "completed", "it ends")
    found = httpx.get(f"{url}/{made['id']}", timeout=None).json()
    (item,) = found["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    named: tuple[dict[str, Any], ...] = ({"previous_response_id": made["id"], "input": "on"}, {"input": [reference]})
    for more in named:
        answer = httpx.post(url, json={"model": "m", "background": True, **more}, timeout=None)
        assert (answer.json()["id"][-3:], answer.headers[REGION_HEADER]) == ("-us", "us; home")
    counted = httpx.post(f"{url}/input_tokens", json={"model": "m", **named[0]}, timeout=None)
    assert counted.headers[REGION_HEADER] == "us; home"
    assert httpx.delete(f"{url}/{made['id']}", timeout=None).json()["deleted"]
    assert httpx.get(f"{us.url}/v1/responses/{made['id']}", timeout=None).status_code == 404

    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": PROMPT}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = httpx.post(f"{us.url}/v1/files", data={"purpose": "batch"}, files=files, timeout=None).json()
    assert file["id"].endswith("-us")
    assert httpx.get(f"{eu.url}/v1/files/{file['id']}/content", timeout=None).json() == line
    new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = httpx.post(f"{eu.url}/v1/batches", json=new, timeout=None).json()
    assert batch["id"].endswith("-us")
    assert httpx.post(f"{eu.url}/v1/batches/{batch['id']}/cancel", timeout=None).json()["id"] == batch["id"]
    assert httpx.get(f"{eu.url}/v1/batches", timeout=None).json()["data"] == [], "lists are of one region"
    assert httpx.delete(f"{eu.url}/v1/files/{file['id']}", timeout=None).json()["deleted"]


def test_a_request_that_came_through_two_regions_is_answered_or_refused(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    peer = {PEER_HEADER: SECRET}
    with busy(us, eu):
        once, twice = (
            {**peer, HOPS_HEADER: "asia;sooner"}, {**peer, HOPS_HEADER: "asia;sooner, africa;sooner"},
        )  # fmt: skip
        body = {**PROMPT, "stream": True}
        for headers, told in ((once, "eu; sooner"), (twice, "us; hops")):
            with httpx.stream("POST", f"{us.url}/v1/completions", json=body, headers=headers, timeout=None) as answer:
                assert answer.headers[REGION_HEADER] == told
        # Without the secret a client's word counts for nothing.
        strange = {HOPS_HEADER: twice[HOPS_HEADER]}
        with httpx.stream("POST", f"{us.url}/v1/completions", json=body, headers=strange, timeout=None) as answer:
            assert answer.headers[REGION_HEADER] == "eu; sooner"
    answer = httpx.get(f"{us.url}/v1/streams/cmpl-0-eu", headers=twice, timeout=None)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "region_away")
    assert "PENSTOCK_REGION_PEERS" in answer.json()["error"]["message"]


def test_a_loop_ends_after_two_hops_an_adopter_answers_and_a_gateway_that_stops_says_where_to_go_on(
    tmp_path: Path,
) -> None:
    with ExitStack() as exits:
        eu, us = (Region(name, tmp_path / name, exits) for name in NAMES)
        for one, other in ((eu, us), (us, eu)):
            one.start_gateway(exits, {}, **{other.name: other.proxy.port, "asia": other.proxy.port})
        answer = httpx.get(f"{eu.url}/v1/streams/cmpl-0-asia", timeout=None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "region_away")

        us.scripted.server.hset(ADOPTED_REGIONS_KEY, "asia", "{}")
        wait_for(lambda: eu.see("us")["adopted"] == ["asia"], "the adoption is known")
        answer = httpx.get(f"{eu.url}/v1/streams/cmpl-0-asia", timeout=None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "region_away"), "us did not take it over"

        request_id = post(us)
        card = us.scripted.server.get(stream_meta_key(request_id))
        assert card is not None
        us.scripted.server.set(stream_meta_key("cmpl-0-asia"), card)
        answer = httpx.get(f"{eu.url}/v1/streams/cmpl-0-asia", headers={"last-event-id": "end"}, timeout=None)
        assert answer.headers[REGION_HEADER] == "us; adopted asia"
        us.scripted.write(request_id, 3)
        with httpx.stream("GET", f"{eu.url}/v1/streams/{request_id}", timeout=None) as stream:
            pieces = stream.iter_bytes()
            received = b""
            while received.count(b"data: ") < 3:
                received += next(pieces)
            eu.gateway.process.stop(PATIENCE_S)
            received += b"".join(pieces)
        assert read_last_error(received) == "gateway_stopping"


def test_a_tenant_has_its_limit_once_over_both_regions(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    stays = TenantEntry(regions=("us",))
    key, staying = write_keys(keys, "acme", "stays", acme=TenantEntry(tokens_per_min=600), stays=stays)
    with ExitStack() as exits:
        eu, us = (Region(name, tmp_path, exits) for name in NAMES)
        for one, other in ((eu, us), (us, eu)):
            one.headers |= {"authorization": f"Bearer {key}"}
            one.start_gateway(exits, {"GATEWAY_KEYS": str(keys)}, **{other.name: other.proxy.port})
        wait_until_ready(eu, us)
        post(us, {**PROMPT, "max_tokens": 500}, **us.headers)

        def is_settled() -> bool:
            left = eu.scripted.server.hget(rate_key("acme"), "tokens")
            return left is not None and float(left) < 150

        wait_for(is_settled, "the use in us is settled in eu")
        body = {**PROMPT, "max_tokens": 300}
        answer = httpx.post(f"{eu.url}/v1/completions", json=body, headers=eu.headers, timeout=None)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        # Its data may be in us alone, where topics of its own are refused: Redis is the bus there.
        for more in ({}, {"idempotency-key": "any"}):
            headers = {"authorization": f"Bearer {staying}", **more}
            answer = httpx.post(f"{eu.url}/v1/completions", json=PROMPT, headers=headers, timeout=None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "own_topics_need_kafka")
            assert answer.headers[REGION_HEADER].startswith("us; ")
        strange = {"authorization": "Bearer psk_0"}
        answer = httpx.get(f"{eu.url}/v1/streams/cmpl-0-us", headers=strange, timeout=None)
        assert (answer.status_code, answer.headers[REGION_HEADER]) == (401, "eu; here"), "nobody else is sent on"


def test_a_slow_peer_is_read_and_one_that_stands_still_ends_in_an_error(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    request_id = post(us)
    us.scripted.finish(request_id, 8)
    us.proxy.delay_replies(3.0)
    assert read_stream(eu, request_id) == read_stream(us, request_id)
    us.proxy.delay_replies(0.0)
    wait_until_ready(eu, us)

    request_id = post(us)
    us.scripted.write(request_id, 3)
    with httpx.stream("GET", f"{eu.url}/v1/streams/{request_id}", timeout=None) as answer:
        pieces = answer.iter_bytes()
        received = b""
        while received.count(b"data: ") < 3:
            received += next(pieces)
        us.proxy.stop_forwarding()
        received += b"".join(pieces)
    assert read_last_error(received) == "region_away"
    us.proxy.forward_normally()
    wait_until_ready(eu, us)


def test_a_region_that_cannot_be_reached_took_nothing_and_what_it_has_is_a_typed_error(
    regions: tuple[Region, Region],
) -> None:
    eu, us = regions
    request_id = post(us)
    with busy(eu, us):
        us.way.close()  # connections are refused now, which eu's gateway learns by this request
        with httpx.stream("POST", f"{eu.url}/v1/completions", json={**PROMPT, "stream": True}, timeout=None) as answer:
            assert (answer.status_code, answer.headers[REGION_HEADER]) == (200, "eu; only"), answer.read()
            assert answer.headers["x-request-id"].endswith("-eu")
        for method, path in (
            ("GET", f"streams/{request_id}"), ("DELETE", f"streams/{request_id}"), ("GET", "responses/resp_0-us"),
            ("POST", "responses/resp_0-us/cancel"), ("GET", "files/file-0-us/content"), ("GET", "batches/batch_0-us"),
        ):  # fmt: skip
            answer = httpx.request(method, f"{eu.url}/v1/{path}", timeout=None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "region_away")
            assert answer.headers["retry-after"] == "1"
        message = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"idempotency-key": pick_key("us")}
        answer = httpx.post(f"{eu.url}/v1/messages", json=message, headers=headers, timeout=None)
        assert answer.status_code == 503
        assert answer.json()["error"]["details"] == {"error_code": "region_away"}
