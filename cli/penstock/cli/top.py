"""`penstock top`: the pipeline, live, in this terminal."""

import logging
import sys

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import DependencyMissing, PenstockError


def top() -> None:
    """Watch lag, workers, hit shares and latencies. q quits, p pauses, s sorts the workers, arrows scroll."""
    try:
        from penstock.top.app import TopApp
    except ImportError as error:
        raise DependencyMissing(f"`penstock top` needs pip install 'penstock[top]' ({error})") from None
    from penstock.ops.live import LiveWatch

    watch = LiveWatch(load_settings(Addresses), load_settings(BusSettings))
    if not sys.stdout.isatty():
        raise PenstockError("`penstock top` draws on a terminal; for programs there is `penstock lag --json --watch`")
    logging.disable()  # errors are shown on the screen
    TopApp(watch.read_latest).run()
