"""The commands as a user runs them: as processes, against real servers."""

import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
from rich.console import Console

from penstock.autoscale.controller import Bounds
from penstock.cli import doctor
from penstock.cli.error_lines import explain_error
from penstock.cli.generate import (
    StreamPosition,
    describe_bus_mismatch,
    explain_waiting,
    find_wait_reasons,
    format_shell_command,
)
from penstock.cli.main import COMMANDS, EXAMPLES, GROUPS, load_command
from penstock.cli.up import choose_workers, load_engine_settings, parse_auto, up
from penstock.cli.up_checks import find_obstacles, list_running_workers
from penstock.config.addresses import Addresses
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import BusUnavailable, DirectoryTaken, SettingsError
from penstock.findings import Finding
from penstock.local.processes import Child, find_free_port, start_child
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.names import STAGES, Pipeline, Stage, WorkerKind
from penstock.ops.status import read_worker_status
from penstock.redis.client import redis_client
from penstock.worker.heartbeat import Heartbeat
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import HERE, Terminal, penstock
from tests.draws import mark_some


def write_beat(url: str, pipeline: Pipeline, kind: WorkerKind, name: str = "one", **status: Any) -> None:
    """Write one heartbeat of a worker, which lasts for a minute."""
    beat = Heartbeat(url, pipeline, kind, name, 60)
    beat.update_status(**status)
    beat.write_beat()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ForkedStack(tmp_path_factory.mktemp("cli")) as made:
        made.wait_until_ready(PATIENCE_S)
        yield made


@pytest.fixture
def url(stack: Stack) -> str:
    return stack.addresses.stream_url


def test_a_demo_on_kafka_without_one_says_how_to_start_it(terminal: Terminal) -> None:
    done = terminal("demo", "--kafka")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "penstock: --kafka: set PENSTOCK_KAFKA=HOST:PORT, or run `make demo-kafka` in a checkout"
    ]


@pytest.mark.proof
def test_doctor_says_what_to_do_where_nothing_runs(terminal: Terminal) -> None:
    done = terminal("doctor")
    assert done.returncode == 1
    assert "penstock up" in done.stdout


def test_doctor_is_content_with_a_running_pipeline(url: str) -> None:
    done = penstock("doctor", PENSTOCK_STREAM_URL=url)
    assert done.returncode == 0, done.stdout
    assert "1 ready of 1" in done.stdout
    assert len(re.findall(r"worker  +\S+: [1-9][\d,]* MiB of memory are resident", done.stdout)) == len(STAGES)


@pytest.mark.proof
def test_doctor_says_how_far_the_clock_is_off(
    terminal: Terminal, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() - 900)
    told = terminal("doctor", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name).stdout
    (line,) = [line for line in told.splitlines() if " clock " in line]
    assert line.startswith("note")
    assert "behind that of Redis" in line


