"""`penstock kv` as a user runs it, on real tiers that others have filled."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config.addresses import Addresses
from penstock.kvstore.codec import LOSSLESS
from penstock.kvstore.codec.lossless import LosslessCodec
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tools import TierLocation as Shown
from penstock.kvstore.tools import codec_name, inspect_block
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
    assert "does not answer" in host.kv("verify", "--tier", "redis", PENSTOCK_KV_URL=away, code=1)
    assert "removed" not in host.kv("evict", "--all", "--yes", "--tier", "redis", PENSTOCK_KV_URL=away, code=1)


@pytest.mark.proof
def test_inspect_by_a_beginning_of_the_key(host: Host) -> None:
    names = new_names(40)
    for kind in KINDS:
        put(host.tiers[kind], names[:1] if kind == "disk" else names)
    host.tiers["redis"].lease_blocks("a job", keys_of(names), 60)
    key = names[0].hash
    for beginning in (key.hex(), key.hex().upper(), key.hex()[:16]):
        shown = " ".join(host.kv("inspect", beginning).split())
        assert shown.count(key.hex()) == len(KINDS)
        for text in ("16", "raw, 3,000 bytes for 3,000", FORM.fingerprint.hex(), names[0].tenant_tag.hex(), "s ago"):
            assert shown.count(text) >= len(KINDS)
        assert "leases 1" in shown
        assert "leases 0" in shown
        assert shown.count("right") == 2 * len(KINDS)
    several = sorted(name.hash.hex() for name in names)
    shared = next(a[:1] for a, b in itertools.pairwise(several) if a[0] == b[0])
    assert f"keys begin with {shared}" in host.kv("inspect", shared, code=1)
    assert "no block's key begins with" in host.kv("inspect", "0" * 64, code=1)
    assert "is no key of a block" in host.kv("inspect", "xyz", code=1)


def flipped(at: int) -> Change:
    return lambda stored: stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_named_and_removed(host: Host, kind: str) -> None:
    for tier in host.tiers.values():
        assert all(put(tier, new_names(20)))
    tier, other = host.tiers[kind], new_names(1)[0]
    bad = new_names(4)
    put(tier, [*bad, other])
    stranger = tier.read_stored(other.hash) or b""
    num_blocks = 20 * len(KINDS) + 5
    assert f"checked {num_blocks} blocks" in (whole := host.kv("verify"))
    assert "all whole" in whole
    host.damage(kind, bad[0].hash, flipped(10))
    host.damage(kind, bad[1].hash, flipped(3000))
    host.damage(kind, bad[2].hash, lambda stored: stored[:1500])
    host.damage(kind, bad[3].hash, lambda _: stranger)
    expected = {
        bad[0]: "the header's checksum is wrong",
        bad[1]: "the content's checksum is wrong",
        bad[2]: "the content's checksum is wrong" if kind != "redis" else "1,308 bytes of content, 3,000 were written",
        bad[3]: f"it is another block, {other.hash.hex()[:16]}…",
    }
    shown = host.kv("verify", code=1)
    assert f"checked {num_blocks} blocks" in shown
    assert "4 damaged" in shown
    for name, problem in expected.items():
        assert f"{name.hash.hex()}\n       {problem}" in shown
    for name in (bad[1], bad[3]):
        assert expected[name] in " ".join(host.kv("inspect", name.hash.hex(), code=1).split())
    assert "4 damaged, 4 removed" in host.kv("verify", "--tier", kind, "--remove", code=1)
    assert "checked 21 blocks" in host.kv("verify", "--tier", kind)
    assert not any(tier.has_blocks(keys_of(bad)))


def test_progress_is_shown_on_a_terminal_only(host: Host) -> None:
    for tier in host.tiers.values():
        put(tier, new_names(3))
    for is_terminal in (False, True):
        done = host.terminal("kv", "verify", **host.environment | ({"FORCE_COLOR": "1"} if is_terminal else {}))
        assert done.returncode == 0
        assert ("redis" in done.stderr) is is_terminal
        assert ("/s" in done.stderr) is is_terminal


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
    shown = host.kv("verify", "--tier", "shared")
    assert "checked 2 blocks" in shown
    assert "".join(shown.split()).count("isnotanarenaofthisversion") == 2


def test_nothing_there_is_said(tmp_path: Path) -> None:
    done = penstock(
        "kv", "verify", PENSTOCK_KV_STORE_REDIS_MB="0", PENSTOCK_KV_STORE_SHARED_DIR=str(tmp_path),
        PENSTOCK_KV_STORE_DISK_DIR=str(tmp_path / "none"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "there is no KV tier here" in done.stderr
    assert "Traceback" not in done.stderr


ALL = ("stats", "inspect 00", "verify", "evict --all")


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
        host, "torch", "transformers", "numpy", commands=("stats", "verify --tier shared")
    )
    assert code == 0, printed
    assert "redis" in printed
    assert asked == 1
    assert "pip install 'penstock[worker]'" in " ".join(told.split())
    for code, printed in without(host, "xxhash", commands=ALL):
        assert code == 1
        assert "pip install xxhash" in printed
        assert "Traceback" not in printed


def test_codecs_have_the_names_that_settings_have() -> None:
    assert codec_name(LOSSLESS) == LosslessCodec.name
    assert "number 9" in codec_name(9)


def test_a_block_that_is_being_replaced_is_read_again(host: Host) -> None:
    (name,) = new_names(1)
    tier = host.tiers["redis"]
    put(tier, [name])
    stored = tier.read_stored(name.hash) or b""
    host.damage("redis", name.hash, flipped(3000))

    class Replaced(Shown):
        def read_stored(self, key: bytes) -> bytes | None:
            found = super().read_stored(key)
            with redis.Redis.from_url(host.url) as client:
                client.set(f"penstock:kv:{key.hex()}", stored)
            return found

    finding = inspect_block(Replaced(tier, ""), name.hash)
    assert finding is not None
    assert not finding.problem
    assert inspect_block(Shown(tier, ""), bytes(32)) is None
