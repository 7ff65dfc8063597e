"""Lines of batches that idle regions answer, between two regions of real servers."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from penstock.ingest.gateway import lending as lending_routes
from penstock.ingest.regions import lending
from penstock.ingest.regions.choosing import RegionAsk, RegionChooser, RegionView
from penstock.ingest.regions.state import BatchOffer, ModelState, describe_offer
from penstock.local.processes import find_free_port
from penstock.names import Pipeline
from penstock.ops.account import Prices
from sim.forked import ForkedStack, pause_process
from sim.waiting import PATIENCE_S, wait_for
from tests.gateways import ENVIRONMENT, ScriptedPipeline
from tests.ingest.batch_files import each_once, lines, read, result_ids, row, wait_for_results

SECRET = "lines for who is idle"
PEER = {"x-penstock-peer": SECRET}


def make_regions(folder: Path, exits: ExitStack) -> tuple[ForkedStack, ForkedStack]:
    """Start two regions with a worker and a gateway each, and wait until the first one knows the second one."""
    ports = {"eu": find_free_port(), "us": find_free_port()}
    stacks = []
    for own, other in (("eu", "us"), ("us", "eu")):
        region = {"NAME": own, "PEERS": f"{other}=http://127.0.0.1:{ports[other]}", "SECRET": SECRET}
        environment = ENVIRONMENT | {f"PENSTOCK_REGION_{name}": value for name, value in region.items()}
        stack = ForkedStack(
            folder / own, pipeline="spare", prefill=0, decode=0, auto=1, gateway=ports[own], environment=environment
        )
        stacks.append(exits.enter_context(stack))
    for stack in stacks:
        stack.wait_until_ready(PATIENCE_S)
    return stacks[0], stacks[1]


@pytest.fixture(scope="module")
def regions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkedStack, ForkedStack]]:
    with ExitStack() as exits:
        yield make_regions(tmp_path_factory.mktemp("regions"), exits)


def read_region(home: ForkedStack, name: str) -> dict[str, Any]:
    """How the home's gateway sees a region."""
    seen = httpx.get(f"{home.gateway_url}/v1/penstock/regions", timeout=None).json()["regions"]
    found: dict[str, Any] = next(one for one in seen if one["name"] == name)
    return found


def read_coverage(home: ForkedStack, name: str) -> float:
    return float(read_region(home, name)["models"].get("demo", {"coverage": 0})["coverage"])


def count_lent(home: ForkedStack) -> int:
    metrics = httpx.get(f"{home.gateway_url}/metrics", timeout=None).text
    found = re.search(r'penstock_region_requests_total\{region="us",why="idle"\} (\d+)', metrics)
    return int(found[1]) if found else 0


def let_home_be_busy(home: ForkedStack, peer: ForkedStack) -> None:
    """Let the home have no worker, and the peer one that is idle."""
    start_workers(home)
    start_workers(peer)
    wait_for(lambda: read_coverage(home, "eu") == read_coverage(home, "us") == 1, "both know the model", every_s=0.1)
    home.stop_workers()
    wait_for(lambda: read_coverage(home, "eu") == 0, "the home has no worker", every_s=0.1)


def start_workers(stack: ForkedStack) -> None:
    for slot in stack.workers:
        slot.was_ready = slot.child is not None
    stack.wait_until_ready(PATIENCE_S)


def open_sdk(home: ForkedStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{home.gateway_url}/v1", api_key="none", max_retries=0, timeout=None)


def make_batch(sdk: openai.OpenAI, num_rows: int) -> str:
    file = sdk.files.create(file=("in.jsonl", lines([row(number) for number in range(num_rows)])), purpose="batch")
    made = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


def read_answers(sdk: openai.OpenAI, batch_id: str, status: str = "completed") -> list[dict[str, Any]]:
    """Wait for the end of a batch, and return the lines of its output."""
    ends = ("completed", "failed", "cancelled", "expired")
    wait_for(lambda: sdk.batches.retrieve(batch_id).status in ends, "the batch's end", every_s=0.1)
    batch = sdk.batches.retrieve(batch_id)
    assert batch.status == status
    return [] if batch.output_file_id is None else read(sdk.files.content(batch.output_file_id).read())


def ids_of(batch_id: str) -> str:
    return f"chatcmpl-{batch_id.removeprefix('batch_')}-"


@pytest.mark.proof
def test_lines_of_a_busy_region_are_answered_by_an_idle_one(regions: tuple[ForkedStack, ForkedStack]) -> None:
    """Each once, with the tokens of any other request, and the results come home."""
    home, peer = regions
    let_home_be_busy(home, peer)
    with open_sdk(home) as sdk, open_sdk(peer) as there:
        batch_id = make_batch(sdk, 12)
        answers = read_answers(sdk, batch_id)
        direct = there.post("/chat/completions", cast_to=openai.types.chat.ChatCompletion, body=row(5)["body"])
    assert each_once(answers, 12)
    assert len(wait_for_results(peer, ids_of(batch_id), 12)) == 12
    assert not result_ids(home, ids_of(batch_id))
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers}
    assert texts["row-5"] == direct.choices[0].message.content


