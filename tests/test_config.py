"""Settings and `penstock config`: what is in force, where it comes from, what is wrong; and never a secret."""

import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cli.config import list_settings
from penstock.config import settings as config_settings
from penstock.config.addresses import Addresses
from penstock.config.settings import (
    REMOVED,
    SETTINGS_CLASSES,
    BusSettings,
    EngineSettings,
    KVSettings,
    RecordSettings,
    check_environment,
    list_variables,
    load_settings,
)
from penstock.config.sources import Settings, list_secret_variables
from penstock.errors import SettingsError
from penstock.redis.urls import hide_passwords
from tests.commands import Terminal, penstock
from tests.draws import mark_some

MARK = "Zq9"
"""In each of the secrets made here, and nowhere else."""
secrets = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1).map(lambda text: f"{MARK}{text}")
URLS = {"PENSTOCK_STREAM_URL", "PENSTOCK_KV_URL"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("PENSTOCK_")]:
        monkeypatch.delenv(variable)


def test_defaults_are_loaded_from_an_empty_environment() -> None:
    assert all(load_settings(part) == part() for part in SETTINGS_CLASSES)


def test_what_is_given_goes_before_the_environment_and_that_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PIPELINE", "other")
    monkeypatch.setenv("PENSTOCK_RECORD_LEASE_S", "2.5")
    assert load_settings(Addresses).pipeline == "other"
    assert load_settings(Addresses, pipeline="given").pipeline == "given"
    assert load_settings(RecordSettings).lease_s == 2.5


@pytest.mark.parametrize(
    ("variable", "nearest"),
    mark_some(
        [
            ("PENSTOCK_KAFAK", "PENSTOCK_KAFKA"),
            ("PENSTOCK_STREAMURL", "PENSTOCK_STREAM_URL"),
            ("PENSTOCK_ENGINE_MAXBATCH", "PENSTOCK_ENGINE_MAX_BATCH"),
            ("PENSTOCK_RECORD_LEASE", "PENSTOCK_RECORD_LEASE_S"),
            ("PENSTOCK_", "PENSTOCK_"),
        ],
        pytest.mark.proof,
    ),
)
def test_an_unknown_variable_names_the_nearest(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=rf"^{variable} is not a setting; the nearest is {nearest}"):
        check_environment({variable: "1"})
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=variable):
        load_settings(BusSettings)


def test_other_programs_variables_are_left_alone() -> None:
    check_environment({"PATH": "/bin", "PENSTOCKS": "1", **dict.fromkeys(list_variables(), "x")})


def test_a_removed_setting_is_accepted_and_named_once(tmp_path: Path) -> None:
    """From the environment and from the configuration file. It has no effect, and a moved one names its new place."""
    assert not REMOVED.keys() & {*list_variables()}
    config = tmp_path / "penstock.toml"
    config.write_text("[record]\nretry_first_s = 31\n[worker]\nstay_max_s = 1\n")
    given = {"PENSTOCK_RECORD_RETRY_CAP_S": "zip", "PENSTOCK_WORKER_NEXT_NAME": "1", "PENSTOCK_CONFIG": str(config)}
    for command in ("show", "check"):
        done = penstock("config", command, **given)
        assert done.returncode == 0, done.stderr
        for name in ("RECORD_RETRY_CAP_S", "RECORD_RETRY_FIRST_S", "WORKER_STAY_MAX_S", "WORKER_NEXT_NAME"):
            assert done.stderr.count(f"PENSTOCK_{name} has no effect any more") == 1
            assert name not in done.stdout
        assert "PENSTOCK_WORKER_NEXT_NAME has no effect any more; use `penstock worker … --next-name`" in done.stderr


