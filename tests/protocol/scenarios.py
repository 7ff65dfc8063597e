"""What is explored: which mishaps together, and how often each. `QUICK` takes seconds, `DEEP` minutes."""

from typing import NamedTuple

from tests.protocol.state import Budget, Rules, State, start


class Scenario(NamedTuple):
    """A beginning, and the rules."""

    left: Budget
    rules: Rules = Rules()
    requests: int = 1
    other_body: bool = False

    def first(self) -> State:
        return start(self.left, self.requests, self.other_body)


QUICK = {
    "nothing happens": Scenario(Budget()),
    "crashes": Scenario(Budget(crashes=2)),
    "pauses": Scenario(Budget(pauses=2)),
    "a crash and a pause": Scenario(Budget(crashes=1, pauses=1)),
    "an answer of one token": Scenario(Budget(crashes=1, pauses=1), Rules(last=1)),
    "an answer of three": Scenario(Budget(crashes=1, moves=1), Rules(last=3)),
    "a rebalance": Scenario(Budget(pauses=1, moves=1)),
    "produced twice": Scenario(Budget(crashes=1), requests=2),
    "produced twice, with a rebalance": Scenario(Budget(moves=1), requests=2),
    "another body": Scenario(Budget(crashes=1), other_body=True),
    "cancelled": Scenario(Budget(crashes=1, cancels=1, preempts=1), Rules(last=3)),
    "cancelled, with a pause": Scenario(Budget(pauses=1, cancels=1, preempts=1), Rules(last=3)),
    "too late": Scenario(Budget(crashes=1, lates=1)),
    "stopped": Scenario(Budget(crashes=1, stops=1)),
    "stopped, with a pause": Scenario(Budget(pauses=1, stops=1)),
    "failing": Scenario(Budget(crashes=1, fails=1)),
    "failing, until it is given up": Scenario(Budget(fails=2)),
    "failing, with a pause": Scenario(Budget(pauses=1, fails=1)),
    "set aside": Scenario(Budget(crashes=1, asides=1)),
    "preempted": Scenario(Budget(pauses=1, preempts=2), Rules(last=3)),
    "a commit in doubt": Scenario(Budget(crashes=1, doubts=1)),
    "a commit in doubt, with a pause": Scenario(Budget(pauses=1, doubts=1)),
    "without room": Scenario(Budget(crashes=1, waits=1)),
    "without room, with a pause": Scenario(Budget(pauses=1, waits=1)),
    "without room, with a rebalance": Scenario(Budget(moves=1, waits=1)),
    "without room, produced twice": Scenario(Budget(waits=1), requests=2),
    "without room, another body": Scenario(Budget(waits=1), other_body=True),
    "without room, Redis empty": Scenario(Budget(losses=1, waits=1)),
    "looked up in the list": Scenario(Budget(crashes=1), Rules(lists=True)),
    "Redis empty": Scenario(Budget(losses=1, crashes=1)),
    "Redis empty, with a pause": Scenario(Budget(losses=1, pauses=1)),
    "Redis empty, with a rebalance": Scenario(Budget(losses=1, moves=1)),
    "Redis empty, cancelled or too late": Scenario(Budget(losses=1, cancels=1, lates=1)),
    "Redis falls back": Scenario(Budget(losses=1, syncs=1)),
}

DEEP = {
    "three crashes": Scenario(Budget(crashes=3)),
    "a crash, a pause and a rebalance": Scenario(Budget(crashes=1, pauses=1, moves=1)),
    "two crashes and a pause": Scenario(Budget(crashes=2, pauses=1)),
    "a crash and two pauses": Scenario(Budget(crashes=1, pauses=2)),
    "produced twice, with crash and pause": Scenario(Budget(crashes=1, pauses=1), requests=2),
    "cancelled, with crash and pause": Scenario(Budget(crashes=1, pauses=1, cancels=1)),
    "too late, with crash and pause": Scenario(Budget(crashes=1, pauses=1, lates=1)),
    "stopped, with crash and pause": Scenario(Budget(crashes=1, pauses=1, stops=1)),
    "failing, with a crash": Scenario(Budget(crashes=1, fails=2, asides=1)),
    "failing, with two pauses": Scenario(Budget(pauses=1, fails=2)),
    "failing, with crash and pause": Scenario(Budget(crashes=1, pauses=1, fails=1)),
    "without room, with crashes": Scenario(Budget(crashes=2, waits=1)),
    "without room, with a crash and a rebalance": Scenario(Budget(moves=1, crashes=1, waits=1)),
    "without room, given back": Scenario(Budget(crashes=1, stops=1, waits=1)),
    "commits in doubt, with crash and pause": Scenario(Budget(crashes=1, pauses=1, doubts=2)),
    "looked up in the list, with two crashes": Scenario(Budget(crashes=2), Rules(lists=True)),
    "looked up in the list, stopped": Scenario(Budget(pauses=1, stops=1), Rules(lists=True)),
    "Redis empty, with crash and pause": Scenario(Budget(losses=1, crashes=1, pauses=1)),
    "Redis falls back, with a crash": Scenario(Budget(losses=1, syncs=1, crashes=1)),
    "Redis falls back, with a pause": Scenario(Budget(losses=1, syncs=1, pauses=1)),
}

FLAWS = {
    ("no binding", "two results"): Budget(pauses=1),
    ("binding changes", "two results"): Budget(pauses=1),
    ("prefill settles", "two results"): Budget(pauses=1, lates=1),
    ("appends by anybody", "a token by somebody who does not hold the request"): Budget(pauses=1),
    ("appends by anybody", "a token that goes on from others"): Budget(losses=1, pauses=1),
    ("settles what it does not hold", "two results"): Budget(crashes=1),
    ("forgets the message", "left alone"): Budget(crashes=1, stops=1),
    ("ends uncounted", "an end that counts wrong"): Budget(losses=1, syncs=1),
    ("forgets the other delivery", "stuck"): Budget(losses=1, pauses=1),
    ("claims what it does not hold", "stuck"): Budget(losses=1, moves=1, pauses=1),
    ("publishes again", "two results"): Budget(crashes=1, doubts=1),
    ("trusts the job", "poison without a dead letter"): Budget(fails=2, lates=1),
}
"""A rule left out, and what is found then."""
