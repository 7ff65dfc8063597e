"""A region that died is adopted: once, whoever is killed where."""

import json
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock import failpoints
from penstock.config.settings import RecordSettings, RegionSettings
from penstock.errors import AdoptionRefused, SettingsError
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.regions import adopting
from penstock.ingest.regions.adopting import AdoptionMark, AdoptionSettings, adopt_region, read_marks
from penstock.local.processes import find_free_port
from penstock.messages import Result, decode_message, now_s
from penstock.names import ADOPTED_REGIONS_KEY, CARD_HEADER, FINGERPRINTS_KEY, MODELS_KEY, Pipeline, stream_meta_key
from sim.events import EventSource
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.gateways import ENVIRONMENT
from tests.regions.copied import BUS, CopiedRegion
from tests.regions.test_copies import SECRET, Killed, die

pytestmark = pytest.mark.usefixtures("armed")
KEEP_S = 600.0
SETTINGS = AdoptionSettings(BUS, RecordSettings(keep_s=KEEP_S), RegionSettings())


def adopt(region: CopiedRegion) -> AdoptionMark:
    return adopt_region(region.client, region.addresses, SETTINGS, region.name, "me@here")


def make_card(region: CopiedRegion, request_id: str, **fields: object) -> dict[str, str]:
    """Return the headers with which a gateway publishes a request."""
    card = {"id": request_id, "path": "/v1/completions", "model": "demo", "created": 1, "request_ids": [request_id]}
    return {CARD_HEADER: json.dumps({**card, "pipeline": region.pipeline.name, **fields})}


def test_what_is_open_is_published_here_and_what_is_answered_is_not(copied_region: CopiedRegion) -> None:
    copied_region.beat()
    copied_region.request("late", deadline=now_s() - 60)
    copied_region.request("open", "answered", headers={"penstock-tenant": "default", "penstock-key": "k1"})
    copied_region.answer("answered")

    mark = adopt(copied_region)

    published = {message.key: message for message in copied_region.read_published()}
    assert published.keys() == {"late", "open"}
    assert published["open"].headers == {"penstock-tenant": "default", "penstock-key": "k1"}
    counts = mark.pipelines[copied_region.pipeline.name]
    # Both came after the only heartbeat, and no gateway made them.
    assert counts == {"taken": 2, "late": 1, "interrupted": 2, "newer": 2, "without_card": 2, "gone": 0}
    assert copied_region.list_ids("taken") == ["late", "open"]
    assert copied_region.list_ids("open") == []
    assert read_marks(copied_region.client)[copied_region.name] == mark
    assert mark.by == "me@here"


def test_gateways_get_what_they_need_to_stream_the_answer_and_nothing_of_others(copied_region: CopiedRegion) -> None:
    own, other, tenant = (f"cmpl-{what}-{copied_region.pipeline.name}" for what in ("own", "other", "tenant"))
    copied_region.request(own, headers=make_card(copied_region, own))
    copied_region.request("a-liar", headers=make_card(copied_region, other))
    copied_region.request(tenant, headers=make_card(copied_region, tenant, tenant="acme"))

    mark = adopt(copied_region)

    stored = copied_region.client.get(stream_meta_key(own))
    assert isinstance(stored, bytes)
    assert StreamMeta.model_validate_json(stored).is_adopted
    assert 0 < copied_region.client.pttl(stream_meta_key(own)) <= KEEP_S * 1000
    assert copied_region.client.exists(stream_meta_key(other), stream_meta_key(tenant)) == 0
    assert mark.pipelines[copied_region.pipeline.name]["without_card"] == 2


def test_what_may_have_been_seen_otherwise_ends_in_a_typed_error(
    pipeline: Pipeline, kafka: str, tmp_path: Path, exits: ExitStack
) -> None:
    """A worker and a gateway of the adopting region, whose model is known to be the same only at last."""
    numbers: dict[str, Any] = {"prefill": 0, "decode": 0, "auto": 1, "gateway": find_free_port()}
    stack = ForkedStack(tmp_path, pipeline=pipeline.name, kafka=kafka, environment=ENVIRONMENT, **numbers)
    exits.enter_context(stack).wait_until_ready(PATIENCE_S)
    copied = exits.enter_context(closing(CopiedRegion(pipeline, kafka, stack.addresses.stream_url)))
    settings = SETTINGS._replace(region=RegionSettings(name="us"))
    told = {
        "unknown": ("", ""), "another": ("a", "b"), "batch": ("a and the batch",) * 2, "part": ("a", "a"),
        "same": ("a", "a"),
    }  # fmt: skip
    for one, fingerprints in told.items():
        for region, fingerprint in zip(("us", copied.name), fingerprints, strict=True):
            copied.client.hset(FINGERPRINTS_KEY, region, json.dumps({"demo": fingerprint} if fingerprint else {}))
        choices = [one, f"{one}-answered"] if one == "part" else [one]
        copied.request(one, headers=make_card(copied, one, id=f"cmpl-{one}", request_ids=choices))
        mark = adopt_region(copied.client, stack.addresses, settings, copied.name, "me", force=True)
        assert mark.pipelines[pipeline.name]["interrupted"] == (one not in ("part", "same"))

    def read_results() -> dict[str, Result]:
        found = [decode_message(Result, message.value) for message in copied.bus.read_all(pipeline.results_topic)]
        return {result.id: result for result in found}

    wait_for(lambda: read_results().keys() == told.keys(), "each has a result")
    codes = {one: result.error and result.error.code for one, result in read_results().items()}
    assert codes == {one: None if one in ("part", "same") else "answer_interrupted" for one in told}
    for one in told:
        source = EventSource(f"{stack.gateway_url}/v1/streams/cmpl-{one}")
        events = list(source.connect())
        assert (events[-1].data == "[DONE]") == (one == "same"), events
        if one != "same":
            assert events[-1].body["error"]["code"] == "answer_interrupted"
        assert bool("".join(event.text for event in events if event.event == "message")) == (one in ("part", "same"))