@pytest.mark.proof
def test_doctor_finds_a_missing_topic(terminal: Terminal, redis_url: str, pipeline: Pipeline) -> None:
    missing = terminal("doctor", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert "penstock topics create" in missing.stdout
    made = terminal("topics", "create", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert all(f"made {topic}" in made.stdout for topic in pipeline.all_topics())
    again = terminal("topics", "create", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert "all topics exist" in again.stdout


def test_doctor_says_what_servers_answer_before_it_imports_anything_heavy() -> None:
    words = "import sys\nfrom penstock.cli.doctor import run_checks\nseen = []\n"
    words += "for one in run_checks():\n    seen.append(one.subject)\n    if one.subject == 'packed weights': break\n"
    words += "print(seen[0], *sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", words], cwd=HERE, capture_output=True, text=True, check=True)
    assert done.stdout == "stream Redis\n"


@pytest.mark.parametrize(
    ("beats", "said"),
    [
        ({"auto": "ready"}, ["ok auto workers 1 ready of 1"]),
        ({"auto": "loading"}, ["note auto workers 0 ready of 1", "fail workers none is ready for prefill and decode"]),
        ({"prefill": "ready"}, ["ok prefill workers 1 ready of 1", "fail workers none is ready for decode"]),
        ({"endpoint": "ready"}, ["ok endpoint workers 1 ready of 1"]),
        ({"embed": "ready"}, ["ok embed workers 1 ready of 1"]),
        ({}, ["fail workers none is ready for prefill and decode"]),
    ],
)
def test_doctor_counts_each_worker_once(
    beats: dict[Any, str], said: list[str], redis_url: str, pipeline: Pipeline
) -> None:
    for kind, state in beats.items():
        write_beat(redis_url, pipeline, kind, state=state)
    found = doctor._check_workers(Addresses(stream_url=redis_url, pipeline=pipeline.name))
    assert [f"{one.state} {one.subject} {one.detail}" for one in found] == said
    with redis_client(redis_url) as client:  # a gateway of a later test would list its model
        client.delete(*(pipeline.worker_key(kind, "one") for kind in beats), "x")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0), (["plan", "--help"], 0), (["doctor"], 1), (["config", "show"], 0),
        (["generate", "schöne Grüße →", "--max-tokens", "4"], 0), (["generate", "x", "--id", "ü"], 1),
        (["explain", "ü"], 1), (["plan", "--trace", "ü"], 1),
    ],
)  # fmt: skip
def test_a_locale_of_8_bits_ends_no_command(arguments: list[str], status: int, url: str, tmp_path: Path) -> None:
    """Nor does a config.json that is nested deeper than Python can read."""
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "modèle"))
    (model / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 200_000)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    done = penstock(*arguments, PENSTOCK_STREAM_URL=url, PENSTOCK_ENGINE_MODEL=str(model), **locale)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert arguments != ["doctor"] or "is not JSON" in done.stdout


