"""Settings: what is misspelt or out of bounds is an error that says so."""

import os

import pytest

from penstock.config.addresses import Addresses
from penstock.config.settings import (
    SETTINGS_CLASSES,
    BusSettings,
    EngineSettings,
    RecordSettings,
    check_environment,
    list_variables,
    load_settings,
)
from penstock.errors import SettingsError
from tools.settings_doc import read_field_docs


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("PENSTOCK_")]:
        monkeypatch.delenv(variable)


def test_defaults_are_loaded_from_an_empty_environment() -> None:
    assert all(load_settings(part) == part() for part in SETTINGS_CLASSES)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PIPELINE", "other")
    monkeypatch.setenv("PENSTOCK_RECORD_LEASE_S", "2.5")
    assert load_settings(Addresses).pipeline == "other"
    assert load_settings(RecordSettings).lease_s == 2.5


def test_what_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PIPELINE", "other")
    assert load_settings(Addresses, pipeline="given").pipeline == "given"


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PENSTOCK_KAFAK", "PENSTOCK_KAFKA"),
        ("PENSTOCK_STREAMURL", "PENSTOCK_STREAM_URL"),
        ("PENSTOCK_ENGINE_MAXBATCH", "PENSTOCK_ENGINE_MAX_BATCH"),
        ("PENSTOCK_RECORD_LEASE", "PENSTOCK_RECORD_LEASE_S"),
        ("PENSTOCK_", "PENSTOCK_"),
    ],
)
def test_an_unknown_variable_names_the_nearest(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=rf"^{variable} is not a setting; the nearest is {nearest}"):
        check_environment({variable: "1"})
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=variable):
        load_settings(BusSettings)


def test_other_programs_variables_are_left_alone() -> None:
    check_environment({"PATH": "/bin", "PENSTOCKS": "1", **dict.fromkeys(list_variables(), "x")})


@pytest.mark.parametrize(
    ("part", "variable", "value"),
    [
        (BusSettings, "PENSTOCK_BUS_PARTITIONS", "0"),
        (BusSettings, "PENSTOCK_BUS_PARTITIONS", "four"),
        (BusSettings, "PENSTOCK_BUS_PARTITIONS", ""),
        (BusSettings, "PENSTOCK_BUS_SESSION_TIMEOUT_S", "-1"),
        (RecordSettings, "PENSTOCK_RECORD_LEASE_S", "nan"),
        (EngineSettings, "PENSTOCK_ENGINE_DTYPE", "float8"),
        (EngineSettings, "PENSTOCK_ENGINE_BLOCK_SIZE", "1025"),
    ],
)
def test_a_bad_value_is_named(
    part: type[BusSettings], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=rf"^{variable}: .*\(given: '{value}'\)$"):
        load_settings(part)


def test_an_unknown_name_given_in_code_is_an_error() -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_PIPELIN: "):
        load_settings(Addresses, pipelin="demo")


def test_variables_are_distinct_and_explained() -> None:
    known = list_variables()
    assert len(set(known)) == len(known)
    for part in SETTINGS_CLASSES:
        assert read_field_docs(part).keys() == part.model_fields.keys()
