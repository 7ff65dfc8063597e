"""`penstock weights pack | fetch`: write the packed weights of a model into a file, which workers map when they start,
or get the file of another region.
"""

from pathlib import Path
from typing import Annotated, Literal

import httpx2
import typer
from rich.console import Console
from rich.markup import escape

from penstock.cli.kv_show import format_bytes
from penstock.config.settings import EngineSettings, RegionSettings, load_settings
from penstock.engine.weights.files import check_model_here, ignore_progress
from penstock.errors import ModelLoadError, ModelUnavailable, SettingsError
from penstock.regions import PEER_HEADER

app = typer.Typer(help="Pack the weights of a model for the kernels.", no_args_is_help=True)
ANSWER_S = 30.0
"""The longest silence of a peer that sends a file."""


@app.callback()
def add_group() -> None:
    """Pack the weights of a model for the kernels."""


@app.command("pack")
def pack_weights(
    model: Annotated[str, typer.Argument(help="A directory or a hub name, as in PENSTOCK_ENGINE_MODEL.")],
    weights: Annotated[
        Literal["auto", "p12", "int8", "int4", "bf16"] | None,
        typer.Option(help="The form of the weights; PENSTOCK_ENGINE_WEIGHTS."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file. Without it, one beside the model, or in the cache, that is found.")
    ] = None,
) -> None:
    """Load and prove a model, and write its packed weights into a file. Workers of these settings then map it."""
    check_model_here(model, ignore_progress)
    from penstock.engine.opening import pack_model

    given = {"model": model} | ({"weights": weights} if weights else {})
    file = pack_model(load_settings(EngineSettings, **given), out)
    stored = file.about["checkpoint_bytes"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {escape(str(file.path))}: {format_bytes(file.num_bytes)}, {format_bytes(stored)} as stored")
    console.print(f"digest {file.digest}")
    if out is not None:
        console.print("a worker maps it with PENSTOCK_ENGINE_PACKED set to this path")


@app.command("fetch")
def fetch_weights(
    model: Annotated[str, typer.Argument(help="A directory or a hub name, as in PENSTOCK_ENGINE_MODEL.")],
    digest: Annotated[str, typer.Argument(help="Which file: the digest that `penstock weights pack` prints.")],
    region: Annotated[
        str | None, typer.Option("--from", help="The region that has it. Without it all peers are asked in turn.")
    ] = None,
) -> None:
    r"""Get a model's packed weights from a gateway of another region, and put them where workers here find them.

    The same command goes on where an earlier one was interrupted.

    \b
    1  what is there of the file already is kept, and the rest is asked for
    2  all of the file is read: its digest is the one asked for, and each tensor has its hash
    3  it gets its name; a crash before that leaves no file that a worker would find
    """
    settings = load_settings(RegionSettings)
    peers = settings.list_peers()
    if not peers or (region is not None and region not in peers):
        known = f"has no region {region!r}" if peers else "is empty: name the gateways of the other regions"
        raise SettingsError(f"PENSTOCK_REGION_PEERS {known}")
    check_model_here(model, ignore_progress)
    from penstock.engine.opening import accept_packed_file, find_packed_place

    place = find_packed_place(load_settings(EngineSettings, model=model))
    place.parent.mkdir(parents=True, exist_ok=True)
    received = place.with_name(f".{place.name}.{digest}.unfinished")
    for name in [region] if region else peers:
        if _receive_file(f"{peers[name]}/v1/penstock/weights/{digest}", settings.secret, received):
            break
    else:
        raise ModelLoadError(f"no packed file with the digest {digest} at {region or ', '.join(peers)}")
    try:
        file = accept_packed_file(received, place, digest, ignore_progress)
    except ModelLoadError:
        received.unlink()
        raise
    Console(highlight=False, soft_wrap=True).print(f"wrote {escape(str(file.path))}: {format_bytes(file.num_bytes)}")


def _receive_file(url: str, secret: str, received: Path) -> bool:
    """Append to a file what it lacks of the one at an address; return whether there is one.

    Raises `ModelUnavailable` where the connection breaks: what has come is kept.
    """
    with received.open("ab") as out:
        headers = {PEER_HEADER: secret, "Range": f"bytes={out.tell()}-"}
        try:
            with httpx2.stream("GET", url, headers=headers, timeout=ANSWER_S, trust_env=False) as answer:
                if answer.status_code == 416:  # nothing is left to send
                    return True
                if answer.status_code == 404:
                    return False
                if answer.status_code == 200:  # all of it, whatever was asked for
                    out.truncate(0)
                for piece in answer.raise_for_status().iter_raw():
                    out.write(piece)
        except httpx2.HTTPError as error:
            raise ModelUnavailable(f"{url}: {error}; the same command goes on with what has come") from error
    return True