def test_lines_come_home_when_the_region_that_has_them_dies(regions: tuple[ForkedStack, ForkedStack]) -> None:
    home, peer = regions
    let_home_be_busy(home, peer)
    (worker,), gateway = peer.workers, peer.gateway
    assert worker.child is not None
    assert gateway is not None
    assert gateway.child is not None
    lent_before = count_lent(home)
    pause_process(worker.child.pid)
    with open_sdk(home) as sdk:
        batch_id = make_batch(sdk, 8)
        wait_for(lambda: count_lent(home) == lent_before + 8, "all lines are lent", every_s=0.1)
        gateway.child.kill()
        worker.child.kill()
        start_workers(home)
        assert each_once(read_answers(sdk, batch_id), 8)
    ids = wait_for_results(home, ids_of(batch_id), 8)
    assert len(ids) == len(set(ids)) == 8
    gateway.was_ready = worker.was_ready = False
    peer.wait_until_ready(PATIENCE_S)


def test_lines_of_a_cancelled_batch_are_cancelled_where_they_were_lent_to(
    regions: tuple[ForkedStack, ForkedStack],
) -> None:
    home, peer = regions
    let_home_be_busy(home, peer)
    (worker,) = peer.workers
    assert worker.child is not None
    lent_before = count_lent(home)
    pause_process(worker.child.pid)
    with open_sdk(home) as sdk, redis.Redis.from_url(peer.addresses.first_url) as server:
        batch_id = make_batch(sdk, 3)
        wait_for(lambda: count_lent(home) == lent_before + 3, "all lines are lent", every_s=0.1)
        sdk.batches.cancel(batch_id)
        assert read_answers(sdk, batch_id, "cancelled") == []
        keys = [Pipeline("spare").record_key(f"{ids_of(batch_id)}{number}") for number in (1, 2, 3)]
        assert [server.hget(key, "cancelled") for key in keys] == [b"1"] * 3
    worker.child.kill()
    worker.was_ready = False
    peer.wait_until_ready(PATIENCE_S)


def lend(number: int, **changes: Any) -> dict[str, Any]:
    """A line as a peer sends it."""
    asked = row(number, **changes)
    return {
        "terms": {"name": "0123-eu", "tenant": "acme"},
        "row": {"number": number, "custom_id": asked["custom_id"], "url": asked["url"], "body": asked["body"]},
    }


