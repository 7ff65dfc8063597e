"""The scenarios to explore: which mishaps happen, and how often. `QUICK` takes seconds, `DEEP` minutes."""

from typing import NamedTuple

from sim.protocol.state import Budget, Rules, State, make_start_state


class Scenario(NamedTuple):
    """A start state, the mishaps that may happen, and the rules."""

    left: Budget
    rules: Rules = Rules()
    requests: int = 1
    other_body: bool = False

    def make_start_state(self) -> State:
        """Return the state in which the scenario starts."""
        return make_start_state(self.left, self.requests, self.other_body)


ONE_STAYS, BOTH_STAY = Rules(stays=(True, False)), Rules(stays=(True, True))
LONGER = Rules(last=3)
VECTORS, HANDED_VECTORS = BOTH_STAY._replace(last=0), Rules(last=0)
QUICK = {
    "nothing happens": Scenario(Budget()),
    "crashes": Scenario(Budget(crashes=2)),
    "pauses": Scenario(Budget(pauses=2)),
    "a crash and a pause": Scenario(Budget(crashes=1, pauses=1)),
    "an answer of one token": Scenario(Budget(crashes=1, pauses=1), Rules(last=1)),
    "an answer of three": Scenario(Budget(crashes=1, moves=1), Rules(last=3)),
    "a rebalance": Scenario(Budget(pauses=1, moves=1)),
    "a rebalance that a worker is told late": Scenario(Budget(moves=1, delays=1, lates=1)),
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
    "the bus knows nothing": Scenario(Budget(crashes=2), Rules(bus_knows=False)),
    "the bus knows nothing of a member that does not read": Scenario(
        Budget(blinds=2, crashes=1), Rules(bus_knows=False)
    ),
    "the bus knows nothing, stopped": Scenario(Budget(crashes=1, stops=1), Rules(bus_knows=False)),
    "the bus knows nothing, with a rebalance": Scenario(Budget(crashes=1, moves=1), Rules(bus_knows=False)),
    "the bus knows nothing, Redis empty": Scenario(Budget(crashes=1, losses=1), Rules(bus_knows=False)),
    "a member does not read": Scenario(Budget(blinds=1, crashes=1)),
    "a member does not read, with a pause": Scenario(Budget(blinds=1, pauses=1)),
    "in two steps": Scenario(Budget(crashes=1), Rules(two_steps=True)),
    "in two steps, with a pause": Scenario(Budget(pauses=1), Rules(two_steps=True)),
    "in two steps, with a rebalance": Scenario(Budget(moves=1), Rules(two_steps=True)),
    "in two steps, in doubt": Scenario(Budget(doubts=1), Rules(two_steps=True)),
    "in two steps, an answer of one token": Scenario(Budget(crashes=1), Rules(last=1, two_steps=True)),
    "in two steps, Redis empty": Scenario(Budget(losses=1), Rules(two_steps=True)),
    "failing, without retries": Scenario(Budget(crashes=1, fails=1), Rules(retries=False)),
    "failing, without retries, until it is given up": Scenario(Budget(fails=2), Rules(retries=False)),
    "failing, without retries, with a pause": Scenario(Budget(pauses=1, fails=1), Rules(retries=False)),
    "failing, without retries, with a rebalance": Scenario(Budget(moves=1, fails=1), Rules(retries=False)),
    "Redis empty": Scenario(Budget(losses=1, crashes=1)),
    "one stays": Scenario(Budget(crashes=1, pauses=1), ONE_STAYS),
    "one stays, with a rebalance": Scenario(Budget(crashes=1, moves=1), ONE_STAYS),
    "one stays, in two steps": Scenario(Budget(crashes=1, doubts=1), ONE_STAYS._replace(two_steps=True)),
    "one stays, stopped or too late": Scenario(Budget(stops=1, lates=1), ONE_STAYS),
    "one stays, cancelled": Scenario(Budget(pauses=1, cancels=1), ONE_STAYS),
    "one stays, produced twice": Scenario(Budget(crashes=1), ONE_STAYS, requests=2),
    "one stays, Redis empty": Scenario(Budget(losses=1, moves=1), ONE_STAYS),
    "one stays, Redis empty, the message comes again": Scenario(Budget(losses=1, moves=2), ONE_STAYS),
    "both stay": Scenario(Budget(crashes=2), BOTH_STAY),
    "both stay, with pauses": Scenario(Budget(pauses=2), BOTH_STAY),
    "both stay, in doubt, with a rebalance": Scenario(Budget(moves=1, doubts=1), BOTH_STAY),
    "both stay, a rebalance that a worker is told late": Scenario(Budget(moves=1, delays=1, lates=1), BOTH_STAY),
    "one stays, a rebalance that a worker is told late": Scenario(Budget(moves=1, delays=1, lates=1), ONE_STAYS),
    "both stay, told late of a rebalance, with a crash": Scenario(Budget(crashes=1, moves=1, delays=1), BOTH_STAY),
    "one stays, told late of a rebalance, with a crash": Scenario(Budget(crashes=1, moves=1, delays=1), ONE_STAYS),
    "both stay, told late of a rebalance, failing": Scenario(Budget(fails=1, moves=1, delays=1), BOTH_STAY),
    "both stay, failing": Scenario(Budget(crashes=1, fails=1), BOTH_STAY),
    "both stay, without room": Scenario(Budget(pauses=1, waits=1), BOTH_STAY),
    "both stay, the bus knows nothing": Scenario(Budget(crashes=1, stops=1), BOTH_STAY._replace(bus_knows=False)),
    "both stay, Redis empty": Scenario(Budget(losses=1, crashes=1), BOTH_STAY),
    "both stay, Redis empty, the message comes again": Scenario(Budget(losses=1, moves=2), BOTH_STAY),
    "Redis empty, with a pause": Scenario(Budget(losses=1, pauses=1)),
    "Redis empty, with a rebalance": Scenario(Budget(losses=1, moves=1)),
    "Redis empty, cancelled or too late": Scenario(Budget(losses=1, cancels=1, lates=1)),
    "Redis falls back": Scenario(Budget(losses=1, syncs=1)),
    "commits are forgotten": Scenario(Budget(forgets=1, crashes=1)),
    "commits are forgotten, in two steps": Scenario(Budget(forgets=1, doubts=1), Rules(two_steps=True)),
    "commits are forgotten, both stay": Scenario(Budget(forgets=1, pauses=1), BOTH_STAY),
    "commits are forgotten, produced twice": Scenario(Budget(forgets=1), requests=2),
    # Requests for vectors: their end is all that is written.
    "without tokens": Scenario(Budget(crashes=2), VECTORS),
    "without tokens, with a pause": Scenario(Budget(crashes=1, pauses=1), VECTORS),
    "without tokens, with a rebalance": Scenario(Budget(crashes=1, moves=1), VECTORS),
    "without tokens, produced twice": Scenario(Budget(crashes=1), VECTORS, requests=2),
    "without tokens, cancelled or failing": Scenario(Budget(cancels=1, fails=1), VECTORS),
    "without tokens, Redis empty": Scenario(Budget(losses=1, crashes=1), VECTORS),
    "without tokens, handed off": Scenario(Budget(crashes=1, pauses=1), HANDED_VECTORS),
    "without tokens, handed off, Redis empty": Scenario(Budget(losses=1, crashes=1), HANDED_VECTORS),
    # KV inside a picture is lost, which only prefill can compute again.
    "given back": Scenario(Budget(returns=2, crashes=1), LONGER),
    "given back, with two crashes": Scenario(Budget(returns=1, crashes=2)),
    "given back, with pauses": Scenario(Budget(returns=1, pauses=2)),
    "given back, with a rebalance": Scenario(Budget(returns=1, moves=1, crashes=1)),
    "given back, a rebalance that a worker is told late": Scenario(Budget(returns=1, moves=1, delays=1, lates=1)),
    "given back, in two steps, in doubt": Scenario(Budget(returns=1, crashes=1, doubts=1), Rules(two_steps=True)),
    "given back, produced twice": Scenario(Budget(returns=1, moves=1), requests=2),
    "given back, cancelled or failing": Scenario(Budget(returns=1, cancels=1, fails=1), LONGER),
    "given back, failing, until it is given up": Scenario(Budget(returns=1, fails=2)),
    "given back, stopped or without room": Scenario(Budget(returns=1, stops=1, waits=1)),
    "given back, the bus knows nothing": Scenario(Budget(returns=1, crashes=2), Rules(bus_knows=False)),
    "given back, Redis empty": Scenario(Budget(returns=2, losses=1, crashes=1)),
    "given back, Redis falls back": Scenario(Budget(returns=1, losses=1, syncs=1)),
    "given back, one stays": Scenario(Budget(returns=1, crashes=1, pauses=1), ONE_STAYS),
    "given back, one stays, Redis empty": Scenario(Budget(returns=1, losses=1, moves=1), ONE_STAYS),
    "given back, commits are forgotten": Scenario(Budget(returns=1, forgets=1)),
    "deleted": Scenario(Budget(deletes=1, crashes=1)),
    "deleted, without room": Scenario(Budget(deletes=1, waits=1), BOTH_STAY),
    "deleted, produced twice": Scenario(Budget(deletes=1, moves=1), requests=2),
}

