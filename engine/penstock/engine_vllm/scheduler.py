"""vLLM's scheduler, in which batch makes way: vLLM preempts only for blocks, never to let an urgent request in."""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class PreemptingScheduler(Scheduler):
    """Preempts the newest request of a lower priority for each waiting one of the highest that has no place."""

    def schedule(self, *args: Any, **given: Any) -> Any:
        """Plan the next step."""
        waiting = [one for one in self.waiting if one.priority == 0 and not self._is_blocked_waiting_status(one.status)]
        others = sorted((one for one in self.running if one.priority > 0), key=lambda one: one.arrival_time)
        while waiting and others and len(self.running) >= self.max_num_active_reqs:
            waiting.pop()
            last = others.pop()
            self.running.remove(last)
            self._preempt_request(last, time.monotonic())
        return super().schedule(*args, **given)
