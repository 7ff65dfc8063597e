"""The index of what is open in a copied region."""

from contextlib import closing

import pytest

from penstock import failpoints
from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, RegionSettings, load_settings
from penstock.errors import SettingsError
from penstock.ingest.regions import copies
from penstock.ingest.regions.copies import read_copy_state
from penstock.testing.gateway import TestGateway
from sim.waiting import wait_for
from tests.commands import Terminal
from tests.regions.copied import CopiedRegion

SECRET = "sixteen characters"


class Killed(BaseException):
    """The process died here."""


def die() -> None:
    raise Killed


def test_what_has_no_result_is_open_in_whatever_order_it_is_copied(copied_region: CopiedRegion) -> None:
    copied_region.request("open", "asked-first", "twice")
    copied_region.answer("asked-first", "answered-first", "twice")
    copied_region.index_all()
    assert copied_region.list_ids("open") == ["open"]
    copied_region.request("answered-first", "twice", "open", "open-later")
    copied_region.write(copied_region.pipeline.request_topic("interactive"), b"no request", "a bad key")
    copied_region.index_all()
    assert copied_region.list_ids("open") == ["open", "open-later"]
    copied_region.answer("open")
    copied_region.index_all()
    assert copied_region.list_ids("open") == ["open-later"]


@pytest.mark.usefixtures("armed")
@pytest.mark.parametrize("point", failpoints.COPY)
def test_an_index_that_dies_at_a_step_is_exact(copied_region: CopiedRegion, point: str) -> None:
    """Two parts of two topics: the third passage of the second step is in the midst of a turn."""
    copied_region.request(*(f"id-{number}" for number in range(40)))
    copied_region.answer(*(f"id-{number}" for number in range(0, 40, 2)))
    failpoints.arm_action(point, die, 3)
    with closing(copied_region.open_index()) as index, pytest.raises(Killed):
        index.take_all()
    failpoints.disarm()
    copied_region.index_all()
    assert copied_region.list_ids("open") == sorted(f"id-{number}" for number in range(1, 40, 2))


def test_two_indexes_at_once_are_one(copied_region: CopiedRegion) -> None:
    copied_region.request(*(f"id-{number}" for number in range(300)))
    with closing(copied_region.open_index()) as first, closing(copied_region.open_index()) as second:
        first.take_new(0.5)
        second.take_all()
        copied_region.answer(*(f"id-{number}" for number in range(299)))
        second.take_all()
        first.take_all()  # its places are old: it begins anew, behind the other's
    assert copied_region.list_ids("open") == ["id-299"]


def test_ids_of_results_are_bounded(copied_region: CopiedRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_ANSWERED", 20)
    copied_region.answer(*(f"id-{number}" for number in range(100)))
    copied_region.index_all()
    assert copied_region.client.zcard(copied_region.pipeline.region_key(copied_region.name, "answered")) == 20


def test_an_open_id_takes_some_hundred_bytes(copied_region: CopiedRegion) -> None:
    """As docs/regions.md says."""
    ids = [f"chatcmpl-{number:032x}-eu" for number in range(1000)]
    copied_region.request(*ids)
    copied_region.index_all()
    key = copied_region.pipeline.region_key(copied_region.name, "open")
    assert copied_region.client.memory_usage(key, samples=0) / len(ids) < 150  # type: ignore[operator]


def test_a_gateway_indexes_and_doctor_sees_a_copy_that_stands(
    copied_region: CopiedRegion, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pipeline = copied_region.name, copied_region.pipeline
    copied_region.request("open")
    copied_region.beat(age_s=2.0)
    region = {"name": "us", "peers": f"{name}=http://127.0.0.1:9", "secret": SECRET, "copies": name}
    with TestGateway(copied_region.addresses, None, region=region):
        wait_for(lambda: copied_region.list_ids("open") == ["open"], "the gateway has indexed it")
        wait_for(lambda: read_copy_state(copied_region.client, pipeline, name).age_s is not None, "it saw a heartbeat")
    state = read_copy_state(copied_region.client, pipeline, name)
    assert state.num_open == 1
    assert state.age_s is not None
    assert state.age_s >= 2.0

    here = {f"PENSTOCK_REGION_{key.upper()}": value for key, value in region.items()}
    here |= {"PENSTOCK_KAFKA": copied_region.addresses.kafka, "PENSTOCK_STREAM_URL": copied_region.addresses.stream_url}
    here |= {"PENSTOCK_PIPELINE": pipeline.name}
    monkeypatch.setattr(copies, "STANDING_S", 600.0)
    assert f"{name}: 1 open, the newest heartbeat is" in find_line(
        terminal("doctor", **here).stdout, "ok    copied regions"
    )
    monkeypatch.setattr(copies, "STANDING_S", 1.0)
    assert "heartbeat" in find_line(terminal("doctor", **here).stdout, "fail  copied regions")


def find_line(text: str, beginning: str) -> str:
    """Return the line that begins so."""
    return next((line for line in text.splitlines() if line.startswith(beginning)), "")


def test_copies_are_refused_where_the_bus_is_redis(addresses: Addresses) -> None:
    region = {"name": "us", "peers": "eu=http://127.0.0.1:9", "secret": SECRET, "copies": "eu"}
    with pytest.raises(SettingsError, match="need Kafka"):
        TestGateway(addresses, None, region=region)


def test_copies_name_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REGION_COPIES", "mars")
    with pytest.raises(SettingsError, match="names mars: no peer"):
        load_settings(RegionSettings)
    assert "region" in GatewayProcessSettings._fields
