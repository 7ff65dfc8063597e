"""The pages under docs/ say what the code does."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis

from penstock import names
from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import SETTINGS_CLASSES, BusSettings, list_variables
from penstock.config.sources import CONFIG_VARIABLE, TESTING_VARIABLE, list_secret_variables
from penstock.errors import REQUEST_ERRORS
from penstock.messages import (
    MAX_REQUEST_BYTES,
    EmbedOptions,
    Request,
    Result,
    Sampling,
    TokenEvent,
    Wire,
    decode_message,
)
from penstock.names import CLASSES, Pipeline
from penstock.record import Record
from penstock.worker.result import build_result_message
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S
from sim.world.flaws import FLAWS
from tests.record.play import end, prefill, say
from tools import asyncapi, settings_doc
from tools.rooms import PORTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = (*(portion.name for portion in PORTIONS), "benchmarks", "docker", "docs", "examples", "sim", "tests", "tools")
PROTOCOL = (DOCS / "protocol.md").read_text("utf-8")
API: dict[str, Any] = asyncapi.make_document()
MESSAGES: dict[str, Any] = API["components"]["messages"]
EXAMPLES = [
    pytest.param(model, example, id=f"{model.__name__}-{example['name']}")
    for model in asyncapi.MODELS
    for example in MESSAGES[model.__name__]["examples"]
]


def blocks(language: str) -> list[str]:
    """The code blocks of the protocol page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PROTOCOL, re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


def rows(first_cell: str) -> list[list[str]]:
    """The rows of the table whose head begins with `first_cell`, for each such table."""
    found = []
    for text in re.findall(rf"^\| {first_cell} \|.*\n\| ---.*\n((?:\|.*\n)+)", PROTOCOL, re.MULTILINE):
        found += [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines()]
    return found


# The AsyncAPI document


def test_the_channels_are_the_topics_and_keys_of_names() -> None:
    pipeline = Pipeline("p1")
    addresses = []
    for channel in API["channels"].values():
        assert re.findall(r"{(\w+)}", channel["address"]) == list(channel["parameters"])
        parameters = {name: API["components"]["parameters"][name] for name in channel["parameters"]}
        for priority_class in parameters.get("class", {}).get("enum", [""]):
            given = {"{pipeline}": "p1", "{class}": priority_class, "{tag}": "{r-1}"}
            addresses.append(re.sub(r"{\w+}", lambda m, given=given: given[m[0]], channel["address"]))  # type: ignore[misc]
    assert sorted(addresses) == sorted([*pipeline.all_topics(), pipeline.log_key("r-1"), pipeline.live_channel("r-1")])


def holds(whole: Any, part: Any) -> bool:
    """Whether all that `part` says is in `whole`."""
    if isinstance(part, dict):
        return all(name in whole and holds(whole[name], value) for name, value in part.items())
    return bool(whole == part)


def validator(schema: str) -> Any:
    return jsonschema.Draft202012Validator(API | {"$ref": f"#/components/schemas/{schema}"})


@pytest.mark.parametrize(("model", "example"), EXAMPLES)
def test_examples_are_valid_by_schema_and_by_model(model: type[Wire], example: dict[str, Any]) -> None:
    validator(model.__name__).validate(example["payload"])
    message = decode_message(model, json.dumps(example["payload"]).encode())
    assert holds(json.loads(message.encode()), example["payload"])
    if "headers" in MESSAGES[model.__name__]:
        validator("Headers").validate(example["headers"])


