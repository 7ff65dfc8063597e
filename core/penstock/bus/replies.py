"""Sends results to the topics in which their requesters want them: reply topics.

A request names its reply topic in its headers (`find_reply`). They travel with its message into its claim and into its
job, so whoever settles the result has them, also after a crash and a take-over. On Redis Streams a reply topic is a
stream of the requester's, by its key.

A result is settled in this order, by the settler of its worker alone:

    1. It is compared with the policy, with names that may be no reply topics, and with what was refused a moment ago.
    2. The bus is asked what it knows against the others: before the transaction, as one refused message fails the
       commit of all that are in it.
    3. Reply, a copy of the result without text in the results topic, and the end of the delivery: one transaction, or
       one script. A result that was refused in 1 or 2 goes to the results topic, with the reason in a header.
    4. Where the bus refuses a reply all the same, nothing was done. The settlement is made again without that reply.

A crash before 3 has ended costs nothing: the next holder of the message settles, from the log, with the same headers.
After 3 both messages are there. A crash between 3 and 4 is one before 3.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Member, Outgoing, Settlement, as_bytes
from penstock.errors import ContentErased, ReplyRefused, TenantKeyMissing
from penstock.messages import ErrorInfo, Result, decode_clear_part, decode_message
from penstock.names import (
    CORRELATION_HEADER,
    REPLY_PARTITION_HEADER,
    REPLY_REFUSED_HEADER,
    REPLY_TO_HEADER,
    REPLY_TOPIC_HEADER,
    TENANT_HEADER,
    Pipeline,
    add_tenant,
    find_shared_topic,
    may_hold_replies,
    split_topic,
)

MAX_HEADER_BYTES = 1024
"""The most bytes of a correlation id."""
REFUSED_S = 10.0
"""For how long no reply is sent to a topic that has refused one."""
MAX_REFUSED_TOPICS = 10_000
MAX_REASON_CHARS = 300
ALL_TENANTS = "*"
_TRAVELLING = (REPLY_TO_HEADER, REPLY_TOPIC_HEADER, REPLY_PARTITION_HEADER, CORRELATION_HEADER)


def pick_reply_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request that its job needs for the reply. Those that are too long are cut, and refused
    once there is a result.
    """
    return {name: headers[name][: MAX_HEADER_BYTES + 1] for name in _TRAVELLING if name in headers}


def find_reply(headers: Mapping[str, str], result: Outgoing) -> tuple[Outgoing | None, str]:
    """Return a result as the reply that its requester's headers ask for, None if they ask for none; and what is wrong
    with these headers.
    """
    topic = headers.get(REPLY_TO_HEADER) or headers.get(REPLY_TOPIC_HEADER)
    if not topic:
        return None, ""
    reply, wrong = replace(result, topic=topic, is_reply=True), ""
    if CORRELATION_HEADER in headers:
        if len(as_bytes(headers[CORRELATION_HEADER])) > MAX_HEADER_BYTES:
            return reply, f"{CORRELATION_HEADER} has more than {MAX_HEADER_BYTES:,} bytes"
        reply = replace(reply, headers={**reply.headers, CORRELATION_HEADER: headers[CORRELATION_HEADER]})
    if REPLY_PARTITION_HEADER in headers and not headers.get(REPLY_TO_HEADER):
        number = as_bytes(headers[REPLY_PARTITION_HEADER])
        if len(number) == 4 and number[0] < 128:
            reply = replace(reply, partition=int.from_bytes(number, "big"))
        else:
            wrong = f"{REPLY_PARTITION_HEADER} is not the number of a partition, as four bytes, big-endian"
    return reply, wrong


