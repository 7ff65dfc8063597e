"""`python -m sim.scenes [NAME …] [--seed N]`: worlds of real processes, each with what must hold in it.

A scene has a name, a load, faults and what must hold. Most are rounds of `sim/chaos`: real workers, a real Redis, a
real Kafka and clients, whose history is checked against the promises. Some worlds need more than a round, as a
container does; these are functions. A fault that a new part of the product has to outlive becomes a scene here.

A scene that fails by a fault which is known and not mended yet has its name in `known`. It must fail: one that does not
is a finding too, so that the mark is taken away with the mend.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from sim.agents import play_line
from sim.chaos.adopted_region import AdoptionRound, run_adoptions
from sim.chaos.clients import Load
from sim.chaos.controllers import find_swings
from sim.chaos.faults import CONTROLLER_FAULTS, Bus
from sim.chaos.history import read_history
from sim.chaos.poison import POISON, name_poison
from sim.chaos.runner import ChaosRound, run_round
from sim.chaos.two_regions import RegionsRound, run_regions
from sim.container import Container, ask_penstock_up
from sim.forked import preload_modules
from sim.replacing import run_replacement
from sim.replies import run_replies
from sim.zones import ZONE_DELAY_S

ROOT = Path(__file__).parents[1]
BUSES: tuple[Bus, ...] = ("embedded", "kafka")
LOADS: tuple[Load, ...] = ("text", "tools", "agents", "states", "vectors", "encoder", "pictures", "endpoint")
WORKERS = ((3, 4, 0), (0, 0, 5), (2, 2, 2))
"""How many workers of prefill, of decode and of both there may be in a round with kills."""
KILLS, MAX_KILLS_S = 60, 150.0
"""A round with kills ends after so many, or so many seconds."""
STARTS_AND_STOPS = 60
"""A round with starts and stops ends after so many, or as a round with kills does: five of them make 300."""
STEADY_S = 40.0
"""How long clients send requests in a round without kills."""
MAX_ZONES_S = 400.0
"""How long it may take until each of three zones was lost, and was back. Usually it is two minutes."""
START_PATIENCE_S = 150.0
"""How long a stack may take until it answers."""
ASKED = {"model": "demo", "prompt": "In the beginning", "max_tokens": 40, "temperature": 0, "stream": True}


class LeftOutError(Exception):
    """The machine lacks what a scene needs; the message says what."""


@dataclass(frozen=True)
class Played:
    """The outcome of a scene."""

    requests: int = 0
    kills: int = 0
    findings: Sequence[str] = ()
    story: str = ""
    """The file with the history, if there is one."""
    starts_and_stops: int = 0
    """How many workers were started, or told to leave or killed, because there were to be other ones."""


Play = Callable[[int, Path], Played]
"""Plays a scene with a seed, below a directory."""


@dataclass(frozen=True)
class Scene:
    """A world, and what must hold in it."""

    name: str
    must: str
    play: Play
    known: str = ""
    """The fault by which it fails today, by its name in the list of known faults; empty if it must pass."""
    half_core: bool = False
    """Whether all of it runs on half a core."""

    @property
    def group(self) -> str:
        """`kills` where processes are killed or come and go, or `unlike` for worlds unlike a quiet machine with quick
        servers and equal workers.
        """
        return "kills" if self.name.startswith(("kills", "starts and stops", "controllers")) else "unlike"


# Rounds of real processes.

ANSWERED = "each accepted request has one result, the right one, and each reader has each token once"


def _play_round(plan: ChaosRound, seed: int, directory: Path) -> Played:
    outcome = run_round(replace(plan, seed=seed), directory)
    told = [f"{one.kind}: {one.id}: {one.description}" for one in outcome.findings]
    if not plan.kills:
        told += [f"a worker ended by itself: {line}" for line in outcome.counts.crashes]
    counts = outcome.counts
    return Played(outcome.requests, counts.kills.total(), told, str(outcome.history), counts.starts_and_stops)


def make_kill_round(seed: int, bus: Bus, load: Load, *, is_replicated: bool = False) -> ChaosRound:
    """Return a round in which all workers are killed again and again, and the servers disturbed, as the seed says."""
    # Only a worker of kind `decode` has no pixels where KV is lost.
    sizes = [one for one in WORKERS if load != "pictures" or one[1]]
    prefill, decode, auto = random.Random(f"{seed}/{bus}").choice(sizes)
    return ChaosRound(
        seed, bus, MAX_KILLS_S, KILLS, prefill, decode, auto, is_replicated=is_replicated, with_system_faults=True,
        load=load,
    )  # fmt: skip


def _kill(bus: Bus, load: Load, *, is_replicated: bool = False) -> Scene:
    def play(seed: int, directory: Path) -> Played:
        return _play_round(make_kill_round(seed, bus, load, is_replicated=is_replicated), seed, directory)

    where = "three brokers and Sentinel" if is_replicated else bus
    return Scene(f"kills, {where}, {load}", ANSWERED, play)


def _start_and_stop(where: str, bus: Bus, **fields: Any) -> Scene:
    """Return a scene in which workers are started and stopped all the time, down to none, beside kills and faults."""
    plan = ChaosRound(
        0, **{"bus": bus, "seconds": MAX_KILLS_S, "prefill": 0, "decode": 0, "auto": 5,
              "starts_and_stops": STARTS_AND_STOPS, **fields}
    )  # fmt: skip
    return Scene(f"starts and stops{where}", ANSWERED, lambda seed, directory: _play_round(plan, seed, directory))


CONTROLLERS_S = 400.0
"""How long it may take until controllers were killed and cut off, one and all. Usually it is two minutes."""


def _play_controllers(seed: int, directory: Path) -> Played:
    """Play a round with a constant load and controllers, and look whether the number of workers swings."""
    plan = ChaosRound(
        seed, "embedded", CONTROLLERS_S, 0, 0, 0, 6, num_in_flight=18, with_controllers=True
    )  # fmt: skip
    played = _play_round(plan, seed, directory)
    history = list(read_history(Path(played.story)))
    if not played.findings and sum(one["what"] == "fault" for one in history) <= CONTROLLER_FAULTS:
        raise LeftOutError(f"a machine whose workers start so soon that this takes {CONTROLLERS_S:.0f} s")
    return replace(played, findings=[*played.findings, *find_swings(history)])


def _undisturbed(name: str, known: str = "", must: str = ANSWERED, *, half_core: bool = False, **fields: Any) -> Scene:
    """Return a scene without kills, in which no worker ends by itself."""
    plan = ChaosRound(0, **{"bus": "kafka", "seconds": STEADY_S, "kills": 0, "prefill": 0, "decode": 0, "auto": 2,
                            "num_in_flight": 6, **fields})  # fmt: skip
    return Scene(
        name, f"{must}; no worker ends", lambda seed, directory: _play_round(plan, seed, directory), known, half_core
    )


ZONES_ROUND = ChaosRound(
    0, "kafka", MAX_ZONES_S, 0, 0, 0, 3, num_in_flight=9, patience_s=240.0, zone_delay_s=ZONE_DELAY_S
)
"""Each of three zones is lost, with a broker, a Redis server and a worker, and comes back."""
POISON_S = 80.0
"""How long clients send requests, one of which in every second hundred is poison."""
MAX_TIMES_SLOWER = 1.5
"""How many times as long good requests may take beside a poisonous one: all of a hundred but the slowest."""


def _play_poison(bus: Bus, seed: int, directory: Path) -> Played:
    """Play a round with poison, and compare the times of its hundreds that have some with those of the others.

    The machine does other things, too: poison that slows others down does so in each hundred that has it.
    """
    played = _play_round(ChaosRound(seed, bus, POISON_S, 0, 0, 0, 2, num_in_flight=6, load="poison"), seed, directory)
    begun_s, times_s = dict[str, float](), defaultdict[int, list[float]](list)
    for entry in read_history(Path(played.story)):
        if entry["what"] == "submitted" and not entry["may"]:
            begun_s[entry["id"]] = entry["at"]
        elif entry["what"] == "end" and entry["id"] in begun_s:
            times_s[int(entry["id"][1:]) // 100].append(entry["at"] - begun_s[entry["id"]])
    slowest_s = defaultdict[str, list[float]](list)
    for hundred, found in times_s.items():
        if hundred and len(found) > 98:  # in the first one the workers start
            slowest_s[name_poison(hundred)].append(sorted(found)[-2])
    if len(slowest_s) <= len(POISON):
        raise LeftOutError(f"a machine that answers 700 requests in {POISON_S:.0f} s")
    usual_s = statistics.median(slowest_s.pop(""))
    told = [
        f"beside {kind} all requests but the slowest take {min(found):.2f} s, and else {usual_s:.2f} s"
        for kind, found in slowest_s.items()
        if min(found) > MAX_TIMES_SLOWER * usual_s
    ]
    return replace(played, findings=[*played.findings, *told])


def _poison(bus: Bus) -> Scene:
    must = f"it ends with its error, the others' p99 is within {MAX_TIMES_SLOWER} of that without it; no worker ends"
    return Scene(f"one poisonous request in a hundred, {bus}", must, partial(_play_poison, bus))


AGENTS_S = 60.0
"""How long agents are played in one process: at least once."""


def _play_agents(seed: int, directory: Path) -> Played:
    """Play agents in a pipeline within this process, again and again."""
    until, played = time.monotonic() + AGENTS_S, Played()
    for number in itertools.count():
        requests, findings = play_line(1000 * seed + number, directory / str(number))
        played = Played(played.requests + requests, 0, findings)
        if findings or time.monotonic() > until:
            break
    return played


REGIONS_S = 90.0
"""How long one fault after the other meets one of two regions: each kind at least once."""


def _play_regions(seed: int, directory: Path) -> Played:
    """Play two regions that help each other, whose processes are killed and stopped, and which are cut off."""
    outcome = run_regions(RegionsRound(seed, REGIONS_S), directory)
    told = [f"{one.kind}: {one.id}: {one.description}" for one in outcome.findings]
    if not outcome.counts["sent on"]:
        told.append("no request was sent on")
    kills = outcome.counts["kill worker"] + outcome.counts["kill gateway"]
    return Played(outcome.requests, kills, told, str(outcome.history))


ADOPTIONS = 3
"""How often a region dies in a scene. Three scenes whose seeds follow each other have each mishap."""


def _play_adoptions(seed: int, directory: Path) -> Played:
    """Play two regions, one of which dies, is adopted by the other, comes back, and dies once more."""
    outcome = run_adoptions(AdoptionRound(seed, ADOPTIONS), directory)
    told = [f"{one.kind}: {one.id}: {one.description}" for one in outcome.findings]
    return Played(outcome.requests, len(outcome.adoptions), told, str(outcome.history))


# Stacks as users start them.


def _ask(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def _join_texts(events: str) -> str:
    """Return the text of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line).get("choices", ()))


