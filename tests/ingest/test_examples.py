"""The backends in examples/ against Kafka and real workers, beside what a topic of results may hold."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from penstock.config.addresses import Addresses
from penstock.local.processes import Child, start_child
from penstock.messages import Request, Result, decode_message
from penstock.names import CLASSES, CORRELATION_HEADER, Pipeline
from sim.kafka_server import find_java
from sim.line import BUS_SETTINGS, InProcessPipeline, run_until_idle
from sim.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.proof
EXAMPLES = Path(__file__).parents[2] / "examples"


def command_node(directory: Path) -> list[str]:
    """The backend for Node with its packages in `directory`."""
    from tests.ingest import nodejs  # only the extra `clients` brings Node

    backend = nodejs.project(EXAMPLES / "backend_node", directory) / "backend.mjs"
    return [nodejs.NODE, "--disable-warning=ExperimentalWarning", str(backend)]


LANGUAGES: dict[str, Callable[[Path], list[str]]] = {
    "python": lambda directory: [sys.executable, str(EXAMPLES / "backend_python.py")],
    "node": command_node,
}


@dataclass
class Backend:
    """An example's process, its table and what it prints."""

    command: list[str]
    line: InProcessPipeline
    directory: Path

    @property
    def table(self) -> Path:
        return self.directory / "questions.db"

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def start(self) -> Child:
        addresses = self.line.addresses
        environment = {**os.environ, "KAFKA": addresses.kafka, "PIPELINE": addresses.pipeline}
        return start_child([*self.command, str(self.table)], name="backend", log=self.log, environment=environment)

    def rows(self) -> dict[str, tuple[Request, Result | None]]:
        """Requests and answers by id, as far as there are any."""
        if not self.table.exists():
            return {}
        with sqlite3.connect(f"file:{self.table}?mode=ro", uri=True) as table:
            if not table.execute("SELECT 1 FROM sqlite_master WHERE name = 'questions'").fetchone():
                return {}
            found = table.execute("SELECT id, request, answer FROM questions").fetchall()
        return {
            one: (
                decode_message(Request, request.encode()),
                None if answer is None else decode_message(Result, answer.encode()),
            )
            for one, request, answer in found
        }

    def ask(self, request: dict[str, object]) -> None:
        """A further question."""
        with sqlite3.connect(self.table) as table:
            table.execute("INSERT INTO questions (id, request) VALUES (?, ?)", (request["id"], json.dumps(request)))

    def answered(self, process: Child) -> None:
        """The workers work until the backend has what it wants."""

        def step() -> bool:
            run_until_idle(self.line.prefill)
            run_until_idle(self.line.decode)
            return not process.is_alive()

        wait_for(step, "the backend has its answers")
        assert process.returncode == 0, process.read_log_tail()


def write_results(line: InProcessPipeline, results: list[Result], *, committed: bool) -> None:
    """Results in a transaction, and how it ends."""
    settings = {"bootstrap.servers": line.addresses.kafka, "transactional.id": f"{line.pipeline.name}-test"}
    producer = Producer(settings)
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for result in results:
        producer.produce(line.pipeline.results_topic, key=result.id, value=result.encode())
    producer.flush()
    if committed:
        producer.commit_transaction(PATIENCE_S)
    else:
        producer.abort_transaction(PATIENCE_S)


@pytest.fixture
def line(kafka: str, redis_url: str, pipeline: Pipeline) -> Iterator[InProcessPipeline]:
    with InProcessPipeline(Addresses(kafka=kafka, stream_url=redis_url, pipeline=pipeline.name)) as made:
        yield made


