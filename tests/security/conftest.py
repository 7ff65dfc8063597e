"""Both servers, started once, and what a program is told to get in."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from sim.servers import start_or_skip
from tests.security.certificates import Authority
from tests.security.secure_servers import REDIS_ACL_FILE, USERS, SecureKafka, SecureRedis
from tests.security.token_server import TokenServer

WORDS = {"WORKER_PASSWORD": "open-sesame", "GATEWAY_PASSWORD": "abracadabra", "CLIENT_PASSWORD": "swordfish"}
PASSWORDS = {
    "penstock-worker": WORDS["WORKER_PASSWORD"], "penstock-gateway": WORDS["GATEWAY_PASSWORD"],
    "penstock-client": WORDS["CLIENT_PASSWORD"],
}  # fmt: skip
"""Of the users of Redis."""
SECRETS = {
    "penstock-worker": "client/secret +1", "penstock-client": "secret of a client", "acme": "secret of acme",
    "beta": "secret of beta",
}  # fmt: skip
"""Of clients of the token server, who have these names at Kafka."""
ADMIN = "user admin on >admin ~* &* +@all\n"


class SecureServers:
    """The servers, and two authorities: all certificates are of the first, nobody should trust the second."""

    def __init__(self, directory: Path) -> None:
        self.authority, self.other = Authority(directory / "authority"), Authority(directory / "other")
        self.certificate, self.key = self.authority.sign("penstock-worker")
        acl = REDIS_ACL_FILE.read_text("utf-8")
        for name, word in WORDS.items():
            acl = acl.replace(name, word)
        self.redis = SecureRedis(directory / "redis", self.authority, acl + ADMIN)
        self.tokens = TokenServer(SECRETS)
        self.kafka = SecureKafka(directory / "kafka", self.authority, self.tokens)

    def start(self) -> None:
        """Both at once; the topics are made by the administrator."""
        with ThreadPoolExecutor() as pool:
            redis_is_up, kafka_is_up = pool.submit(self.redis.start), pool.submit(self.kafka.start)
            redis_is_up.result()
            kafka_is_up.result()
        KafkaBus(Pipeline("demo"), self.kafka.bootstrap, BusSettings(partitions=1)).create_topics()

    def stop(self) -> None:
        """Both."""
        self.redis.stop()
        self.kafka.stop()
        self.tokens.stop()

    def redis_access(self, user: str) -> dict[str, str]:
        """The environment of who uses Redis so."""
        return {
            "PENSTOCK_STREAM_URL": self.redis.url(user, PASSWORDS[user]),
            "PENSTOCK_REDIS_CA_FILE": str(self.authority.file),
            "PENSTOCK_REDIS_CERT_FILE": str(self.certificate),
            "PENSTOCK_REDIS_KEY_FILE": str(self.key),
        }

    def kafka_access(self, user: str, mechanism: str = "SCRAM-SHA-512") -> dict[str, str]:
        """The environment of who uses Kafka so."""
        is_token = mechanism == "OAUTHBEARER"
        return {
            "PENSTOCK_KAFKA": self.kafka.sasl, "PENSTOCK_KAFKA_SECURITY": "SASL_SSL",
            "PENSTOCK_KAFKA_MECHANISM": mechanism, "PENSTOCK_KAFKA_USER": user,
            "PENSTOCK_KAFKA_PASSWORD": SECRETS[user] if is_token else USERS[user],
            "PENSTOCK_KAFKA_CA_FILE": str(self.authority.file),
            **({"PENSTOCK_KAFKA_TOKEN_URL": self.tokens.url} if is_token else {}),
        }  # fmt: skip

    def admin(self) -> "redis.Redis":
        """Who may do everything in Redis."""
        return redis.Redis(
            host="127.0.0.1", port=self.redis.port, username="admin", password="admin", decode_responses=True, ssl=True,
            ssl_ca_certs=str(self.authority.file), ssl_certfile=str(self.certificate), ssl_keyfile=str(self.key),
        )  # fmt: skip


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServers]:
    """Running."""
    made = SecureServers(tmp_path_factory.mktemp("secure"))
    try:
        start_or_skip(made.start)
        yield made
    finally:
        made.stop()
