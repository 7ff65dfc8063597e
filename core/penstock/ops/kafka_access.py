"""Checks whether the brokers let this process in. librdkafka retries for ever; only its error callback says why."""

import contextlib
import logging
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient  # type: ignore[attr-defined]

from penstock.bus.kafka.client import client_settings
from penstock.config.addresses import kafka_security_config
from penstock.config.tokens import MskTokens, describe_token_error, explain_token_error
from penstock.errors import AccessRefused
from penstock.names import Pipeline, Role, add_tenant
from penstock.ops.tls import speaks_tls
from penstock.redis.client import log_outage

if TYPE_CHECKING:
    from penstock.config.addresses import Addresses

log = logging.getLogger(__name__)

MAX_WAIT_S = 3.0
ATTEMPT_TIMEOUT_S = 0.5


def check_kafka(addresses: "Addresses", pipeline: Pipeline, role: Role | None) -> None:
    """Raise `AccessRefused` where the brokers do not let us in, or refuse what the `role` needs.

    Brokers that are away are waited for a little, as errors of both kinds come mixed.
    """
    errors: list[KafkaError] = []
    access = kafka_security_config(addresses)
    if isinstance(tokens := access.get("oauth_cb"), MskTokens):
        tokens.make_token()
    settings = client_settings(addresses.kafka, access)
    admin = AdminClient(settings | {"error_cb": errors.append})
    end = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < end:
        with contextlib.suppress(KafkaException, TimeoutError):
            admin.list_topics(timeout=ATTEMPT_TIMEOUT_S)
            _check_rights(admin, addresses, pipeline, role)
            return
        admin.poll(0)
        for error in errors:
            if reason := _explain_refusal(error, addresses):
                raise AccessRefused(f"Kafka at {addresses.kafka}: {reason}")
        if errors and addresses.kafka_security.endswith("plaintext") and _any_speaks_tls(addresses.kafka):
            raise AccessRefused(
                f"Kafka at {addresses.kafka}: it speaks TLS, and we do not: "
                f"PENSTOCK_KAFKA_SECURITY is {addresses.kafka_security}"
            )
    for error in errors:
        if reason := describe_token_error(error.str()):
            log_outage(log, f"Kafka: {reason}")


def list_rights(pipeline: Pipeline, role: Role) -> dict[str, list[AclOperation]]:
    """Return the operations that a role needs, by topic."""
    read, write = AclOperation.READ, AclOperation.WRITE
    if role == "client" or role == "gateway":  # noqa: PLR1714 - this the type checker understands
        inputs = pipeline.input_topics("prefill").values()
        return {**{topic: [write] for topic in inputs}, pipeline.results_topic: [read]}
    jobs = {"prefill": [write], "auto": [read, write]}.get(role)
    return {
        **{topic: [read] for topic in pipeline.input_topics(role).values()},
        **({} if jobs is None else dict.fromkeys(pipeline.input_topics("decode").values(), jobs)),
        **{topic: [write] for topic in [pipeline.results_topic, pipeline.dead_letter_topic]},
    }


class TenantRight(NamedTuple):
    """A right of a backend that is one tenant alone. Brokers let who has it describe the same, too."""

    operation: Literal["READ", "WRITE"]
    kind: Literal["TOPIC", "GROUP"]
    name: str
    pattern: Literal["LITERAL", "PREFIXED"]


def list_tenant_rights(pipeline: Pipeline, tenant: str) -> list[TenantRight]:
    """Return all rights of a backend of one tenant: on its own topics, and on groups whose names begin with its own
    topic of results.

    A record has no principal: these rights bind a producer to its tenant, and a worker refuses a request of another
    tenant that it finds in these topics.
    """
    inputs = [add_tenant(topic, tenant) for topic in pipeline.input_topics("prefill").values()]
    results = add_tenant(pipeline.results_topic, tenant)
    return [
        *(TenantRight("WRITE", "TOPIC", topic, "LITERAL") for topic in inputs),
        TenantRight("READ", "TOPIC", results, "LITERAL"),
        TenantRight("READ", "GROUP", results, "PREFIXED"),
    ]


def _check_rights(admin: AdminClient, addresses: "Addresses", pipeline: Pipeline, role: Role | None) -> None:
    """Raise `AccessRefused` if the user lacks a right. Missing topics are ignored."""
    rights = list_rights(pipeline, role) if role else {}
    asked: dict[str, Future[Any]] = (
        admin.describe_topics(TopicCollection(list(rights)), include_authorized_operations=True) if rights else {}
    )
    for topic, future in asked.items():
        try:
            allowed = future.result(MAX_WAIT_S).authorized_operations
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                continue
            allowed = []
        missing = [] if allowed is None else [right.name for right in rights[topic] if right not in allowed]
        if missing:
            raise AccessRefused(
                f"Kafka at {addresses.kafka}: the user {addresses.kafka_user or 'of this client'} may not "
                f"{' or '.join(missing)} the topic {topic}; the rights it needs are in docs/operations.md"
            )


def _explain_refusal(error: KafkaError, addresses: "Addresses") -> str:
    """Return what an error means, if it means that we are not let in; else an empty string."""
    code, text = error.code(), error.str()
    said = text.split(": ", 1)[-1].split(" (after ")[0]
    if code == KafkaError._AUTHENTICATION:  # noqa: SLF001 - that is its name
        return _explain_login(text, said, addresses)
    if "certificate verify failed" in text:
        return "its certificate is not trusted: see PENSTOCK_KAFKA_CA_FILE"
    if "alert" in text and "certificate" in text:
        return "it wants a certificate of the client's: see PENSTOCK_KAFKA_CERT_FILE and PENSTOCK_KAFKA_KEY_FILE"
    if "PLAINTEXT broker listener" in text and not _any_speaks_tls(addresses.kafka):
        return f"it does not speak TLS: PENSTOCK_KAFKA_SECURITY is {addresses.kafka_security}"
    return f"TLS fails ({said}): see PENSTOCK_KAFKA_SECURITY" if code == KafkaError._SSL else ""  # noqa: SLF001


def _explain_login(text: str, said: str, addresses: "Addresses") -> str:
    """Return why a login failed, with the setting to look at; empty where a token server is away."""
    if "OAUTHBEARER token" in text:
        return explain_token_error(text)
    if "handshake failed" in text:
        return f"{said}: see PENSTOCK_KAFKA_SECURITY and PENSTOCK_KAFKA_MECHANISM"
    if addresses.kafka_mechanism == "AWS_MSK_IAM":
        return f"AWS's IAM refuses ({said}): this process's role needs kafka-cluster:Connect"
    if addresses.kafka_mechanism == "OAUTHBEARER":
        return (
            "the brokers refuse the token, which has expired, or is of another issuer or audience than they take: see "
            "PENSTOCK_KAFKA_TOKEN_URL and PENSTOCK_KAFKA_TOKEN_SCOPE, and compare the clocks"
        )
    return "wrong user or password: see PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD"


def _any_speaks_tls(bootstrap: str) -> bool:
    places = [place.rpartition(":") for place in bootstrap.split(",")]
    return any(speaks_tls(host.strip("[] "), int(port)) for host, _, port in places if port.isdigit())
