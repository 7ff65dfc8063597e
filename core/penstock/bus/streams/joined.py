"""A member of both stages' groups on Redis Streams: it reads new messages of both in one round trip."""

from collections.abc import Mapping

import redis

from penstock.bus.joined import JoinedMember
from penstock.bus.streams.client import bus_errors
from penstock.bus.streams.member import StreamsMember
from penstock.names import PriorityClass


class JoinedStreams(JoinedMember[StreamsMember]):
    """A `JoinedMember` over two members on one server."""

    def _poll_members(self, capacity: Mapping[PriorityClass, int]) -> None:
        left = self._count_left(capacity)
        with bus_errors():
            try:
                for member in (self._jobs, self._requests):
                    self._taken += member.take_known(left)
                self._taken += self._jobs.take_new([self._jobs, self._requests], left)
            except redis.RedisError as error:
                for member in (self._jobs, self._requests):
                    member.note_lost_reply()
                for member in (self._jobs, self._requests):
                    member.mend_groups(error)
