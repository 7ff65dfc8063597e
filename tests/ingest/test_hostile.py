"""What strangers may send to a running gateway, over plain sockets: a clear error each, and it goes on."""

import fcntl
import json
import os
import re
import resource
import signal
import socket
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import pytest

from penstock.bus.contract import Outgoing
from penstock.ingest.tenants import TenantEntry
from penstock.messages import Request, Result, Usage
from penstock.names import Pipeline
from sim.forked import pause_process, run_penstock
from sim.waiting import wait_for
from tests.gateways import GatewayProcess, ScriptedPipeline, write_keys

MB = 2**20
MODEL = "hostile-demo"
SIZES = {"GATEWAY_MAX_BODY_MB": "1", "BATCH_MAX_FILE_BYTES": str(MB)}
BODY_S = 1
TIMES = {
    "TESTING": json.dumps({"gateway": {"headers_s": 1, "body_s": BODY_S, "body_kb_per_s": 1000, "stalled_s": 1}}),
    "GATEWAY_IDLE_S": "1",
}
"""Limits that a good request, too, may miss on a busy machine: of a gateway by itself."""
PATIENT = {"TESTING": json.dumps({"gateway": {"headers_s": 600, "body_s": 600, "stalled_s": 600}})}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}


class Reply(NamedTuple):
    """An answer; of a stream only its headers."""

    status: int
    headers: str
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in found["error"]["message"]
        error: dict[str, Any] = found["error"]
        return error


class GuardedGateway(ScriptedPipeline):
    """A gateway process with three tenants, before a pipeline whose requests nobody takes."""

    main: Callable[..., None] = staticmethod(run_penstock)

    def __init__(self, redis_url: str, folder: Path, times: Mapping[str, str], model: str = MODEL) -> None:
        super().__init__(redis_url, Pipeline(f"t-{uuid.uuid4().hex[:12]}"), model)
        entries = {"acme": TenantEntry(classes=("interactive",), weight=3), "slow": TenantEntry(requests_per_min=1)}
        self.acme, self.other, self.slow = write_keys(folder / "keys.json", "acme", "other", "slow", **entries)
        self.folder, self.times = folder, times
        self.gateway: GatewayProcess

    def __enter__(self) -> Self:
        super().__enter__()
        settings = {**SIZES, **self.times, "GATEWAY_KEYS": str(self.folder / "keys.json")}
        self.gateway = GatewayProcess(self.addresses, self.folder, settings, self.main)
        return self

    def __exit__(self, *_: object) -> None:
        self.gateway.process.kill()
        super().__exit__()

    def is_well(self) -> bool:
        """Whether it answers somebody else."""
        assert self.gateway.process.is_alive(), self.gateway.process.read_log_tail()
        try:
            return self.send(encode_request("GET", "/healthz")).status == 200
        except OSError:
            return False

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.gateway.port))

    def send(self, raw: bytes) -> Reply:
        """Send bytes and read the answer."""
        with self.connect() as connection:
            with suppress(OSError):  # it may refuse before all is sent
                connection.sendall(raw)
            return read_reply(connection)

    def ask(self, method: str, path: str, key: str = "", **headers: str) -> Reply:
        """A request without a body, by default with acme's key."""
        return self.send(encode_request(method, path, {"authorization": f"Bearer {key or self.acme}"} | headers))

    def post(self, path: str, body: Any, key: str = "", **headers: str) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        own = {"authorization": f"Bearer {key or self.acme}", "content-type": "application/json"}
        return self.send(encode_request("POST", path, own | headers, raw))

    def read_new(self, before: list[Request]) -> list[Request]:
        """Return what was published since."""
        known = {one.id for one in before}
        return [one for one in self.read_requests() if one.id not in known]


