"""A small system under chaos that nobody kills, and the question it is asked."""

from penstock.client.sync import Client
from penstock.messages import now_s
from sim.chaos.system import ChaosStack
from sim.waiting import PATIENCE_S

TOKENS = list(range(10, 110))


def all_ready(stack: ChaosStack) -> bool:
    """Return whether every worker that should run serves. Those that died are started again."""
    stack.restart_dead()
    return all(stack.is_ready(worker) for worker in stack.workers if worker.name not in stack.absent)


def ask(stack: ChaosStack, first: int, deadline_in_s: float | None = None) -> list[int]:
    """Return the answer to a prompt that begins with a token of its own."""
    deadline = None if deadline_in_s is None else now_s() + deadline_in_s
    with Client(stack.addresses) as client:
        sent = client.submit(
            token_ids=[first, *TOKENS], max_tokens=8, temperature=0.0, ignore_eos=True, deadline=deadline
        )
        return client.result(sent, timeout_s=PATIENCE_S).token_ids
