"""A settlement whose reply is lost, on both buses."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.bus.contract import Bus, Member, Outgoing, Settlement
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from penstock.worker.settler import Settler
from sim.waiting import wait_for
from tests.bus.buses import list_values, publish_messages, take_deliveries

pytestmark = pytest.mark.proof


class Forgetful:
    """A member whose first settlement succeeds, though its reply is lost."""

    current_problem, slowness = "", 1

    def __init__(self, member: Member) -> None:
        self._member, self._has_forgotten = member, False

    def settle(self, settlements: Sequence[Settlement]) -> None:
        self._member.settle(settlements)
        if not self._has_forgotten:
            self._has_forgotten = True
            raise BusUnavailable("the reply is lost")


@pytest.mark.parametrize(("is_held", "is_again"), [(True, False), (False, True)])
def test_no_job_goes_out_twice_under_one_name_though_the_reply_is_lost(
    bus: Bus, is_held: bool, is_again: bool, pipeline: Pipeline
) -> None:
    """If the lost delivery shows that the job is out, it is not published again; otherwise under another name."""
    publish_messages(bus, [Outgoing(pipeline.request_topic("interactive"), b"request", key="r1")])
    with bus.join_group("prefill", "p1") as member:
        (delivery,) = take_deliveries(member, 1)
        settler = Settler(Forgetful(member), pipeline)  # type: ignore[arg-type]
        mine, jobs = replace(delivery, is_held=is_held), pipeline.job_topic("interactive")
        settler.settle(
            Settlement(mine, [Outgoing(jobs, b"first", key="r1")]),
            again=lambda: Settlement(mine, [Outgoing(jobs, b"second", key="r1")]),
        )
        outcomes: list[tuple[None, bool]] = []

        def has_ended() -> bool:
            outcomes.extend(settler.collect())
            return bool(outcomes)

        wait_for(has_ended, "the settlement's end")
        wait_for(lambda: not settler.trouble, "nothing is tried any more, so nothing is wrong")
        assert len(settler) == 0, "nothing is under way"
        settler.close()
        assert list_values(bus.read_all(jobs)) == [b"first", b"second"][: 1 + is_again]
        assert outcomes == [(None, is_again)]  # the next holder settles a lost delivery from the record
