"""What both workers are made of: the frame of the loop, its inbox, settling in the background, the heartbeat."""

from penstock.worker.ends import cause_to_end, too_late
from penstock.worker.failures import Failures, cause_of, is_suspect, letters
from penstock.worker.heartbeat import Heartbeat, slot_name, stay_on
from penstock.worker.inbox import Inbox
from penstock.worker.load import Held, Load
from penstock.worker.loop import StopSignal, run_until_idle, serve
from penstock.worker.outage import Outages
from penstock.worker.parcel import pack, unpack
from penstock.worker.rescue import Rescue
from penstock.worker.settler import Settler
from penstock.worker.stage import StageWorker

__all__ = [
    "Failures",
    "Heartbeat",
    "Held",
    "Inbox",
    "Load",
    "Outages",
    "Rescue",
    "Settler",
    "StageWorker",
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
