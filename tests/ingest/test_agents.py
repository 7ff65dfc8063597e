"""Coding agents do a task of four turns through a gateway, while workers and gateways are killed.

They are the programs themselves, with the settings of docs/agents.md, an empty home and no other environment. A script
says their turns (`sim/scripted.py`): an engine in `auto` workers, or a server behind endpoint workers.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from penstock.bus.connect import connect_bus
from penstock.cli.up import build_endpoint_environment
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port, start_child
from penstock.local.stack import ProcessSlot, Stack
from penstock.messages import Result, decode_message
from penstock.names import Pipeline
from penstock.ops.status import read_worker_status
from sim.endpoint import CountingEndpoint
from sim.scripted import Script, ScriptedStack, Turn, count_results, write_turn
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import TOOL_MODEL
from tests.ingest import clients, nodejs

pytestmark = pytest.mark.clients
AGENT_FOLDER = Path(__file__).with_name("agent_programs")
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
URL, MODEL = "http://127.0.0.1:8000", "coder"
"""The gateway and the model of that page."""
NUM_RUNS = int(os.environ.get("TEST_AGENT_RUNS", "1"))
TASK = "List the files, read program.sh, let it add 1 to its total, and run it."
PROGRAM = "total=1\necho run >> calls\necho $total\n"
OLD, NEW = "total=1", "total=1; total=$((total + 1))"
"""What is replaced in the program, and by what. Done twice, it gives another program."""
TEXTS = ["I list the files.", "I read one.", "I edit it.", "I run it.", "All is done."]
HELD = (2, 3)
"""The turns in which somebody is killed: the one that edits, and the one that runs what was edited."""
Kind = Literal["auto", "endpoint"]
Victim = Literal["nobody", "worker", "gateway"]


@dataclass(frozen=True)
class Agent:
    """A program, and how it calls its tools."""

    title: str
    """The heading of its section on the page."""
    file: str
    """The file in its home that has its settings; empty where its environment has all."""
    program: str
    """Its path below node_modules."""
    words: Sequence[str]
    """Its arguments before the task."""
    calls: Sequence[tuple[str, Mapping[str, str]]]
    """The calls of the four turns, which a shell counts in the file `calls`."""

    def find_settings(self, url: str) -> tuple[str, dict[str, str]]:
        """Return the settings on the page, as the text of the file and as an environment, with the gateway's URL."""
        section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
        (own,) = (part.replace(URL, url) for part in section if part.startswith(f"{self.title}\n"))
        blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", own, re.MULTILINE | re.DOTALL))
        exports = re.findall(r"^export (\w+)=(\S*)$", blocks.get("sh", ""), re.MULTILINE)
        return blocks.get(Path(self.file).suffix[1:], ""), dict(exports)