@pytest.mark.parametrize("point", failpoints.ADOPT)
def test_killed_at_every_step_and_begun_again(
    copied_region: CopiedRegion, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "MAX_TAKEN", 4)
    ids = [f"id-{number}" for number in range(10)]
    copied_region.request(*ids)
    failpoints.arm_action(point, die, 2 if point[6] in "456" else 1)
    with pytest.raises(Killed):
        adopt(copied_region)
    failpoints.disarm()
    first = read_marks(copied_region.client)[copied_region.name]

    mark = adopt(copied_region)

    assert mark.since_s == first.since_s
    assert mark.pipelines[copied_region.pipeline.name]["taken"] == 10
    assert copied_region.list_ids("taken") == sorted(ids)
    assert copied_region.list_ids("open") == []
    published = Counter(message.key for message in copied_region.read_published())
    assert published.keys() == {*ids}
    # Those that were published and not noted are published again, and answered once.
    assert sum(published.values()) == 10 + (4 if point == "adopt.5.published" else 0)


def test_a_region_with_another_model_does_not_stand_in(copied_region: CopiedRegion) -> None:
    name, own = copied_region.name, f"us-{copied_region.name}"
    settings = SETTINGS._replace(region=RegionSettings(name=own))
    copied_region.request("open")
    told = {own: {"demo": "a", "mine": "x"}, name: {"demo": "b", "theirs": "y"}}
    for region, models in told.items():
        copied_region.client.hset(FINGERPRINTS_KEY, region, json.dumps(models))
    with pytest.raises(AdoptionRefused, match="demo of"):
        adopt_region(copied_region.client, copied_region.addresses, settings, name, "me")
    assert name not in read_marks(copied_region.client)
    assert copied_region.read_published() == []
    copied_region.client.hset(FINGERPRINTS_KEY, own, json.dumps(told[name]))
    adopt_region(copied_region.client, copied_region.addresses, settings, name, "me")
    assert [message.key for message in copied_region.read_published()] == ["open"]


def test_a_model_that_the_dead_region_never_had_is_passed_over(copied_region: CopiedRegion) -> None:
    copied_region.request("open")
    field = f"{copied_region.pipeline.name}-own:{copied_region.pipeline.name}-own"
    copied_region.client.hset(MODELS_KEY, field, "{}")
    try:
        assert adopt(copied_region).pipelines.keys() == {copied_region.pipeline.name}
    finally:
        copied_region.client.hdel(MODELS_KEY, field)


def test_a_message_that_the_copy_lost_stays_open_and_is_told(copied_region: CopiedRegion) -> None:
    copied_region.request("one")
    copied_region.index_all()
    key = copied_region.pipeline.region_key(copied_region.name, "open")
    copied_region.client.hset(key, "lost", "i:0:4000000")
    assert adopt(copied_region).pipelines[copied_region.pipeline.name]["gone"] == 1
    assert copied_region.list_ids("open") == ["lost"]


def test_operators_adopt_and_give_back(copied_region: CopiedRegion, terminal: Terminal) -> None:
    name, addresses = copied_region.name, copied_region.addresses
    here = {"KAFKA": addresses.kafka, "STREAM_URL": addresses.stream_url, "PIPELINE": addresses.pipeline}
    here |= {"REGION_NAME": "us", "REGION_PEERS": f"{name}=http://127.0.0.1:9", "REGION_SECRET": SECRET}
    here = {f"PENSTOCK_{key}": value for key, value in here.items()} | {"PENSTOCK_REGION_COPIES": name}
    copied_region.request("open")
    copied_region.beat()

    told = terminal("regions", "adopt", name, **here)
    assert told.returncode == 0, told.stderr
    assert f"1 open requests of {name} are answered here" in told.stdout
    rows = {row["region"]: row for row in json.loads(terminal("regions", "list", "--json", **here).stdout)}
    assert rows[name]["adopted"]["pipelines"][addresses.pipeline]["taken"] == 1
    assert "is not copied here" in terminal("regions", "adopt", "mars", **here).stderr
    assert "it has ended what was adopted" in " ".join(terminal("regions", "give-back", name, **here).stderr.split())
    assert copied_region.list_ids("taken") == ["open"]
    assert terminal("regions", "give-back", name, "--force", **here).returncode == 0
    assert copied_region.client.hget(ADOPTED_REGIONS_KEY, name) is None
    assert copied_region.list_ids("taken") == []
    assert "is not adopted here" in terminal("regions", "give-back", name, **here).stderr


def test_with_redis_as_the_bus_it_is_refused(copied_region: CopiedRegion) -> None:
    embedded = copied_region.addresses.model_copy(update={"kafka": ""})
    with pytest.raises(SettingsError, match="need Kafka"):
        adopt_region(copied_region.client, embedded, SETTINGS, copied_region.name, "me")
    assert read_marks(copied_region.client).get(copied_region.name) is None
