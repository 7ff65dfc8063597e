"""Who is not let in is told why in one line, soon, which setting to look at, and no password."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import redis
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]

from penstock.config.addresses import Addresses
from penstock.errors import AccessRefused
from penstock.names import Pipeline, Role
from penstock.ops.access import check_access
from penstock.ops.kafka_access import check_kafka, list_rights
from tests.commands import Terminal
from tests.security.conftest import PASSWORDS, SecureServers
from tests.security.secure_servers import REDIS_ACL_FILE, USERS

WRONG = "hunter2-and-more"
PASSWORD, UNTRUSTED, CERTIFICATE = "wrong user or password", "not trusted", "certificate of the client's"
TLS_FILES = ["PENSTOCK_REDIS_CA_FILE", "PENSTOCK_REDIS_CERT_FILE", "PENSTOCK_REDIS_KEY_FILE"]
Faults = dict[str, tuple[Callable[[SecureServers], dict[str, str]], str, str]]
"""What is said otherwise, the setting that is named, and words of the reason."""


def stream_url(servers: SecureServers, scheme: str = "rediss", name: str = "STREAM_URL") -> dict[str, str]:
    """Return an address with a wrong password."""
    return {f"PENSTOCK_{name}": servers.redis.url("penstock-worker", WRONG, scheme)}


def plain(address: str) -> dict[str, str]:
    names = ("SECURITY", "MECHANISM", "USER", "PASSWORD", "CA_FILE")
    values = ("plaintext", "PLAIN", "", "", "")
    return {"PENSTOCK_KAFKA": address} | {f"PENSTOCK_KAFKA_{n}": v for n, v in zip(names, values, strict=True)}


def without_certificate(servers: SecureServers) -> dict[str, str]:
    tls = {"PENSTOCK_KAFKA_SECURITY": "ssl", "PENSTOCK_KAFKA_CA_FILE": str(servers.authority.file)}
    return plain(servers.kafka.tls) | tls


REDIS: Faults = {
    "wrong password": (stream_url, "PENSTOCK_STREAM_URL", PASSWORD),
    "no password": (
        lambda servers: {"PENSTOCK_STREAM_URL": f"rediss://127.0.0.1:{servers.redis.port}/0"},
        "PENSTOCK_STREAM_URL", PASSWORD,
    ),
    "unknown authority": (
        lambda servers: {TLS_FILES[0]: str(servers.other.file)}, "PENSTOCK_REDIS_CA_FILE", UNTRUSTED,
    ),
    "no certificate": (lambda _: dict.fromkeys(TLS_FILES[1:], ""), "PENSTOCK_REDIS_CERT_FILE", CERTIFICATE),
    "plaintext to TLS": (
        lambda servers: stream_url(servers, "redis") | dict.fromkeys(TLS_FILES, ""),
        "rediss:// in PENSTOCK_STREAM_URL", "it speaks TLS",
    ),
    "no rights": (lambda servers: servers.redis_access("penstock-client"), "docs/operations.md", "may not PUBLISH"),
    "wrong password of the KV store": (
        lambda servers: stream_url(servers, name="KV_URL"), "PENSTOCK_KV_URL", PASSWORD,
    ),
}  # fmt: skip
KAFKA: Faults = {
    "wrong password": (lambda _: {"PENSTOCK_KAFKA_PASSWORD": WRONG}, "PENSTOCK_KAFKA_PASSWORD", PASSWORD),
    "wrong password, plain": (
        lambda _: {"PENSTOCK_KAFKA_PASSWORD": WRONG, "PENSTOCK_KAFKA_MECHANISM": "PLAIN"},
        "PENSTOCK_KAFKA_PASSWORD", PASSWORD,
    ),
    "mechanism": (
        lambda _: {"PENSTOCK_KAFKA_MECHANISM": "SCRAM-SHA-256"},
        "PENSTOCK_KAFKA_MECHANISM", "Unsupported SASL mechanism",
    ),
    "unknown authority": (
        lambda servers: {"PENSTOCK_KAFKA_CA_FILE": str(servers.other.file)}, "PENSTOCK_KAFKA_CA_FILE", UNTRUSTED,
    ),
    "plaintext to TLS": (lambda servers: plain(servers.kafka.sasl), "PENSTOCK_KAFKA_SECURITY", "it speaks TLS"),
    "TLS to plaintext": (
        lambda servers: {"PENSTOCK_KAFKA": servers.kafka.bootstrap}, "PENSTOCK_KAFKA_SECURITY", "does not speak TLS",
    ),
    "no certificate": (without_certificate, "PENSTOCK_KAFKA_CERT_FILE", CERTIFICATE),
    "no rights": (
        lambda servers: servers.kafka_access("nobody"),
        "docs/operations.md", "the user nobody may not READ the topic penstock.demo.requests",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REDIS)
def test_redis(servers: SecureServers, terminal: Terminal, fault: str) -> None:
    change, setting, words = REDIS[fault]
    check(terminal, servers.redis_access("penstock-worker") | change(servers), setting, words)


@pytest.mark.parametrize("fault", KAFKA)
def test_kafka(servers: SecureServers, terminal: Terminal, fault: str) -> None:
    change, setting, words = KAFKA[fault]
    access = servers.redis_access("penstock-worker") | servers.kafka_access("penstock-worker")
    check(terminal, access | change(servers), setting, words)


def check(terminal: Terminal, environment: dict[str, str], setting: str, words: str) -> None:
    """A worker does not start; the line it ends with."""
    done = terminal("worker", "prefill", **environment)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    assert setting in line
    assert words in line
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed
    assert not any(word in printed for word in [WRONG, *PASSWORDS.values(), *USERS.values()])


def test_a_tool_says_it_too(servers: SecureServers, terminal: Terminal) -> None:
    """It begins without asking, and asks why when it fails."""
    change, setting, words = REDIS["wrong password"]
    done = terminal("lag", **servers.redis_access("penstock-client") | change(servers))
    assert done.returncode == 1
    assert setting in done.stderr
    assert words in done.stderr


def rights_of(user: str) -> list[str]:
    """The keys, channels, categories and commands of the ACL file."""
    (line,) = [line for line in REDIS_ACL_FILE.read_text("utf-8").splitlines() if line.startswith(f"user {user} ")]
    return [word for word in line.split()[3:] if not word.startswith(">")]


@pytest.mark.parametrize(
    ("user", "role"), [("penstock-worker", "decode"), ("penstock-gateway", "gateway"), ("penstock-client", "client")]
)
def test_each_right_is_asked_for_at_start(servers: SecureServers, user: str, role: Role) -> None:
    """None is given for nothing, and without any one of them nothing begins."""
    given = rights_of(user)
    access: dict[str, Any] = {
        name.removeprefix("PENSTOCK_").lower(): value for name, value in servers.redis_access(user).items()
    }
    addresses = Addresses(**{**access, "stream_url": servers.redis.url("less", "less")})

    def permit(rights: list[str]) -> None:
        with servers.admin() as admin:
            admin.execute_command("ACL", "SETUSER", "less", "reset", "on", ">less", *rights)

    permit(given)
    check_access(addresses, role, kv=role == "decode")
    for right in given:
        if right[0] in "~&+%":
            permit([other for other in given if other != right])
            with pytest.raises(AccessRefused, match="the user less may not"):
                check_access(addresses, role, kv=role == "decode")


@pytest.mark.parametrize(
    "command",
    [
        "HSET penstock:keys x x", "HGET penstock:keys x", "HGET penstock:tenants x", "GET penstock:gateway:secret",
        "ZADD penstock:webhooks:acme 0 x", "XADD penstock:demo:{x}:log * e x", "DEL penstock:demo:{x}:record",
        "XADD penstock:bus:{demo}:penstock.demo.results * value x", "PUBLISH penstock:demo:{x}:live x",
    ],
)  # fmt: skip
def test_a_client_may_neither_forge_nor_look_at_keys(servers: SecureServers, command: str) -> None:
    url, ca = servers.redis.url("penstock-client", PASSWORDS["penstock-client"]), str(servers.authority.file)
    paths = {"ssl_ca_certs": ca, "ssl_certfile": str(servers.certificate), "ssl_keyfile": str(servers.key)}
    with redis.Redis.from_url(url, **paths) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


def test_a_broker_that_goes_away_while_rights_are_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def __init__(self, settings: dict[str, Any]) -> None: ...
        def poll(self, timeout: float) -> None: ...
        def list_topics(self, timeout: float) -> None: ...

        def describe_topics(self, topics: TopicCollection, **_: bool) -> dict[str, Future[None]]:
            return {"requests": Future()}

    monkeypatch.setattr("penstock.ops.kafka_access.AdminClient", Gone)
    monkeypatch.setattr("penstock.ops.kafka_access.MAX_WAIT_S", 0.05)
    check_kafka(Addresses(kafka="localhost:1"), Pipeline("p"), "prefill")  # work begins, and waits for the broker


def test_a_worker_of_both_stages_reads_and_writes_jobs() -> None:
    pipeline = Pipeline("p")
    rights = list_rights(pipeline, "auto")
    assert rights[pipeline.job_topic("batch")] == [AclOperation.READ, AclOperation.WRITE]
    assert rights[pipeline.request_topic("batch")] == [AclOperation.READ]
    assert list_rights(pipeline, "prefill")[pipeline.job_topic("batch")] == [AclOperation.WRITE]
    assert list_rights(pipeline, "decode")[pipeline.job_topic("batch")] == [AclOperation.READ]
    assert not list_rights(pipeline, "endpoint").keys() & pipeline.input_topics("decode").values()
