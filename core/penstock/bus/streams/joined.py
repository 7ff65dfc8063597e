"""A member of both stages' groups on Redis Streams: it reads new messages of both in one round trip."""

from collections.abc import Mapping

from penstock.bus.contract import Delivery
from penstock.bus.joined import JoinedMember
from penstock.bus.streams.member import StreamsMember, StreamsReader
from penstock.names import Pipeline, PriorityClass


class JoinedStreams(JoinedMember):
    """A `JoinedMember` over two members on one server."""

    def __init__(self, pipeline: Pipeline, requests: StreamsMember, jobs: StreamsMember, url: str) -> None:
        super().__init__(pipeline, requests, jobs)
        self._reader = StreamsReader([jobs, requests], url)

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        found = self._reader.poll(timeout_s, capacity)
        self.forget_settled(found)
        return found

    def close(self) -> None:
        """Leave both groups: unsettled deliveries go to other members at once."""
        self._reader.close()
        super().close()
