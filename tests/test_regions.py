"""Names of regions, and homes of requests."""

import pytest

from penstock.config.settings import RegionSettings, load_settings
from penstock.errors import SettingsError
from penstock.regions import add_home, choose_home, find_home, parse_peers

REGIONS = ("eu", "us", "us-east")


def test_an_id_names_its_home() -> None:
    made = add_home("chatcmpl-" + "0" * 32, "us-east")
    assert find_home(made, REGIONS) == find_home(f"{made}.3", REGIONS) == "us-east"
    assert find_home(add_home("chatcmpl-0", "us"), REGIONS) == "us"
    assert add_home("chatcmpl-0", "") == "chatcmpl-0"
    assert find_home("chatcmpl-0", REGIONS) is find_home("eu", REGIONS) is None


def test_a_region_that_is_added_takes_keys_from_others_alone() -> None:
    keys = [f"key{number}" for number in range(600)]
    before = {key: choose_home("acme", key, REGIONS) for key in keys}
    after = {key: choose_home("acme", key, (*reversed(REGIONS), "asia")) for key in keys}
    assert {after[key] for key in keys if after[key] != before[key]} == {"asia"}
    assert min(list(after.values()).count(region) for region in (*REGIONS, "asia")) > 100


@pytest.mark.parametrize(
    "text", ["us", "us=gateway:8080", "US=http://a", "us=http://a/path", "us=http://a, us=http://b"]
)
def test_peers_that_are_wrong_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NAME=URL|twice"):
        parse_peers(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "Eu"}, "PENSTOCK_REGION_NAME"),
        ({"peers": "us=http://a"}, "needs PENSTOCK_REGION_NAME"),
        ({"name": "eu", "peers": "eu=http://a", "secret": "x" * 16}, "none of the peers"),
        ({"name": "eu", "peers": "us=http://a"}, "at least 16"),
        ({"name": "eu", "peers": "us=a", "secret": "x" * 16}, "PENSTOCK_REGION_PEERS"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(RegionSettings, **given)


def test_peers_are_read() -> None:
    given = {"name": "eu", "peers": "us=https://us.example:8080/, asia=http://b:1", "secret": "x" * 16}
    assert load_settings(RegionSettings, **given).list_peers() == {
        "us": "https://us.example:8080",
        "asia": "http://b:1",
    }
