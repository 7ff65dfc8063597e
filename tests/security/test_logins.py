"""Logins that end: tokens of a token server at Kafka, passwords that rotate at Redis, and what AWS signs."""

import base64
import hashlib
import hmac
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from botocore.exceptions import ClientError
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from penstock.bus.contract import Outgoing, Publisher
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.writers import Transactions
from penstock.client.sync import Client
from penstock.config.addresses import Addresses, kafka_security_config
from penstock.config.settings import BusSettings, RecordSettings
from penstock.config.tokens import MskTokens
from penstock.errors import AccessRefused, BusUnavailable, DependencyMissing
from penstock.kvstore.tiers.contract import TierCounters
from penstock.kvstore.tiers.server import KVServer
from penstock.messages import EndEvent, Request
from penstock.names import Pipeline, add_tenant
from penstock.ops import kafka_access
from penstock.ops.access import check_access
from penstock.ops.kafka_access import check_kafka, list_tenant_rights
from penstock.record import Record
from penstock.redis.client import redis_client
from penstock.redis.logins import LoginUnavailable, split_login
from sim.waiting import PATIENCE_S, wait_for
from tests.pipeline.checks import Streams
from tests.record.play import die, end, prefill, say, tokens_of
from tests.security.conftest import SECRETS, SecureServers

SHORT_S = 5.0
PIPELINE = Pipeline("demo")


@pytest.fixture
def tokens(servers: SecureServers) -> Iterator[dict[str, Any]]:
    """The settings of a worker that logs in with tokens. The token server is as before afterwards."""
    given = servers.kafka_access("penstock-worker", "OAUTHBEARER")
    yield {name.removeprefix("PENSTOCK_").lower(): value for name, value in given.items()}
    servers.tokens.lifetime_s = 3600.0
    servers.tokens.stop()
    servers.tokens.start()


def open_bus(settings: dict[str, Any], more: dict[str, Any] | None = None) -> KafkaBus:
    addresses = Addresses(**settings)
    access = kafka_security_config(addresses) | (more or {})
    return KafkaBus(PIPELINE, addresses.kafka, BusSettings(partitions=1, transaction_timeout_s=30.0), access)


def settle(writer: Transactions, output: Outgoing) -> None:
    """One transaction, as a worker makes it: what fails is tried again."""
    while True:
        try:
            if not writer.clear_doubt(PATIENCE_S):
                writer.run_transaction([output], [], None)
            return
        except KafkaException:
            continue


