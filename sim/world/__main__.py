"""`python -m sim.world --seed N --requests M`.

SIGINT and SIGTERM end it, with the process in which scenes run. It prints what it had counted then.
"""

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from penstock.testing.engine import load_tokenizer
from sim.world.regions.scene import REGIONS_LEVEL, RegionScene, draw_plan
from sim.world.scene import Plan, Scene, Verdict, shorten_plan
from sim.world.servers import LEVELS

SCENES_OF_A_PROCESS = 50
"""How many scenes run in one process. With it alone are threads freed that never end: a greenlet that is freed before
runs to its end first, in the product's `finally`s.
"""

REGION_SCENES_OF_A_PROCESS = 10
"""The same of two regions, whose gateways take more memory."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""The exit status after one of these signals."""


@dataclass
class Tally:
    """What was counted of all scenes that have ended."""

    requests: int = 0
    kills: int = 0
    starts_and_stops: int = 0
    findings: int = 0
    processor_s: float = 0.0
    is_interrupted: bool = False


def bind_to_parent() -> None:
    """Let this process, in which scenes run, end with the one that started it. That one alone deals with signals."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def run_scene(plan: Plan, *, shorten: bool) -> tuple[Verdict, float]:
    """Return the verdict of a plan's run, or of the shortest one that finds something as well, and the processor's time
    that it took.
    """
    make_scene = RegionScene if plan.level == REGIONS_LEVEL else Scene
    begun_s, verdict = time.process_time(), make_scene(plan).run()
    if verdict.findings and shorten:
        short = shorten_plan(plan, make_scene, lambda what: print(f"    still found {what}", flush=True))
        verdict = make_scene(short).run()
    return verdict, time.process_time() - begun_s


def main(*words: str) -> None:
    """Run scenes as the words of the command say, this process's if there are none, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m sim.world")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument(
        "--level", default="", choices=["", *LEVELS, REGIONS_LEVEL], help="one for all seeds; else drawn by the seed"
    )
    parser.add_argument("--until-found", action="store_true", help="end with the first seed that finds something")
    parser.add_argument(
        "--max-s", type=float, default=1e9, help="begin no new seed after so many seconds of the processor"
    )
    parser.add_argument(
        "--shorten", action="store_true", help="leave out mishaps and requests that a finding does not need"
    )
    parser.add_argument(
        "--rate", action="append", default=[], metavar="NAME=VALUE", help="a rate of mishaps in place of the drawn one"
    )
    parser.add_argument("--history", action="store_true", help="print what happened")
    given = parser.parse_args(words or None)
    if os.environ.get("PYTHONHASHSEED") != "0":  # else the order of sets differs from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "sim.world", *sys.argv[1:]])
    gc.freeze()  # what is imported lives on: looking through it again and again takes a tenth of the time
    load_tokenizer()
    begun_s, tally = time.monotonic(), Tally()

    def interrupt_run(*_: object) -> None:
        tally.is_interrupted = True
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt_run)
    try:
        run_seeds(given, tally)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.kill()
    per_s = tally.requests / (time.monotonic() - begun_s)
    print(
        f"{tally.requests} requests, {tally.kills} kills, {tally.findings} findings, {per_s:.0f} requests/s, "
        f"{tally.starts_and_stops} starts and stops",
        flush=True,
    )
    if tally.is_interrupted:
        os._exit(INTERRUPTED)  # the pool would wait for its process


def run_seeds(given: argparse.Namespace, tally: Tally) -> None:
    """Run scenes as the command says, and print what was found."""
    exits = contextlib.ExitStack()
    for seed in range(given.seed, given.seed + given.seeds):
        if tally.is_interrupted:  # Python drops what a signal raises in the hooks of a fork
            raise KeyboardInterrupt
        if tally.processor_s > given.max_s or (given.until_found and tally.findings):
            break
        is_regions = given.level == REGIONS_LEVEL
        plan = (draw_plan if is_regions else Plan.draw)(seed, given.requests, given.level)
        rates = {name: float(value) for name, _, value in (rate.partition("=") for rate in given.rate)}
        plan = replace(plan, rates=replace(plan.rates, **rates))
        if (seed - given.seed) % (REGION_SCENES_OF_A_PROCESS if is_regions else SCENES_OF_A_PROCESS) == 0:
            exits.close()
            context = multiprocessing.get_context("fork")
            process = exits.enter_context(ProcessPoolExecutor(1, context, bind_to_parent))
        verdict, scene_s = process.submit(run_scene, plan, shorten=given.shorten).result()
        tally.requests, tally.kills = tally.requests + verdict.requests, tally.kills + verdict.kills
        tally.starts_and_stops += verdict.starts_and_stops
        tally.findings, tally.processor_s = tally.findings + len(verdict.findings), tally.processor_s + scene_s
        told = hashlib.sha256(json.dumps(verdict.history, sort_keys=True).encode()).hexdigest()[:12]
        if verdict.findings or given.seeds == 1:
            print(f"seed {seed}: {verdict.requests} requests, {verdict.kills} kills, {verdict.virtual_s:.0f} s, {told}")
        for finding in verdict.findings:
            print(f"    {finding.kind}: {finding.id}: {finding.description}")
        if given.history:
            for entry in verdict.history:
                print(json.dumps(entry))
    exits.close()


if __name__ == "__main__":
    main()
