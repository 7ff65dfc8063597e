"""What a Kafka member commits, when its partitions move on while it does."""

from penstock.bus.contract import Delivery
from penstock.bus.kafka.buffer import Holdings
from penstock.names import Pipeline


def test_what_is_passed_over_during_a_commit_is_in_the_next() -> None:
    """Else the marker behind the last message would look like work that nobody does."""
    pipeline = Pipeline("p")
    topic = pipeline.job_topic("interactive")
    holdings = Holdings(pipeline, "decode")
    holdings.assign((topic, 0), 0, "")
    holdings.arrive(Delivery(topic, "0:0", b"job", None, {}, "interactive", 0.0))
    found = holdings.hand_out({"interactive": 1})
    commits = holdings.to_commit(found)
    assert commits == [((topic, 0), 1, "")]
    holdings.reach_end((topic, 0), 2)
    holdings.finish(found)
    holdings.committed(commits)
    again = holdings.to_commit()
    assert again == [((topic, 0), 2, "")]
    holdings.committed(again)
    assert holdings.to_commit() == []
    holdings.check_integrity()
