"""The record of a request in Redis: its holder, the job that settles it, and the token log.

`Record` is the workers' side (claim, append, finish, …), `Session` says that a worker lives, `TokenLog` is for readers.
Each change is one Lua script under `lua/`, which says what a crash around it costs.
"""

from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, ClaimEvent, Conflict, TakenOver
from penstock.record.log import AsyncTokenLog, RequestStatus, TokenLog, parse_event
from penstock.record.record import Record, UnclaimedMessage, check_server_key_types
from penstock.record.session import Session
from penstock.record.sharded import ShardedSession, check_key_types, connect_servers, open_record

__all__ = [
    "AppendOutcome",
    "AsyncTokenLog",
    "Bound",
    "Busy",
    "Claim",
    "ClaimEvent",
    "Conflict",
    "Record",
    "RequestStatus",
    "Session",
    "ShardedSession",
    "TakenOver",
    "TokenLog",
    "UnclaimedMessage",
    "check_key_types",
    "check_server_key_types",
    "connect_servers",
    "open_record",
    "parse_event",
]
