"""A token server as OIDC has it: tokens for client credentials, and the keys with which brokers check them."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

AUDIENCE = "kafka"


class TokenServer:
    """On a port of 127.0.0.1. It can go away and come back at the same port."""

    def __init__(self, secrets: dict[str, str]) -> None:
        """`secrets`: of the clients, by their ids, which are also their names at the brokers."""
        self.secrets = secrets
        self.lifetime_s = 3600.0
        self.audience = AUDIENCE
        self.num_given = 0
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """Where tokens are asked for."""
        return f"http://127.0.0.1:{self.port}/token"

    @property
    def keys_url(self) -> str:
        """Where the public keys are."""
        return f"http://127.0.0.1:{self.port}/keys"

    def start(self) -> None:
        """Listen."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _make_handler(self))
        self._server, self.port = server, server.server_port
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def give_token(self, client: str) -> tuple[str, float]:
        """Return a signed token of a client, and when it ends, in seconds since 1970."""
        self.num_given += 1
        now = time.time()
        end = int(now + self.lifetime_s)
        claims = {"sub": client, "aud": self.audience, "iat": int(now), "exp": end, "jti": str(self.num_given)}
        signed = f"{_encode({'alg': 'RS256', 'kid': 'test', 'typ': 'JWT'})}.{_encode(claims)}"
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), SHA256())
        return f"{signed}.{_encode_bytes(signature)}", float(end)

    def answer_keys(self) -> dict[str, Any]:
        """Return the public keys as a JSON Web Key Set."""
        numbers = self._key.public_key().public_numbers()
        key = {name: _encode_bytes(number.to_bytes(-(-number.bit_length() // 8)))
               for name, number in (("n", numbers.n), ("e", numbers.e))}  # fmt: skip
        return {"keys": [{"kty": "RSA", "kid": "test", "alg": "RS256", "use": "sig", **key}]}

    def answer_client(self, login: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Return status and body for who asks for a token."""
        client, _, secret = base64.b64decode(login.removeprefix("Basic ")).decode().partition(":")
        client, secret = unquote(client), unquote(secret)
        if form["grant_type"] != ["client_credentials"] or self.secrets.get(client) != secret:
            return 401, {"error": "invalid_client", "error_description": "Invalid client or client credentials"}
        if form.get("scope", ["kafka"]) != ["kafka"]:
            return 400, {"error": "invalid_scope", "error_description": "no such scope"}
        token, _ = self.give_token(client)
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": int(self.lifetime_s)}


def _make_handler(tokens: TokenServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, tokens.answer_keys())

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if self.path == "/token":
                self._answer(*tokens.answer_client(self.headers["Authorization"], form))
            else:
                self._answer(404, {})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    return Handler


def _encode(value: dict[str, Any]) -> str:
    return _encode_bytes(json.dumps(value).encode())


def _encode_bytes(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
