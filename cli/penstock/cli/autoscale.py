"""`penstock autoscale`: say how many workers of each kind the load needs."""

from typing import Annotated

import typer

from penstock.autoscale.controller import Bounds
from penstock.autoscale.service import AutoscaleService
from penstock.autoscale.sizing import Targets
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, EngineSettings, SloSettings, load_settings
from penstock.errors import SettingsError
from penstock.worker.loop import StopSignal


def parse_bounds(text: str, option: str = "--workers") -> Bounds:
    """Return the bounds that `MIN..MAX` means. Raises `SettingsError`."""
    least, dots, most = text.partition("..")
    if not dots or not least.isdecimal() or not (most.isdecimal() or not most):
        raise SettingsError(f"{option} {text}: write MIN..MAX, such as 1..6, or MIN.. without a bound")
    if most and not max(1, int(least)) <= int(most):
        raise SettingsError(f"{option} {text}: MAX is at least 1, and not below MIN")
    return Bounds(int(least), int(most) if most else None)


def open_service(addresses: Addresses, bounds: Bounds) -> AutoscaleService:
    """Return the controller of a pipeline, with the targets of the settings."""
    slo = load_settings(SloSettings)
    targets = Targets(slo.interactive_ttft_s, slo.interactive_gap_s)
    block_size = load_settings(EngineSettings).block_size
    return AutoscaleService(addresses, load_settings(BusSettings), targets, bounds, block_size)


def autoscale(
    workers: Annotated[
        str, typer.Option(help="The least and the most workers, of all kinds together; 0..: none while nothing comes.")
    ] = "1..",
) -> None:
    """Say how many workers of each kind the load needs, and why. It starts none: KEDA does, or `penstock up --auto`."""
    service = open_service(load_settings(Addresses), parse_bounds(workers))
    try:
        service.run_until_stopped(StopSignal().install().wait)
    finally:
        service.close()