def test_what_is_no_redis_is_named(terminal: Terminal, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"redis://127.0.0.1:{server.server_port}/0"
        said = "it is no Redis, as it speaks HTTP: see PENSTOCK_STREAM_URL"
        for command in (["doctor"], ["generate", "x"], ["lag"], ["up", "--redis", url, "--data", str(tmp_path)]):
            done = terminal(*command, PENSTOCK_STREAM_URL=url)
            assert (done.returncode, said in done.stdout + done.stderr) == (1, True), done
        server.shutdown()


def test_a_check_that_does_not_end_is_told_behind_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECK_LIMIT_S", 0.2)
    goes_on = threading.Event()

    def check(_: object) -> Iterator[Finding]:
        yield Finding("ok", "Kafka", "answers")
        goes_on.wait()

    for name in ("_check_stream_redis", "_check_kv_redis", "_check_workers"):
        monkeypatch.setattr(doctor, name, lambda _: iter(()))
    monkeypatch.setattr(doctor, "_check_bus", check)
    found = list(doctor.run_checks())
    goes_on.set()
    at = found.index(Finding("ok", "Kafka", "answers"))
    assert (found[at + 1].state, found[at + 1].subject) == ("fail", "bus")
    assert found[at + 1].detail == "no answer within 0.2 s"


def test_the_error_of_a_check_is_raised() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("ok", "Kafka", "answers")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(doctor._run_within_limit("bus", check))


@pytest.mark.proof
def test_generate_joins_and_resumes(terminal: Terminal, url: str) -> None:
    first = penstock("generate", "In the beginning", "--max-tokens", "12", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert first.returncode == 0, first.stderr
    assert "12 tokens, first after" in first.stderr
    again = terminal("generate", "In the beginning", "--max-tokens", "12", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert again.stdout == first.stdout
    other = terminal("generate", "And God said", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert other.returncode == 1
    assert "id_conflict" in other.stderr


@pytest.mark.parametrize(
    ("schema", "printed", "code"),
    mark_some(
        [('{"enum": ["yes"]}', '"yes"', ""), ('{"not": {}}', "", "unsupported_schema"), ("{", "", "invalid_request")],
        pytest.mark.proof,
    ),
)
def test_generate_follows_a_schema(
    terminal: Terminal, url: str, tmp_path: Path, schema: str, printed: str, code: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(schema)
    done = terminal("generate", "x", "--json-schema", str(file), PENSTOCK_STREAM_URL=url)
    assert (done.returncode, done.stdout.strip()) == (int(bool(code)), printed)
    assert code in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", ""], "invalid_request: prompt is empty"),
        (["generate", "x", "--max-tokens", "0"], "invalid_request: sampling.max_tokens: must be greater than"),
        (["generate", "x", "--max-tokens", "100000"], "prompt_too_long"),
        (["generate", "x", "--temperature", "nan"], "invalid_request: sampling.temperature: must be a finite number"),
    ],
)
def test_a_bad_request_is_one_line_in_our_own_words(
    terminal: Terminal, url: str, arguments: list[str], said: str
) -> None:
    done = terminal(*arguments, PENSTOCK_STREAM_URL=url)
    assert done.returncode == 1
    assert f"penstock: {said}" in done.stderr.splitlines()[-1]


@pytest.mark.proof
def test_the_version_is_told(terminal: Terminal) -> None:
    done = terminal("--version")
    assert (done.returncode, done.stdout) == (0, f"{version('penstock')}\n")


def test_the_help_is_that_of_the_commands(terminal: Terminal) -> None:
    printed = terminal("--help").stdout
    assert [printed.index(title) for title in GROUPS] == sorted(printed.index(f"{title} ─") for title in GROUPS)
    for name, line in COMMANDS.items():
        assert load_command(name).help.partition("\n\n")[0].replace("\n", " ") == line


def list_commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command in a command, with the words that call it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from list_commands(inner, (*words, name))


def test_each_help_ends_with_an_example_that_the_command_takes(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    shown = set()
    for name in COMMANDS:
        for words, command in list_commands(load_command(name), (name,)):
            title, _, example = command.epilog.partition(": ")
            shown.add(example)
            penstock, *given = shlex.split(example)
            assert (title, penstock, *given[: len(words)]) == ("Example", "penstock", *words)
            if not hasattr(command, "commands"):
                command.make_context(words[-1], given[len(words) :])
    assert shown == {*EXAMPLES}, "each is of a command"
    assert terminal("kv", "evict", "--help").stdout.rstrip().endswith("penstock kv evict --tier disk --older-than 7d")
    assert terminal("--help").stdout.rstrip().endswith(EXAMPLES[0])


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["genrate"], 2)])
def test_no_client_is_imported_for_the_help(arguments: list[str], code: int) -> None:
    words = f"import sys; sys.argv = {['penstock', *arguments]!r}; from penstock.cli.main import main\n"
    words += "try:\n    main()\n"
    words += "finally:\n    print(sorted({'redis', 'opentelemetry', 'penstock.config.settings'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", words], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "generate" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_server_that_is_away_is_named_with_its_setting(terminal: Terminal, redis_url: str) -> None:
    port = find_free_port()
    redis = terminal("generate", "x", PENSTOCK_STREAM_URL=f"redis://:secret@127.0.0.1:{port}/0")
    advice = "start one with `penstock up`, or set PENSTOCK_STREAM_URL"
    assert redis.stderr.splitlines()[-1] == f"penstock: Redis at 127.0.0.1:{port} does not answer: {advice}"
    kafka = Addresses(stream_url=redis_url, kafka=f"127.0.0.1:{port}")
    advice = "start it, or set PENSTOCK_KAFKA to where it is"
    assert explain_error(BusUnavailable("Kafka: no"), kafka) == f"Kafka at 127.0.0.1:{port} does not answer: {advice}"
    both_answer = Addresses(stream_url=redis_url)
    assert explain_error(BusUnavailable("Redis: no room"), both_answer) == "Redis: no room"
    assert explain_error(ValueError("a bug")) is None