def test_only_a_test_changes_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RECORD_RETRY_CAP_S", "31")
    assert load_settings(RecordSettings).retry_cap_s == 30.0
    monkeypatch.setenv("PENSTOCK_TESTING", json.dumps({"record": {"retry_cap_s": 2, "retry_first_s": "0.5"}}))
    found = load_settings(RecordSettings)
    assert (found.retry_cap_s, found.retry_first_s, found.lease_s) == (2.0, 0.5, 1.0)
    monkeypatch.setenv("PENSTOCK_TESTING", '{"record_lease_s": 3}')
    with pytest.raises(SettingsError, match="PENSTOCK_RECORD_LEASE_S is not a setting"):
        load_settings(RecordSettings)


@pytest.mark.parametrize(
    ("part", "variable", "value"),
    mark_some([
        (BusSettings, "BUS_PARTITIONS", "0"), (BusSettings, "BUS_PARTITIONS", "four"),
        (BusSettings, "BUS_PARTITIONS", ""), (BusSettings, "BUS_REPLICATION", "-1"),
        (RecordSettings, "RECORD_LEASE_S", "nan"), (EngineSettings, "ENGINE_DTYPE", "float8"),
        (EngineSettings, "ENGINE_ISA", "sse9"), (EngineSettings, "ENGINE_BLOCK_SIZE", "1025"),
    ], pytest.mark.proof),
)  # fmt: skip
def test_a_bad_value_is_named(
    part: type[BusSettings], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PENSTOCK_{variable}", value)
    with pytest.raises(SettingsError, match=rf"^PENSTOCK_{variable}: .*\(given: '{value}'\)$"):
        load_settings(part)


@pytest.mark.parametrize(
    ("model", "given", "name"),
    mark_some([
        ("demo", "", "demo"), ("org/model-7b", "", "org/model-7b"), ("/models/model-7b/", "", "model-7b"),
        ("~/model-7b", "", "model-7b"), ("here/model-7b", "", "model-7b"), ("/models/model-7b", "chat", "chat"),
    ], pytest.mark.proof),
)  # fmt: skip
def test_a_model_from_a_directory_is_asked_for_by_the_directorys_own_name(
    model: str, given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "model-7b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert EngineSettings(model=model, served_name=given).find_served_name() == name


def test_an_unknown_name_given_in_code_is_an_error() -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_PIPELIN: "):
        load_settings(Addresses, pipelin="demo")


def test_every_class_of_settings_can_be_set() -> None:
    """A class that is in no list has variables that every program refuses as unknown."""
    found = {one for one in vars(config_settings).values() if isinstance(one, type) and issubclass(one, Settings)}
    assert found - {Settings, *SETTINGS_CLASSES} == set()


# The command.


@pytest.fixture
def shown(terminal: Terminal) -> Any:
    def run(**environment: str) -> dict[str, tuple[object, str]]:
        done = terminal("config", "show", "--json", **environment)
        assert done.returncode == 0, done.stderr
        return {row["variable"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)}

    return run


@pytest.mark.proof
def test_every_setting_is_shown_with_its_origin(shown: Any, tmp_path: Path, terminal: Terminal) -> None:
    secret, config = tmp_path / "password", tmp_path / "penstock.toml"
    secret.write_text("correct horse\n")
    config.write_text('kafka = "k:9092"\n[engine]\nmax_batch = 7\nthreads = 2\n')
    environment = {
        "PENSTOCK_CONFIG": str(config), "PENSTOCK_ENGINE_THREADS": "3", "PENSTOCK_KAFKA_SECURITY": "SASL_SSL",
        "PENSTOCK_KAFKA_USER": "me", "PENSTOCK_KAFKA_PASSWORD_FILE": str(secret),
    }  # fmt: skip
    found = shown(**environment)
    assert list(found) == list_variables()
    assert found["PENSTOCK_KAFKA"] == ("k:9092", f"file {config}")
    assert found["PENSTOCK_ENGINE_MAX_BATCH"] == (7, f"file {config}")
    assert found["PENSTOCK_ENGINE_THREADS"] == (3, "environment PENSTOCK_ENGINE_THREADS")
    assert found["PENSTOCK_KAFKA_SECURITY"] == ("sasl_ssl", "environment PENSTOCK_KAFKA_SECURITY")
    assert found["PENSTOCK_KAFKA_PASSWORD"] == ("***", f"file {secret} (PENSTOCK_KAFKA_PASSWORD_FILE)")
    assert found["PENSTOCK_ENGINE_BLOCK_SIZE"] == (16, "default")
    table = terminal("config", "show", **environment).stdout
    assert re.search(r"PENSTOCK_ENGINE_MAX_BATCH +7 +file ", table)
    assert "correct horse" not in table


@pytest.mark.proof
def test_a_secret_in_a_file_is_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = tmp_path / "url"
    url.write_text("redis://me:secret@host:1/0\n")
    monkeypatch.setenv("PENSTOCK_STREAM_URL_FILE", str(url))
    assert load_settings(Addresses).stream_url == "redis://me:secret@host:1/0"
    assert "secret" not in repr(load_settings(Addresses))


@pytest.mark.proof
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(secrets, min_size=4, max_size=4), broken=st.booleans())
def test_no_secret_is_printed(terminal: Terminal, words: list[str], broken: bool) -> None:
    """Neither by what is well, nor by what complains."""
    first, second, third, fourth = words
    environment = {
        "PENSTOCK_STREAM_URL": f"redis://me:{urllib.parse.quote(first, safe='')}@host:1/0",
        "PENSTOCK_KV_URL": f"redis://a/0, redis://b:1?password={urllib.parse.quote(second, safe='')}",
        "PENSTOCK_KAFKA": "k:1",
        "PENSTOCK_KAFKA_SECURITY": "ssl" if broken else "sasl_ssl",
        "PENSTOCK_KAFKA_USER": "me",
        "PENSTOCK_KAFKA_PASSWORD": third,
        "PENSTOCK_KV_STORE_SALT_SECRET": fourth,
    }
    for command in ("show", "check"):
        done = terminal("config", command, **environment)
        assert done.returncode == (1 if broken else 0), done.stderr
        assert MARK not in done.stdout + done.stderr


@given(word=secrets)
def test_no_password_is_shown_of_a_url_that_is_wrong(word: str) -> None:
    for url in (
        f"redis://me:{word}@host/0", f"redis://{word.replace(':', '')}@host", f"me:{word}@host", f"redis://me:{word}",
        f"rediss://h/0?password={word.replace('&', '').replace('#', '')}", f"redis://a,redis://me:{word}@b:1/0",
        f"redis://me:{word}@[::1]:1/0",
    ):  # fmt: skip
        assert MARK not in hide_passwords(url)


def test_an_address_without_a_password_is_shown_as_it_is() -> None:
    for url in ("redis://h:1/0", "redis://[::1]:7379/0", "rediss://[2001:db8::1]/0?db=1#a", "unix:///run/redis"):
        assert hide_passwords(url) == url


def test_all_that_may_be_secret_may_come_from_a_file() -> None:
    assert set(list_secret_variables(SETTINGS_CLASSES)) == URLS | {
        "PENSTOCK_KAFKA_PASSWORD", "PENSTOCK_KV_STORE_SALT_SECRET", "PENSTOCK_ENDPOINT_KEY", "PENSTOCK_WEBHOOK_SECRET",
        "PENSTOCK_WEBHOOK_URL", "PENSTOCK_REGION_SECRET",
    }  # fmt: skip


BAD = {
    "PENSTOCK_PIPELINE": "a b", "PENSTOCK_STREAM_URL": "http://me:Zq9@host",
    "PENSTOCK_KV_URL": "redis://me:Zq9@host:port/0", "PENSTOCK_REDIS_CA_FILE": "/nowhere.pem",
    "PENSTOCK_KAFKA_MECHANISM": "MD5", "PENSTOCK_BUS_PARTITIONS": "0", "PENSTOCK_RECORD_LEASE_S": "0",
    "PENSTOCK_KV_STORE_REDIS_MB": "-1", "PENSTOCK_ENGINE_MAX_BATCH": "-1", "PENSTOCK_WORKER_STALL_LIMIT_S": "0",
    "PENSTOCK_TRACE_KEEP_S": "-1", "PENSTOCK_TELEMETRY_PORT": "65536", "PENSTOCK_GATEWAY_MAX_WAIT_S": "soon",
    "PENSTOCK_GATEWAY_MAX_BODY_MB": "0", "PENSTOCK_GATEWAY_PORT": "70000", "PENSTOCK_GATEWAY_ORIGINS": "https://a.example,app.example",
    "PENSTOCK_BATCH_MAX_FILE_BYTES": "0",
}  # fmt: skip
"""Of each part something that is wrong."""


@pytest.mark.proof
def test_check_tells_everything_at_once(terminal: Terminal) -> None:
    done = terminal("config", "check", **BAD, PENSTOCK_KAFAK="x", PENSTOCK_KAFKA_CERT_FILE=__file__)
    assert done.returncode == 1
    for variable in [*BAD, "PENSTOCK_KAFAK is not a setting; the nearest is PENSTOCK_KAFKA", "_KEY_FILE are given"]:
        assert variable in done.stderr
    assert MARK not in done.stderr
    assert terminal("config", "check").stdout == "nothing is wrong with the settings\n"


TOGETHER: dict[str, tuple[dict[str, str], str]] = {
    "sasl without a user": ({"KAFKA": "k:1", "KAFKA_SECURITY": "sasl_ssl"}, "PENSTOCK_KAFKA_USER"),
    "a user without sasl": ({"KAFKA": "k:1", "KAFKA_USER": "me"}, "need sasl_ssl, not plaintext"),
    "tls without brokers": ({"KAFKA_SECURITY": "ssl"}, "needs brokers in PENSTOCK_KAFKA"),
    "an authority without tls": ({"KAFKA": "k:1", "KAFKA_CA_FILE": __file__}, "PENSTOCK_KAFKA_CA_FILE needs ssl"),
    "a certificate without a key": (
        {"STREAM_URL": "rediss://h", "REDIS_CERT_FILE": __file__}, "PENSTOCK_REDIS_KEY_FILE are given together",
    ),
    "an authority for nothing": ({"REDIS_CA_FILE": __file__}, "PENSTOCK_REDIS_CA_FILE needs a rediss:// url"),
    "a secret twice": (
        {"KV_URL": "redis://h", "KV_URL_FILE": __file__}, "set either PENSTOCK_KV_URL or PENSTOCK_KV_URL_FILE",
    ),
    "a secret that is not there": ({"KV_URL_FILE": "/nowhere"}, "PENSTOCK_KV_URL_FILE: /nowhere cannot be read"),
    "no configuration file": ({"CONFIG": "/nowhere"}, "PENSTOCK_CONFIG: /nowhere cannot be read"),
    "a large batch": ({"ENGINE_MAX_BATCH": "512"}, "MAX_BATCH=512 is more than PENSTOCK_ENGINE_MAX_STEP"),
    "a step of less than a batch": (
        {"ENGINE_MAX_BATCH": "9", "ENGINE_MAX_STEP_TOKENS": "8"}, "MAX_BATCH=9 is more than PENSTOCK_ENGINE_MAX_STEP",
    ),
    "a batch of all that a step has": ({"ENGINE_MAX_BATCH": "8", "ENGINE_MAX_STEP_TOKENS": "8"}, ""),
    "a small step": ({"ENGINE_MAX_STEP_TOKENS": "8"}, ""),
    "a large batch of another engine": ({"ENGINE_MAX_BATCH": "512", "ENGINE_KIND": "vllm"}, ""),
    "a form of weights": ({"ENGINE_PREFILL_WEIGHTS": "int8"}, ""),
    "a form of weights for another engine": (
        {"ENGINE_PREFILL_WEIGHTS": "int8", "ENGINE_KIND": "vllm"},
        "are for Penstock's own engine, and PENSTOCK_ENGINE_KIND is vllm",
    ),
    "adapters": ({"ENGINE_ADAPTERS": "sql=/a, chat=/b", "ENGINE_KIND": "vllm"}, ""),
    "adapters of the own engine": ({"ENGINE_ADAPTERS": "sql=/a"}, "needs PENSTOCK_ENGINE_KIND=vllm, and that is own"),
    "adapters of endpoints": (
        {"ENGINE_ADAPTERS": "sql=/a", "ENGINE_KIND": "openai"}, "needs PENSTOCK_ENGINE_KIND=vllm, and that is openai",
    ),
    "an adapter without a directory": (
        {"ENGINE_ADAPTERS": "sql", "ENGINE_KIND": "vllm"}, "'sql' is not NAME=DIRECTORY",
    ),
    "an adapter without a name": ({"ENGINE_ADAPTERS": "=/a", "ENGINE_KIND": "vllm"}, "'=/a' is not NAME=DIRECTORY"),
    "two adapters of a name": ({"ENGINE_ADAPTERS": "a=/a,a=/b", "ENGINE_KIND": "vllm"}, "the name 'a' stands twice"),
    "an adapter with the model's name": (
        {"ENGINE_ADAPTERS": "demo=/a", "ENGINE_KIND": "vllm"}, "'demo' is the name of the model itself",
    ),
}  # fmt: skip
"""By case what is given, and what is said of it; nothing where it is taken."""


@pytest.mark.parametrize("case", TOGETHER)
def test_what_goes_together_and_what_does_not(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    given, words = TOGETHER[case]
    for name, value in given.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    part = EngineSettings if "ENGINE" in "".join(given) else Addresses
    if words:
        with pytest.raises(SettingsError, match=re.escape(words)):
            load_settings(part)
    else:
        load_settings(part)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nmaxbatch = 7\n", "ENGINE_MAXBATCH is not a setting; the nearest is PENSTOCK_ENGINE_MAX_BATCH"),
        ("[engine]\nmax_batch = 0\n", "PENSTOCK_ENGINE_MAX_BATCH: "),
        ("password = Zq9\n", "cannot be read: Invalid value"),
    ],
)  # fmt: skip
def test_a_configuration_file_is_held_to_the_same(terminal: Terminal, tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(text)
    done = terminal("config", "check", PENSTOCK_CONFIG=str(config))
    assert done.returncode == 1
    assert words in done.stderr
    assert MARK not in done.stderr


def test_certificates_go_into_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a url says itself goes before; others than `rediss://` are left as they are."""
    monkeypatch.setenv("PENSTOCK_STREAM_URL", "rediss://me:p%40@h:1/0")
    monkeypatch.setenv("PENSTOCK_KV_URL", "redis://plain/0,rediss://h/0?ssl_ca_certs=/own.pem&protocol=3")
    monkeypatch.setenv("PENSTOCK_REDIS_CA_FILE", __file__)
    found = load_settings(Addresses)
    assert found.stream_url == f"rediss://me:p%40@h:1/0?ssl_ca_certs={urllib.parse.quote(__file__)}"
    assert found.kv_url == "redis://plain/0,rediss://h/0?ssl_ca_certs=/own.pem&protocol=3"
    monkeypatch.setenv("PENSTOCK_STREAM_URL", found.stream_url)
    assert load_settings(Addresses) == found


def test_rows_hold_no_secret_of_the_default() -> None:
    assert ("PENSTOCK_KV_STORE_SALT_SECRET", "***", "default") in list(list_settings())
    assert KVSettings().salt_secret not in {row.value for row in list_settings()}
