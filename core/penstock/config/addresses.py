"""The addresses of servers, with the TLS and user settings of the clients that connect to them."""

import os
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, quote, urlencode

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from penstock.config.sources import Settings
from penstock.config.tokens import MskTokens, find_authorities
from penstock.errors import InvalidName
from penstock.names import Pipeline
from penstock.redis.sentinel import split_address
from penstock.redis.urls import check_names, check_urls, split_urls

KafkaSecurity = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
KafkaMechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER", "AWS_MSK_IAM"]

_REDIS_FILES = {"ssl_ca_certs": "redis_ca_file", "ssl_certfile": "redis_cert_file", "ssl_keyfile": "redis_key_file"}
"""Query parameters of redis-py's urls, and the settings that they are filled from."""
_WITH_TLS = ("rediss", "rediss+sentinel")
_SECURITY, _MECHANISM = "PENSTOCK_KAFKA_SECURITY", "PENSTOCK_KAFKA_MECHANISM"
_TOKEN_SETTINGS = ("kafka_token_url", "kafka_token_scope", "kafka_token_extensions", "kafka_token_ca_file")
_FILES = tuple(f"{server}_{kind}_file" for server in ("kafka", "redis") for kind in ("ca", "cert", "key"))


def check_file(path: str) -> str:
    """Return the path, if it is empty or names a readable file. Raises `ValueError`."""
    if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ValueError("it is not a file that can be read")
    return path


RedisUrls = Annotated[str, AfterValidator(check_urls)]
StreamUrls = Annotated[RedisUrls, AfterValidator(check_names)]
ReadableFile = Annotated[str, AfterValidator(check_file)]


