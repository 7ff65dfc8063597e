"""Tokens for Kafka's brokers: those of Amazon MSK, and what a token server's own error means."""

import base64
import logging
import re
import ssl
import time
from pathlib import Path

from penstock.aws import AwsSigner
from penstock.errors import AccessRefused
from penstock.redis.client import log_outage

log = logging.getLogger(__name__)

RETRY_S = 10.0
_MSK_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")
_MSK_URL = "https://kafka.{region}.amazonaws.com/?Action=kafka-cluster%3AConnect"
_CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_NOT_TAKEN = "Failed to acquire SASL OAUTHBEARER token: "
_AWAY = re.compile(
    r"Failed to connect|Could not connect|Could not resolve|[Tt]imed out|[Cc]onnection|Empty reply|Recv fail"
)


class MskTokens:
    """Makes tokens for the brokers of Amazon MSK: `oauth_cb` of confluent-kafka, which calls it on its own thread."""

    def __init__(self, bootstrap: str) -> None:
        """`bootstrap`: the brokers' names have the region. Raise `DependencyMissing` without botocore."""
        found = _MSK_HOST.search(bootstrap)
        self._signer, self._region = AwsSigner("kafka-cluster"), found[1] if found else ""

    def make_token(self) -> tuple[str, float]:
        """Return a token, and until when it is valid, in seconds since 1970. Raise `AccessRefused`."""
        url, end_s = self._signer.sign_url(_MSK_URL, self._region)
        return base64.urlsafe_b64encode(f"{url}&User-Agent=penstock".encode()).decode().rstrip("="), end_s

    def __call__(self, _: str = "") -> tuple[str, float]:
        """Return a token, and until when it is valid. Without credentials it is one that brokers refuse."""
        # Without any token a client could not be made at all. So it is made, and asks again before this one ends.
        try:
            return self.make_token()
        except AccessRefused as error:
            log_outage(log, f"Kafka: {error}")
            return "unavailable", time.time() + RETRY_S


def find_authorities() -> str:
    """Return the file of the authorities that this system trusts; empty where none is found.

    librdkafka's package asks token servers by a client of its own, which would look in one distribution's place alone.
    """
    files = (ssl.get_default_verify_paths().cafile or "", *_CA_FILES)
    return next((file for file in files if file and Path(file).is_file()), "")


def explain_token_error(text: str) -> str:
    """Return why there is no token, with the setting to look at, if an error of librdkafka's means that, and that the
    token server is not away; else an empty string.
    """
    _, is_about_token, said = text.partition(_NOT_TAKEN)
    if not is_about_token or _AWAY.search(said):
        return ""
    if "certificate" in said or "SSL" in said or "trust anchors" in said:
        return (
            f"TLS with the token server fails ({said}): see PENSTOCK_KAFKA_TOKEN_CA_FILE and PENSTOCK_KAFKA_TOKEN_URL"
        )
    if "unexpired" in said:
        return f"the token server's token has expired already ({said}): compare its clock with this machine's"
    if "invalid_client" in said or "unauthorized_client" in said:
        return f"the token server refuses the client ({said}): see PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD"
    if "invalid_scope" in said:
        return f"the token server refuses the scope ({said}): see PENSTOCK_KAFKA_TOKEN_SCOPE"
    user = "PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD"
    return f"no token comes from PENSTOCK_KAFKA_TOKEN_URL ({said}): see that, {user}"


def describe_token_error(text: str) -> str:
    """Return what an error of librdkafka's says about tokens, without what differs each time; else an empty string."""
    _, is_about_token, said = text.partition(_NOT_TAKEN)
    return f"no token: {re.sub(' after [0-9]+ ms', '', said)}" if is_about_token else ""
