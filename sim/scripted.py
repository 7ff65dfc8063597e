"""An engine, and answers of a server with OpenAI's API, that say the next turn of a script: for tests with agents.

Which turn is next follows from the prompt alone: as many turns were said as it has results of tools. So whoever goes on
with an answer, or is asked again, says the same. A question without tools, as for a chat's title, is none of the
script's.

Where the script holds a turn, whoever says it first stops within its call, until a test lets it go on or kills it.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer

from penstock.engine.contract import EngineLimits
from penstock.local.processes import Child
from penstock.local.stack import WorkerSlot
from penstock.testing.engine import BLOCK_SIZE, MAX_BATCH, FormulaEngine, FormulaModel
from penstock.worker.process import WorkerProcess
from sim.endpoint import Choice
from sim.forked import ForkedStack, fork_process, run_penstock
from sim.workload import TOOL_MODEL

MAX_LENGTH = 500_000
"""Agents send 100 kB before they say anything, and the tool model's tokens are short."""
TITLE = "A title"
HELD_PIECE = 16
"""A turn that is held stops before this token, or this piece: within its call."""
PIECE_CHARS = 2
"""The characters in each piece of a server's answer."""


@dataclass(frozen=True)
class Turn:
    """What is said at once: a text and, unless the task is done with it, a call."""

    text: str
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Script:
    """The script in a folder, which all processes read again for each piece: it is replaced for the next task."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "script.json"

    def write(self, turns: Sequence[Turn], held: Sequence[int] = ()) -> None:
        """Replace the script. `held` has the numbers of the turns that are held."""
        for path in [*self._folder.glob("held-*"), *self._folder.glob("go-*")]:
            path.unlink()
        draft = self._folder / "draft"
        draft.write_text(json.dumps({"turns": [asdict(turn) for turn in turns], "held": list(held)}))
        draft.replace(self._file)

    def find_turn(self, number: int) -> Turn:
        """Return the turn with a number, the last one for a number behind it."""
        turns = json.loads(self._file.read_text())["turns"]
        return Turn(**turns[min(number, len(turns) - 1)])

    def pass_piece(self, number: int, place: int) -> None:
        """Wait before a piece of a turn that is held, unless somebody has waited there before."""
        if place != HELD_PIECE or number not in json.loads(self._file.read_text())["held"]:
            return
        try:
            with (self._folder / f"held-{number}").open("x") as held:
                held.write(str(os.getpid()))
        except FileExistsError:
            return
        while not (self._folder / f"go-{number}").exists():
            time.sleep(0.005)

    def find_holder(self, number: int) -> int | None:
        """Return the id of the process that waits in a turn; None if none does."""
        held = self._folder / f"held-{number}"
        text = held.read_text() if held.exists() else ""
        return int(text) if text else None

    def let_go(self, number: int) -> None:
        """Let the process go on that waits in a turn."""
        (self._folder / f"go-{number}").touch()


# The engine of an `auto` worker.


class ScriptedModel(FormulaModel):
    """The tool model without its weights, and with room for an agent's prompts."""

    name, context_length = str(TOOL_MODEL), MAX_LENGTH
    eos_token_ids: frozenset[int]

    def __init__(self) -> None:
        self.eos_token_ids = frozenset([self.tokenizer.eos_token_id])
        self.response_template = self.tokenizer.response_template

    @cached_property
    def tokenizer(self) -> Any:
        """The tool model's tokenizer."""
        return AutoTokenizer.from_pretrained(str(TOOL_MODEL))

    @cached_property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return len(self.tokenizer)


class ScriptedEngine(FormulaEngine):
    """The engine of a worker that says a script, with calls in the form of the model's response template."""

    limits = EngineLimits(MAX_BATCH, 4096, MAX_LENGTH)

    def __init__(self, script: Script) -> None:
        model = ScriptedModel()
        super().__init__(
            random.Random(0), model=model, choose_token=self._choose, num_blocks=MAX_BATCH * MAX_LENGTH // BLOCK_SIZE
        )
        self._script, self._tokenizer = script, model.tokenizer
        self._result_start = self._encode("<|im_start|>tool")  # its line end may be one token with what follows
        self._offer = self._tokenizer.convert_tokens_to_ids("<tools>")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _choose(self, prompt: Sequence[int], _seed: int, position: int) -> int:
        """Return the token at a position of the turn that follows a prompt."""
        if self._offer not in prompt:
            said = TITLE
        else:
            number = self._count_results(prompt)
            turn = self._script.find_turn(number)
            self._script.pass_piece(number, position)
            call = json.dumps({"name": turn.tool, "arguments": turn.arguments})
            said = f"{turn.text}<tool_call>{call}</tool_call>" if turn.tool else turn.text
        tokens = self._encode(said)
        return tokens[position] if position < len(tokens) else int(self._tokenizer.eos_token_id)

    def report_state(self) -> dict[str, object]:
        """Return what a worker's heartbeat and metrics say: there is no KV."""
        drafts = {"drafted": 0, "accepted": 0}
        return {"waiting": 0, "pool": {"used": 0, "total": self.num_blocks}, "drafts": drafts, "kv": {}}

    def _count_results(self, prompt: Sequence[int]) -> int:
        start = self._result_start
        places = (place for place, token in enumerate(prompt) if token == start[0])
        return sum(list(prompt[place : place + len(start)]) == start for place in places)


def run_worker(folder: str) -> None:
    """Run a worker of kind `auto` that says the script in a folder."""
    engine = ScriptedEngine(Script(Path(folder)))
    with mock.patch.object(WorkerProcess, "open_engine", return_value=engine):
        run_penstock("worker", "auto", "--next-name")


class ScriptedStack(ForkedStack):
    """A stack whose `auto` workers say the script in its directory."""

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        if worker.stage != "auto":
            return super()._start_worker(worker, environment)
        log = self._log_path(worker)
        return fork_process(worker.name, log, run_worker, str(self.directory), environment=environment)


# The answers of a server.


def count_results(body: Mapping[str, Any]) -> int:
    """Return the results of tools in a question to a server."""
    return sum(turn["role"] == "tool" for turn in body["messages"])


def write_turn(script: Script, body: Mapping[str, Any]) -> list[Choice]:
    """Return the choices of a turn, as `CountingEndpoint` sends them."""
    turn, said = script.find_turn(count_results(body)), ""
    if body.get("continue_final_message"):
        said = body["messages"][-1]["content"]
    text = turn.text.removeprefix(said)
    deltas: list[dict[str, Any]] = [{"content": part} for part in _cut(text)]
    if turn.tool:
        parts: list[dict[str, Any]] = [{"arguments": part} for part in _cut(json.dumps(turn.arguments))]
        head = {"name": turn.tool, "arguments": ""}
        deltas += [{"tool_calls": [{"index": 0, "function": part}]} for part in (head, *parts)]
    choices: list[Choice] = [{"delta": delta} for delta in deltas]
    return [*choices, {"finish_reason": "tool_calls" if turn.tool else "stop"}]


def _cut(text: str) -> list[str]:
    return [text[place : place + PIECE_CHARS] for place in range(0, len(text), PIECE_CHARS)]
