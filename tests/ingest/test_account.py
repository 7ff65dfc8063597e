"""What tokens are sold for and what workers cost: counted, priced, and shown."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import SettingsError
from penstock.ingest.metering import UsageMeter, list_last_days
from penstock.messages import Result, Usage
from penstock.names import KEY_HEADER, Pipeline, PriorityClass
from penstock.ops.account import Account, Prices, Whose, read_account, read_prices
from penstock.redis.client import redis_client
from sim.waiting import wait_for
from tests.commands import Terminal
from tests.gateways import open_stack, write_keys
from tests.ingest.batch_files import lines, row

TABLE = """
currency = "EUR"
[worker_hour]
auto = 7200.0
[[tokens]]
model = "demo"
class = "batch"
input = 1.0
cached = 0.5
output = 2.0
[[tokens]]
input = 10.0
cached = 5.0
output = 20.0
"""


@pytest.mark.proof
def test_a_gateway_with_prices_tells_the_margin_of_each_key(tmp_path: Path, terminal: Terminal) -> None:
    (prices := tmp_path / "prices.toml").write_text(TABLE)
    keys = write_keys(tmp_path / "keys.json", "acme", "acme")
    settings = {"PENSTOCK_GATEWAY_KEYS": str(tmp_path / "keys.json"), "PENSTOCK_GATEWAY_PRICES": str(prices)}
    with open_stack(tmp_path / "s", pipeline="priced", prefill=0, decode=0, auto=1, settings=settings) as stack:
        body = {"model": "demo", "prompt": "In the beginning", "max_tokens": 8, "ignore_eos": True}
        for key in keys:
            own = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{stack.gateway_url}/v1/completions", json=body, headers=own, timeout=None)
            assert answer.status_code == 200
        own, content = {"Authorization": f"Bearer {keys[0]}"}, {"file": ("in.jsonl", lines([row(0)]))}
        post = partial(httpx.post, headers=own, timeout=None)
        file = post(f"{stack.gateway_url}/v1/files", files=content, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert post(f"{stack.gateway_url}/v1/batches", json=asked).status_code == 200

        def read() -> dict[str, Any]:
            given = {"PENSTOCK_STREAM_URL": stack.addresses.stream_url, "PENSTOCK_PIPELINE": "priced"}
            told = terminal("usage", "--cost", "--json", **settings, **given)
            found: dict[str, Any] = json.loads(told.stdout)
            return found

        wait_for(lambda: sum(of["requests"] for of in read()["rows"]) == 3, "all are counted")
        stack.stop_workers()  # they write what they have not written
        told = read()
        one, other = (key.split("_")[1] for key in keys)
        wanted = [(one, "interactive", 8, 10), (one, "batch", 6, 1), (other, "interactive", 8, 10)]
        assert sorted((of["key"], of["priority_class"]) for of in told["rows"]) == sorted(of[:2] for of in wanted)
        for key, priority_class, num_tokens, price in wanted:
            (found,) = (of for of in told["rows"] if (of["key"], of["priority_class"]) == (key, priority_class))
            assert (found["tenant"], found["model"]) == ("acme", "demo")
            sold = found["prefill_tokens"] + found["cached_tokens"] * 0.5 + found["decode_tokens"] * 2
            assert found["sold"] == pytest.approx(price * sold / 1e6)
            assert found["decode_tokens"] == num_tokens
            assert found["prefill_s"] > 0
            assert found["cost"] == pytest.approx(2 * (found["prefill_s"] + found["decode_s"]))
        assert told["idle_cost"] == pytest.approx(2 * told["idle_s"]) != 0
        assert told["margin"] == pytest.approx(told["sold"] - told["cost"] - told["idle_cost"])
        assert (told["currency"], told["unpriced_tokens"]) == ("EUR", 0)
        metrics = httpx.get(f"{stack.gateway_url}/metrics").text
        assert re.search(r'^penstock_account\{[^}]*part="margin"', metrics, re.MULTILINE)


def test_results_are_counted_by_key_model_and_class_as_they_are_by_tenant(redis_url: str, pipeline: Pipeline) -> None:
    addresses = Addresses(stream_url=redis_url, pipeline=pipeline.name)
    bus = connect_bus(addresses, BusSettings())
    bus.create_topics()
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5)
    told: list[tuple[str, str, PriorityClass]] = [("a", "k1", "interactive"), ("a", "k1", "batch"), ("b", "", "batch")]
    messages = []
    for number, (tenant, key, priority_class) in enumerate(told):
        result = Result(
            id=f"r{number}", tenant=tenant, model="m", priority_class=priority_class, finish_reason="stop", usage=usage
        )
        headers = {KEY_HEADER: key} if key else {KEY_HEADER: "x" * 1000}  # no id is so long
        messages.append(Outgoing(pipeline.results_topic, result.encode(), result.id, headers=headers))
    bus.create_publisher().publish(messages)
    meter = UsageMeter(addresses, BusSettings())
    wait_for(lambda: meter.count_once(0.3) == 0, "all are counted")
    with redis_client(redis_url) as client:
        account = read_account(client, pipeline, list_last_days(2), Prices())
    assert {whose: (row.requests, row.prefill_tokens, row.cached_tokens, row.decode_tokens)
            for whose, row in account.rows.items()} == {
        Whose(tenant, key, "m", priority_class): (1, 6, 4, 5) for tenant, key, priority_class in told
    }  # fmt: skip
    assert account.num_unpriced_tokens == 3 * 15


def test_the_first_row_that_fits_has_the_price(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(TABLE)
    prices = read_prices(str(tmp_path / "prices.toml"))
    account = Account()
    for priority_class in ("interactive", "batch"):
        for model in ("demo", "other"):
            whose = json.dumps(["t", "", model, priority_class])
            account.add_day({f"decode_tokens:{whose}".encode(): b"1000000"}, {}, prices)
    assert {(whose.model, whose.priority_class): row.sold for whose, row in account.rows.items()} == {
        ("demo", "interactive"): 20.0, ("demo", "batch"): 2.0, ("other", "interactive"): 20.0, ("other", "batch"): 20.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens = 3", "tokens: .*list"), ("[[tokens]]\ninput = -1\ncached = 0\noutput = 0", "tokens.0.input"),
        ("[worker_hour]\ngpu = 1.0", "worker_hour.gpu"), ("[", "prices.toml: "), (None, "No such file"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_says_where(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "prices.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=rf"(?s)PENSTOCK_GATEWAY_PRICES=.*{words}"):
        read_prices(str(file))


def test_without_a_table_the_command_says_what_to_set(terminal: Terminal) -> None:
    assert "PENSTOCK_GATEWAY_PRICES names no file" in terminal("usage", "--cost").stderr
