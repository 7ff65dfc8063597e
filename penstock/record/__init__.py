"""The record of a request in Redis: who holds it, which job settles it, and everything it has said.

`Record` is the workers' side (claim, append, finish, …), `Session` says that a worker lives, `Log` is for readers.
Each change is one Lua script under `lua/`, which says what a crash around it costs.
"""

from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, Conflict, News, TakenOver, body_hash
from penstock.record.log import AsyncLog, Log, Status, parse_event
from penstock.record.record import Record, Waiting
from penstock.record.session import Session
from penstock.record.spread import Sessions, connect_servers, record_on

__all__ = [
    "AppendOutcome",
    "AsyncLog",
    "Bound",
    "Busy",
    "Claim",
    "Conflict",
    "Log",
    "News",
    "Record",
    "Session",
    "Sessions",
    "Status",
    "TakenOver",
    "Waiting",
    "body_hash",
    "connect_servers",
    "parse_event",
    "record_on",
]