def test_options_for_addresses_go_before_the_settings_in_what_is_said(tmp_path: Path) -> None:
    port = find_free_port()
    options = ("--data", str(tmp_path), "--gateway-port", str(find_free_port()))
    done = penstock("up", "--redis", f"redis://127.0.0.1:{port}/0", *options)
    assert done.stderr.splitlines()[-1].startswith(f"penstock: Redis at 127.0.0.1:{port} does not answer")


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", find_free_port())) as listener:
        yield listener.getsockname()[1]


@pytest.mark.proof
def test_up_says_all_that_stands_in_its_way_before_it_starts_anything(
    terminal: Terminal, tmp_path: Path, taken_port: int
) -> None:
    options = ("--data", str(tmp_path), "--gateway-port", str(taken_port), "--prefill", "1")
    kafka = f"127.0.0.1:{find_free_port()}"
    done = terminal(
        "up", *options, "--kafka", kafka, PENSTOCK_ENGINE_MODEL="/nope", PENSTOCK_TELEMETRY_PORT=str(taken_port),
        PENSTOCK_KV_STORE_SHARED_MB=str(2**40),
    )  # fmt: skip
    head, *found = done.stderr.splitlines()
    assert (done.returncode, head) == (1, "penstock: nothing was started, for 6 reasons:")
    for line, words in zip(found, (
        f"port {taken_port} for the gateway is taken: ",
        f"port {taken_port} is for the gateway and for the metrics of prefill-0: choose another --gateway-port or ",
        "cannot load model '/nope': there is no directory /nope: use `demo`, a directory with config.json",
        "Redis at 127.0.0.1:",
        "Kafka at 127.0.0.1:",
        f"shared memory for KV blocks: no room for {2**40} MB in ",
    ), strict=True):  # fmt: skip
        assert words in line
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_served_is_told_once_before_torch_is_imported(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    (model / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    options = [str(model), "--data", str(tmp_path / "data"), "--port", "0", "--gateway-port", str(find_free_port())]
    words = f"import sys; sys.argv = {['penstock', 'up', *options]!r}; from penstock.cli.main import main\n"
    words += "try:\n    main()\nfinally:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", words], cwd=HERE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "[]\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"penstock: cannot load model '{model}': {model}/config.json is of type 't5', which is an enc"
    )


def test_without_what_a_worker_needs_up_says_what_to_install(tmp_path: Path) -> None:
    needed = ["torch", "transformers", "numpy", "xxhash"]
    options = ["--data", str(tmp_path / "data"), "--port", str(find_free_port()), "--gateway-port", "0"]
    words = f"import sys; sys.argv = {['penstock', 'up', *options]!r}; sys.modules.update(dict.fromkeys({needed}))\n"
    words += "from penstock.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", words], cwd=HERE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1, "penstock: workers need torch, transformers, numpy, xxhash: pip install 'penstock[worker]'\n"
    )  # fmt: skip


def find_up_obstacles(directory: Path, **given: Any) -> list[str]:
    """What stands in the way of a stack, where Redis is started on a free port."""
    stack = Stack(directory, port=find_free_port(), **given)
    try:
        return find_obstacles(stack, find_free_port(), None)
    finally:
        stack.stop()


def test_a_host_that_is_not_this_one_is_named_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("192.0.2.1", "no host"):
        monkeypatch.setenv("PENSTOCK_GATEWAY_HOST", host)
        stack = Stack(tmp_path, port=find_free_port())
        (line,) = find_obstacles(stack, find_free_port(), port := find_free_port())
        stack.stop()
        assert line.startswith(f"port {port} for the gateway cannot be used on {host} (")
        assert line.endswith("): choose another PENSTOCK_GATEWAY_HOST or --gateway-port")


@pytest.mark.parametrize("depth", [0, 3])
def test_up_with_data_that_another_one_has_is_refused(depth: int, tmp_path: Path) -> None:
    """Also where the path is longer than that of a socket may be, and where both begin at once."""
    directory = tmp_path.joinpath(*["d" * 60] * depth)
    begun = Stack(directory, port=find_free_port())
    assert find_obstacles(begun, find_free_port(), None) == []
    (refused,) = find_up_obstacles(directory)
    assert f"{directory}/valkey cannot be used for data: another server has it, of pid {os.getpid()} on " in refused
    begun.stop()
    assert find_up_obstacles(directory) == []

    with ValkeyServer(directory / "valkey") as server:
        server._unlock_directory()  # as if the process that started it had been killed
        with pytest.raises(DirectoryTaken, match=f"of pid {os.getpid()} on "):
            ValkeyServer(directory / "valkey").start()
    with ValkeyServer(directory / "valkey"):
        pass