BAD_REQUESTS: list[dict[str, Any]] = [
    {"id": "r", "prompt": "x"}, {"v": 2, "id": "r", "prompt": "x"}, {"v": 1, "prompt": "x"}, {"v": 1, "id": "r"},
    {"v": 1, "id": "r", "prompt": None}, {"v": 1, "id": "r", "prompt": ""}, {"v": 1, "id": "r", "token_ids": []},
    {"v": 1, "id": "r", "prompt": "x", "token_ids": [1]}, {"v": 1, "id": "r", "prompt": "x", "priority_class": "batch"},
    {"v": 1, "id": "r", "prompt": "x", "sampling": {"max_tokens": 0}},
    {"v": 1, "id": "r", "prompt": "x", "sampling": {"temperature": -0.1}}, {"v": 1, "id": "-r", "prompt": "x"},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_REQUESTS, ids=str)
def test_the_schema_refuses_what_the_model_refuses(body: dict[str, Any]) -> None:
    assert not validator("Request").is_valid(body)
    with pytest.raises(Exception):  # noqa: B017, PT011 - which one is the matter of test_messages
        decode_message(Request, json.dumps(body).encode())


# settings.md


def test_the_settings_page_is_up_to_date(tmp_path: Path) -> None:
    page, made = (DOCS / "settings.md").read_text("utf-8"), tmp_path / "settings.md"
    # In a process of its own: engines of this one have other defaults.
    subprocess.run([sys.executable, "-m", "tools.settings_doc", str(made)], cwd=ROOT, check=True)
    assert page == made.read_text("utf-8"), "run: python -m tools.settings_doc docs/settings.md"
    assert re.findall(r"^\| `(PENSTOCK_\w+)` \|", page, re.MULTILINE) == list_variables()


NO_SETTINGS = {"PENSTOCK_IMAGE"}
"""Variables of other programs: the image that Compose takes."""


def list_written_files() -> list[tuple[Path, str]]:
    """Return the files that somebody wrote, but the tests and the history, and their texts."""
    found = []
    for path in [
        *ROOT.glob("*.*"),
        ROOT / "Makefile",
        *(path for name in ({*FOLDERS} - {"tests"}) | {".ci"} for path in (ROOT / name).rglob("*")),
    ]:
        left_out = {"CHANGELOG.md", "node_modules", "__pycache__"} & {*path.relative_to(ROOT).parts}
        if path.is_file() and not left_out:
            with contextlib.suppress(UnicodeDecodeError):
                found.append((path, path.read_text("utf-8")))
    return found


def test_every_variable_that_is_named_is_a_setting() -> None:
    """`PENSTOCK_KAFKA_…` and `…_KAFKA` are the beginning and the end of some."""
    files = [f"{name}_FILE" for name in list_secret_variables(SETTINGS_CLASSES)]
    known = [*list_variables(), *files, CONFIG_VARIABLE, TESTING_VARIABLE, *NO_SETTINGS]

    def is_known(word: str) -> bool:
        if word.startswith("…"):
            return any(name.endswith(word[1:]) for name in known)
        return word in known or (word.endswith("_") and any(name.startswith(word) for name in known))

    pattern = re.compile(r"PENSTOCK_[A-Z0-9_]*|…_[A-Z][A-Z0-9_]*")
    words = [(path, word) for path, text in list_written_files() for word in pattern.findall(text)]
    assert len({word for _, word in words}) > len(list_variables()), "all settings, and parts of names"
    assert not [(str(path.relative_to(ROOT)), word) for path, word in words if not is_known(word)]


def test_variables_are_distinct_and_explained() -> None:
    known = list_variables()
    assert len(set(known)) == len(known)
    for part in SETTINGS_CLASSES:
        assert settings_doc.read_field_docs(part).keys() == part.model_fields.keys()


# protocol.md


def test_all_topics_and_keys_are_named() -> None:
    pipeline = Pipeline("PIPELINE")
    wanted = [*pipeline.all_topics(), pipeline.log_key("ID"), pipeline.live_channel("ID"), pipeline.record_key("ID")]
    for name in wanted:
        assert f"`{name.replace('PIPELINE', '<pipeline>').replace('ID', '<id>')}`" in PROTOCOL
    assert pipeline.stream_key("<topic>").replace("PIPELINE", "<pipeline>") in PROTOCOL
    demo = Pipeline("demo")
    assert f"XADD {demo.stream_key(demo.request_topic('interactive'))} * key" in PROTOCOL
    assert f"STREAMS {demo.stream_key(demo.results_topic)} " in PROTOCOL


