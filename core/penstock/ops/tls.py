"""Checks whether a server speaks TLS."""

import socket
import ssl

TLS_TIMEOUT_S = 2.0
"""The longest time in seconds in which a server must begin TLS."""


def speaks_tls(host: str, port: int) -> bool:
    """Return whether a server answers a TLS handshake, whatever its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), TLS_TIMEOUT_S) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, ValueError):
        return False