def test_up_whose_data_would_lie_in_a_file_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert f"{blocked}, for data and logs: " in find_up_obstacles(blocked)[0]


@pytest.mark.parametrize(
    ("status", "asks", "said"),
    mark_some(
        [
            ({"model": "demo", "kafka": ""}, False, ""),
            ({"model": "other", "kafka": ""}, False, "workers that serve other, not demo, one on "),
            ({"model": "demo", "kafka": "h:1"}, False, "read from Kafka at h:1, this command sends to Redis Streams"),
            ({"model": "demo", "kafka": ""}, True, "a worker that has an engine of its own for text, one on "),
        ],
        pytest.mark.proof,
    ),
)
def test_up_beside_workers_that_it_cannot_join_is_refused(
    status: dict[str, Any], asks: bool, said: str, redis_url: str, pipeline: Pipeline, tmp_path: Path
) -> None:
    write_beat(redis_url, pipeline, "decode", **status)
    workers: dict[str, Any] = {"prefill": 0, "decode": 0, "endpoint": 1} if asks else {}
    stack = Stack(tmp_path, redis=redis_url, pipeline=pipeline.name, **workers)
    found = find_obstacles(stack, None, None)
    with redis_client(redis_url) as client:  # a gateway of a later test would list its model
        client.delete(pipeline.worker_key("decode", "one"))
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_a_worker_that_was_killed_stands_in_nobodys_way(redis_url: str, pipeline: Pipeline) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_beat(redis_url, pipeline, "decode", pid=gone.pid)
    assert list_running_workers(Addresses(stream_url=redis_url, pipeline=pipeline.name)) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    mark_some([
        ({}, (0, 0, 1)), ({"auto": 3}, (0, 0, 3)), ({"prefill": 2, "decode": 1}, (2, 1, 0)),
        ({"prefill": 1, "auto": 1}, (1, 0, 1)), ({"decode": 1}, (0, 1, 0)), ({"auto": 0}, (0, 0, 0)),
    ], pytest.mark.proof),
)  # fmt: skip
def test_one_worker_does_all_unless_a_number_is_given(given: dict[str, int], expected: tuple[int, ...]) -> None:
    kinds = ("prefill", "decode", "auto")
    chosen = choose_workers(dict.fromkeys(kinds) | given, "")
    assert chosen == dict(zip(kinds, expected, strict=True))


def test_auto_is_a_number_of_workers_or_bounds_for_a_controller() -> None:
    assert parse_auto(None) == (None, None)
    assert parse_auto("3") == (3, None)
    assert parse_auto("0..4") == (1, Bounds(0, 4)), "the first load of a model comes before the first request"
    assert parse_auto("2..6") == (2, Bounds(2, 6))
    for text in ("2..", "x", "4..2", "-1"):
        with pytest.raises(SettingsError, match="--auto"):
            parse_auto(text)


def test_a_folder_with_the_name_of_the_demo_model_takes_its_place_by_its_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        (tmp_path / name).mkdir()
    given = {"demo": "demo", "./demo": str(tmp_path / "demo"), "mine": str(tmp_path / "mine"), "org/name": "org/name"}
    assert {name: load_engine_settings(name, "", "").model for name in given} == given


