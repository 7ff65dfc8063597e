"""What a Kafka member commits, when its partitions move on while it does."""

from penstock.bus.contract import Delivery
from penstock.bus.kafka.buffer import PrefetchBuffer
from penstock.names import Pipeline


def test_what_is_passed_over_during_a_commit_is_in_the_next() -> None:
    """Else the marker behind the last message would look like work that nobody does."""
    pipeline = Pipeline("p")
    topic = pipeline.job_topic("interactive")
    holdings = PrefetchBuffer(pipeline, "decode")
    holdings.assign_partition((topic, 0), 0, "")
    holdings.add_message(Delivery(topic, "0:0", b"job", None, {}, "interactive", 0.0))
    found = holdings.hand_out({"interactive": 1})
    commits = holdings.build_commits(found)
    assert commits == [((topic, 0), 1, "")]
    holdings.reach_end((topic, 0), 2)
    holdings.finish_deliveries(found)
    holdings.note_committed(commits)
    again = holdings.build_commits()
    assert again == [((topic, 0), 2, "")]
    holdings.note_committed(again)
    assert holdings.build_commits() == []
    holdings.check_integrity()