DEEP = {
    "in two steps, in doubt, with a crash": Scenario(Budget(crashes=1, doubts=1), Rules(two_steps=True)),
    "in two steps, Redis empty, the message comes again": Scenario(
        Budget(losses=1, moves=2), ONE_STAYS._replace(two_steps=True)
    ),
    "in two steps, Redis empty, with a crash": Scenario(Budget(losses=1, crashes=1), Rules(two_steps=True)),
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
    "the bus knows nothing, with three crashes": Scenario(Budget(crashes=3), Rules(bus_knows=False)),
    "in two steps, with crashes and a pause": Scenario(Budget(crashes=2, pauses=1), Rules(two_steps=True)),
    "in two steps, without retries": Scenario(
        Budget(crashes=1, fails=1, pauses=1), Rules(two_steps=True, retries=False)
    ),
    "in two steps, produced twice": Scenario(Budget(crashes=1, pauses=1), Rules(two_steps=True), requests=2),
    "Redis empty, with crash and pause": Scenario(Budget(losses=1, crashes=1, pauses=1)),
    "given back, with crashes and a pause": Scenario(Budget(returns=2, crashes=2, pauses=1)),
    "given back, with crash, pause and rebalance": Scenario(Budget(returns=1, crashes=1, pauses=1, moves=1), ONE_STAYS),
    "given back, Redis falls back, with a crash": Scenario(Budget(returns=2, losses=1, syncs=1, crashes=1)),
    "given back, Redis empty, with crash and pause": Scenario(Budget(returns=1, losses=1, crashes=1, pauses=1)),
    "given back, in two steps, in doubt, with a pause": Scenario(
        Budget(returns=1, pauses=1, doubts=1), Rules(two_steps=True)
    ),
    "Redis falls back, with a crash": Scenario(Budget(losses=1, syncs=1, crashes=1)),
    "Redis falls back, with a pause": Scenario(Budget(losses=1, syncs=1, pauses=1)),
}

