"""Flaws planted in the product, each of which the world must find: `python -m sim.world.flaws [--seeds N] [NAME …]`.

A flaw is a change of one place of the source. It is made in a copy of the package, on which the world runs with one
seed after the other until it finds something. The limit is a number of seeds, so the outcome is no machine's own.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.rooms import HOUSE

WORKER, RECORD, BUS = "worker/penstock/worker", "core/penstock/record", "core/penstock/bus"
ENDPOINT, INGEST = "worker/penstock/endpoint_worker", "ingest/penstock/ingest"
REGIONS = f"{INGEST}/regions"
FOLDERS = (*HOUSE, "docker", "sim")
LOST = ("region_s=5", "gateways=0", "task_s=0", "stays=0", "cancel=0", "deadlines=0")
"""The region is lost again and again, and requests go to its topics."""


@dataclass(frozen=True)
class Flaw:
    """A change that makes the product wrong."""

    name: str
    file: str
    before: str
    after: str
    level: str = "fast"
    """The level at which it is looked for."""
    rates: tuple[str, ...] = ()
    """Rates to set, where the drawn ones bring together what it takes in few runs alone."""


FEWER = ("gateways=0", "endpoint=0", "bug=0", "wedge=0", "poison=0", "hostile_s=0", "full_s=0")
"""Without these mishaps more of a run is about those that a flaw is seen by."""
LEAVES = (
    "leave_s=0.5", "attempts=2", "slow=0.5", "kill_s=0", "crash=0", "stall=0", "loss=0", "freeze_s=0", "away_s=0",
    "cut_s=0", "pause_s=0", "forget_s=0", "rebalance_s=0", *FEWER,
)  # fmt: skip
"""Workers leave again and again, and nothing else costs a request an attempt."""

SEES = ("pictures=0.8", "texts=0", "kv_loss=0.02", "autos=0.5", *FEWER)
"""Prompts have pictures, and KV of them is lost."""

FLAWS = (
    Flaw(
        "a refused token counts as written", f"{WORKER}/worker.py", "if AppendOutcome.FENCED in found:", "if False:",
        rates=("forget_s=0.1", "kill_s=0", "crash=0", *FEWER),
    ),
    Flaw(
        "a refused end counts as written", f"{WORKER}/worker.py",
        "if written is AppendOutcome.FENCED:", "if written is None:",
        rates=(
            "forget_s=0.05", "delay_s=0.1", "kill_s=0", "crash=0", "leave_s=0", "away_s=0", "freeze_s=0", "cut_s=0",
            "pause_s=0", "loss=0", *FEWER,
        ),
    ),
    Flaw(
        "the log is not read", f"{WORKER}/worker.py",
        "[event for event in claim.log if isinstance(event, TokenEvent)]", "[]",
    ),
    Flaw(
        "a stale job is kept", f"{WORKER}/intake.py",
        "self._settler.settle(Settlement(task.delivery))", "self.queue.defer(task.delivery)",
    ),
    Flaw(
        "a lost delivery counts as settled", f"{WORKER}/settler.py",
        "self._record_outcomes(gone, settled=False)", "self._record_outcomes(gone, settled=True)",
    ),
    Flaw(
        "a settlement that fails is forgotten", f"{WORKER}/settler.py",
        'log.warning("settling failed, trying again: %s", error)', "return",
    ),
    Flaw(
        "a job goes out twice under one name", f"{WORKER}/settler.py",
        "[_make_anew(pending) for pending in batch]", "batch",
    ),
    Flaw(
        "lost claims are kept", f"{WORKER}/worker.py",
        "if event is ClaimEvent.LOST:\n                    self._drop_lost_task(task)",
        "if event is ClaimEvent.LOST:\n                    continue",
        rates=("freeze_s=1", "kill_s=0", "crash=0", *FEWER),
    ),
    Flaw(
        "the session's thread ends in silence", f"{RECORD}/session.py",
        "if not (isinstance(error, redis.RedisError) and is_outage(error)):\n                self._failure = error\n",
        "if True:\n",
    ),
    Flaw(
        "refused claims are not released", f"{WORKER}/worker.py",
        "self.record.release_all([(task.claim, task.delivery.is_held) for task in tasks])", "pass",
        rates=(
            "forget_s=0.1", "kill_s=0", "crash=0", "leave_s=0", "away_s=0", "freeze_s=0", "cut_s=0", "pause_s=0",
            "loss=0", *FEWER,
        ),
    ),
    Flaw(
        "a deferred delivery is forgotten", f"{WORKER}/delivery_queue.py",
        "heapq.heappush(self._deferred, _Deferred(", "list((",
    ),
    Flaw(
        "a hand-off settles the message that came again", "testing/penstock/testing/bus.py",
        "delivery.is_held and held is delivery", "delivery.is_held and held is not None",
        rates=(
            "forget_s=0.1", "rebalance_s=0.5", "pause_s=8", "autos=0.5", "gateways=0", "endpoint=0", "bug=0", "loss=0",
            "kill_s=0", "crash=0", "leave_s=0", "away_s=0", "freeze_s=0", "cut_s=0", "deadlines=0", "cancel=0",
        ),
    ),
    Flaw(
        "a worker that was given up keeps its requests, and the engine too", f"{WORKER}/worker.py",
        "            self._hand_back()\n        self.settler.abandon()\n        self.engine.abandon()",
        "            pass\n        self.settler.abandon()", rates=("loss=0.3", "kill_s=0", *FEWER),
    ),
    Flaw(
        "an older task is not replaced", f"{WORKER}/worker.py",
        "older = self.running.get(task.id)\n        if older is None:", "older = None\n        if older is None:",
    ),
    Flaw(
        "free requests are not taken over", f"{WORKER}/worker.py",
        "for stage in self.intake.stages if accept else ():", "for stage in ():",
    ),
    Flaw(
        "expired sessions are not ended", f"{RECORD}/session.py",
        "self.num_free = self._record.end_expired_sessions(round(as_of_s * 1000))",
        "self.num_free = {stage: self._record.count_free(stage) for stage in STAGES}",
    ),
    Flaw(
        "a session that is over goes on", f"{RECORD}/session.py",
        "self._lost += self._claims\n            self._claims, self.id = {}, session", "self.id = session",
    ),
    Flaw(
        "a session is never renewed", f"{RECORD}/session.py",
        "if not self.is_stopped and not self._is_stalled():", "if False:",
    ),
    Flaw(
        "a hand-off is not noted", f"{WORKER}/worker.py",
        "self.record.note_all_handed_off(handed)", "pass",
        rates=(*LEAVES, "autos=0"),
    ),
    Flaw(
        "a hand-off that did not settle is noted", f"{WORKER}/worker.py",
        "left.append((task.claim, task.delivery.is_held))\n                continue", "pass",
    ),
    Flaw(
        "a result goes out before its end is written", f"{WORKER}/worker.py",
        "        for task, (claim, built, _), written in zip(",
        "        for task, (_, built, _) in zip(tasks, ends, strict=True):\n"
        "            if task.outcome is not None:\n"
        "                task.outcome = replace(task.outcome, end_event=built)\n"
        "                self._complete_task(task, begun_s)\n"
        "        for task, (claim, built, _), written in zip(",
    ),
    Flaw(
        "a token that was logged is sampled again", "prefill_worker/penstock/prefill_worker/role.py",
        "if task.hands_off and not is_first:\n            return None", "if False:\n            return None",
    ),
    Flaw(
        "an end that its own message settles is not bound", f"{WORKER}/task.py",
        'return self.name if is_own else ""', 'return ""', rates=("autos=1",),
    ),
    Flaw(
        "an end is bound to a message that was taken over without its delivery", f"{WORKER}/task.py",
        'self.claim.stage == "prefill" and self.delivery.is_held and not', 'self.claim.stage == "prefill" and not',
        rates=(
            "autos=0.5", "loss=0.3", "stall=0.08", "crash=0.03", "gone_s=1", "kill_s=0", "freeze_s=0", "away_s=0",
            "slow=0", "delete_s=0", "forget_s=0", "deadlines=0", "cancel=0", *FEWER,
        ),
    ),
    Flaw(
        "an end is bound to a message that goes on as a job", f"{WORKER}/task.py",
        "self.delivery.is_held and not self.hands_off", "self.delivery.is_held",
    ),
    Flaw(
        "a request's own message counts as another one", f"{WORKER}/task.py",
        "self.id, self.body_hash, self.name, message",
        'self.id, self.body_hash, "" if self.body_hash else self.name, message',
        rates=("autos=1",),
    ),
    Flaw(
        "an end that is bound to its own message goes on as a job", f"{WORKER}/worker.py",
        'task.leaving_for = "ended" if claim.is_unbound else ""', "pass", rates=("autos=0.5",),
    ),
    Flaw(
        "a result is settled of an end that is not bound", "prefill_worker/penstock/prefill_worker/role.py",
        "if not task.hands_off:\n            sampling",
        "if task.outcome is not None or not task.hands_off:\n            sampling",
    ),
    Flaw(
        "a result and its offset are not one transaction", f"{BUS}/kafka/settling.py",
        "if writer is not None and all(find_shared_topic(output.topic) != self._results_topic for output in outputs):",
        "if writer is not None:", "kafka",
        (
            "autos=0.5", "rebalance_s=0.4", "stall=0.02", "crash=0.005", "kill_s=0", "loss=0", "away_s=0", "freeze_s=0",
            "leave_s=0", "forget_s=0", *FEWER,
        ),
    ),
    Flaw(
        "what follows from a message of a tenant's own topic goes to the shared ones", f"{BUS}/contract.py",
        "_, own = split_topic(self.delivery.topic)", 'own = ""', "kafka", ("stays=0.5",),
    ),
    Flaw(
        "a job is published without its requester's reply topic",
        "prefill_worker/penstock/prefill_worker/handoff.py",
        "pick_reply_headers(told)", "{}", rates=("replies=0.8",),
    ),
    Flaw(
        "replies go to any topic", f"{BUS}/replies.py", "if not reply.topic.startswith(allowed):", "if False:",
        rates=("replies=0.8", *FEWER),
    ),
    Flaw(
        "a reply that is refused stops what is settled with it", f"{WORKER}/settler.py",
        'log.warning("replies are refused: %s", error)', "raise BusUnavailable(str(error)) from error",
        rates=("replies=0.8", "closing_s=0.5", *FEWER),
    ),
    Flaw(
        "a reply that brokers refuse leaves its transaction open", f"{BUS}/kafka/writers.py",
        "except ReplyRefused:\n            self._abort_refused()\n", "except ReplyRefused:\n", "kafka",
        ("replies=0.8", "closing_s=0.5", *FEWER),
    ),
    Flaw(
        "what was answered in a tenant's own topic before it was forgotten is answered again",
        f"{BUS}/kafka/places.py",
        "self._pipeline.results_topic + split_topic(topic)[1]", "self._pipeline.results_topic", "kafka",
        ("stays=1", "away_s=3", "delete_s=0"),
    ),
    Flaw(
        "who reads for a dead worker begins at the first message", f"{BUS}/kafka/orphans.py",
        "self._find_start(TopicPartition(*one, offset, metadata or \"\"), partial(_guess_bounds, consumer))",
        'StartPosition(max(0, offset), metadata or "", None)', "kafka",
        ("away_s=3", "kill_s=0", "freeze_s=0", *FEWER),
    ),
    Flaw(
        "claims of a worker that leaves are kept", f"{WORKER}/worker.py",
        "self.record.release_all([*((one.claim", "list([*((one.claim",
        rates=LEAVES,
    ),
    Flaw(
        "a message being read is forgotten by a worker that leaves", f"{WORKER}/message_reader.py",
        "claims = [(reading.claim, reading.delivery.is_held) for reading in self._open if reading.claim is not None]",
        "claims = []",
        rates=LEAVES,
    ),
    Flaw(
        "a settler whose thread died is not noticed", f"{WORKER}/settler.py",
        "self._thread.raise_failure()\n", "pass\n",
    ),
    Flaw(
        "tokens of a worker that lost its claim are written", f"{RECORD}/lua/append.lua",
        "if r[1] ~= ARGV[3] then return 0 end", "", "streams",
    ),
    Flaw(
        "a claim does not raise the epoch", f"{RECORD}/lua/claim.lua",
        "epoch = math.max(epoch + 1, now)\nlocal", "epoch = math.max(epoch, 1)\nlocal", "streams",
    ),
    Flaw(
        "a take-over does not raise the epoch", f"{RECORD}/lua/take.lua",
        "math.max(tonumber(r[1]) + 1, now)", "tonumber(r[1])", "streams",
    ),
    Flaw(
        "each job is claimed", f"{RECORD}/lua/claim.lua",
        "if bound ~= '' and bound ~= name then return {'bound'} end", "", "streams",
    ),
    Flaw(
        "the end of a worker that lost its claim is written", f"{RECORD}/lua/finish.lua",
        "if r[1] ~= ARGV[2] or r[2] ~= ARGV[3] then return 0 end", "", "streams",
        rates=("deadlines=0.9", "slow=0.3", "cut_s=3", "freeze_s=4", "kill_s=0", "crash=0", "leave_s=0", "away_s=0"),
    ),
    Flaw(
        "an ended request stays among those that its session holds", f"{RECORD}/lua/finish.lua",
        "if (r[4] or '') ~= '' then redis.call('SREM', string.format(ARGV[7], r[4]), ARGV[6]) end", "", "streams",
    ),
    Flaw(
        "what must not run twice is sent again", "core/penstock/redis/client.py",
        "connection.disconnect()\n        raise\n    finally", "connection.disconnect()\n"
        "        return execute_once(client, commands)\n    finally", "streams",
    ),
    Flaw(
        "a take-over whose reply was lost is sent again", f"{RECORD}/record.py",
        "(taken,) = TAKE.run_once(self._client, [TAKE.command(keys, args)])",
        "taken = TAKE.run(self._client, keys, args)", "streams",
    ),
    Flaw(
        "deliveries of another member are settled", f"{BUS}/streams/lua/settle.lua",
        "if #lost > 0 then return lost end", "", "streams",
    ),
    Flaw(
        "what a dead member held is forgotten", f"{BUS}/streams/lua/reclaim.lua",
        "if info.pending == 0 then", "if true then", "streams",
    ),
    Flaw(
        "a message that was not written counts as published", f"{BUS}/streams/bus.py",
        "with bus_errors():\n            replies", "with contextlib.suppress(redis.RedisError):\n            replies",
        "streams",
    ),
    Flaw(
        "an offset is committed too far", f"{BUS}/kafka/offsets.py",
        "first = next((offset for offset in self._unfinished if offset not in also), self._next)",
        "first = self._next", "kafka",
    ),
    Flaw(
        "a commit has the leader epoch of what was read last", f"{BUS}/kafka/offsets.py",
        "if not self._finished or self._finished[-1][1] < self._next:", "if True:", "kafka",
        ("pause_s=3", "rebalance_s=1", "gateways=0", "endpoint=0"),
    ),
    Flaw(
        "a claim behind the end binds the request's own message", f"{RECORD}/lua/claim.lua",
        "if bound == '' then remember_end(ARGV[13], tonumber(ARGV[14]), id, name, r[5] or '') end\n  end\n"
        "  return {'claim', epoch, tokens, hash, prefill and bound == '' and 2 or 1,",
        "end\n  redis.call('HSET', KEYS[1], 'bound', name)\n  return {'claim', epoch, tokens, hash, 1,", "kafka",
        ("pause_s=3", "rebalance_s=1", "gateways=0", "endpoint=0"),
    ),
    Flaw(
        "a transaction that was aborted counts as committed", f"{BUS}/kafka/settling.py",
        "if time.monotonic() > end:", "return\n                    if moved:", "kafka",
    ),
    Flaw(
        "outputs that are not acknowledged count as written", f"{BUS}/kafka/settling.py",
        "with self.time_settlement(), bus_errors():\n            writer.write_outputs",
        "with self.time_settlement(), contextlib.suppress(KafkaException):\n            writer.write_outputs", "kafka",
        rates=("full_s=3",),
    ),
    Flaw(
        "deliveries of partitions that went are settled", f"{BUS}/kafka/member.py",
        "self._holdings.revoke_partitions(gone)", "pass", "kafka",
    ),
    Flaw(
        "finished work beyond the committed offset is repeated", f"{BUS}/kafka/offsets.py",
        "if is_in_ranges(self._finished, offset):\n            return False", "", "kafka",
    ),
    Flaw(
        "what was answered before its commit was forgotten is answered again", f"{BUS}/kafka/offsets.py",
        "delivery.offset[1] < self.forgotten_end and", "False and", "kafka", rates=("away_s=3", "delete_s=0"),
    ),
    Flaw(
        "what its record has forgotten is answered again", f"{RECORD}/lua/claim.lua",
        "if ARGV[12] == '1' then", "if false then", "streams", rates=("away_s=6", "double=0.4", "delete_s=0"),
    ),
    Flaw(
        "deleted messages are not told", f"{BUS}/kafka/member.py",
        "if count:\n            self._places", "if False:\n            self._places", "kafka", rates=("delete_s=2",),
    ),
    Flaw(
        "deleted entries are not counted", f"{BUS}/streams/lua/lost.lua", "if gone > finished", "if false", "streams",
        rates=("delete_s=2",),
    ),
    Flaw(
        "a commit that was refused counts as made", f"{BUS}/kafka/writers.py",
        "return [] if error is not None else", "return commits if error is not None else", "kafka",
        rates=("full_s=3", "kill_s=0", "crash=0", "leave_s=0", "away_s=0", "rebalance_s=0"),
    ),
    Flaw(
        "a loop that stands still keeps its claims", f"{WORKER}/watch.py",
        "return bool(stalled)", "return False",
    ),
    Flaw(
        "what ends workers is read again for ever", f"{WORKER}/worker.py",
        "(claim.num_tokens > 0 or not is_over)", "True",
        rates=("poison=0.2", "attempts=12", "endpoint=0", "gateways=0"),
    ),
    Flaw(
        "a reading that stands still is not watched", f"{WORKER}/watch.py",
        "for one in (self._turn, self._reading) if", "for one in (self._turn,) if",
        rates=("poison=0.3", "attempts=12", "endpoint=0", "gateways=0"),
    ),
    Flaw(
        "an error in a heartbeat ends its thread", f"{WORKER}/heartbeat.py",
        'except Exception:  # a bug in a figure: without heartbeats a worker that works would look lost',
        "except ZeroDivisionError:",
    ),
    Flaw(
        "an error in the lag ends backpressure's thread", "prefill_worker/penstock/prefill_worker/backpressure.py",
        "except Exception:  # e.g. the heartbeat of another version: batch work must not wait for ever",
        "except ZeroDivisionError:",
        rates=("gateways=0", "endpoint=0", "bug=0.004", "crash=0", "leave_s=0", "away_s=0", "wedge=0"),
    ),
    Flaw(
        "deadlines go by the worker's own clock", f"{WORKER}/worker.py",
        "overdue, server_now_s = [], self.session.server_now_s()", "overdue, server_now_s = [], now_s()",
    ),
    Flaw(
        "halves of surrogate pairs are written as they came", "core/penstock/messages.py",
        'return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")', "return text",
    ),
    Flaw(
        "an endpoint's stop string is written as it came", f"{ENDPOINT}/reply.py",
        "replace_surrogates(told) if isinstance(", "told if isinstance(",
    ),
    Flaw(
        "a request that an endpoint refuses is asked for again for ever", f"{ENDPOINT}/engine.py",
        "if self.asked_s < endpoint.answered_s:\n            return not (self.failed.is_busy and self.was_crowded)\n"
        "        return now_s", "return False and now_s",
    ),
    Flaw(
        "vectors are left out of the end", "prefill_worker/penstock/prefill_worker/handoff.py",
        "error=task.wire_error, vectors=vectors", "error=task.wire_error", rates=("texts=0.7", "endpoint=0"),
    ),
    Flaw(
        "a record with vectors is gone before they are read", "core/penstock/record/record.py",
        "keep_ms = min(self._keep_ms, KEEP_VECTORS_MS) if is_short", "keep_ms = 1 if is_short",
        rates=("texts=0.7", "endpoint=0"),
    ),
    Flaw(
        "the names of blocks leave out pictures", "kvstore/penstock/kvstore/block.py",
        'b"picture" + span.name + place', 'b"picture" + place', rates=SEES,
    ),
    Flaw(
        "a row of a picture that is not here is computed from its token", "engine/penstock/engine/pictures/rows.py",
        "if self._see is None:\n                    raise", "if self._see is None:\n                    continue\n"
        "                if False:\n                    raise", rates=SEES,
    ),
    Flaw(
        "decode ends what it lacks KV of", "decode_worker/penstock/decode_worker/role.py",
        "return num_returns < MAX_RETURNS and not waits", "return False", rates=SEES,
    ),
    Flaw(
        "each piece forgives an endpoint its failures", f"{ENDPOINT}/engine.py",
        "if seq.num_made > seq.most_pieces:", "if True:",
    ),
    Flaw(
        "calls that were cut are told", f"{ENDPOINT}/reply.py",
        'raise _FailedError(Failed("lost", "the answer was cut"',
        'self._report_pieces(self._writer.end())\n            raise _FailedError(Failed("lost", "the answer was cut"',
    ),
    Flaw(
        "a batch's line whose model is not seen for a minute is unknown", f"{INGEST}/batch/answer.py",
        "            with suppress(BusUnavailable, ApiError):\n"
        "                return await self._pipelines.find_pipeline(model)\n",
        "            now_s = asyncio.get_running_loop().time()\n"
        "            try:\n"
        "                return await self._pipelines.find_pipeline(model)\n"
        "            except BusUnavailable:\n"
        "                pass\n"
        "            except ApiError as error:\n"
        '                if error.status == 404 and now_s > vars(self).setdefault("begun_s", now_s) + 60.0:\n'
        "                    raise\n",
        rates=("gateways=0.6", "kill_s=2", "batches=0.4", "away_s=4", "endpoint=0"),
    ),
    Flaw(
        "a reader that comes back gets its last event again", f"{INGEST}/openai/sse.py",
        'self._is_past[index] = _parse_position(position, "") > self._ranks[index]',
        'self._is_past[index] = _parse_position(position, "") >= self._ranks[index]',
    ),
    Flaw(
        "a POST under the key of another makes a request of its own", f"{INGEST}/streaming/stream_meta.py",
        "hmac.digest(self._secret,", "hmac.digest(secrets.token_hex(8).encode(),",
    ),
    Flaw(
        "the meters start at the beginning again", f"{INGEST}/leased_reader.py",
        "stored: Any = self.client.hgetall(key)", "stored: Any = {}",
    ),
    Flaw(
        "the mark of an adoption is dropped when all is published", f"{REGIONS}/adopting.py",
        "client.hset(ADOPTED_REGIONS_KEY, region, mark.encode())  # 7", "client.hdel(ADOPTED_REGIONS_KEY, region)  # 7",
        "regions", LOST,
    ),
    Flaw(
        "an id that is adopted is not noted", f"{REGIONS}/adopting.py",
        "noted.hset(taken_key, mapping={one.id: one.place for one in batch})", "pass", "regions", LOST,
    ),
    Flaw(
        "the index of a copy forgets requests", f"{INGEST}/lua/index_copy.lua",
        "redis.call('HSETNX', KEYS[2], id, place)", "", "regions", LOST,
    ),
    Flaw(
        "the index of a copy forgets results", f"{INGEST}/lua/index_copy.lua",
        "redis.call('HDEL', KEYS[2], id)\n", "\n", "regions", LOST,
    ),
    Flaw(
        "a home that is back settles before it has heard", "worker/penstock/worker/joining.py",
        "while client.get(REGION_JOINED_KEY) in (None, before):", "while False:", "regions", LOST,
    ),
    Flaw(
        "what a peer has adopted is not ended at home", f"{REGIONS}/returning.py",
        "await self._end_ids(name, pipeline, ids)  # 2", "pass", "regions", LOST,
    ),
    Flaw(
        "topics of a tenant that stays are copied", "docker/mirror/eu-us.properties",
        "eu->us.topics = penstock\\\\.[A-Za-z0-9_-]+\\\\.(requests\\\\.(interactive|batch)|results)\n"
        "eu->us.topics.exclude = .*\\\\.t-[0-9a-f]+",
        "eu->us.topics = penstock\\\\..*\neu->us.topics.exclude = none", "regions", ("stays=0.5",),
    ),
    Flaw(
        "a request that another region may have accepted goes elsewhere", f"{REGIONS}/forward.py",
        "except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:", "except httpx2.HTTPError as error:",
        "regions", ("gateways=1",),
    ),
    Flaw(
        "each region is the home of a key", f"{INGEST}/gateway/elsewhere.py",
        "choose_home(caller.tenant, key, keepers) if keepers else self._peers.own", "self._peers.own", "regions",
        ("gateways=1",),
    ),
)  # fmt: skip


def find_flaw(flaw: Flaw, root: Path, seeds: int, seconds: float = 1e9) -> tuple[int | None, str, float]:
    """Return the seed that finds a flaw, what was found, and the time it took.

    The seed is None if none of so many finds it, or none within so many seconds of the processor.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-flaw-") as folder:
        for name in FOLDERS:
            shutil.copytree(root / name, Path(folder) / name)
        path = Path(folder) / flaw.file
        source = path.read_text()
        if source.count(flaw.before) != 1:
            raise SystemExit(f"{flaw.name}: its place is {source.count(flaw.before)} times in {flaw.file}")
        path.write_text(source.replace(flaw.before, flaw.after))
        paths = [folder, *(str(Path(folder) / name) for name in HOUSE)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "sim.world", "--seeds", str(seeds), "--until-found", "--max-s", str(seconds)]
        command += ["--level", flaw.level]
        command += [word for rate in flaw.rates for word in ("--rate", rate)]
        told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        spent_s = time.monotonic() - begun_s
    lines = told.stdout.splitlines()
    found = [line for line in lines if line.startswith("seed ")]
    if not found:
        return None, (told.stderr.splitlines() or [""])[-1], spent_s
    first = lines[lines.index(found[0]) + 1].strip()
    return int(found[0].split()[1].rstrip(":")), first[:90], spent_s


def main() -> None:
    """Look for all flaws, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m sim.world.flaws")
    parser.add_argument("names", nargs="*", help="parts of names; all if there are none")
    parser.add_argument("--seeds", type=int, default=400, help="how many to try")
    parser.add_argument("--seconds", type=float, default=1e9, help="try no more after so many of the processor")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the world ends too, and the copy is removed
    root, table = Path(__file__).parents[2], Table("flaw", "seed", "s", "found")
    for flaw in FLAWS:
        if not given.names or any(name in flaw.name for name in given.names):
            seed, found, spent_s = find_flaw(flaw, root, given.seeds, given.seconds)
            table.add_row(flaw.name, "" if seed is None else str(seed), f"{spent_s:.0f}", found)
            sys.stderr.write(f"{flaw.name}: {seed} {found} {spent_s:.0f} s\n")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
