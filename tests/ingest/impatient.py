"""`penstock`, but an answer of a batch that is silent is asked for again soon."""

from penstock.ingest.batch import answer
from sim.forked import run_penstock


def penstock(*arguments: str) -> None:
    """The command."""
    answer.MIN_ANSWER_TIMEOUT_S = 2.0
    run_penstock(*arguments)
