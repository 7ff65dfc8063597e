"""`penstock kv` as a user runs it, on real tiers that others have filled."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.addresses import Addresses
from penstock.kvstore.tiers.contract import Tier
from penstock.local.processes import find_free_port
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.ops.status import read_worker_status
from penstock.worker.heartbeat import Heartbeat
from sim.servers import serve_address
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import HERE, Terminal, penstock
from tests.kvstore import children, host_child
from tests.kvstore.blocks import FORM, keys_of, new_names, put
from tests.kvstore.places import Change, DiskPlace, Place, RedisPlace, SharedPlace

BUDGET = 2 * 2**20
KINDS = ("shared", "disk", "redis")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = ValkeyServer(tmp_path_factory.mktemp("kv"), appendonly=False)

    @contextlib.contextmanager
    def url() -> Iterator[str]:
        with made:
            yield made.url

    yield from serve_address(url())


class Host:
    """All tiers of a host, open as a worker has them."""

    def __init__(self, directory: Path, url: str, terminal: Terminal) -> None:
        self.directory, self.url, self.terminal = directory, url, terminal
        for name in ("shared", "disk"):
            (directory / name).mkdir()
        self.places: dict[str, Place] = {
            "shared": SharedPlace(directory / "shared"),
            "disk": DiskPlace(directory / "disk", directory / "shared"),
            "redis": RedisPlace(url),
        }
        self.tiers: dict[str, Tier] = {name: place.open(FORM, BUDGET) for name, place in self.places.items()}

    def damage(self, kind: str, key: bytes, change: Change) -> None:
        self.places[kind].damage(self.tiers[kind], key, change)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "COLUMNS": "80",
            "PENSTOCK_STREAM_URL": self.url,
            "PENSTOCK_KV_STORE_SHARED_DIR": str(self.directory / "shared"),
            "PENSTOCK_KV_STORE_DISK_DIR": str(self.directory / "disk"),
        }

    def kv(self, *arguments: str, code: int = 0, **environment: str) -> str:
        """What the command prints; it must end with `code`, and fit the terminal."""
        done = self.terminal("kv", *arguments, **self.environment | environment)
        assert done.returncode == code, done.stdout + done.stderr
        if "--json" in arguments:
            return done.stdout
        assert all(len(line) <= 80 for line in done.stdout.splitlines())
        return done.stdout + done.stderr


@pytest.fixture
def host(tmp_path: Path, server: str, terminal: Terminal) -> Iterator[Host]:
    made = Host(tmp_path, server, terminal)
    yield made
    for tier in made.tiers.values():
        tier.close()


@pytest.mark.proof
def test_stats_of_each_tier(host: Host) -> None:
    names = new_names(5)
    for tier in host.tiers.values():
        assert all(put(tier, names))
        tier.lease_blocks("a job", keys_of(names[:2]), 60)
    told = json.loads(host.kv("stats", "--json"))
    assert [row["tier"] for row in told["tiers"]] == list(KINDS)
    for row in told["tiers"]:
        usage = host.tiers[row["tier"]].read_usage()
        assert (row["blocks"], row["leased"]) == (5, 2)
        assert (row["bytes"], row["budget"]) == (usage.bytes, usage.budget)
    assert told["workers"] == {}
    shown = host.kv("stats")
    assert "no live worker says what it found" in shown
    assert all(kind in shown for kind in KINDS)


def test_stats_of_the_workers_are_summed_by_stage(host: Host) -> None:
    pipeline = Pipeline("stats")
    counters = {"hits": 3, "misses": 1, "damaged": 1, "bytes_read": 3 * 2**20, "bytes_written": 10}
    told = {"kv": {"pool": {"hits": 10, "misses": 0}, "shared": counters, "recomputed_jobs": 2, "not_worth": 7}}
    with contextlib.ExitStack() as stack:
        for stage, name, load in (
            ("prefill", "p0", told),
            ("prefill", "p1", told),
            ("prefill", "older", {}),
            ("decode", "d0", {"kv": {"redis": {"hits": 0, "misses": 0}}}),
            ("decode", "strange", {"kv": {"redis": {"hits": "many"}, "recomputed_jobs": None}}),
        ):
            beat = Heartbeat(host.url, pipeline, stage, name, 60.0)
            beat.set_load_source(lambda load=load: load)  # type: ignore[misc]
            stack.enter_context(beat)
        addresses = Addresses(stream_url=host.url, pipeline=pipeline.name)
        wait_for(lambda: sum("kv" in status for status in read_worker_status(addresses)) == 4, "they say it")
        stats = json.loads(host.kv("stats", "--json", PENSTOCK_PIPELINE=pipeline.name))
        shown = host.kv("stats", PENSTOCK_PIPELINE=pipeline.name)
    prefill, decode = stats["workers"]["prefill"], stats["workers"]["decode"]
    assert (prefill["workers"], prefill["recomputed_jobs"]) == (2, 4)
    shared = prefill["tiers"]["shared"]
    assert (shared["hits"], shared["misses"], shared["damaged"], shared["hit_rate"]) == (6, 2, 2, 0.75)
    assert (shared["bytes_read"], shared["bytes_written"]) == (6 * 2**20, 20)
    assert prefill["tiers"]["pool"]["hit_rate"] == 1
    assert (decode["workers"], decode["tiers"]["redis"]["hit_rate"]) == (2, None)
    for text in ("prefill, live workers: 2, jobs computed again: 4", "75.0%", "100.0%", "6.0 MiB"):
        assert text in shown


def test_stats_tell_of_a_server_that_is_away(host: Host) -> None:
    away = f"redis://127.0.0.1:{find_free_port()}/0"
    shown = host.kv("stats", PENSTOCK_KV_URL=away, code=1)
    assert "does not answer" in " ".join(shown.split())
    assert "shared" in shown
    shown = host.kv("evict", "--all", "--yes", "--tier", "redis", PENSTOCK_KV_URL=away, code=1)
    assert "does not answer" in shown
    assert "removed" not in shown


def test_progress_is_shown_on_a_terminal_only(host: Host) -> None:
    for is_terminal in (False, True):
        for tier in host.tiers.values():
            put(tier, new_names(3))
        environment = host.environment | ({"FORCE_COLOR": "1"} if is_terminal else {})
        done = host.terminal("kv", "evict", "--all", "--yes", **environment)
        assert done.returncode == 0
        assert ("redis" in done.stderr) is is_terminal
        assert (" kB" in done.stderr) is is_terminal


@pytest.mark.proof
def test_evict_takes_what_is_named_and_spares_what_is_leased(host: Host) -> None:
    names = new_names(6)
    for tier in host.tiers.values():
        put(tier, names)
        tier.lease_blocks("a job", keys_of(names[:1]), 60)
    assert "removed 6 blocks" in host.kv("evict", names[1].hash.hex(), names[2].hash.hex()[:20])
    assert "removed 1 blocks" in host.kv("evict", "--tier", "disk", names[3].hash.hex())
    assert "removed 0 blocks; 3 are leased" in " ".join(host.kv("evict", names[0].hash.hex()).split())
    assert "no block's key begins with" in host.kv("evict", names[1].hash.hex(), code=1)
    assert "removed 1 blocks" in host.kv("evict", "--tier", "redis", "--leased", names[0].hash.hex())
    here = {kind: tier.has_blocks(keys_of(names)) for kind, tier in host.tiers.items()}
    assert here == {
        "shared": [True, False, False, True, True, True],
        "disk": [True, False, False, False, True, True],
        "redis": [False, False, False, True, True, True],
    }


def test_evict_by_age(host: Host) -> None:
    for tier in host.tiers.values():
        put(tier, new_names(4))
    assert "removed 0 blocks" in host.kv("evict", "--older-than", "1h")
    assert "removed 12 blocks" in host.kv("evict", "--older-than", "0.001s")
    assert "no time" in host.kv("evict", "--older-than", "soon", code=2)
    assert "one of them" in host.kv("evict", code=2)
    assert "one of them" in host.kv("evict", "--all", "--older-than", "1h", code=2)


def test_evict_asks_before_it_takes_all(host: Host) -> None:
    for tier in host.tiers.values():
        put(tier, new_names(300))
    for answer, code, left in (("", 1, 300), ("n\n", 1, 300), ("y\n", 0, 0)):
        done = host.terminal("kv", "evict", "--all", typed=answer, **host.environment)
        assert done.returncode == code, done.stderr
        assert "Remove 900 blocks from shared, disk, redis?" in done.stdout
        assert [tier.read_usage().blocks for tier in host.tiers.values()] == [left] * 3
    for tier in host.tiers.values():
        put(tier, new_names(2))
    assert "removed 6 blocks" in host.kv("evict", "--all", "--yes")


def test_an_arena_that_is_half_made_hides_no_other(host: Host) -> None:
    """Its maker was killed; it is the first in order, and one of another version the last."""
    directory, user = host.directory / "shared", os.geteuid()
    put(host.tiers["shared"], new_names(2))
    assert children.start(host_child.main, directory, "die", "shared", "open.2", "1").wait(PATIENCE_S) == -9
    (directory / "log").unlink()
    (half,) = (path for path in directory.iterdir() if not path.read_bytes()[:8].strip(b"\0"))
    half.rename(directory / f"penstock-kv-{user}-{'0' * 16}-demo")
    other = directory / f"penstock-kv-{user}-{'f' * 16}-demo"
    other.touch(0o600)
    other.write_bytes(b"PKVARENA\2".ljust(8192, b"\0"))
    shown = " ".join(host.kv("stats", "--json").split())
    assert [row["blocks"] for row in json.loads(shown)["tiers"] if row["tier"] == "shared"] == [2]
    shown = host.kv("evict", "--tier", "shared", "--all", "--yes")
    assert "removed 2 blocks" in shown
    assert "".join(shown.split()).count("isnotanarenaofthisversion") == 2


def test_nothing_there_is_said(tmp_path: Path) -> None:
    done = penstock(
        "kv", "stats", PENSTOCK_KV_STORE_REDIS_MB="0", PENSTOCK_KV_STORE_SHARED_DIR=str(tmp_path),
        PENSTOCK_KV_STORE_DISK_DIR=str(tmp_path / "none"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "there is no KV tier here" in done.stderr
    assert "Traceback" not in done.stderr


ALL = ("stats", "evict --all")


def without(host: Host, *modules: str, commands: tuple[str, ...] = ("stats",)) -> list[tuple[int, str]]:
    """How commands end where some packages are not installed, and what they print, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(modules), json.dumps(commands)],
        env=os.environ | host.environment, cwd=HERE, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [(code, printed) for code, printed in json.loads(done.stdout)]


WITHOUT = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
from penstock.cli.main import main
told = []
for command in json.loads(sys.argv[2]):
    sys.argv = ["penstock", "kv", *command.split()]
    with io.StringIO() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as ended:
            told.append((ended.code or 0, out.getvalue()))
print(json.dumps(told))
"""


def test_redis_needs_nothing_of_a_worker_but_xxhash(host: Host) -> None:
    put(host.tiers["redis"], new_names(2))
    ((code, _),) = without(host, "torch", "transformers")
    assert code == 0
    (code, printed), (asked, told) = without(
        host, "torch", "transformers", "numpy", commands=("stats", "evict --all --yes --tier shared")
    )
    assert code == 0, printed
    assert "redis" in printed
    assert asked == 1
    assert "pip install 'penstock[worker]'" in " ".join(told.split())
    for code, printed in without(host, "xxhash", commands=ALL):
        assert code == 1
        assert "pip install xxhash" in printed
        assert "Traceback" not in printed