def test_all_fields_are_listed_with_their_defaults() -> None:
    listed = {row[0].strip("`"): row for row in rows("Field")}
    fields = {field.alias or name: field for name, field in Request.model_fields.items()}
    assert sorted(listed) == sorted([*fields, *Sampling.model_fields])
    assert [row[0].strip("`") for row in rows("In `embed`")] == list(EmbedOptions.model_fields)
    for name, field in Sampling.model_fields.items():
        default = "from the id" if name == "seed" else f"`{json.dumps(field.default)}`"
        assert listed[name][2] == default
    assert listed["tenant"][2] == f"`{json.dumps(fields['tenant'].default)}`"
    assert f"{MAX_REQUEST_BYTES:,} bytes" in PROTOCOL


def test_all_error_codes_are_listed() -> None:
    assert [row[0].strip("`") for row in rows("Code")] == list(REQUEST_ERRORS)


def test_all_headers_are_listed() -> None:
    listed = [name for row in rows("Header") for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(listed) == sorted(API["components"]["schemas"]["Headers"]["properties"])
    ours = {value for name, value in vars(names).items() if name.isupper() and str(value).startswith("penstock-")}
    assert ours <= set(listed)


def test_the_rolling_hash_example_is_right() -> None:
    rolled = names.START_HASH
    table = rows("Position")
    assert len(table) == 3
    for position, token, hashed, event in table:
        assert hashed == f"`{rolled}` `{int(token):08x}`"
        rolled = names.roll_hash(rolled, int(token))
        assert event == f"`{names.event_id(int(position), rolled)}`"
    assert json.loads(blocks("json")[2].splitlines()[0])["id"] == table[0][3].strip("`")


# The example on the protocol page, against a real Redis.


@pytest.fixture
def example(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (source,) = blocks("python")
    monkeypatch.setenv("PIPELINE", pipeline.name)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "protocol.md", "exec"), namespace)
    return namespace


def test_the_example_reads_a_stream_while_it_is_written(
    example: dict[str, Any], server: "redis.Redis", record: Record
) -> None:
    claim = prefill(record)
    say(record, claim, [5, 6])
    reading = example["stream"](server, "r1")
    assert [next(reading)["token"] for _ in range(2)] == [5, 6]
    say(record, claim, [7])
    assert next(reading)["token"] == 7
    say(record, claim, [8, 9])
    record.finish_request(claim, end("length"))
    assert [event.get("token", event.get("finish_reason")) for event in reading] == [8, 9, "length"]


def test_the_example_resumes_and_notices_another_answer(
    example: dict[str, Any], server: "redis.Redis", record: Record
) -> None:
    claim = prefill(record)
    say(record, claim, [5, 6, 7])
    ids = [event.id for event in record.read_log("r1") if isinstance(event, TokenEvent)]
    record.finish_request(claim, end("length"))
    for after, rest in zip(ids, ([6, 7], [7], []), strict=True):
        found = list(example["stream"](server, "r1", after=after))
        assert [event["token"] for event in found[:-1]] == rest
    for wrong in (names.event_id(0, names.roll_hash(names.START_HASH, 6)), names.event_id(3, ids[2].split("-")[1])):
        with pytest.raises(RuntimeError, match="not the answer"):
            list(example["stream"](server, "r1", after=wrong))


def test_the_example_gives_up_on_silence(example: dict[str, Any], server: "redis.Redis") -> None:
    with pytest.raises(TimeoutError, match="never-sent"):
        list(example["stream"](server, "never-sent", patience_s=0.01))


