"""`penstock weights fetch`: a packed file comes from a gateway of another region, whole or not at all."""

import shutil
from pathlib import Path

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.loading.loading import open_model
from penstock.engine.loading.packed import pack_model
from penstock.names import Pipeline
from tests.commands import Terminal
from tests.engine.helpers import needs_kernels
from tests.gateways import GatewayProcess, ScriptedPipeline

pytestmark = [needs_kernels, pytest.mark.proof]

SECRET = "weights for the other one"


def describe_engine(model: Path, cache: Path) -> dict[str, str]:
    return {"MODEL": str(model), "WEIGHTS": "bf16", "DTYPE": "bfloat16", "DEVICE": "cpu", "CACHE_DIR": str(cache)}


def test_packed_weights_of_another_region_are_mapped_here(
    tiny_dir: Path,
    tmp_path: Path,
    redis_url: str,
    pipeline: Pipeline,
    terminal: Terminal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there, here = (Path(shutil.copytree(tiny_dir, tmp_path / name / "model")) for name in ("there", "here"))
    engines = {folder: describe_engine(folder, folder.parent / "cache") for folder in (there, here)}
    settings = {
        folder: EngineSettings.model_validate({name.lower(): value for name, value in engine.items()})
        for folder, engine in engines.items()
    }
    file = pack_model(settings[there])
    served = {f"ENGINE_{name}": value for name, value in engines[there].items()}
    region = {"REGION_NAME": "us", "REGION_PEERS": "eu=http://127.0.0.1:9", "REGION_SECRET": SECRET}
    with (
        ScriptedPipeline(redis_url, pipeline) as made,  # a gateway is ready when it knows a worker
        GatewayProcess(made.addresses, tmp_path, served | region) as gateway,
    ):
        ours = {"REGION_NAME": "eu", "REGION_PEERS": f"us={gateway.url}", "REGION_SECRET": SECRET}
        ours |= {f"ENGINE_{name}": value for name, value in engines[here].items()}
        environment = {f"PENSTOCK_{name}": value for name, value in ours.items()}

        def fetch(digest: str, **changes: str) -> tuple[int, str]:
            done = terminal("weights", "fetch", str(here), digest, **environment | changes)
            return done.returncode, done.stdout + done.stderr

        assert "us" in fetch("0" * 32)[1]
        assert "no packed file" in fetch(file.digest, PENSTOCK_REGION_SECRET="another one, of sixteen")[1]
        assert "PENSTOCK_REGION_PEERS is empty" in fetch(file.digest, PENSTOCK_REGION_PEERS="")[1]
        assert not list(here.glob("*.packed"))

        half = here / f".{file.path.name}.{file.digest}.unfinished"
        content = file.path.read_bytes()
        damaged = bytearray(content[: len(content) // 2])
        damaged[-1] ^= 1
        half.write_bytes(damaged)
        assert "damaged" in fetch(file.digest)[1], "what was there is kept, and checked"
        assert not half.exists()

        half.write_bytes(content[: len(content) // 2])
        assert fetch(file.digest)[0] == 0
        assert (here / file.path.name).read_bytes() == content
        assert not half.exists()
    with caplog.at_level("INFO", logger="penstock.engine"):
        open_model(settings[here])
    assert "weights are mapped from" in caplog.text