def encode_request(
    method: str, path: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b""
) -> bytes:
    own = {"host": "gateway", "content-length": str(len(body))} if body else {"host": "gateway"}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**own, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_reply(connection: socket.socket) -> Reply:
    connection.settimeout(None)
    answer = HTTPResponse(connection)
    answer.begin()
    return Reply(answer.status, str(answer.headers).lower(), b"" if answer.chunked else answer.read())


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedGateway]:
    with GuardedGateway(redis_url, tmp_path_factory.mktemp("hostile"), PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def impatient(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedGateway]:
    with GuardedGateway(redis_url, tmp_path_factory.mktemp("impatient"), TIMES, f"{MODEL}-impatient") as made:
        yield made


def run_with_few_files(*arguments: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    run_penstock(*arguments)


@pytest.fixture
def few(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedGateway]:
    monkeypatch.setattr(GuardedGateway, "main", staticmethod(run_with_few_files))
    with GuardedGateway(redis_url, tmp_path, TIMES, f"{MODEL}-few") as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    name = next(name for name in ("impatient", "gateway", "few") if name in request.fixturenames)
    made: GuardedGateway = request.getfixturevalue(name)
    yield
    wait_for(made.is_well, "it answers")
    assert b"Traceback" not in made.gateway.log.read_bytes()


# Time.


@pytest.mark.proof
def test_a_request_that_never_ends_is_closed(impatient: GuardedGateway) -> None:
    for begin in (b"G", b"GET / HT", b"GET /healthz HTTP/1.1\r\nhost: gateway\r\nx-slow: ", b"\r\nG"):
        with impatient.connect() as connection:
            connection.sendall(begin)
            reply = read_reply(connection)
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")


def test_slow_headers_are_bounded_in_all_not_each(impatient: GuardedGateway) -> None:
    with impatient.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(encode_request("GET", "/healthz")[:-2])
            while True:  # a header at a time, never the last
                connection.sendall(b"x-a: b\r\n")
                connection.settimeout(0.1)
                with suppress(TimeoutError):
                    if connection.recv(1, socket.MSG_PEEK):
                        break
        assert read_reply(connection).status == 408


def test_the_second_request_of_a_connection_may_not_be_slow_either(impatient: GuardedGateway) -> None:
    with impatient.connect() as connection:
        connection.sendall(encode_request("GET", "/healthz"))
        assert read_reply(connection).status == 200
        connection.sendall(b"\r\nGET /heal")
        assert read_reply(connection).status == 408


def test_a_connection_without_a_request_is_closed_without_a_word(impatient: GuardedGateway) -> None:
    for sent in (b"", b"\r\n", encode_request("GET", "/healthz")):
        with impatient.connect() as connection:
            connection.sendall(sent)
            if len(sent) > 2:
                assert read_reply(connection).status == 200
            assert connection.recv(1) == b""


def test_what_came_in_time_is_answered_by_a_gateway_that_stood_still(impatient: GuardedGateway) -> None:
    pid, half = impatient.gateway.process.pid, 20
    get = encode_request("GET", "/healthz")
    post = encode_request("POST", "/v1/files", {"authorization": f"Bearer {impatient.acme}", **FORM}, BODY)
    with ExitStack() as stack:

        def stop_with_open_connections() -> dict[socket.socket, bytes]:
            """Stop the gateway while each connection is somewhere else on its way; return what remains to be sent."""
            stack.pop_all().close()
            found = dict[socket.socket, bytes]()
            for first, then in ((b"", get), (get, get), (get[:half], get[half:]), (post[:-half], post[-half:])):
                connection = stack.enter_context(impatient.connect())
                connection.sendall(first)
                if first == get:
                    assert read_reply(connection).status == 200
                found[connection] = then
            wait_for(lambda: all(map(is_received, found)), "all is received")
            pause_process(pid)
            return found

        while not all(map(is_silent, (found := stop_with_open_connections()))):
            os.kill(pid, signal.SIGCONT)  # this process was so slow that the gateway's times were over: again
        try:
            for connection, then in found.items():
                connection.sendall(then)
            until = time.monotonic() + 2 * BODY_S
            wait_for(lambda: time.monotonic() > until, "all times are over", every_s=0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [read_reply(connection).status for connection in found] == [200] * 4


def is_received(connection: socket.socket) -> bool:
    """Whether the other side's kernel has all that was sent."""
    return fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) == bytes(4)


def is_silent(connection: socket.socket) -> bool:
    """Whether nothing came, neither bytes nor an end."""
    with suppress(BlockingIOError):
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False
    return True


@pytest.mark.proof
@pytest.mark.parametrize("framing", ["content-length: 100000", "transfer-encoding: chunked"])
def test_a_body_that_never_ends_is_refused(impatient: GuardedGateway, framing: str) -> None:
    head = encode_request("POST", "/v1/chat/completions", {"authorization": f"Bearer {impatient.acme}"})[:-2]
    with impatient.connect() as connection:
        connection.sendall(head + framing.encode() + b"\r\n\r\n5\r\n{    \r\n")
        reply = read_reply(connection)
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")


def test_a_body_after_the_answer_is_not_waited_for(impatient: GuardedGateway) -> None:
    with impatient.connect() as connection:
        connection.sendall(encode_request("POST", "/v1/chat/completions", {"content-length": "100000"}) + b"{")
        reply = read_reply(connection)
        assert reply.status in {401, 408}
        assert connection.recv(10) == b""


@pytest.mark.proof
def test_a_reader_that_takes_nothing_is_cut_off(impatient: GuardedGateway) -> None:
    with impatient.connect() as connection:
        connection.settimeout(0.2)
        with suppress(OSError):
            for _ in range(1000):
                connection.sendall(encode_request("GET", "/openapi.json"))

        def is_cut() -> bool:  # without reading: 7 is CLOSE, after a reset
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x07"

        wait_for(is_cut, "the gateway ends it")


# Size.


@pytest.mark.proof
@pytest.mark.parametrize(
    "flood",
    [
        b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 300_000,
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"n" * 300_000,
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"e" * 300_000,
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-t: " + b"e" * 300_000,
    ],
    ids=["url", "headers", "value", "name", "chunk extension", "trailer"],
)
def test_a_flood_of_headers_is_refused(gateway: GuardedGateway, flood: bytes) -> None:
    reply = gateway.send(flood)
    assert reply.status in {431, 404, 401}
    if reply.status == 431:
        assert reply.error["code"] == "headers_too_large"


@pytest.mark.proof
@pytest.mark.parametrize(("path", "most"), [("/v1/chat/completions", 1), ("/v1/files", 2), ("/v1/batches", 1)])
@pytest.mark.parametrize("says_length", [True, False])
def test_a_body_of_100_mb_is_refused(gateway: GuardedGateway, path: str, most: int, says_length: bool) -> None:
    headers = {"authorization": f"Bearer {gateway.acme}"}
    length, piece = {"content-length": str(100 * MB)}, b"x" * MB
    with gateway.connect() as connection:
        connection.sendall(
            encode_request("POST", path, headers | (length if says_length else {"transfer-encoding": "chunked"}))
        )
        with suppress(OSError):
            for _ in range(100):
                connection.sendall(piece if says_length else b"%x\r\n%s\r\n" % (MB, piece))
        reply = read_reply(connection)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert f"{most} MB" in reply.error["message"]
    assert "connection: close" in reply.headers


@pytest.mark.parametrize("more", [b"", b"expect: other\r\n"])
@pytest.mark.parametrize(("num_bytes", "key", "status"), [(100 * MB, "", 413), (9, "wrong", 401)])
def test_who_waits_for_a_go_is_told_no_at_once(
    gateway: GuardedGateway, more: bytes, num_bytes: int, key: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {key or gateway.acme}", "expect": "100-continue"}
    request = encode_request("POST", "/v1/chat/completions", headers | {"content-length": str(num_bytes)})
    with gateway.connect() as connection:
        connection.sendall(request[:-2] + more + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 %d" % status, "not 100 before it"


def test_many_half_requests_at_once_hold_up_nobody(impatient: GuardedGateway) -> None:
    connections = [impatient.connect() for _ in range(300)]
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nx-long: " + b"y" * 30_000)
    wait_for(impatient.is_well, "it answers somebody else")
    assert {read_reply(connection).status for connection in connections} == {408}
    for connection in connections:
        connection.close()


def test_more_idle_connections_than_open_files_hold_up_nobody(few: GuardedGateway) -> None:
    assert "160 open files are allowed, so 80 connections instead of 4000" in few.gateway.log.read_text()
    with ExitStack() as stack:
        first = stack.enter_context(few.connect())
        first.sendall(encode_request("GET", "/healthz"))
        assert read_reply(first).status == 200
        for _ in range(300):
            stack.enter_context(few.connect())
        wait_for(few.is_well, "it answers somebody else while they are open here")
        assert first.recv(1) == b"", "the one that is idle for the longest time is closed for a new one"


# HTTP.

FORM = {"content-type": "multipart/form-data; boundary=cut"}
BODY = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--cut\r\n'
    b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\nGET /version HTTP/1.1\r\n\r\n--cut--\r\n'
)
"""An upload, whose answer says how many bytes the file has; a request is in it."""
CHUNKED = b"7;x=y\r\n%s\r\n%x\r\n%s\r\n0\r\n" % (BODY[:7], len(BODY) - 7, BODY[7:])
SIZED = f"content-length: {len(BODY)}"


def encode_head(line: str, *headers: str, version: str = "1.1", host: str = "host: gateway") -> bytes:
    """Return a head of these lines, with acme's key where the test puts it in."""
    given = [f"{line} HTTP/{version}", *([host] if host else []), "authorization: Bearer {acme}", *headers]
    return "\r\n".join([*given, "", ""]).encode()


def encode_upload(*headers: str, body: bytes = BODY, **fields: str) -> bytes:
    form = (f"{name}: {value}" for name, value in FORM.items())
    return encode_head("POST /v1/files", *form, *headers, **fields) + body


HTTP: dict[str, bytes] = {
    "a POST with its length": encode_upload(SIZED),
    "`Transfer-Encoding: chunked`, with extensions and trailers": encode_upload(
        "transfer-encoding: chunked", body=CHUNKED + b"x-trailer: 1\r\n\r\n"
    ),
    "`Expect: 100-continue`": encode_upload(SIZED, "expect: 100-continue"),
    "`Upgrade: h2c` or another protocol, also with a body": b"".join(
        encode_upload(SIZED, "connection: Upgrade, HTTP2-Settings", f"upgrade: {other}", "http2-settings: AAMAAABk")
        for other in ("h2c", "websocket", "TLS/1.0")
    )
    + encode_upload("transfer-encoding: chunked", "connection: upgrade", "upgrade: h2c", body=CHUNKED + b"\r\n"),
    "two requests at once": encode_head("GET /healthz") + encode_upload(SIZED),
    "a GET with a body": encode_head("GET /healthz", SIZED) + BODY,
    "an absolute URI": encode_head("GET http://gateway:80/healthz?x=1") + encode_head("GET HTTP://gateway"),
    "`OPTIONS`, also `OPTIONS *`": encode_head("OPTIONS /healthz") + encode_head("OPTIONS *"),
    "`HEAD`": encode_head("HEAD /healthz"),
    "HTTP/1.0, also with `keep-alive`": encode_head("GET /healthz", "connection: keep-alive", version="1.0", host=""),
    "HTTP/1.0, a stream": encode_head("GET /v1/live?looks=1", version="1.0"),
    "HTTP/1.0 with `Expect: 100-continue`": encode_upload(SIZED, "expect: 100-continue", version="1.0"),
    "HTTP/1.0 with `Transfer-Encoding`": encode_upload("transfer-encoding: chunked", body=CHUNKED, version="1.0"),
    "HTTP/2, also without an offer": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another version": encode_head("GET /healthz", version="2.0"),
    "`CONNECT`": encode_head("CONNECT gateway:443"),
    "`Content-Encoding: gzip`": encode_upload(SIZED, "content-encoding: gzip"),
    "`Transfer-Encoding: gzip, chunked`": encode_upload("transfer-encoding: gzip, chunked", body=CHUNKED + b"\r\n"),
    "two `Content-Encoding`, one of them `gzip`": encode_upload(
        SIZED, "content-encoding: gzip", "content-encoding: identity"
    ),
    "two `Transfer-Encoding`, `gzip` and `chunked`": encode_upload(
        "transfer-encoding: gzip", "transfer-encoding: chunked", body=CHUNKED + b"\r\n"
    ),
    "two lengths, also if they are the same": encode_upload(SIZED, SIZED),
    "a length beside `chunked`": encode_upload(SIZED, "transfer-encoding: chunked", body=CHUNKED),
    "a length that is none": encode_upload("content-length: -1"),
    "no `Host`, in HTTP/1.1": encode_head("GET /healthz", host=""),
    "two `Host`": encode_head("GET /healthz", "host: other"),
    "two requests at once, the second of them bad": encode_head("GET /healthz") + encode_head("GET /", "host: other"),
}
"""What is sent for each row of the table of requests in docs/gateway.md."""


def read_rows() -> dict[str, tuple[str, str]]:
    """Return answer and connection for each request in the page's table."""
    section = (
        (Path(__file__).parents[2] / "docs/gateway.md").read_text().partition("\n## HTTP\n")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {request: (answer, connection.strip()) for request, answer, connection in rows[1:]}


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(HTTP.keys() | read_rows().keys()))
@pytest.mark.parametrize("size", [1, MB], ids=["byte by byte", "at once"])
def test_a_request_has_one_answer_as_the_page_says(gateway: GuardedGateway, name: str, size: int) -> None:
    answer, then = read_rows()[name]
    raw = HTTP[name].replace(b"{acme}", gateway.acme.encode())
    if then == "stays open":
        raw += encode_request("GET", "/healthz", {"connection": "close"})
    with gateway.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # it may refuse before all is sent
            for at in range(0, len(raw), size):
                connection.sendall(raw[at : at + size])
        got = b"".join(iter(lambda: connection.recv(65536), b""))
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", got)]
    expected = [int(status) for status in re.findall(r"\b\d{3}\b", answer)]
    assert statuses == expected + ([200] if then == "stays open" else []), got.decode()
    num_uploads = raw.count(b"POST /v1/files") if expected[-1] == 200 else 0
    assert got.count(b'"bytes":23,') == num_uploads, "each body is read whole"
    if expected[-1] >= 400 and name != "`HEAD`":
        assert json.loads(got.rpartition(b"\r\n\r\n")[2])["error"]["message"]
    if "1.0" in name:
        assert b"transfer-encoding" not in got


# Nonsense.


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"GET\r\n\r\n",
        b"G\xc3\xa9T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx y: z\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\rb\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_as_everything_else(gateway: GuardedGateway, raw: bytes) -> None:
    reply = gateway.send(raw)
    assert (reply.status, reply.error["type"]) in {(400, "invalid_request_error"), (404, "not_found_error")}
    assert "connection: close" in reply.headers


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"", b"null", b"[]", b'"text"', b"\xff\xfe{}", b'{"model": "\xc3"}', b"\0", b"[" * 100_000,
        b'{"a":' * 100_000, b'{"model": NaN}', b'{"model": 1e999}', b'{"model": "\\ud800"}', b"1" * 100_000,
        json.dumps(CHAT).encode()[:-1] + b', "seed": ' + b"9" * 5000 + b"}",
        json.dumps({**CHAT, "messages": [{"role": "user", "content": {"a": [[[]]]}}]}).encode(),
        json.dumps({**CHAT, "stop": ["x"] * 100_000}).encode(),
        json.dumps({**CHAT, "max_tokens": -1}).encode(),
    ],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_invalid_bodies(gateway: GuardedGateway, body: bytes) -> None:
    before = len(gateway.read_requests())
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        reply = gateway.post(path, body, **{"content-type": "application/json"})
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert len(reply.body) < 5000, "it does not send everything back"
    assert len(gateway.read_requests()) == before


# Rights.


@pytest.mark.proof
@pytest.mark.parametrize(
    "key",
    ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer psk_000000000000_" + "a" * 43, "Bearer {acme}x", "Bearer {id}",
     "Bearer {acme} {other}", "Bearer \xe9", "Bearer " + "psk_" * 5000],
)  # fmt: skip
def test_without_a_valid_key_nothing_is_told(gateway: GuardedGateway, key: str) -> None:
    key_id = gateway.acme[:16] + "_" + "A" * 43
    value = key.replace("{acme}", gateway.acme).replace("{other}", gateway.other).replace("{id}", key_id)
    headers = {"authorization": value} if value else {}
    for path in ("/v1/models", "/v1/usage", "/v1/streams/chatcmpl-1"):
        reply = gateway.send(encode_request("GET", path, headers))
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert MODEL not in reply.headers + reply.body.decode()
    body = json.dumps(CHAT).encode()
    assert gateway.send(encode_request("POST", "/v1/chat/completions", headers, body)).status == 401


def test_two_keys_are_none(gateway: GuardedGateway) -> None:
    assert gateway.ask("GET", "/v1/models", Authorization=f"Bearer {gateway.other}").status == 401


def test_headers_do_not_say_who_one_is(gateway: GuardedGateway) -> None:
    before = gateway.read_requests()
    smuggled = {"penstock-tenant": "other", "x-tenant": "other", "penstock-class": "batch", "penstock-weight": "9"}
    assert gateway.post("/v1/chat/completions", CHAT, **smuggled).status == 200
    (found,) = gateway.read_new(before)
    assert (found.tenant, found.priority_class, found.weight) == ("acme", "interactive", 3.0)


@pytest.mark.proof
def test_too_many_requests(gateway: GuardedGateway) -> None:
    reply = gateway.post("/v1/chat/completions", CHAT, key=gateway.slow)
    assert (reply.status, "x-ratelimit-remaining-requests: 0" in reply.headers) == (200, True)
    reply = gateway.post("/v1/chat/completions", CHAT, key=gateway.slow)
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after: " in reply.headers
    busy = {"x-penstock-reject-if-busy": "true"}
    reply = gateway.post("/v1/chat/completions", CHAT, key=gateway.other, **busy)  # nobody decodes here
    assert (reply.status, reply.error["code"]) == (429, "busy")


@pytest.mark.proof
def test_a_class_above_ones_right(gateway: GuardedGateway) -> None:
    flex = {**CHAT, "service_tier": "flex"}
    reply = gateway.post("/v1/chat/completions", flex)
    assert (reply.status, reply.error["code"]) == (403, "class_not_allowed")
    assert gateway.post("/v1/chat/completions", flex, key=gateway.other).status == 200
    batch = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert gateway.post("/v1/batches", batch).status == 403


@pytest.mark.proof
def test_anothers_ids_are_as_unknown_ones(gateway: GuardedGateway) -> None:
    before, same = gateway.read_requests(), {"idempotency-key": "the-same"}
    for key in (gateway.acme, gateway.other):
        assert gateway.post("/v1/chat/completions", CHAT, key=key, **same).status == 200
    ids = {one.tenant: one.id for one in gateway.read_new(before)}
    assert ids.keys() == {"acme", "other"}, "a key of one's own, not the other tenant's request"
    names = ids["acme"], ids["acme"][:-4] + "0000"
    for method in ("GET", "DELETE"):
        replies = [gateway.ask(method, f"/v1/streams/{name}", key=gateway.other) for name in names]
        assert [reply.status for reply in replies] == [404, 404]
        first, second = (json.dumps(reply.error).replace(name, "") for reply, name in zip(replies, names, strict=True))
        assert first == second


@pytest.mark.proof
def test_usage_is_ones_own(gateway: GuardedGateway) -> None:
    publisher = gateway.bus.create_publisher()
    for number, (tenant, tokens) in enumerate([("acme", 5), ("other", 700), ("acme", 6)]):
        usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=tokens)
        result = Result(id=f"u-{number}", tenant=tenant, finish_reason="stop", usage=usage)
        publisher.publish([Outgoing(gateway.pipeline.results_topic, result.encode(), result.id)])
    publisher.close()
    expected = {"requests": 2, "prefill_tokens": 12, "cached_tokens": 8, "decode_tokens": 11}

    def read_usage() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(gateway.ask("GET", "/v1/usage?days=2").body)
        return found

    wait_for(lambda: read_usage()["total"] == expected, "it is counted", every_s=0.1)
    found = read_usage()
    assert found["tenant"] == "acme"
    assert [{**day, "day": ""} for day in found["data"]] == [{"day": "", **expected}]
    reply = gateway.ask("GET", "/v1/usage?days=0&tenant=other")
    assert (reply.status, reply.error["param"]) == (400, "days")


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "..%5c..%5cx", "a%00b",
     "%0d%0aset-cookie:x", "x;ls", "$(id)", "*", "{acme}", "%ff%fe", "a" * 5000, "~root", "file-..",
     "%252e%252e%252f", "C:%5cx", "."],
)  # fmt: skip
def test_path_tricks(gateway: GuardedGateway, name: str) -> None:
    for path in ("/v1/streams/", "/v1/files/", "/v1/batches/", "/v1/models/"):
        for suffix in ("", "/content"):
            reply = gateway.ask("GET", path + name + suffix)
            assert reply.status in {400, 404}
            assert reply.error["type"] in {"invalid_request_error", "not_found_error"}
            assert "root:" not in reply.body.decode()
            assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    "headers",
    [{"last-event-id": "9" * 8000}, {"last-event-id": "0-zz"}, {"last-event-id": "\xe9\xff"},
     {"idempotency-key": "k" * 300}, {"x-session-affinity": "a b"}, {"x-session-affinity": "../x"},
     {"x-penstock-deadline-s": "nan"}, {"x-penstock-reject-if-busy": "maybe"}],
)  # fmt: skip
def test_odd_headers(gateway: GuardedGateway, headers: dict[str, str]) -> None:
    if "last-event-id" in headers:
        reply = gateway.ask("GET", "/v1/streams/x", **headers)
        assert reply.status in {400, 404}
    else:
        reply = gateway.post("/v1/chat/completions", CHAT, **headers)
        assert reply.status == 400
    assert reply.error["message"]
    assert len(reply.body) < 20_000
