"""The program in an engine's process: one JSON object a line in, one out.

python -m benchmarks.peers.serve ENGINE

    {"do": "load", "with": {…}}       what `benchmarks/peers/engines/ENGINE.py` needs in its `load(**with)`
    {"do": "run", "with": {…}}        requests and temperature; answered with their timeline and tokens
    {"do": NAME, "with": {…}}         any other public method of what was loaded
                                      → {"is": …} or {"error": "…"}

ENGINE may say after an underscore how it was built. It runs where nothing of this repository is installed but the files
themselves. What an engine prints goes to stderr.
"""

import importlib
import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.workload import Request, Timeline


def run_timed(engine: Any, requests: list[Request], temperature: float = 0.0) -> dict[str, Any]:
    """Let the engine answer the requests; returns the timeline and the new tokens of each."""
    timeline: Timeline = []
    begun_s = time.perf_counter()

    def on_step(indices: list[int]) -> None:
        if indices:
            timeline.append((time.perf_counter() - begun_s, indices))

    tokens = engine.run([(list(prompt), new) for prompt, new in requests], on_step, temperature)
    return {"timeline": timeline, "tokens": tokens}


def load_timed(module: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load the engine; return it and the seconds that took. Its files are in the page cache then."""
    model, form = Path(given.pop("model")), given.pop("form", "")
    prepared = module.prepare(model, form) if form else module.prepare(model)
    for file in [prepared] if prepared.is_file() else [*prepared.glob("*.safetensors"), *prepared.glob("*.bin")]:
        with file.open("rb") as content:
            while content.read(16 * 2**20):
                pass
    begun_s = time.perf_counter()
    engine = module.load(model=prepared, **given)
    return engine, {"load_s": time.perf_counter() - begun_s}


def serve_pipes(name: str, questions: Connection, answers: Connection) -> None:
    """Serve an engine in a process that was forked."""
    with open(questions.fileno(), closefd=False) as asked, open(answers.fileno(), "w", closefd=False) as said:
        serve_engine(name, asked, said)


def serve_engine(name: str, questions: TextIO, answers: TextIO) -> None:
    """Answer questions until they end."""
    module = importlib.import_module(f"benchmarks.peers.engines.{name.partition('_')[0]}")
    engine: Any = None
    for line in questions:
        question = json.loads(line)
        given = question.get("with", {})
        answer: Any
        try:
            match question["do"]:
                case "load":
                    engine, answer = load_timed(module, given)
                case "run":
                    answer = run_timed(engine, **given)
                case name:
                    answer = getattr(engine, name)(**given)
            reply = {"is": answer}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve_engine(sys.argv[1], sys.stdin, answers)


if __name__ == "__main__":
    main()
