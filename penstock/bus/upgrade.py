"""Messages that an older version deferred in retry topics, which this version does not read any more."""

from penstock.bus.contract import Bus, Delivery, Outgoing
from penstock.bus.dead_letters import build_dead_letter
from penstock.errors import UpgradeNeeded
from penstock.names import ATTEMPT_HEADER, ORIGIN_HEADER, REASON_HEADER, STACK_HEADER, Pipeline

NOT_BEFORE = "penstock-not-before"
_OLD_HEADERS = (ATTEMPT_HEADER, NOT_BEFORE, ORIGIN_HEADER, REASON_HEADER, STACK_HEADER)


def check_upgraded(bus: Bus) -> None:
    """Raise `UpgradeNeeded` while messages are left in those topics. Raise `BusUnavailable` if that is not known."""
    if num := bus.count_old_retries():
        raise UpgradeNeeded(
            f"{num} messages are left in the retry topics of an older version: stop its workers, then run "
            "penstock topics create"
        )


def old_workers_error(stage: str) -> UpgradeNeeded:
    """Return the error for moving messages while workers run: they may hold some of the messages."""
    return UpgradeNeeded(f"{stage} workers still run: stop all workers, then run penstock topics create again")


def build_moved_message(pipeline: Pipeline, delivery: Delivery) -> Outgoing:
    """Return the message that moves a delivery from a retry topic back to the topic it came from.

    If its headers do not name that topic, it becomes a dead letter.
    """
    origin = delivery.headers.get(ORIGIN_HEADER, "")
    if origin not in (pipeline.request_topic(delivery.klass), pipeline.job_topic(delivery.klass)):
        return build_dead_letter(pipeline, delivery, "in the retry topic, but from no known topic")
    headers = {name: text for name, text in delivery.headers.items() if name not in _OLD_HEADERS}
    return Outgoing(origin, delivery.value, delivery.key, headers)