@pytest.mark.parametrize("source", ["token server", "callback"])
def test_an_idle_transactional_producer_outlives_its_tokens(
    servers: SecureServers, tokens: dict[str, Any], source: str
) -> None:
    """The brokers end a connection with its token. The callback is what MSK's tokens come by."""
    servers.tokens.lifetime_s = SHORT_S
    more: dict[str, Any] = {}
    if source == "callback":
        tokens |= {"kafka_mechanism": "PLAIN", "kafka_token_url": ""}
        more = {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": lambda _: servers.tokens.give_token("penstock-worker")}
    writer = open_bus(tokens, more).create_transactions("penstock.demo.idle")
    output = Outgoing(PIPELINE.dead_letter_topic, b"{}", source)
    settle(writer, output)
    given = servers.tokens.num_given
    wait_for(lambda: servers.tokens.num_given >= given + 2, "the first token has ended", every_s=0.05)
    settle(writer, output)
    writer.close()
    written = KafkaBus(PIPELINE, servers.kafka.bootstrap, BusSettings()).read_all(PIPELINE.dead_letter_topic)
    assert sum(message.key == source for message in written) == 2


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "wrong secret": (
        {"kafka_password": "hunter2"},
        "refuses the client.*PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD",
    ),
    "unknown scope": ({"kafka_token_scope": "none"}, "PENSTOCK_KAFKA_TOKEN_SCOPE"),
    "no token server": ({"kafka_token_url": "/elsewhere"}, "PENSTOCK_KAFKA_TOKEN_URL"),
    "no rights": ({"kafka_user": "acme", "kafka_password": SECRETS["acme"]}, "the user acme may not READ"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_who_gets_no_token_is_told_why(servers: SecureServers, tokens: dict[str, Any], fault: str) -> None:
    change, words = REFUSED[fault]
    if url := change.get("kafka_token_url"):
        change = {"kafka_token_url": servers.tokens.url.replace("/token", url)}
    with pytest.raises(AccessRefused, match=words) as refused:
        check_kafka(Addresses(**tokens | change), PIPELINE, "prefill")
    assert not any(secret in str(refused.value) for secret in ("hunter2", *SECRETS.values()))


def test_tokens_that_have_expired_are_named(servers: SecureServers, tokens: dict[str, Any]) -> None:
    """Those that the token server gives so, by its clock, and those that brokers find so."""
    servers.tokens.lifetime_s = -60.0
    with pytest.raises(AccessRefused, match=r"expired already.*clock"):
        check_kafka(Addresses(**tokens), PIPELINE, "prefill")


def test_a_token_of_another_audience_is_refused_by_the_brokers(
    servers: SecureServers, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers.tokens, "audience", "another")
    with pytest.raises(AccessRefused, match=r"the brokers refuse the token.*PENSTOCK_KAFKA_TOKEN_URL"):
        check_kafka(Addresses(**tokens), PIPELINE, "prefill")


def test_a_token_server_that_is_away_is_waited_for(
    servers: SecureServers, tokens: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As brokers are; what was sent meanwhile is written when it is back."""
    servers.tokens.stop()
    monkeypatch.setattr(kafka_access, "MAX_WAIT_S", 0.6)
    monkeypatch.setattr("penstock.redis.client._said_at", {})
    with caplog.at_level(logging.WARNING):
        check_kafka(Addresses(**tokens), PIPELINE, "prefill")
    assert "no token: Failed to connect" in caplog.text
    with closing(open_bus(tokens).create_publisher()) as publisher:
        (sent,) = publisher.send_messages([Outgoing(PIPELINE.dead_letter_topic, b"{}", "waits")])
        servers.tokens.start()
        assert sent.result(PATIENCE_S)
    assert not any(secret in caplog.text for secret in SECRETS.values())


def test_no_tenant_writes_or_reads_anothers(servers: SecureServers, tokens: dict[str, Any]) -> None:
    """Each backend has the literal rights of its tenant, by the name in its token."""
    everybody = KafkaBus(PIPELINE, servers.kafka.bootstrap, BusSettings(partitions=1))
    admin, tenants = AdminClient(everybody.clients), ("acme", "beta")
    for tenant in tenants:
        everybody.create_topics(tenant)
        made = [
            AclBinding(
                getattr(ResourceType, right.kind), right.name, getattr(ResourcePatternType, right.pattern),
                f"User:{tenant}", "*", getattr(AclOperation, right.operation), AclPermissionType.ALLOW,
            )
            for right in list_tenant_rights(PIPELINE, tenant)
        ]  # fmt: skip
        for future in admin.create_acls(made).values():
            future.result()

    def write(publisher: Publisher, topic: str) -> None:
        publisher.send_messages([Outgoing(topic, b"{}", "planted")])[0].result(PATIENCE_S)

    with closing(everybody.create_publisher()) as publisher:
        publisher.publish(
            [Outgoing(add_tenant(PIPELINE.results_topic, one), b"{}", f"result of {one}") for one in tenants]
        )
    own, shared = PIPELINE.request_topic("batch"), PIPELINE.results_topic
    for tenant, other in (tenants, tenants[::-1]):
        bus = open_bus(tokens | {"kafka_user": tenant, "kafka_password": SECRETS[tenant]})
        with closing(bus.create_publisher()) as publisher:
            write(publisher, add_tenant(own, tenant))
            for topic in (add_tenant(own, other), add_tenant(shared, tenant), add_tenant(shared, other), own, shared):
                with pytest.raises(BusUnavailable, match=r"[Aa]uthoriz"):
                    write(publisher, topic)
        assert [message.key for message in bus.read_all(add_tenant(shared, tenant))] == [f"result of {tenant}"]
        assert bus.read_all(add_tenant(shared, other)) == [], "brokers do not tell who may not read it that it is there"
        asked = AdminClient(bus.clients).list_topics(add_tenant(shared, other), PATIENCE_S).topics
        refused = asked[add_tenant(shared, other)].error
        assert refused is not None
        assert refused.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    for tenant in tenants:
        assert [message.key for message in everybody.read_all(add_tenant(own, tenant))] == ["planted"]
        assert len(everybody.read_all(add_tenant(shared, tenant))) == 1


def test_a_password_rotates_under_a_stream_that_is_read(servers: SecureServers, tmp_path: Path) -> None:
    """Reader, writer and KV store open their connections anew, with what the file says then."""
    file = tmp_path / "password"
    rights = ["on", "resetkeys", "resetchannels", "~*", "&*", "+@all"]
    addresses = Addresses(
        pipeline=f"rotates-{tmp_path.name[:32]}".replace("_", "-"),
        stream_url=f"{servers.redis.url('rotating', '').replace(':@', '@')}?login=file:{file}",
        redis_ca_file=str(servers.authority.file),
        redis_cert_file=str(servers.certificate),
        redis_key_file=str(servers.key),
    )

    def rotate(password: str) -> None:
        file.write_text(f"{password}\n")
        with servers.admin() as admin:
            admin.execute_command("ACL", "SETUSER", "rotating", "reset", *rights, f">{password}")
            admin.execute_command("CLIENT", "KILL", "USER", "rotating")

    def has_read(position: int) -> bool:
        return len(streams.events[request.id]) > position

    rotate("first")
    request = Request(id="rotates", prompt="x")
    store = KVServer(addresses.stream_url, large=False)
    with redis_client(addresses.stream_url) as server, Client(addresses) as client, closing(store):
        record = Record(server, Pipeline(addresses.pipeline), RecordSettings(lease_s=30))
        claim = prefill(record, request.id, "rotates")
        streams = Streams(client, [request])
        for position, password in enumerate(("second", "third")):
            say(record, claim, [position])
            wait_for(partial(has_read, position), "it is read", every_s=0.01)
            assert store.call(lambda _: "answered", TierCounters()) == "answered"
            rotate(password)
        say(record, claim, [2])
        record.finish_request(claim, end())
        streams.finish()
        *events, last = streams.events[request.id]
        assert tokens_of(events) == [0, 1, 2]
        assert isinstance(last, EndEvent)
        assert store.call(lambda _: "answered", TierCounters()) == "answered"
        die(record, "rotates")
        record.close()

    def refuse(words: str) -> None:
        with pytest.raises(AccessRefused, match=words) as refused:
            check_access(addresses)
        assert "PENSTOCK_STREAM_URL" in str(refused.value)
        assert "third" not in str(refused.value)

    file.write_text("second")
    refuse(f"refuses the password of file:{file}, which may have expired")
    file.write_text(" \n")
    refuse("is empty")
    file.unlink()
    refuse("cannot be read: No such file")


BAD_LOGINS = {
    "rediss://user:secret@host/0?login=file:/run/x": "a password and a login",
    "redis+sentinel://user@host:1,host:2/s/0?login=file:x": "login=file:/PATH",
    "redis://user@host/0?login=vault:x": "login=elasticache:CACHE",
}


@pytest.mark.parametrize("url", BAD_LOGINS)
def test_a_login_of_no_valid_form_is_named(url: str) -> None:
    with pytest.raises(ValueError, match=BAD_LOGINS[url]) as refused:
        Addresses(stream_url=url)
    assert "secret" not in str(refused.value)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret key; no other credentials are found."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    return "wJalrXUtnFEMI"


def verify_url(url: str, secret: str) -> dict[str, str]:
    """Check a signed url as AWS's servers do (Signature Version 4), and return its parameters."""
    parts, query = urlsplit(url), dict(parse_qsl(urlsplit(url).query, strict_parsing=True))
    signature = query.pop("X-Amz-Signature")
    listed = "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))
    nothing = hashlib.sha256(b"").hexdigest()
    canonical = f"GET\n/\n{listed}\nhost:{parts.netloc}\n\nhost\n{nothing}"
    _, *scope = query["X-Amz-Credential"].split("/")
    key = f"AWS4{secret}".encode()
    for step in scope:
        key = hmac.digest(key, step.encode(), "sha256")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = f"AWS4-HMAC-SHA256\n{query['X-Amz-Date']}\n{'/'.join(scope)}\n{digest}"
    assert signature == hmac.new(key, signed.encode(), "sha256").hexdigest()
    return query | {"scope": "/".join(scope[1:])}


@pytest.mark.parametrize(
    "host", ["b-1.x.c2.kafka.us-east-1.amazonaws.com:9098", "boot.c1.kafka-serverless.us-east-1.amazonaws.com:9098"]
)
def test_tokens_of_msk_are_signed_for_the_brokers_region(aws: str, host: str) -> None:
    addresses = Addresses(kafka=host, kafka_security="sasl_ssl", kafka_mechanism="AWS_MSK_IAM")
    token, end_s = kafka_security_config(addresses)["oauth_cb"]("")
    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert url.startswith("https://kafka.us-east-1.amazonaws.com/?Action=kafka-cluster%3AConnect&")
    found = verify_url(url.removesuffix("&User-Agent=penstock"), aws)
    assert (found["Action"], found["scope"]) == ("kafka-cluster:Connect", "us-east-1/kafka-cluster/aws4_request")
    assert end_s > 0


def test_elasticache_gets_a_signed_password(aws: str) -> None:
    plain, login = split_login("rediss://me@cache.example:6379/0?ssl_ca_certs=/ca.pem&login=elasticache:My-Cache#one")
    assert plain == "rediss://cache.example:6379/0?ssl_ca_certs=/ca.pem#one"
    user, password = login["credential_provider"].get_credentials()
    assert user == "me"
    found = verify_url(f"https://{password}", aws)
    assert password.startswith("my-cache/?")
    assert (found["User"], found["scope"]) == ("me", "eu-west-1/elasticache/aws4_request")
    assert aws not in repr(login)


def refuse_role(patch: pytest.MonkeyPatch) -> None:
    """Credentials come with a role, and AWS's token service does not give it to this process."""
    refused = ClientError({"Error": {"Code": "AccessDenied", "Message": "not yours"}}, "AssumeRoleWithWebIdentity")
    patch.setattr("botocore.session.Session.get_credentials", Mock(side_effect=refused))


MISSING: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[Exception], str]] = {
    "package": (lambda patch: patch.setitem(sys.modules, "botocore", None), DependencyMissing, r"penstock\[aws\]"),
    "credentials": (lambda patch: patch.delenv("AWS_ACCESS_KEY_ID"), AccessRefused, "AWS_ACCESS_KEY_ID"),
    "region": (lambda patch: patch.delenv("AWS_DEFAULT_REGION"), AccessRefused, "AWS_REGION"),
    "role": (refuse_role, AccessRefused, "AccessDenied"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_aws_lacks_is_named(aws: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start; later a client gets a token that brokers refuse, and asks again."""
    take_away, kind, words = MISSING[what]
    take_away(monkeypatch)
    with pytest.raises(kind, match=words):
        check_kafka(
            Addresses(kafka="broker:9098", kafka_security="sasl_ssl", kafka_mechanism="AWS_MSK_IAM"), PIPELINE, None
        )
    if what != "package":
        assert MskTokens("broker:9098")("")[0] == "unavailable"
        _, login = split_login("redis://me@cache.example/0?login=elasticache:one")
        with pytest.raises(LoginUnavailable, match=words):
            login["credential_provider"].get_credentials()
