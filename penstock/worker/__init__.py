"""What workers are made of: the frame of the loop, its inbox, settling in the background, the heartbeat.

The loop itself, `worker.py`, stands above engine and kvstore; what is named here needs neither.
"""

from penstock.worker.failures import Failures, cause_of, cause_to_end, is_suspect, letters, too_late
from penstock.worker.heartbeat import Heartbeat, slot_name, stay_on
from penstock.worker.inbox import Inbox, pack, unpack
from penstock.worker.load import Held, Load
from penstock.worker.loop import StopSignal, run_until_idle, serve
from penstock.worker.outage import Outages
from penstock.worker.rescue import Rescue
from penstock.worker.settler import Settler

__all__ = [
    "Failures",
    "Heartbeat",
    "Held",
    "Inbox",
    "Load",
    "Outages",
    "Rescue",
    "Settler",
    "StopSignal",
    "cause_of",
    "cause_to_end",
    "is_suspect",
    "letters",
    "pack",
    "run_until_idle",
    "serve",
    "slot_name",
    "stay_on",
    "too_late",
    "unpack",
]