def _play_container(container: Container, seed: int, directory: Path) -> Played:
    """Start `penstock up` in a container, and ask it."""
    if problem := container.find_problem():
        raise LeftOutError(problem)
    try:
        answer = ask_penstock_up(container, directory, {}, START_PATIENCE_S)
    except (ChildProcessError, TimeoutError):
        last = (directory / "log").read_text(errors="replace").strip().splitlines()[-1:]
        told = f"`penstock up` does not answer; its last line: {' '.join(last)}"
        return Played(1, 0, [told], str(directory / "log"))
    return Played(1, 0, [] if answer else ["the answer is empty"], str(directory / "log"))


def _play_replacement(_: int, directory: Path) -> Played:
    """Replace all workers and gateways of a stack under load by the same tree with its version raised."""
    readers, num_replaced = run_replacement(directory)
    told = [f"streams broken: {len(readers.broken)}; {one}" for one in readers.broken]
    if not readers.num_resumed:
        told.append("no stream went on at the other gateway")
    return Played(readers.num_whole + len(readers.broken), 0, told, starts_and_stops=2 * num_replaced)


REPLY_REQUESTS = 500


def _play_replies(seed: int, directory: Path) -> Played:
    """Send requests with reply topics, one bad in ten, while workers are killed."""
    replied = run_replies(directory, seed, REPLY_REQUESTS, 1)
    story = directory / "replied.json"
    story.write_text(json.dumps(vars(replied)))
    return Played(replied.requests, replied.kills, replied.faults, str(story))


