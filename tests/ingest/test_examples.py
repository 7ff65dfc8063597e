"""The backends in examples/ against Kafka and real workers, beside what a topic of results may hold."""

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.config.addresses import Addresses
from penstock.local.processes import Child, start_child
from penstock.messages import Request, Result, decode_message
from penstock.names import CLASSES, Pipeline
from sim.line import InProcessPipeline, run_until_idle
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