AGENTS = {
    "codex": Agent(
        "Codex CLI", ".codex/config.toml",
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        ["exec", "--strict-config", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        [
            ("exec_command", {"cmd": "echo list >> calls; ls"}),
            ("exec_command", {"cmd": "echo read >> calls; cat program.sh"}),
            ("exec_command", {"cmd": f"echo edit >> calls; sed -i 's/{OLD}/{NEW}/' program.sh"}),
            ("exec_command", {"cmd": "sh program.sh"}),
        ],
    ),
    "opencode": Agent(
        "opencode", ".config/opencode/opencode.json", "opencode-linux-x64/bin/opencode", ["run"],
        [
            ("bash", {"command": "echo list >> calls; ls", "description": "List files"}),
            ("read", {"filePath": "{work}/program.sh"}),
            ("edit", {"filePath": "{work}/program.sh", "oldString": OLD, "newString": NEW}),
            ("bash", {"command": "sh program.sh", "description": "Run it"}),
        ],
    ),
    "claude": Agent(
        "Claude Code", "",
        "@anthropic-ai/claude-code-linux-x64/claude", ["-p", "--allowedTools", "Bash,Read,Edit", "--"],
        [
            ("Bash", {"command": "echo list >> calls; ls", "description": "List files"}),
            ("Read", {"file_path": "{work}/program.sh"}),
            ("Edit", {"file_path": "{work}/program.sh", "old_string": OLD, "new_string": NEW}),
            ("Bash", {"command": "sh program.sh", "description": "Run it"}),
        ],
    ),
}  # fmt: skip


class Site:
    """A pipeline whose workers say a script, and its gateway."""

    def __init__(self, folder: Path, kind: Kind, exits: ExitStack) -> None:
        self.kind, self.script = kind, Script(folder)
        self.endpoint = CountingEndpoint()
        self.endpoint.models, self.endpoint.num_pieces = [MODEL], 3
        self.endpoint.write_choices = partial(write_turn, self.script)
        self.endpoint.pass_piece = self._pass_piece
        exits.enter_context(self.endpoint)
        model = {"PENSTOCK_ENGINE_MODEL": str(TOOL_MODEL), "PENSTOCK_ENGINE_SERVED_NAME": MODEL}
        asks = build_endpoint_environment([self.endpoint.url]) | {"PENSTOCK_ENGINE_MODEL": MODEL}
        self.stack: Stack = ScriptedStack(
            folder, pipeline=f"agents-{kind}", prefill=0, decode=0, auto=2 * (kind == "auto"),
            endpoint=2 * (kind == "endpoint"), gateway=find_free_port(), environment=model if kind == "auto" else asks,
        )  # fmt: skip
        exits.enter_context(self.stack)
        self.stack.wait_until_ready(PATIENCE_S)

    def _pass_piece(self, body: Mapping[str, object], place: int) -> None:
        if body.get("tools"):
            self.script.pass_piece(count_results(body), place)

    def list_texts(self) -> list[str]:
        """Return the texts of all answers so far, once nobody works any more. Their calls stand in them, too."""
        pipeline, bus = Pipeline(self.stack.addresses.pipeline), connect_bus(self.stack.addresses, BusSettings())
        topics = {*pipeline.all_topics()} - {pipeline.results_topic, pipeline.dead_letter_topic}
        wait_for(lambda: not any(bus.read_all(topic) for topic in topics), "all messages are settled")
        results = [decode_message(Result, message.value) for message in bus.read_all(pipeline.results_topic)]
        assert all(result.error is None for result in results), results
        return [result.text for result in results]

    def kill(self, turn: int, victim: Victim) -> None:
        """Kill the worker that stands still within a turn, or the gateway; it is started again."""
        slot = self.stack.gateway if victim == "gateway" else self._find_holder(turn)
        assert slot is not None
        assert slot.child is not None
        slot.failures = 0  # as if it had lived for long
        slot.child.kill()
        self.script.let_go(turn)

    def _find_holder(self, turn: int) -> ProcessSlot:
        if self.kind == "auto":
            return self._find_slots({self.script.find_holder(turn)})[0]

        def find_busy() -> list[ProcessSlot]:
            beats = read_worker_status(self.stack.addresses)
            return self._find_slots({int(beat["pid"]) for beat in beats if beat.get("running")})

        wait_for(lambda: len(find_busy()) == 1, "one worker alone has requests")
        return find_busy()[0]

    def _find_slots(self, pids: set[int | None]) -> list[ProcessSlot]:
        return [slot for slot in self.stack.workers if slot.child is not None and slot.child.pid in pids]


@pytest.fixture(scope="module", params=["auto", "endpoint"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as exits:
        yield Site(tmp_path_factory.mktemp("site"), request.param, exits)


def run_agent(
    site: Site, command: Sequence[str], environment: Mapping[str, str], work: Path, victim: Victim, held: Sequence[int]
) -> tuple[int, str]:
    """Run an agent in a folder, while somebody is killed in turns that are held. Return its exit status and output."""
    left, out = list(held), work.with_name("out")
    agent = start_child(command, name="agent", log=out, environment=environment, directory=work)

    def has_ended() -> bool:
        if left and site.script.find_holder(left[0]) is not None:
            site.kill(left.pop(0), victim)
        site.stack.restart_dead()
        return not agent.is_alive()

    try:
        wait_for(has_ended, "the agent ends")
    finally:
        status = agent.kill()
    assert not left, f"nobody was killed in turns {left}: {out.read_text()}"
    return status, out.read_text()


def place_in(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a call, with paths in a folder."""
    return {name: text.replace("{work}", str(folder)) for name, text in given.items()}


@pytest.mark.parametrize("run", range(NUM_RUNS))
@pytest.mark.parametrize("victim", ["nobody", "worker", "gateway"])
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_its_task(site: Site, name: str, victim: Victim, run: int, tmp_path: Path) -> None:
    agent, home, work = AGENTS[name], tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    (work / "program.sh").write_text(PROGRAM)
    settings, variables = agent.find_settings(site.stack.gateway_url)
    if agent.file:
        (home / agent.file).parent.mkdir(parents=True)
        (home / agent.file).write_text(settings)
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", **variables}
    held = () if victim == "nobody" else HELD
    turns = [Turn(text, tool, place_in(work, given)) for text, (tool, given) in zip(TEXTS, agent.calls, strict=False)]
    site.script.write([*turns, Turn(TEXTS[-1])], held)
    num_before = len(site.list_texts())

    command = [
        str(nodejs.find_modules(clients.find_place(AGENT_FOLDER) / "package.json") / agent.program),
        *agent.words,
        TASK,
    ]
    status, told = run_agent(site, command, environment, work, victim, held)
    assert (status, TEXTS[-1] in told) == (0, True), told

    counted = [found for _, given in agent.calls for found in re.findall(r"echo (\w+)", str(given))]
    assert (work / "calls").read_text().split() == [*counted, "run"], told
    assert (work / "program.sh").read_text() == PROGRAM.replace(OLD, NEW)

    def count_turns() -> Counter[str]:
        return Counter(text for said in site.list_texts()[num_before:] for text in TEXTS if said.startswith(text))

    # The result of an answer whose worker was killed behind its end comes once that one's lease is over.
    wait_for(lambda: count_turns().keys() == set(TEXTS), "each turn has its result")
    asked = count_turns()
    again = {TEXTS[turn] for turn in held} if victim == "gateway" else set()
    assert all(asked[text] in ((1, 2) if text in again else (1,)) for text in TEXTS), asked