def test_a_line_is_lent_for_a_while(redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back when no worker has begun it, or it has no answer; until then it is answered once."""
    monkeypatch.setattr(lending_routes, "LOOK_S", 0.05)
    region = {"name": "us", "peers": "eu=http://127.0.0.1:9", "secret": SECRET}
    with (
        ScriptedPipeline(redis_url, pipeline) as made,
        made.open_gateway(region=region) as gateway,
        gateway.client(headers=PEER) as client,
    ):
        model = {"model": pipeline.name}
        assert (
            client.post(lending.ROWS_PATH, json=lend(1, **model), headers={"x-penstock-peer": "?"}).status_code == 404
        )
        with ThreadPoolExecutor(1) as pool:
            lent = pool.submit(client.post, lending.ROWS_PATH, json=lend(1, **model))
            wait_for(lambda: made.read_requests("batch"), "the line is published")
            monkeypatch.setattr(lending_routes, "LEASE_S", 0.0)
            assert lent.result().status_code == 409, "nobody has begun it"
        (asked,) = made.read_requests("batch")
        assert (asked.id, asked.tenant) == ("chatcmpl-0123-eu-1", "acme")
        assert client.post(lending.ROWS_PATH, json=lend(2, temperature=99, **model)).status_code == 409, "it is wrong"
        made.write("chatcmpl-0123-eu-3", 2)
        assert client.post(lending.ROWS_PATH, json=lend(3, **model)).status_code == 202, "it is under way"
        made.finish("chatcmpl-0123-eu-4")
        monkeypatch.setattr(lending_routes, "LEASE_S", 60.0)
        finished = client.post(lending.ROWS_PATH, json=lend(4, **model)).json()
    assert (finished["number"], finished["is_ok"]) == (4, True)
    assert json.loads(finished["line"])["response"]["request_id"] == "chatcmpl-0123-eu-4"


def view(wait_s: float | None, worker_hour: float | None = None, *, away_s: float = 0.1, **changes: Any) -> RegionView:
    """A region that lets batch work wait for so long."""
    told = {"prompt_token_s": 0.001, "num_workers": 1, "coverage": 1.0, **changes}
    offer = {name: told.pop(name) for name in ("is_welcome",) if name in told}
    model = ModelState(fingerprint=None, wait_s={"interactive": 0.0, "batch": wait_s}, **told)
    return RegionView(model, away_s, 0.0, BatchOffer(worker_hour=worker_hour, **offer))


BUSY, ASK = 5.0, RegionAsk("demo", "batch", 10)


@pytest.mark.parametrize(
    ("views", "allowed", "chosen"),
    [
        ({"eu": view(0.0, away_s=0), "us": view(0.0)}, None, "eu"),
        ({"eu": view(BUSY, away_s=0), "us": view(0.0, away_s=0.3), "asia": view(0.0)}, None, "asia"),
        ({"eu": view(0.0, 3.0, away_s=0), "us": view(0.0, 2.0)}, None, "us"),
        ({"eu": view(0.0, 3.0, away_s=0), "us": view(0.0, 2.0, prompt_token_s=0.002)}, None, "eu"),
        ({"eu": view(0.0, 3.0, away_s=0), "us": view(0.0)}, None, "eu"),
        ({"eu": view(0.0, is_welcome=False, away_s=0), "us": view(0.0)}, None, "us"),
        ({"eu": view(BUSY, away_s=0), "us": view(0.0, is_welcome=False)}, None, "eu"),
        ({"eu": view(BUSY, away_s=0), "us": view(None)}, None, None),
        ({"eu": view(BUSY, away_s=0), "us": view(0.0, coverage=0.2)}, None, None),
        ({"eu": view(BUSY, away_s=0), "us": view(0.0)}, frozenset({"eu", "asia"}), "eu"),
        ({"eu": view(BUSY, away_s=0), "us": view(BUSY)}, None, None),
        ({}, None, "eu"),
    ],
    ids=[
        "near", "nearest", "cheapest", "cheapest by its speed", "no price comes last", "the home's hours", "hours",
        "unknown is not idle", "hardly known", "residency", "all are busy", "nothing is known",
    ],
)  # fmt: skip
def test_a_line_goes_to_the_cheapest_idle_region(
    views: dict[str, RegionView], allowed: frozenset[str] | None, chosen: str | None
) -> None:
    assert RegionChooser("eu").choose_idle(ASK._replace(allowed=allowed), views, 0.5) == chosen


def test_lines_that_were_just_sent_count() -> None:
    chooser, views = RegionChooser("eu"), {"eu": view(BUSY, away_s=0), "us": view(0.0)}
    found = [chooser.choose_idle(ASK, views, 0.5) for _ in range(150)]
    assert found == ["us"] * 100 + [None] * 50, "ten milliseconds each, until they wait for a second"


@pytest.mark.parametrize(
    ("hours", "welcome"),
    [([], range(24)), ([[22, 6]], [*range(6), 22, 23]), ([[9, 11], [20, 24]], [9, 10, *range(20, 24)])],
)
def test_a_region_tells_its_price_and_its_hours(hours: list[list[int]], welcome: Any) -> None:
    prices = Prices.model_validate({"worker_hour": {"prefill": 1.0, "decode": 3.0}, "batch_hours": hours})
    told = [describe_offer(prices, time.gmtime(hour * 3600 + 59 * 60)) for hour in range(24)]
    assert {offer.worker_hour for offer in told} == {2.0}
    assert [hour for hour, offer in enumerate(told) if offer.is_welcome] == list(welcome)
    assert describe_offer(None, time.gmtime()) == BatchOffer()