CONNECTIONS = 50
PAUSES_S = ("12", "60", "80")
"""How long the clients of a language stop between their questions: longer than many servers keep a connection."""
LANGUAGE_S = 600.0
"""How long all their answers may take beside the pauses: a client that waits for ever is a finding."""
_CURL = 'curl -sN "$1" -H "Content-Type: application/json" -d "$2"; echo ---'
LANGUAGES = {
    "Java": ["java", "{folder}/Ask.java"],
    "Go": ["go", "run", "{folder}/ask.go"],
    "Node": ["node", "{folder}/ask.mjs"],
    "Python": [sys.executable, "{folder}/ask.py"],
    "curl": ["sh", "-c", _CURL, "curl"],
}
"""By language: the command, which is followed by the URL, the body, the number of clients and the pauses."""


def _play_language(language: str, seed: int, directory: Path) -> Played:
    """Ask a gateway with clients of another language side by side, and compare their texts with that of ours."""
    command = [word.format(folder=ROOT / "sim/languages") for word in LANGUAGES[language]]
    if not shutil.which(program := command[-1] if language == "curl" else command[0]):
        raise LeftOutError(f"{program} is not installed")
    body = {**ASKED, "seed": seed, "max_tokens": 8}
    with Stack(directory, prefill=0, decode=0, auto=1, gateway=find_free_port()) as stack:
        stack.wait_until_ready(START_PATIENCE_S)
        url = f"{stack.gateway_url}/v1/completions"
        expected = _join_texts(_ask(url, body))
        patience_s = LANGUAGE_S + sum(map(float, PAUSES_S))
        try:
            told = subprocess.run(
                [*command, url, json.dumps(body), str(CONNECTIONS), *PAUSES_S],
                capture_output=True, text=True, timeout=patience_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Played(1, 0, [f"{language}: it still waits after {patience_s:g} s"])
    count = 1 if language == "curl" else CONNECTIONS * (1 + len(PAUSES_S))
    answers = told.stdout.split("---\n")[:-1]
    wrong = [answer for answer in answers if _join_texts(answer) != expected]
    findings = [f"{len(answers)} of {count} answers came: {told.stderr[-200:]!r}"] if len(answers) != count else []
    findings += [f"{len(wrong)} answers differ, the first is {wrong[0][:200]!r}"] if wrong or not expected else []
    return Played(1 + count, 0, [f"{language}: {told}" for told in findings])


def _language(language: str, known: str = "") -> Scene:
    return Scene(
        f"a client in {language}", "each answer has the text that our client gets",
        lambda seed, directory: _play_language(language, seed, directory), known,
    )  # fmt: skip


VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
ADAPTERS, NUM_ADAPTER_ANSWERS = "kills and reloads of adapters in vLLM", 2000


def _play_adapters(seed: int, directory: Path) -> Played:
    """Play workers with vLLM and adapters, in the environment of `make test-vllm` where this one has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        if not VLLM_PYTHON.exists():
            raise LeftOutError("vLLM is not installed (make test-vllm)")
        command = [str(VLLM_PYTHON), "-m", "sim.scenes", ADAPTERS, "--seed", str(seed)]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
        return Played(told["requests"], told["kills"], told["findings"], told["story"], told["starts_and_stops"])
    from sim.adapters import KILLS, RELOADS, play_adapters  # needs what only that environment has

    run = play_adapters(seed, directory, NUM_ADAPTER_ANSWERS)
    story = directory / "answers"
    story.write_text("\n".join(map(repr, run.answers)))
    return Played(len(run.answers), KILLS, run.find_faults(), str(story), RELOADS)


SCENES = (
    Scene("an agent's KV in small tiers", "tokens are those of `generate()`, with retention and without", _play_agents),
    *(_kill(bus, load) for load in LOADS for bus in BUSES),
    _kill("kafka", "text", is_replicated=True),
    Scene(
        ADAPTERS, "an answer is that of one version of its adapter, or ends where no worker has that one any more",
        _play_adapters,
    ),
    Scene(
        "kills, reply topics", "each result is once in its producer's topic, or among all with the reason, and in no "
        "other's", _play_replies,
    ),
    *(_start_and_stop(f", {bus}", bus) for bus in BUSES),
    _start_and_stop(" on slow servers", "kafka", kills=0, starts_and_stops=20, delays_s={"redis": 0.2, "kafka": 0.2}),
    Scene(
        "controllers that are killed, cut off and doubled",
        f"{ANSWERED}; the number of workers does not swing", _play_controllers,
    ),
    Scene(
        "two regions, embedded", f"{ANSWERED}, at either gateway; no POST is accepted twice, and none is stuck",
        _play_regions,
    ),
    Scene(
        "two regions, Kafka and MirrorMaker",
        "what was copied of a region that dies has one result, and each reader its tokens or a typed error; "
        "nothing of a tenant that stays is copied", _play_adoptions,
    ),
    _undisturbed("Kafka answers 0.2 s late", delays_s={"kafka": 0.2}),
    _undisturbed("Kafka answers 0.5 s late", delays_s={"kafka": 0.5}),
    _undisturbed("Kafka answers 1 s late", delays_s={"kafka": 1.0}),
    _undisturbed("Kafka answers 2 s late", delays_s={"kafka": 2.0}),
    _undisturbed("Redis answers 0.1 s late", bus="embedded", delays_s={"redis": 0.1}),
    _undisturbed("Redis answers 0.5 s late", bus="embedded", delays_s={"redis": 0.5}),
    _undisturbed("Redis answers 1 s late", bus="embedded", delays_s={"redis": 1.0}),
    # A worker starts by 40 answers in a row.
    _undisturbed("Redis answers 2 s late", bus="embedded", delays_s={"redis": 2.0}, patience_s=240.0),
    _undisturbed("agents on slow servers", load="agents", delays_s={"redis": 0.2, "kafka": 0.2}),
    # librdkafka may hang in a transaction, which is given up after 90 to 180 s.
    _undisturbed(
        "one of three brokers stands still for 20 s", is_replicated=True, broker_pauses_s=20.0, seconds=75.0,
        patience_s=240.0,
    ),
    Scene("one of three zones dies", f"{ANSWERED}; no worker ends", partial(_play_round, ZONES_ROUND)),
    *(_poison(bus) for bus in BUSES),
    _undisturbed("one of four workers four times slower", auto=4, num_in_flight=8, slowness={"auto-3": 4.0}),
    _undisturbed("clocks that jump", with_clock_jumps=True, auto=0, prefill=1, decode=2),
    _undisturbed("half a core", half_core=True, num_in_flight=3),
    *(
        Scene(f"a container with {what}", "`penstock up` starts and answers", partial(_play_container, container))
        for what, container in {
            "64 MB of shared memory": Container(), "a read-only root": Container(is_read_only=True),
        }.items()
    ),
    Scene(
        "all workers and gateways replaced by a raised version", "each reader has each token once, and the right text",
        _play_replacement,
    ),
    *map(_language, LANGUAGES),
)  # fmt: skip


def play_scene(scene: Scene, seed: int, directory: Path) -> dict[str, Any]:
    """Play a scene and return what is told about it: requests, kills, findings, and what it did that is known.

    Where the machine lacks something, `left_out` says what.
    """
    try:
        played = scene.play(seed, directory)
    except LeftOutError as missing:
        return {"scene": scene.name, "seed": seed, "left_out": str(missing)}
    findings = list(played.findings)
    if scene.known:
        findings = [] if findings else [f"it passes, though it is known to fail by {scene.known}: take the mark away"]
    failed_as_known = bool(scene.known and played.findings)
    return {
        "scene": scene.name, "seed": seed, "requests": played.requests, "kills": played.kills,
        "starts_and_stops": played.starts_and_stops, "findings": findings,
        "known": list(played.findings)[:3] if failed_as_known else [], "story": played.story if findings else "",
    }  # fmt: skip


def main() -> None:
    """Play scenes, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m sim.scenes", epilog="; ".join(scene.name for scene in SCENES))
    parser.add_argument("names", nargs="*", help="parts of names; all if there are none")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    scenes = [one for one in SCENES if not given.names or any(name in one.name for name in given.names)]
    encoders = ["sentence_transformers"] if any("encoder" in scene.name for scene in scenes) else []
    preload_modules("sim.chaos.runner", *encoders)
    for scene in scenes:
        if scene.half_core and "SIM_HALF_CORE" not in os.environ:
            command = [str(ROOT / "tools/slow.sh"), sys.executable, "-m", "sim.scenes", scene.name]
            environment = {**os.environ, "SIM_HALF_CORE": "1"}
            subprocess.run([*command, "--seed", str(given.seed)], env=environment, check=True)
            continue
        directory = Path(tempfile.mkdtemp(prefix="penstock-scene-"))
        with ExitStack() as exits:
            told = play_scene(scene, given.seed, directory)
            if not told.get("findings"):
                exits.callback(shutil.rmtree, directory, ignore_errors=True)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