BLIND, DOUBTFUL = Rules(bus_knows=False), BOTH_STAY._replace(two_steps=True)
FLAWS = {
    ("no binding", "two results"): (Budget(pauses=1), Rules()),
    ("binding changes", "two results"): (Budget(pauses=1), Rules()),
    ("prefill settles", "two results"): (Budget(crashes=1, lates=1), Rules(two_steps=True)),
    ("appends by anybody", "a token by somebody who does not hold the request"): (Budget(pauses=1), Rules()),
    ("appends by anybody", "a token that goes on from others"): (Budget(losses=1, pauses=1), Rules()),
    ("settles what it does not hold", "two results"): (Budget(crashes=1), Rules()),
    ("nobody reads for the dead", "stuck"): (Budget(blinds=1), BLIND),
    ("ends uncounted", "an end that counts wrong"): (Budget(losses=1, syncs=1), Rules()),
    ("forgets the other delivery", "stuck"): (Budget(losses=1, pauses=1), Rules()),
    ("claims what it does not hold", "stuck"): (Budget(losses=1, moves=1, pauses=1), Rules()),
    ("settles what came again", "stuck"): (Budget(losses=1, moves=2), ONE_STAYS),
    ("attaches to a lost claim", "stuck"): (Budget(losses=1, moves=2), BOTH_STAY),
    ("binds behind the end", "stuck"): (Budget(moves=1, delays=1, lates=1), Rules()),
    ("binds behind another claim", "stuck"): (Budget(crashes=1, moves=1, delays=1), BOTH_STAY),
    ("publishes again", "two results"): (Budget(crashes=1, doubts=1), Rules()),
    ("claims without a session", "stuck"): (Budget(pauses=1), Rules()),
    ("reaps without freeing", "stuck"): (Budget(crashes=1), BLIND),
    ("handed before durable", "stuck"): (Budget(crashes=1), Rules()),
    ("ends unbound", "two results"): (Budget(moves=1, delays=1), DOUBTFUL),
    ("binds without the delivery", "stuck"): (Budget(losses=1, waits=1), BOTH_STAY),
    ("forgets its own message", "stuck"): (Budget(crashes=1), BOTH_STAY),
    ("answers what was forgotten", "two results"): (Budget(forgets=1), Rules()),
    ("nobody ends what is gone", "stuck"): (Budget(deletes=1), Rules()),
    ("passed on without freeing", "stuck"): (Budget(returns=1), Rules()),
    ("settles what it gives back", "stuck"): (Budget(returns=1), Rules()),
}
"""Rules that can be left out, each with a fault that is found then, and the scenario that shows it."""
