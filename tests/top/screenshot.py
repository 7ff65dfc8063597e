"""A picture of `penstock top` on a busy pipeline.

python -m tests.top.screenshot docs/screenshots/top.svg
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from penstock.config.settings import BusSettings
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.ops.live import LiveWatch
from penstock.top.app import TopApp
from tests.top import busy

SIZE = (96, 26)
BUSY_LOOKS = 25
"""So many looks make a sparkline."""


async def picture(stack: Stack) -> str:
    """The screen as SVG, after the sparklines have filled."""
    app = TopApp(LiveWatch(stack.addresses, BusSettings()).read_latest)
    async with app.run_test(size=SIZE) as pilot:
        for _ in range(BUSY_LOOKS):
            busy.submit_requests(stack, 6, 150)
            before = app.snapshot
            while app.snapshot is before:
                await pilot.pause(0.1)
        return without_fonts(app.export_screenshot(title="penstock top"))


def without_fonts(svg: str) -> str:
    """The same without fonts from elsewhere: whoever looks at it asks nobody."""
    return re.sub(r"@font-face\s*{[^}]*}\s*", "", svg)


def main() -> None:
    """Start a pipeline, look, write the file."""
    file = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as scratch,
        ValkeyServer(Path(scratch, "server")) as server,
        busy.start_pipeline(Path(scratch, "stack"), server, decode=1, auto=1) as stack,
    ):
        svg = asyncio.run(picture(stack))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(svg)


if __name__ == "__main__":
    main()
