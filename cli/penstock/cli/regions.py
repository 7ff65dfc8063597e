"""`penstock regions list | adopt | join | give-back`: the regions that are copied to this one, and their adoption."""

import getpass
import json
import socket
import time
import uuid
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.config.addresses import Addresses
from penstock.config.settings import RegionSettings, load_group, load_settings
from penstock.errors import SettingsError
from penstock.names import REGION_JOINED_KEY, Pipeline
from penstock.redis.client import redis_client

app = typer.Typer(help="Show the regions that are copied here; adopt one that died.", no_args_is_help=True)

Region = Annotated[str, typer.Argument(metavar="NAME", help="A region in PENSTOCK_REGION_COPIES.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_regions(as_json: AsJson = False) -> None:
    """The regions that are copied here: what is open there, how old the copy is, and who adopted them when."""
    from penstock.ingest.regions.adopting import list_pipelines, read_marks
    from penstock.ingest.regions.copies import read_copy_state

    addresses, rows = load_settings(Addresses), list[dict[str, Any]]()
    with redis_client(addresses.first_url) as client:
        marks = read_marks(client)
        for region in sorted({*load_settings(RegionSettings).list_copies(), *marks}):
            mark = marks.get(region)
            states = {
                name: read_copy_state(client, Pipeline(name), region) for name in list_pipelines(client, addresses)
            }
            pipelines = {name: state._asdict() for name, state in states.items()}
            rows.append({"region": region, "pipelines": pipelines, "adopted": mark._asdict() if mark else None})
    if as_json:
        print(json.dumps(rows, indent=1))  # noqa: T201
        return
    console = Console(highlight=False)
    console.print(_build_table(rows) if rows else "no region is copied here: PENSTOCK_REGION_COPIES names none")


@app.command("adopt")
def adopt(
    region: Region,
    force: Annotated[
        bool, typer.Option("--force", help="Though its gateways, or other regions, say otherwise.")
    ] = False,
) -> None:
    """Answer here what is open in a region that died. Started again, it goes on where it was interrupted.

    It is refused while the region's gateways take connections, and where another region has adopted it or does not
    answer. docs/regions.md has the list of what to look at first.
    """
    from penstock.ingest.regions.adopting import AdoptionSettings, adopt_region

    _check_copied(region)
    addresses, begun_s = load_settings(Addresses), time.monotonic()
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    with redis_client(addresses.first_url) as client:
        mark = adopt_region(client, addresses, load_group(AdoptionSettings), region, who, force=force)
    for pipeline, counts in mark.pipelines.items():
        print(  # noqa: T201
            f"{pipeline}: {counts['taken']:,} open requests of {region} are answered here, {counts['late']:,} of them "
            f"after their deadline; {counts['interrupted']:,} end with answer_interrupted, as other tokens of them may "
            f"have been seen; {counts['newer']:,} came after the copy's newest heartbeat and may be computed "
            f"twice; {counts['without_card']:,} cannot be streamed by a gateway; {counts['gone']:,} are in no copy"
        )
    if not mark.pipelines:
        print(f"nothing of {region} is copied to {addresses.kafka}")  # noqa: T201
    print(f"published within {time.monotonic() - begun_s:.1f} s")  # noqa: T201


@app.command("join")
def join(
    force: Annotated[bool, typer.Option("--force", help="Begin though a peer does not answer.")] = False,
) -> None:
    """Say whether workers of this region may begin; with --force let those begin that wait now.

    A region that was away waits until its gateways have asked all peers what these have adopted of it. If a peer
    cannot answer, and has adopted nothing, an operator says so.
    """
    from penstock.ingest.regions.returning import JOINED_LASTS_S

    region = load_settings(RegionSettings).name
    with redis_client(load_settings(Addresses).first_url) as client:
        if force:
            client.set(REGION_JOINED_KEY, uuid.uuid4().hex, ex=JOINED_LASTS_S)
        has_joined = client.exists(REGION_JOINED_KEY)
    print(f"workers of {region} {'may begin' if has_joined else 'wait for the answers of its peers'}")  # noqa: T201
    raise typer.Exit(0 if has_joined else 1)


@app.command("give-back")
def give_back(
    region: Region,
    force: Annotated[
        bool, typer.Option("--force", help="Though no gateway there says that it has ended that.")
    ] = False,
) -> None:
    """Forget that a region was adopted, once it is back and has ended what was answered here."""
    from penstock.ingest.regions.adopting import give_back as forget
    from penstock.ingest.regions.adopting import read_marks

    addresses = load_settings(Addresses)
    with redis_client(addresses.first_url) as client:
        if region not in read_marks(client):
            raise SettingsError(f"{region} is not adopted here: see penstock regions list")
        forget(client, addresses, load_settings(RegionSettings), region, force=force)
    print(f"{region} decides about its requests again")  # noqa: T201


def _check_copied(region: str) -> None:
    copies = load_settings(RegionSettings).list_copies()
    if region not in copies:
        named = ", ".join(copies) or "none"
        raise SettingsError(f"{region!r} is not copied here: PENSTOCK_REGION_COPIES names {named}")


def _build_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("region", "pipeline", "open", "copy's age", "adopted", box=None, header_style="bold")
    for row in rows:
        mark = row["adopted"]
        words = "" if mark is None else f"{_describe_time(mark['since_s'])} by {mark['by']}"
        if mark is not None and mark["done_s"] is None:
            words += ", not finished: adopt again"
        for name, state in row["pipelines"].items():
            age = "no heartbeat" if state["age_s"] is None else f"{state['age_s']:.1f} s"
            table.add_row(row["region"], name, f"{state['num_open']:,}", age, words)
    return table


def _describe_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
