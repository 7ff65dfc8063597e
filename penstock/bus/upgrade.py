"""What an older version put off to be tried again, in topics that nobody reads any more."""

from penstock.bus.contract import Bus, Delivery, Outgoing
from penstock.bus.dead_letters import build_dead_letter
from penstock.errors import UpgradeNeeded
from penstock.names import ATTEMPT_HEADER, ORIGIN_HEADER, REASON_HEADER, STACK_HEADER, Pipeline

NOT_BEFORE = "penstock-not-before"
_OLD_HEADERS = (ATTEMPT_HEADER, NOT_BEFORE, ORIGIN_HEADER, REASON_HEADER, STACK_HEADER)


def check_upgraded(bus: Bus) -> None:
    """Raise `UpgradeNeeded` while there is something left that this version does not read, or `BusUnavailable`."""
    if num := bus.count_old_retries():
        raise UpgradeNeeded(
            f"{num} messages are left in the retry topics of an older version: stop its workers, then run "
            "penstock topics create"
        )


def old_workers_error(stage: str) -> UpgradeNeeded:
    """The error of a move that an older worker would not notice."""
    return UpgradeNeeded(f"{stage} workers still run: stop all workers, then run penstock topics create again")


def build_moved_message(pipeline: Pipeline, delivery: Delivery) -> Outgoing:
    """A message of a retry topic as it goes back to where it came from; to the dead letters if it does not say that."""
    origin = delivery.headers.get(ORIGIN_HEADER, "")
    if origin not in (pipeline.request_topic(delivery.klass), pipeline.job_topic(delivery.klass)):
        return build_dead_letter(pipeline, delivery, "in the retry topic, but from no known topic")
    headers = {name: text for name, text in delivery.headers.items() if name not in _OLD_HEADERS}
    return Outgoing(origin, delivery.value, delivery.key, headers)