class Addresses(Settings):
    """Where the servers are and how to log in. Without `PENSTOCK_KAFKA` the stream Redis is the bus, too."""

    pipeline: str = "demo"
    """The pipeline to work for: one model, one set of topics."""
    kafka: str = ""
    """Kafka bootstrap servers, `host:port,…`."""
    stream_url: StreamUrls = Field(default="redis://127.0.0.1:7379/0", repr=False)
    """Redis for logs and claims. It must be persistent and must not evict. The default is where `penstock up` starts
    one. With TLS and a user: `rediss://user:password@host:port/0`, special characters percent-encoded; with a password
    that changes: `rediss://user@host:port/0?login=file:/PATH` or `…?login=elasticache:CACHE`. Behind
    Sentinels: `redis+sentinel://user:password@host1:26379,host2:26379/service/0`, or `rediss+sentinel://…`. Several
    addresses, with commas between them, share the requests: one server writes about a hundred thousand tokens a second.
    Each has a name by which requests are distributed: `#name` at its end, else `host:port/db`. All processes need the
    same list in the same order."""
    kv_url: RedisUrls = Field(default="", repr=False)
    """Redis for KV blocks, a cache. Several addresses, with commas between them, share the blocks. Empty: those of
    `PENSTOCK_STREAM_URL`."""
    kafka_security: Annotated[KafkaSecurity, BeforeValidator(str.lower)] = "plaintext"
    """How clients connect to Kafka: with TLS (`ssl`, `sasl_ssl`), with user and password (`sasl_…`), or neither."""
    kafka_mechanism: Annotated[KafkaMechanism, BeforeValidator(str.upper)] = "SCRAM-SHA-512"
    """Kafka: the SASL mechanism, with `sasl_…`. `OAUTHBEARER` gets tokens from `PENSTOCK_KAFKA_TOKEN_URL`;
    `AWS_MSK_IAM` signs them with AWS's credentials (`penstock[aws]`)."""
    kafka_user: str = ""
    """Kafka: the user, with `sasl_…`; with `OAUTHBEARER` the client's id at the token server."""
    kafka_password: SecretStr = Field(default=SecretStr(""), repr=False)
    """Kafka: its password; with `OAUTHBEARER` the client's secret."""
    kafka_token_url: str = ""
    """Kafka, with `OAUTHBEARER`: where OIDC's token server gives tokens for client credentials, `https://…`."""
    kafka_token_scope: str = ""
    """Kafka, with `OAUTHBEARER`: the scope to ask for, where the token server wants one."""
    kafka_token_extensions: str = ""
    """Kafka, with `OAUTHBEARER`: what brokers want beside the token, `name=value,…`: Confluent Cloud's
    `logicalCluster` and `identityPoolId`."""
    kafka_token_ca_file: ReadableFile = ""
    """Kafka, with `OAUTHBEARER`: the certificates of the authorities that sign the token server's, PEM. Empty: the
    system's."""
    kafka_ca_file: ReadableFile = ""
    """Kafka: the certificates of the authorities that sign the brokers', PEM. Empty: the system's."""
    kafka_cert_file: ReadableFile = ""
    """Kafka: the client's certificate, PEM, where brokers ask for one."""
    kafka_key_file: ReadableFile = ""
    """Kafka: the key of the client's certificate, PEM."""
    redis_ca_file: ReadableFile = ""
    """Redis: the certificates of the authorities that sign the servers' at `rediss://`, PEM. Empty: the system's."""
    redis_cert_file: ReadableFile = ""
    """Redis: the client's certificate, PEM, where servers ask for one."""
    redis_key_file: ReadableFile = ""
    """Redis: the key of the client's certificate, PEM."""

    tenant_keys: str = ""
    """A directory with a file of keys for each tenant whose content is encrypted in topics, logs, files and KV, such as
    a mounted secret. All processes and clients need the same. Empty: everything is stored in clear."""

    @property
    def first_url(self) -> str:
        """The address of the first stream server, which keeps everything that does not belong to a single request."""
        return split_urls(self.stream_url)[0]

    @field_validator("pipeline")
    @classmethod
    def _check_pipeline(cls, pipeline: str) -> str:
        try:
            return Pipeline(pipeline).name
        except InvalidName as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        """Raise one `ValueError` for all contradictions; else put the TLS files into the `rediss://` addresses."""
        if wrong := find_contradictions(self):
            raise ValueError("; ".join(wrong))
        for name in ("stream_url", "kv_url"):
            complete = ",".join(add_tls_files(url, self) for url in split_urls(getattr(self, name)))
            if complete != getattr(self, name):
                setattr(self, name, complete)
        return self


def kafka_security_config(addresses: Addresses) -> dict[str, Any]:
    """Return the security settings of every Kafka client. Raise `DependencyMissing` where AWS's package is not there.

    Clients of tokens get them, before the last one ends, on a thread of their own: also those that are idle.
    """
    if addresses.kafka_security == "plaintext":
        return {}
    given: dict[str, Any] = {
        "ssl.ca.location": addresses.kafka_ca_file,
        "ssl.certificate.location": addresses.kafka_cert_file,
        "ssl.key.location": addresses.kafka_key_file,
    }
    is_sasl = addresses.kafka_security.startswith("sasl")
    if is_sasl and addresses.kafka_mechanism == "OAUTHBEARER":
        given |= {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": addresses.kafka_user,
            "sasl.oauthbearer.client.secret": addresses.kafka_password.get_secret_value(),
            "sasl.oauthbearer.token.endpoint.url": addresses.kafka_token_url,
            "sasl.oauthbearer.scope": addresses.kafka_token_scope,
            "sasl.oauthbearer.extensions": addresses.kafka_token_extensions,
            "https.ca.location": addresses.kafka_token_ca_file or find_authorities(),
        }
    elif is_sasl and addresses.kafka_mechanism == "AWS_MSK_IAM":
        given |= {"sasl.mechanism": "OAUTHBEARER", "oauth_cb": MskTokens(addresses.kafka)}
    elif is_sasl:
        given |= {
            "sasl.mechanism": addresses.kafka_mechanism,
            "sasl.username": addresses.kafka_user,
            "sasl.password": addresses.kafka_password.get_secret_value(),
        }
    return {"security.protocol": addresses.kafka_security} | {name: value for name, value in given.items() if value}