IDLE_OPTIONS: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"redis": "redis://h:1/0", "port": 7000}, {}, "--port 7000 .* --redis names one"),
    ({"port": 7000}, {"PENSTOCK_STREAM_URL": "redis://h:1/0"}, "--port 7000 .* PENSTOCK_STREAM_URL names one"),
    ({"url": ["http://h:1"], "prefill": 2}, {}, "--prefill 2 has no effect with --url"),
    ({"engine_kind": "openai", "decode": 1}, {}, "--decode 1 has no effect with --engine-kind openai"),
    ({"decode": 1}, {"PENSTOCK_ENGINE_KIND": "openai"}, "--decode 1 has no effect with PENSTOCK_ENGINE_KIND=openai"),
    ({"model": "org/name", "url": ["http://h:1"]}, {}, "the model org/name has no effect with --url"),
    ({"engine_kind": "own", "url": ["http://h:1"]}, {}, "--url has no effect with --engine-kind own"),
]


@pytest.mark.parametrize(("options", "settings", "said"), IDLE_OPTIONS)
def test_an_option_that_cannot_act_is_refused(
    options: dict[str, Any], settings: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_STREAM_URL", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        up(**options, data=tmp_path)


def test_a_gateway_port_without_a_gateway_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.up.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="--gateway-port 7001: no gateway is started"):
        up(gateway_port=7001, data=tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_a_key_of_another_type_ends_a_worker_before_it_is_ready(
    stage: Stage, redis_url: str, pipeline: Pipeline
) -> None:
    key = pipeline.readers_key
    with redis.Redis.from_url(redis_url) as client:
        client.zadd(key, {"topic:0": 1.0})
    environment = {"PENSTOCK_STREAM_URL": redis_url, "PENSTOCK_PIPELINE": pipeline.name}
    assert penstock("topics", "create", **environment).returncode == 0
    done = penstock("worker", stage, **environment)
    assert done.returncode == 1
    said = next(line for line in done.stderr.splitlines() if f"the key {key} on Redis " in line)
    assert "is a zset, and this version expects a hash" in said
    assert f"redis-cli DEL {key}" in said
    assert f"the key {key} " in penstock("doctor", **environment).stdout


def test_a_worker_whose_shared_memory_cannot_be_ends_before_it_looks_for_its_model(
    terminal: Terminal, tmp_path: Path
) -> None:
    given = {
        "PENSTOCK_ENGINE_MODEL": str(tmp_path / "no model"),
        "PENSTOCK_KV_STORE_SHARED_DIR": str(tmp_path / "none"),
    }
    done = terminal("worker", "decode", **given)
    assert done.returncode == 1
    assert "penstock: shared memory for KV blocks: " in done.stderr.splitlines()[-1]
    assert "none is no directory: PENSTOCK_KV_STORE_SHARED_DIR names another one" in done.stderr


def test_a_command_for_another_shell_has_the_settings_it_needs() -> None:
    assert format_shell_command(Addresses(), "penstock lag") == "penstock lag"
    given = Addresses(pipeline="line", kafka="k1:9092,k2:9092", stream_url="redis://me:secret@h:6379/0?db=1#a")
    assert format_shell_command(given, "penstock lag") == (
        "PENSTOCK_PIPELINE=line PENSTOCK_KAFKA=k1:9092,k2:9092 "
        "PENSTOCK_STREAM_URL='redis://me:***@h:6379/0?db=1#a' penstock lag"
    )


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ("k:9092", "k:9092", ""),
        ("", "", ""),
        ("k:9092", "", "read from Kafka at k:9092, this command sends to Redis Streams: set PENSTOCK_KAFKA=k:9092"),
        ("", "k:9092", "read from Redis Streams, this command sends to Kafka at k:9092: unset PENSTOCK_KAFKA"),
        ("k:9092", "h:9092", "sends to Kafka at h:9092: set PENSTOCK_KAFKA=k:9092, unless these are the same brokers"),
    ],
)
def test_a_request_for_another_bus_is_told_so(theirs: str, ours: str, message: str) -> None:
    found = describe_bus_mismatch([{"state": "loading"}, {"kafka": theirs}], Addresses(kafka=ours))
    assert message in found
    assert bool(message) == bool(found)


