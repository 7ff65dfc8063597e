"""`python -m sim.world --seed N --requests M`."""

import argparse
import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from penstock.testing.engine import load_tokenizer
from sim.world.scene import Plan, Scene, Verdict, shorten_plan
from sim.world.servers import LEVELS

SCENES_OF_A_PROCESS = 50
"""How many scenes run in one process. With it alone are threads freed that never end: a greenlet that is freed before
runs to its end first, in the product's `finally`s.
"""


def run_scene(plan: Plan, *, shorten: bool) -> tuple[Verdict, float]:
    """Return the verdict of a plan's run, or of the shortest one that finds something as well, and the processor's time
    that it took.
    """
    begun_s, verdict = time.process_time(), Scene(plan).run()
    if verdict.findings and shorten:
        verdict = Scene(shorten_plan(plan, lambda what: print(f"    still found {what}", flush=True))).run()
    return verdict, time.process_time() - begun_s


def main(*words: str) -> None:
    """Run scenes as the words of the command say, this process's if there are none, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m sim.world")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--level", default="", choices=["", *LEVELS], help="one for all seeds; else drawn by the seed")
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
    begun_s, used_s, total, kills, found, exits = time.monotonic(), 0.0, 0, 0, 0, contextlib.ExitStack()
    for seed in range(given.seed, given.seed + given.seeds):
        if used_s > given.max_s or (given.until_found and found):
            break
        plan = Plan.draw(seed, given.requests, given.level)
        rates = {name: float(value) for name, _, value in (rate.partition("=") for rate in given.rate)}
        plan = replace(plan, rates=replace(plan.rates, **rates))
        if (seed - given.seed) % SCENES_OF_A_PROCESS == 0:
            exits.close()
            process = exits.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("fork")))
        verdict, scene_s = process.submit(run_scene, plan, shorten=given.shorten).result()
        used_s += scene_s
        total, kills, found = total + verdict.requests, kills + verdict.kills, found + len(verdict.findings)
        told = hashlib.sha256(json.dumps(verdict.history, sort_keys=True).encode()).hexdigest()[:12]
        if verdict.findings or given.seeds == 1:
            print(f"seed {seed}: {verdict.requests} requests, {verdict.kills} kills, {verdict.virtual_s:.0f} s, {told}")
        for finding in verdict.findings:
            print(f"    {finding.kind}: {finding.id}: {finding.description}")
        if given.history:
            for entry in verdict.history:
                print(json.dumps(entry))
    exits.close()
    spent_s = time.monotonic() - begun_s
    print(f"{total} requests, {kills} kills, {found} findings, {total / spent_s:.0f} requests/s")


if __name__ == "__main__":
    main()