class ReplyRouter:
    """Sends the results of one worker where they are wanted. For one thread, the settler's."""

    def __init__(self, pipeline: Pipeline, member: Member) -> None:
        self._pipeline, self._member = pipeline, member
        self._refused: dict[str, tuple[float, str]] = {}
        """The topics that have refused a reply: until when none is sent to them, and why."""

    def route_results(self, settlements: Sequence[Settlement], refused: Sequence[str]) -> list[Settlement]:
        """Return settlements whose results go where they are wanted: steps 1 to 3.

        `refused` has for each settlement why its reply was refused before; else an empty text. Settlements without a
        reply are returned as they are. Raise `BusUnavailable`.
        """
        replies = dict[int, Outgoing]()
        reasons = dict[int, str]()
        for index, settlement in enumerate(settlements):
            if (result := self._find_result(settlement)) is None:
                continue
            reply, wrong = find_reply(settlement.delivery.headers, result)
            if reply is not None:
                replies[index] = reply
                reasons[index] = wrong or refused[index] or self._find_refusal(settlement.delivery, reply)
        asked = [index for index in replies if not reasons[index]]
        if asked:
            told = self._member.find_reply_refusals([replies[index] for index in asked])
            reasons |= dict(zip(asked, told, strict=True))
        routed = list(settlements)
        for index, reply in replies.items():
            routed[index] = self._send_reply(settlements[index], reply, reasons[index])
        return routed

    def find_topic(self, settlement: Settlement) -> str:
        """Return the topic in which the requester of a settlement's result wants it; empty where that is nowhere."""
        result = self._find_result(settlement)
        reply, _ = (None, "") if result is None else find_reply(settlement.delivery.headers, result)
        return "" if reply is None else reply.topic

    def note_refused(self, error: ReplyRefused) -> None:
        """Note the topics that have refused a reply, whatever it is: none is sent to them for a while."""
        if error.is_sure:
            if len(self._refused) > MAX_REFUSED_TOPICS:
                self._refused.clear()
            until_s = time.monotonic() + REFUSED_S
            self._refused |= {topic: (until_s, reason) for topic, reason in error.reasons.items()}

    def _find_result(self, settlement: Settlement) -> Outgoing | None:
        results = self._pipeline.results_topic
        return next((one for one in settlement.outputs if find_shared_topic(one.topic) == results), None)

    def _find_refusal(self, delivery: Delivery, reply: Outgoing) -> str:
        """Return why a reply may not be sent: step 1. An empty text if it may."""
        tenant = reply.headers.get(TENANT_HEADER, "default")
        if tenant == "default":  # of a message that cannot be read nothing but its headers is known
            tenant = delivery.headers.get(TENANT_HEADER, tenant)
        if not may_hold_replies(reply.topic):
            return "the name is one of Penstock's or Kafka's own topics or keys, or can be none"
        prefixes = self._member.reply_prefixes
        allowed = (*prefixes.get(tenant, ()), *prefixes.get(ALL_TENANTS, ()))
        if not reply.topic.startswith(allowed):
            return "PENSTOCK_BUS_REPLY_TOPICS does not allow this topic for the request's tenant"
        _, own = split_topic(delivery.topic)
        if own and not (tenant.isascii() and add_tenant("", tenant) == own):
            return "the request came in the topics of another tenant"
        if reply.num_bytes > MAX_MESSAGE_BYTES:
            return f"with {CORRELATION_HEADER} it has more than {MAX_MESSAGE_BYTES:,} bytes"
        until_s, reason = self._refused.get(reply.topic, (0.0, ""))
        return reason if time.monotonic() < until_s else ""

    def _send_reply(self, settlement: Settlement, reply: Outgoing, refusal: str) -> Settlement:
        """Return a settlement with the reply and the copy of its result; or with its result, and why it has no
        reply.
        """
        outputs = list[Outgoing]()
        for output in settlement.outputs:
            if find_shared_topic(output.topic) != self._pipeline.results_topic:
                outputs.append(output)
                continue
            told = {name: text for name, text in reply.headers.items() if name == CORRELATION_HEADER}
            if refusal:
                told |= {REPLY_REFUSED_HEADER: f"{reply.topic[:MAX_REASON_CHARS]}: {refusal[:MAX_REASON_CHARS]}"}
                told_why = replace(output, headers={**output.headers, **told})
                outputs.append(told_why if told_why.num_bytes <= MAX_MESSAGE_BYTES else output)
            else:
                told |= {REPLY_TO_HEADER: reply.topic}
                value = drop_text(output.value)
                outputs += [replace(output, value=value, headers={**output.headers, **told}), reply]
        return replace(settlement, outputs=outputs)


def drop_text(value: bytes) -> bytes:
    """Return a result for meters: who used how much, and how it ended, without the answer and words of its error.

    Raises `RequestError` for what is no result.
    """
    try:
        result = decode_message(Result, value)
    except (ContentErased, TenantKeyMissing):  # its key was dropped since it was encrypted
        result = decode_clear_part(Result, value)
    bare = Result(
        id=result.id,
        tenant=result.tenant,
        priority_class=result.priority_class,
        model=result.model,
        finish_reason=result.finish_reason,
        usage=result.usage,
        timings=result.timings,
        error=result.error and ErrorInfo(code=result.error.code, message="its reply says more"),
    )
    return bare.encode()