@pytest.mark.proof
def test_what_a_request_waits_for_is_said(redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.generate.SILENCE_BEFORE_REASONS_S", 0.0)
    addresses, output = Addresses(stream_url=redis_url, pipeline=pipeline.name), io.StringIO()
    with explain_waiting(StreamPosition("x", None), addresses, "interactive", Console(file=output, width=500)):
        wait_for(output.getvalue, "the reason")
    assert output.getvalue().startswith(f"waiting: there is no worker of pipeline '{pipeline.name}'")
    for stage in STAGES:
        write_beat(redis_url, pipeline, stage, state="ready" if stage == "decode" else "loading", kafka="")
    assert find_wait_reasons(addresses, "interactive") == ["no prefill worker is ready"]
    write_beat(redis_url, pipeline, "prefill", "two", state="ready", kafka="")
    assert find_wait_reasons(addresses, "interactive")[0].startswith("0 requests of class interactive are queued")
    silent = Addresses(stream_url=f"redis://127.0.0.1:{find_free_port()}/0", pipeline=pipeline.name)
    assert "does not answer" in find_wait_reasons(silent, "interactive")[0]


def start_up(port: int, data: Path, log: Path, *options: str, environment: Mapping[str, str] | None = None) -> Child:
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--port", str(port), "--data", str(data), *options]
    command += ["--gateway-port", str(find_free_port())]
    return start_child(command, name="up", log=log, environment=environment, directory=HERE)


def test_up_serves_until_interrupted(tmp_path: Path) -> None:
    port = find_free_port()
    log = tmp_path / "up.log"
    model = os.path.relpath(DEMO_MODEL, HERE)
    environment = {**os.environ, "PENSTOCK_ENGINE_MODEL": "/none", "PENSTOCK_ENGINE_SERVED_NAME": "other"}
    child = start_up(port, tmp_path / "data", log, model, "--served-name", "mine", environment=environment)
    addresses = Addresses(stream_url=f"redis://127.0.0.1:{port}/0")
    wait_for(lambda: log.exists() and "Or:  curl" in log.read_text(), "penstock up", every_s=0.1)
    states = read_worker_status(addresses)
    assert {status["state"] for status in states} == {"ready"}
    assert [(one["model"], one["model_source"]) for one in states] == [("mine", str(DEMO_MODEL))]
    wait_for(lambda: "The page: http://" in log.read_text(), "the hints")
    assert "Penstock is up: mine, pipeline demo" in log.read_text()
    lines = log.read_text().splitlines()
    assert lines[0] == f"pipeline demo; the logs of all processes are in {tmp_path / 'data'}"
    assert lines[1] == "auto-0: starting, gateway: starting"
    assert any("auto-0: importing torch" in line for line in lines)
    command = f"{shlex.quote(sys.executable)} -m penstock.cli.main"
    for start, words, said in (
        ("Try: ", "generate --max-tokens 4", "4 tokens, first after"),
        ("KV blocks: ", "kv stats --json #", f'"where": "{tmp_path / "data" / "kv"}'),
    ):
        hint = log.read_text().partition(start)[2].partition("    (")[0].partition("\n")[0]
        hint = hint.replace(f"penstock {words.split()[0]}", f"{command} {words}")
        done = subprocess.run(hint, shell=True, cwd=HERE, text=True, capture_output=True, check=False)
        assert said in done.stdout + done.stderr
    os.kill(states[0]["pid"], signal.SIGKILL)
    wait_for(lambda: "auto-0 ended with status -9 and is started again" in log.read_text(), "it is said")
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == 0


def test_up_that_is_ended_before_it_is_ready_stops_in_order(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    environment = {**os.environ, "PENSTOCK_KV_STORE_SHARED_DIR": str(shared), "PENSTOCK_KV_STORE_DISK_MB": "0"}
    child = start_up(find_free_port(), tmp_path, tmp_path / "up.log", environment=environment)
    wait_for((tmp_path / "auto-0.log").exists, "the first worker was started")
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 0, child.read_log_tail()
    assert "Penstock is up" not in child.read_log_tail()
    assert "stopping" in child.read_log_tail()
    assert not list(shared.iterdir())