def add_tls_files(url: str, addresses: Addresses) -> str:
    """Return a Redis url with the settings' certificates and key, unless it names its own."""
    parts = split_address(url)
    if parts.scheme not in _WITH_TLS:
        return url
    query = dict(parse_qsl(parts.query))
    ours = {name: getattr(addresses, setting) for name, setting in _REDIS_FILES.items()}
    query = {name: value for name, value in ours.items() if value} | query
    return parts._replace(query=urlencode(query, quote_via=quote, safe="/")).geturl()


def find_contradictions(addresses: Addresses) -> list[str]:
    """Return a line for each contradiction between settings, with the names of their variables."""
    return [
        *_find_kafka_contradictions(addresses),
        *_find_redis_contradictions(addresses),
        *_find_incomplete_pairs(addresses),
    ]


def _find_kafka_contradictions(addresses: Addresses) -> list[str]:
    security, mechanism, wrong = addresses.kafka_security, addresses.kafka_mechanism, []
    has_user, has_password = bool(addresses.kafka_user), bool(addresses.kafka_password.get_secret_value())
    is_aws, has_tokens = mechanism == "AWS_MSK_IAM", mechanism == "OAUTHBEARER"
    if is_aws and (has_user or has_password):
        wrong.append(f"{_MECHANISM}={mechanism} takes AWS's credentials: leave PENSTOCK_KAFKA_USER and …_PASSWORD out")
    if (is_aws or has_tokens) and not security.startswith("sasl"):
        wrong.append(f"{_MECHANISM}={mechanism} needs sasl_ssl, not {security}, in {_SECURITY}")
    if has_tokens and not addresses.kafka_token_url.startswith(("https://", "http://")):
        wrong.append(
            f"{_MECHANISM}={mechanism} needs the token server's address, https://…, in PENSTOCK_KAFKA_TOKEN_URL"
        )
    if not has_tokens:
        given = [name for name in _TOKEN_SETTINGS if getattr(addresses, name)]
        wrong += [f"PENSTOCK_{name.upper()} needs OAUTHBEARER in {_MECHANISM}" for name in given]
    if security.startswith("sasl") and not is_aws and not (has_user and has_password):
        wrong.append(f"{_SECURITY}={security} needs PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD")
    if not security.startswith("sasl") and (has_user or has_password):
        wrong.append(f"PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD need sasl_ssl, not {security}, in {_SECURITY}")
    if security != "plaintext" and not addresses.kafka:
        wrong.append(f"{_SECURITY}={security} needs brokers in PENSTOCK_KAFKA")
    if not security.endswith("ssl"):
        given = [name for name in _FILES if name.startswith("kafka") and getattr(addresses, name)]
        wrong += [f"PENSTOCK_{name.upper()} needs ssl or sasl_ssl, not {security}, in {_SECURITY}" for name in given]
    return wrong


def _find_redis_contradictions(addresses: Addresses) -> list[str]:
    wrong = []
    if not any(
        url.partition("://")[0] in _WITH_TLS for url in split_urls(f"{addresses.stream_url},{addresses.kv_url}")
    ):
        given = [name for name in _REDIS_FILES.values() if getattr(addresses, name)]
        wrong += [f"PENSTOCK_{name.upper()} needs a rediss:// url in PENSTOCK_STREAM_URL" for name in given]
    return wrong


def _find_incomplete_pairs(addresses: Addresses) -> list[str]:
    wrong = []
    for server in ("KAFKA", "REDIS"):
        cert, key = (getattr(addresses, f"{server.lower()}_{kind}_file") for kind in ("cert", "key"))
        if bool(cert) != bool(key):
            wrong.append(f"PENSTOCK_{server}_CERT_FILE and PENSTOCK_{server}_KEY_FILE are given together")
    return wrong