@pytest.mark.parametrize("language", ["python", pytest.param("node", marks=pytest.mark.clients)])
def test_a_backend_gets_one_answer_to_each_question(language: str, line: InProcessPipeline, tmp_path: Path) -> None:
    backend = Backend(LANGUAGES[language](tmp_path), line, tmp_path)
    process = backend.start()
    wait_for(lambda: len(backend.rows()) == 3 or not process.is_alive(), "the questions are in the table")
    false_results = [Result(id=one, finish_reason="stop", text="never said") for one in backend.rows()]
    write_results(line, false_results, committed=False)
    write_results(line, [Result(id="somebody-elses", finish_reason="stop")], committed=True)
    backend.answered(process)

    first = backend.rows()
    assert len(first) == 3, process.read_log_tail()
    by_prompt = {request.prompt: answer for request, answer in first.values()}
    assert all(answer is not None and answer.tenant == "shop" for answer in by_prompt.values())
    for prompt, priority_class in (("In the beginning", "interactive"), ("And God said", "batch")):
        answer = by_prompt[prompt]
        assert answer is not None
        assert (answer.priority_class, answer.finish_reason, answer.usage.completion_tokens) == (
            priority_class,
            "length",
            16,
        )
    refused = by_prompt["The LORD"]
    assert refused is not None
    assert refused.error is not None
    assert refused.error.code == "unknown_model"
    assert "unknown_model (asking again does not help)" in backend.log.read_text()
    sent = {
        m.key: m for priority_class in CLASSES for m in line.bus.read_all(line.pipeline.request_topic(priority_class))
    }
    assert sent.keys() == first.keys()
    for one, (request, _) in first.items():
        assert decode_message(Request, sent[one].value) == request
        headers = dict(sent[one].headers)
        assert headers["penstock-tenant"] == "shop"
        assert headers["penstock-class"] == request.priority_class
        assert float(headers["penstock-deadline"]) == request.deadline

    write_results(line, false_results, committed=True)  # a second result with the same id: the first counts
    backend.ask({"v": 1, "id": "late", "tenant": "shop", "class": "batch", "deadline": 1.0, "prompt": "Amen"})
    backend.answered(backend.start())
    second = backend.rows()
    late = second.pop("late")[1]
    assert second == first
    assert late is not None
    assert late.error is not None
    assert late.error.code == "deadline_exceeded"
    assert "deadline_exceeded (ask again)" in backend.log.read_text()


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch, kafka: str, pipeline: Pipeline) -> str:
    """The topic in which the tenant `shop` has its replies; the line that is made after it allows it."""
    topic = f"{pipeline.name}.replies"
    settings = BUS_SETTINGS.model_copy(update={"reply_topics": f"shop={topic}"})
    monkeypatch.setattr("sim.line.BUS_SETTINGS", settings)
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(PATIENCE_S)
    return topic


def test_a_backend_has_its_answers_in_a_topic_of_its_own(
    replies: str, line: InProcessPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLIES", replies)
    backend = Backend(LANGUAGES["python"](tmp_path), line, tmp_path)
    process = backend.start()
    wait_for(lambda: len(backend.rows()) == 3 or not process.is_alive(), "the questions are in the table")
    wait_for(lambda: sum(line.bus.count_unsettled().values()) == 3 or not process.is_alive(), "they are produced")
    process.kill()  # its replies come while it is not there
    run_until_idle(line.prefill)
    run_until_idle(line.decode)
    backend.answered(backend.start())
    answers = {one: answer for one, (_, answer) in backend.rows().items()}
    found = {one.key: decode_message(Result, one.value) for one in line.bus.read_all(replies)}
    assert found == answers
    assert {one.finish_reason for one in found.values()} == {"length", "error"}, "refusals are replies, too"
    copies = line.read_results()
    assert sorted(one.id for one in copies) == sorted(answers)
    assert not any(one.text or one.token_ids for one in copies)
    assert {one.id: one.usage for one in copies} == {one: answer.usage for one, answer in found.items()}


@pytest.mark.clients
def test_springs_template_gets_its_replies_and_finds_those_of_its_last_life(
    replies: str, line: InProcessPipeline, tmp_path: Path
) -> None:
    if not (maven := shutil.which("mvn")):
        pytest.skip("Maven fetches Spring, and is not here")
    project = shutil.copytree(EXAMPLES / "backend_spring", tmp_path / "spring")
    fetched = subprocess.run(
        [maven, "-q", "-B", "dependency:copy-dependencies", "compile"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert fetched.returncode == 0, fetched.stdout
    where = f"{project}/target/classes:{project}/target/dependency/*"
    environment = {**os.environ, "KAFKA": line.addresses.kafka, "PIPELINE": line.pipeline.name, "TENANT": "shop"}
    environment["REPLIES"] = replies

    def start(*ids: str) -> Child:
        command = [find_java(), "-cp", where, "Backend", *ids]
        return start_child(command, name="spring", log=tmp_path / "-".join(ids), environment=environment)

    def work_until(is_over: Callable[[], bool]) -> None:
        def step() -> bool:
            run_until_idle(line.prefill)
            run_until_idle(line.decode)
            return is_over()

        wait_for(step, "Spring's template has what it waits for")

    first = start("s1", "s2")
    work_until(lambda: not first.is_alive())
    assert first.returncode == 0, first.read_log_tail()
    second = start("s3")
    wait_for(lambda: sum(line.bus.count_unsettled().values()) or not second.is_alive(), "it is asked")
    second.kill()
    work_until(lambda: len(line.bus.read_all(replies)) == 3)
    third = start("-s3")
    work_until(lambda: not third.is_alive())
    assert third.returncode == 0, third.read_log_tail()
    logs = [(tmp_path / name).read_text().splitlines() for name in ("s1-s2", "-s3")]
    told = [decode_message(Result, line.encode()) for log in logs for line in log if line.startswith("{")]
    assert [(one.id, one.finish_reason, one.usage.completion_tokens) for one in told] == [
        ("s1", "length", 16), ("s2", "length", 16), ("s3", "length", 16)
    ]  # fmt: skip
    assert all(len(one.headers[CORRELATION_HEADER]) for one in line.bus.read_all(replies))
