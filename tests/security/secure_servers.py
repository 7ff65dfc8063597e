"""A Kafka and a Redis that demand TLS, users and rights."""

import shutil
import ssl
from pathlib import Path
from typing import Any, Self

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock.errors import DependencyMissing
from penstock.local.processes import Child, find_free_port, start_child, wait_until_serving
from sim.kafka_server import KafkaServer
from sim.waiting import PATIENCE_S
from tests.security.certificates import Authority
from tests.security.token_server import AUDIENCE, TokenServer

USERS = {
    "penstock-worker": "correct horse", "penstock-gateway": "open gate", "penstock-client": "battery staple",
    "nobody": "no rights",
}  # fmt: skip
"""Of Kafka, with their passwords; what each may do is in `kafka.acl`."""
KAFKA_ACL_FILE, REDIS_ACL_FILE = (Path(__file__).with_name(f"{server}.acl") for server in ("kafka", "redis"))
"""What `docs/operations.md` shows, for the pipeline `demo`."""


class SecureKafka(KafkaServer):
    """Beside the plain listener, where the tests are the administrator: one with SASL, one for client certificates."""

    def __init__(self, directory: Path, authority: Authority, tokens: TokenServer) -> None:
        """`tokens` is asked for the keys of tokens; it runs already."""
        super().__init__(directory, jvm_options=[f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={tokens.keys_url}"])
        self._sasl, self._tls, self._tokens = find_free_port(), find_free_port(), tokens
        self._authority = authority

    @property
    def sasl(self) -> str:
        """Where TLS and a password are asked for."""
        return f"127.0.0.1:{self._sasl}"

    @property
    def tls(self) -> str:
        """Where TLS and a client's certificate are asked for."""
        return f"127.0.0.1:{self._tls}"

    def start(self) -> Self:
        """Start, and make the users of SCRAM."""
        super().start()
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users: list[Any] = [UserScramCredentialUpsertion(name, info, word.encode()) for name, word in USERS.items()]
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        made = [*admin.alter_user_scram_credentials(users).values(), *admin.create_acls(rights()).values()]
        for future in made:
            future.result()
        return self

    def _build_settings(self) -> dict[str, str]:
        certificate, key = self._authority.sign("broker")
        keystore = self.directory / "broker.pem"
        keystore.write_text(key.read_text() + certificate.read_text())
        plain = super()._build_settings()
        listeners = f",SASL_SSL://{self.sasl},SSL://{self.tls}"
        users = " ".join(f'user_{name}="{word}"' for name, word in USERS.items())
        module = "org.apache.kafka.common.security"
        return plain | {
            "listeners": plain["listeners"] + listeners,
            "advertised.listeners": plain["advertised.listeners"] + listeners,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL",
            "ssl.keystore.type": "PEM", "ssl.keystore.location": str(keystore), "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._authority.file), "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
            "listener.name.ssl.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN,OAUTHBEARER",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required {users};",
            "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config":
                f"{module}.oauthbearer.OAuthBearerLoginModule required;",
            "listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class":
                f"{module}.oauthbearer.OAuthBearerValidatorCallbackHandler",
            # A connection ends with its token, unless it has logged in anew.
            "listener.name.sasl_ssl.oauthbearer.connections.max.reauth.ms": "3600000",
            "sasl.oauthbearer.jwks.endpoint.url": self._tokens.keys_url, "sasl.oauthbearer.expected.audience": AUDIENCE,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }  # fmt: skip


def rights() -> list[AclBinding]:
    """The lines of `kafka.acl`: who, what, and on which topics, groups or transactional ids that begin how."""
    found = []
    for line in KAFKA_ACL_FILE.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            user, operations, kind, name = line.split()
            resource, pattern = getattr(ResourceType, kind), ResourcePatternType.PREFIXED
            found += [
                AclBinding(
                    resource, name, pattern, f"User:{user}", "*", getattr(AclOperation, right), AclPermissionType.ALLOW
                )
                for right in operations.split(",")
            ]
    return found


class SecureRedis:
    """Debian's Redis with TLS alone, which asks for a client's certificate, and the users of the ACL file alone."""

    def __init__(self, directory: Path, authority: Authority, users: str) -> None:
        self.directory = directory
        self.port = find_free_port()
        self._authority, self._users = authority, users
        self._child: Child | None = None

    def url(self, user: str, password: str, scheme: str = "rediss") -> str:
        """The address for a user."""
        return f"{scheme}://{user}:{password}@127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        """Start, and wait until it answers; raises `DependencyMissing`."""
        program = shutil.which("redis-server")
        if program is None:
            raise DependencyMissing("no redis-server with TLS: apt-get install redis-server")
        self.directory.mkdir(parents=True)
        acl = self.directory / "users.acl"
        acl.write_text(self._users)
        certificate, key = self._authority.sign("redis")
        options = {
            "bind": "127.0.0.1", "port": "0", "tls-port": str(self.port), "tls-auth-clients": "yes",
            "tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-ca-cert-file": str(self._authority.file),
            "aclfile": str(acl), "dir": str(self.directory), "appendonly": "yes", "save": "",
        }  # fmt: skip
        command = [program, *(word for name, value in options.items() for word in (f"--{name}", value))]
        self._child = start_child(command, name="Redis", log=self.directory / "redis.log", directory=self.directory)
        wait_until_serving(self._child, self._answers, PATIENCE_S)
        return self

    def stop(self) -> None:
        """End in order."""
        if self._child is not None:
            self._child.stop()

    def _answers(self) -> bool:
        try:
            return bool(ssl.get_server_certificate(("127.0.0.1", self.port)))
        except OSError:
            return False