def test_the_example_sends_requests_and_finds_results(example: dict[str, Any], kafka: str, pipeline: Pipeline) -> None:
    bus = KafkaBus(pipeline, kafka, BusSettings(partitions=2))
    bus.create_topics()
    (request, *_) = blocks("json")
    for priority_class in CLASSES:
        example["submit"](kafka, json.loads(request) | {"class": priority_class})
        (message,) = bus.read_all(pipeline.request_topic(priority_class))
        assert message.key == decode_message(Request, message.value).id == "order-1729"
    publisher = bus.create_publisher()
    publisher.publish(
        [build_result_message(pipeline, Result(id=name, finish_reason="stop"), {}) for name in ("other", "r1")]
    )
    publisher.close()
    assert example["result"](kafka, "r1")["id"] == "r1"


def test_the_example_runs_against_a_live_pipeline(kafka: str, tmp_path: Path) -> None:
    """No line of it imports Penstock."""
    (example,) = blocks("python")
    assert "penstock" not in "".join(re.findall(r"^import .*$", example, re.M))
    script = tmp_path / "backend.py"
    script.write_text(example)
    with ForkedStack(tmp_path / "stack", pipeline=f"example-{os.getpid()}", kafka=kafka) as stack:
        stack.wait_until_ready(PATIENCE_S)
        addresses = stack.addresses
        here = os.environ | {"KAFKA": kafka, "REDIS": addresses.stream_url, "PIPELINE": addresses.pipeline}
        command = [sys.executable, str(script)]
        done = subprocess.run(command, env=here, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *text, finish_reason = done.stdout.splitlines()
    assert finish_reason in ("length", "stop")
    assert "".join(text)


def test_cancelling_by_hand(server: "redis.Redis", record: Record, pipeline: Pipeline) -> None:
    key = pipeline.record_key("r1")
    with server.pipeline() as batch:
        batch.hset(key, "cancelled", "1")
        batch.pexpire(key, 604_800_000, nx=True)
        batch.execute()
    assert server.pttl(key) > 604_000_000
    assert prefill(record).is_cancelled


# Links

FOUND = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
PAGES = sorted(path for path in FOUND if "node_modules" not in path.relative_to(ROOT).parts and not path.is_symlink())


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        plain = slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = 0
        while slug in anchors:
            again += 1
            slug = f"{plain}-{again}"
        anchors.add(slug)
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_links_of_a_page_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_dead_anchor = anchor and target.suffix == ".md" and target.exists() and anchor not in list_anchors(target)
        if not target.exists() or is_dead_anchor:
            dead.append(link)
    assert not dead


def test_the_engine_runs_alone_as_its_page_says() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "engine" / "README.md").read_text("utf-8"), re.M | re.S)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) > 2, done.stdout


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", (ROOT / page).read_text("utf-8"))
    assert named
    for name, path in named:
        assert re.search(rf"def {name}\(", (ROOT / path).read_text("utf-8")), name


def test_the_controls_that_are_named_are_planted() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (table,) = re.findall(r"^\| Promise \| On real servers .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = re.findall(r'"([^"]+)"', table)
    assert len(named) > 15
    assert set(named) <= {flaw.name for flaw in FLAWS}


# Figures


def test_every_figure_of_the_readme_stands_in_a_file_with_its_origin() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.search(r"^\| What \| Figure \|.*\n\|---.*\n((?:\|.*\n)+)", readme, re.MULTILINE)
    assert table
    for line in table[1].splitlines():
        _, figure, source, _ = (cell.strip() for cell in line.strip("| ").split(" | "))
        path = re.search(r"\((docs/figures/\w+\.json)\)", source)
        assert path, line
        stored = json.loads((ROOT / path[1]).read_text("utf-8"))
        assert stored["commit"]
        assert stored["machine"]
        assert stored["command"]
        known = {number for numbers in stored["figures"].values() for number in numbers}
        shown = {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", figure)}
        assert shown
        assert shown <= known, line
