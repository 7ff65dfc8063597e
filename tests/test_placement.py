"""Requests go to the worker that computes them soonest: what each prompt begins with, and what is chosen."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bus.contract import Outgoing
from penstock.bus.placement import (
    MAX_LINKS,
    MAX_REMEMBERED_LINKS,
    MAX_SENT_S,
    MEMORY_S,
    ON_THE_WAY_S,
    PIECE_CHARS,
    PIECE_TOKENS,
    PIECES_OF_A_LENGTH,
    TOKEN_S,
    JobLoad,
    JobNeed,
    Link,
    Placement,
    Placer,
    PromptChain,
    WorkerBeat,
    chain_prompt,
    choose_by_hash,
    count_prompt_chars,
)
from penstock.cli.demo import PROMPTS
from penstock.client.core import RequestFields, make_request, prepare_message
from penstock.config.settings import BusSettings
from penstock.errors import InvalidRequest
from penstock.messages import ChatMessage, Picture, Request, decode_message, encode_request
from penstock.names import Pipeline, PriorityClass
from penstock.telemetry import tracing
from penstock.worker_speed import WorkerSpeed

num_partitions = st.integers(1, 40)


def make_chain(**fields: Any) -> PromptChain:
    return chain_prompt(make_request(None, cast(RequestFields, fields)))


def make_chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]


# chain_prompt


TURNS = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "x" * 300},
    {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"},
]  # fmt: skip
VECTORS: list[tuple[dict[str, Any], list[str], str, tuple[int, int]]] = [
    ({"prompt": "Hello"}, ["30196f87ec7d22d8c47ae3ff94a90e49"], "30196f87", (2, 7)),
    (
        {"messages": TURNS},
        ["8f45e5dbe9b9fb247bc56fe39d26a6f1", "d8cf492b47c5ee0bdf873dd9b224d2a0", "a46e35fcb56f03f3ee2f89453c5e0e9e",
         "0fea2eea39cdc82f972a224c0e555bf4", "dc1216e7937b7ca6bbc5b204c93ce7f9"],
        "a46e35fc", (3, 7),
    ),
    (
        {"token_ids": list(range(1, 101))},
        ["38597413920093964829e7b0100f91bf", "a9d60097b7de11fe8b2f758b45f257aa"], "38597413", (0, 4),
    ),
    (
        {"prompt": "Hello", "tenant": "acme", "session": "chat-7"},
        ["408d060d81a17f70617c3d320679c89e"], "b8f55945ae724fa53d9f9cc0aeadcc67", (3, 3),
    ),
]  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(("fields", "links", "home", "partitions"), VECTORS)
def test_a_producer_in_another_language_can_compare(
    fields: dict[str, Any], links: list[str], home: str, partitions: tuple[int, int]
) -> None:
    """These are the vectors of the protocol, made by a program of its own."""
    found = make_chain(**fields)
    assert [link.digest.hex() for link in found.links] == links
    assert found.home.hex().startswith(home)
    assert (choose_by_hash(found.home, range(4)), choose_by_hash(found.home, range(8))) == partitions
    page = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text("utf-8")
    assert ", ".join(f"`{link.digest.hex()}` {link.length}" for link in found.links) in page
    assert home in page


def test_links_end_pieces_whose_length_doubles_and_messages() -> None:
    text = make_chain(prompt="x" * 10_000)
    assert [link.length for link in text.links[:10]] == [*range(256, 2049, 256), 2560, 3072]
    assert text.links[-1].length == text.length == 10_000
    turns = make_chain(messages=make_chat("x" * 300, "y", "z" * 256))
    assert [link.length for link in turns.links] == [256, 300, 301, 557]
    tokens = make_chain(token_ids=list(range(150)))
    assert ([link.length for link in tokens.links], tokens.is_tokens) == ([64, 128, 150], True)
    longest = make_chain(prompt="x" * 10**6)
    assert len(longest.links) == MAX_LINKS
    assert longest.links[-1].length == PIECES_OF_A_LENGTH * PIECE_CHARS * 255, "half a million characters"


def test_links_are_those_of_all_that_begin_so() -> None:
    first = "x" * 5000
    one, longer, other = (
        make_chain(prompt=first + "y"),
        make_chain(prompt=first + "z" * 5000),
        make_chain(prompt="y" + first),
    )
    assert max(link.length for link in set(one.links) & set(longer.links)) == 4608
    assert not set(one.links) & set(other.links)
    turn, next_turn = make_chat("question", "answer", "and"), make_chat("question", "answer", "and", "answer", "why")
    assert make_chain(messages=next_turn).links[:3] == make_chain(messages=turn).links
    assert not set(make_chain(messages=make_chat("ab", "c")).links) & set(
        make_chain(messages=make_chat("a", "bc")).links
    )
    system = [{"role": "system", "content": "a"}]
    assert make_chain(messages=system).links != make_chain(messages=make_chat("a")).links


def test_a_picture_is_a_part_of_its_turn() -> None:
    def chain(*content: str | Picture) -> Sequence[Link]:
        turns = [ChatMessage(role="user", content=list(content)), ChatMessage(role="assistant", content="yes")]
        request = make_request(None, RequestFields(messages=turns))
        assert decode_message(Request, request.encode()) == request
        return chain_prompt(request).links

    cat, dog = Picture(digest="ca" * 32, num_bytes=7), Picture(digest="d0" * 32)
    assert chain("see ", cat) == chain("see ", Picture(digest=cat.digest))
    assert len({chain("see ", cat), chain("see ", dog), chain(cat, "see "), chain("see ")}) == 4


def test_a_session_is_home_else_the_first_user_message_else_the_first_piece() -> None:
    one = make_chain(prompt="one", session="s")
    assert one.home == make_chain(prompt="two", session="s").home == make_chain(token_ids=[1], session="s").home
    assert one.home not in (make_chain(prompt="one", session="t").home, make_chain(prompt="one").home)
    system = {"role": "system", "content": "You are helpful. " * 100}
    turn = make_chain(messages=[system, *make_chat("question")])
    assert (
        turn.home
        == make_chain(messages=[system, *make_chat("question", "answer", "and")]).home
        == turn.links[-1].digest
    )
    assert turn.home != make_chain(messages=[system, *make_chat("another")]).home
    beginning = "é" * PIECE_CHARS
    assert (
        make_chain(prompt=beginning).home
        == make_chain(prompt=beginning + "more").home
        != make_chain(prompt=beginning[1:]).home
    )
    ids = list(range(PIECE_TOKENS))
    assert make_chain(token_ids=ids).home == make_chain(token_ids=[*ids, 5]).home != make_chain(token_ids=ids[1:]).home
    silent = make_chain(messages=[{"role": "user", "content": ""}])
    assert (len(silent.home), silent.links) == (16, ())


def test_tenants_do_not_meet() -> None:
    one, other = make_chain(prompt="one", tenant="a"), make_chain(prompt="one", tenant="b")
    assert one.home != other.home
    assert not set(one.links) & set(other.links)
    assert make_chain(prompt="x", session="s", tenant="a").home != make_chain(prompt="x", session="s", tenant="b").home
    assert (
        make_chain(prompt="x", session="bc", tenant="a").home != make_chain(prompt="x", session="c", tenant="ab").home
    )


def test_nothing_else_of_a_request_counts_but_its_class() -> None:
    one = make_chain(prompt="x", id="a", max_tokens=3, deadline=9e9)
    assert one == make_chain(prompt="x", id="b", temperature=0.5)
    assert make_chain(prompt="x", priority_class="batch").priority_class == "batch"


def test_characters_are_counted_as_chains_count_them() -> None:
    for fields in ({"prompt": "é" * 700}, {"messages": make_chat("a" * 300, "bc")}):
        made = make_request(None, cast(RequestFields, fields))
        assert count_prompt_chars(made) == chain_prompt(made).length
    assert count_prompt_chars(make_request(None, {"token_ids": [1, 2]})) == 0


def test_what_the_client_sends_has_it() -> None:
    request = Request(id="r", prompt="x", session="s")
    span, message = prepare_message(Pipeline("p"), encode_request(request))
    span.end()
    assert (message.chain, message.key) == (chain_prompt(request), "r")
    assert b'"session":"s"' in message.value
    assert Outgoing("t", b"").chain is None


@pytest.mark.parametrize("session", ["", "a b", "x" * 10_000_000])
def test_what_is_no_name_of_a_session_is_refused_in_few_words(session: str) -> None:
    with pytest.raises(InvalidRequest, match="session") as raised:
        make_request("x", {"session": session})
    assert len(str(raised.value)) < 1000


def test_what_was_chosen_is_on_the_span_of_a_request_that_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    span = mock.MagicMock()
    span.is_recording.return_value = True
    monkeypatch.setattr(tracing, "start_span", lambda *_, **__: span)
    _, message = prepare_message(Pipeline("p"), encode_request(Request(id="r", prompt="x")))
    assert message.chain is not None
    assert message.chain.explain is not None
    message.chain.explain("told")
    span.set_attribute.assert_called_with("penstock.placement", "told")


# choose_by_hash


@given(st.binary(max_size=9), num_partitions)
def test_a_new_partition_takes_homes_and_moves_no_other(home: bytes, count: int) -> None:
    assert choose_by_hash(home, range(count + 1)) in (count, choose_by_hash(home, range(count)))


def test_each_of_the_two_workers_of_the_demo_reads_a_prompt() -> None:
    count = BusSettings().partitions
    chosen = {choose_by_hash(make_chain(prompt=prompt).home, range(count)) for prompt, _ in PROMPTS}
    assert len(chosen) > count / 2


# Placer


def make_beat(
    worker: str,
    partitions: Sequence[int],
    waiting: int = 0,
    batch: int = 0,
    *,
    at_s: float = 0.0,
    ratio: float | None = None,
    lasts_s: float = 3.0,
    speed: WorkerSpeed | None = None,
) -> WorkerBeat:
    tokens: dict[PriorityClass, int] = {"interactive": waiting, "batch": batch}
    read: dict[PriorityClass, Sequence[int]] = {"interactive": partitions, "batch": partitions}
    return WorkerBeat(worker, at_s, at_s + lasts_s, read, tokens, ratio, speed)


def test_a_request_for_an_adapter_goes_to_a_worker_that_has_it() -> None:
    """Whatever the others have left; where none tells it, to any. It shares no KV with the model's own prompts."""
    placer = Placer()
    placer.note_beats([make_beat("a", [0]), replace(make_beat("b", [1], waiting=10**6), adapters=["sql"])])
    assert placer.choose_partition(make_chain(prompt="x" * 600), [0, 1], 1.0).worker == "a"
    for _ in range(2):
        chosen = placer.choose_partition(make_chain(prompt="x" * 600, model="sql"), [0, 1], 1.0)
        assert (chosen.worker, chosen.partition, list(chosen.costs)) == ("b", 1, ["b"])
    assert chosen.num_cached == 150
    assert placer.choose_partition(make_chain(prompt="x" * 600, model="other"), [0, 1], 1.0).worker == "a"


def test_a_worker_has_no_adapters_kv_for_another_one() -> None:
    placer = Placer()
    placer.note_beats([replace(make_beat("a", [0]), adapters=["sql", "chat"])])
    found = [placer.choose_partition(make_chain(prompt="x" * 600, model=name), [0], 1.0).num_cached for name in MODELS]
    assert found == [0, 0, 0, 150, 150, 150]


MODELS = ("sql", "chat", "demo", "sql", "chat", "demo")


def in_s(**tokens: int) -> Any:
    """Return the costs of workers that have so many tokens left, where none tells its speed."""
    return pytest.approx({worker: number * TOKEN_S for worker, number in tokens.items()})


def make_speed(slowness: float = 1.0, *, rows: int = 0, slowdown: float = 1.0) -> WorkerSpeed:
    """Return the speed of a worker for which a prompt token takes a millisecond, a step 20 and a row 1, when idle."""
    token_s = 0.001 * slowness
    return WorkerSpeed(token_s * slowdown, token_s, rows, 20 * token_s * slowdown, token_s * slowdown, slowdown)


def make_prompt(name: str, *lengths: int, priority_class: PriorityClass = "interactive", home: str = "") -> PromptChain:
    """Return a prompt of token ids, whose links of these lengths are those of others with this name."""
    links = tuple(Link(f"{name} {length}".encode(), length) for length in lengths)
    return PromptChain(priority_class, (home or name).encode(), links, lengths[-1], is_tokens=True)


def placer_of(*beats: WorkerBeat) -> Placer:
    made = Placer()
    made.note_beats(beats)
    return made


@pytest.mark.proof
@pytest.mark.parametrize(
    ("waiting", "batch", "priority_class", "chosen"),
    [
        # Worker "a" was sent 600 tokens that begin as this prompt of 1,000 does, and its heartbeat shows that it has
        # computed them: its cost is what it has left + 400. The cost of "b" is what it has left + 1,000. Home is "c",
        # with too much to do.
        ((0, 0), (0, 0), "interactive", "a"),
        ((599, 0), (0, 0), "interactive", "a"),
        ((601, 0), (0, 0), "interactive", "b"),
        ((0, 0), (9000, 0), "interactive", "a"),  # its batch work comes behind this one
        ((0, 0), (601, 0), "batch", "b"),
        ((601, 0), (0, 0), "batch", "b"),
    ],
)
def test_the_least_work_is_chosen(
    waiting: tuple[int, int], batch: tuple[int, int], priority_class: PriorityClass, chosen: str
) -> None:
    home = find_home("abc", "c")
    placer = placer_of(make_beat("a", [0]))
    placer.choose_partition(make_prompt("p", 600, home=home), range(3), 0.5)
    left = zip(waiting, batch, strict=True)
    beats = [make_beat("ab"[number], [number], *mine, at_s=1.0) for number, mine in enumerate(left)]
    placer.note_beats([*beats, make_beat("c", [2], waiting=9000, at_s=1.0)])
    placed = placer.choose_partition(
        make_prompt("p", 600, 1000, priority_class=priority_class, home=home), range(3), 1.5
    )
    assert (placed.worker, placed.partition) == (chosen, "abc".index(chosen))
    counted = [one + (other if priority_class == "batch" else 0) for one, other in zip(waiting, batch, strict=True)]
    assert placed.costs == in_s(a=counted[0] + 400, b=counted[1] + 1000, c=9000 + 1000)
    assert placed.num_cached == (600 if chosen == "a" else 0)


def find_home(workers: str, wanted: str) -> str:
    """Return a home that the hash gives to this worker."""
    return next(name for name in map(str, range(1000)) if order_by_hash(name, workers)[0] == wanted)


def test_what_was_sent_counts_until_a_heartbeat_has_it_or_some_seconds_passed() -> None:
    home, lasts_s = find_home("abc", "c"), 100.0
    busy = make_beat("c", [2], waiting=10**6, lasts_s=lasts_s)
    placer = placer_of(make_beat("a", [0], lasts_s=lasts_s), make_beat("b", [1], waiting=1000, lasts_s=lasts_s), busy)

    def list_costs(name: str, num_tokens: int, now_s: float) -> list[int]:
        costs = placer.choose_partition(make_prompt(name, num_tokens, home=home), range(3), now_s).costs
        return [round(costs[worker] / TOKEN_S) for worker in "ab"]

    assert list_costs("one", 700, 1.0) == [700, 1700]
    assert list_costs("two", 700, 1.0) == [1400, 1700]
    assert list_costs("three", 700, 1.0) == [2100, 1700]
    placer.note_beats([make_beat("a", [0], at_s=1.0 + ON_THE_WAY_S / 2), make_beat("b", [1], at_s=2.0), busy])
    assert list_costs("four", 1, 2.0) == [1401, 1], "it may not have been counted there yet"
    placer.note_beats([make_beat("a", [0], lasts_s=lasts_s), make_beat("b", [1], lasts_s=lasts_s), busy])
    assert list_costs("five", 1, 1.1 + MAX_SENT_S) == [1, 2]


def test_characters_become_tokens_by_what_workers_tell() -> None:
    text = PromptChain("interactive", b"home", (Link(b"first", 300),), 900)

    def list_costs(*ratios: float | None) -> list[int]:
        placer = placer_of(*(make_beat(str(number), [number], ratio=ratio) for number, ratio in enumerate(ratios)))
        costs = placer.choose_partition(text, range(3), 0.0).costs.values()
        return sorted(round(cost / TOKEN_S) for cost in costs)

    assert list_costs(None, None) == [225, 225], "four, where nothing is told"
    assert list_costs(2.0, 4.0, None) == [300, 300, 300]


def test_equal_costs_are_decided_alike_by_placers_that_do_not_talk() -> None:
    beats = [make_beat(f"w{number}", [number]) for number in range(4)]
    chosen = Counter[str]()
    for number in range(200):
        new = make_prompt(f"p{number}", 1)
        one, other = (placer_of(*order).choose_partition(new, range(4), 0.0) for order in (beats, beats[::-1]))
        assert one == other
        chosen[one.worker] += 1
    assert set(chosen) == {"w0", "w1", "w2", "w3"}
    assert min(chosen.values()) > 25


@pytest.mark.proof
def test_a_request_stays_at_home_unless_that_costs_much_more() -> None:
    """Who has sent no turn of a chat knows its home too: there may be all of it."""
    for name in map(str, range(8)):
        order = order_by_hash(name, "ab")
        for waiting, chosen in ((0, 0), (299, 0), (301, 1)):
            beats = [make_beat(order[0], [0], waiting), make_beat(order[1], [1])]
            placed = placer_of(*beats).choose_partition(make_prompt("p", 100, home=name), [0, 1], 0.0)
            assert (placed.worker, placed.partition) == (order[chosen], chosen)
            assert placed.costs == in_s(**{order[0]: waiting + 100, order[1]: 100})


@pytest.mark.proof
@pytest.mark.parametrize(
    ("mine", "others", "waiting", "stays"),
    [
        # A prompt of 100 tokens takes 0.1 s elsewhere, so a home that is up to 0.3 s later keeps it.
        (make_speed(), make_speed(), 299, True),
        (make_speed(), make_speed(), 301, False),
        (make_speed(slowdown=2.0), make_speed(), 0, True),  # 0.04 + 0.2 s against 0.02 + 0.1
        (make_speed(slowdown=2.0), make_speed(), 91, False),  # 0.04 + 0.382 s
        (make_speed(rows=280), make_speed(), 0, True),  # a step takes 0.28 s more
        (make_speed(rows=281), make_speed(), 21, False),
        (make_speed(), make_speed(slowdown=2.0), 640, True),  # 0.3 s become 0.6 where all others are slow, too
        (make_speed(), None, 299, True),  # what one does not tell is as with the others
        (None, make_speed(), 299, True),
        (None, make_speed(), 301, False),
        (make_speed(slowdown=3.9)._replace(step_s=None, row_s=None), make_speed(), 0, True),
        (make_speed(slowdown=4.1)._replace(step_s=None, row_s=None), make_speed(), 0, False),
    ],
)
def test_a_home_is_left_for_seconds_of_the_other_worker(
    mine: WorkerSpeed | None, others: WorkerSpeed | None, waiting: int, stays: bool
) -> None:
    home = find_home("ab", "a")
    placer = placer_of(make_beat("a", [0], waiting, speed=mine), make_beat("b", [1], speed=others))
    placed = placer.choose_partition(make_prompt("p", 100, home=home), [0, 1], 0.0)
    assert (placed.home, placed.worker) == ("a", "a" if stays else "b")


def count_homes(*speeds: WorkerSpeed | None) -> list[int]:
    """Return how many of 4,000 homes each worker has."""
    beats = [make_beat(str(number), [number], speed=speed) for number, speed in enumerate(speeds)]
    placer, partitions = placer_of(*beats), range(len(beats))
    homes = Counter(placer.choose_partition(make_prompt(f"p{one}", 1), partitions, 0.0).home for one in range(4000))
    return [homes[str(number)] for number in partitions]


def test_homes_are_shared_by_the_speed_of_the_idle_machine() -> None:
    """In powers of 1.5, to the median: what differs by less is equal, and what slows a worker now counts elsewhere."""
    equal = count_homes(None, None, None, None)
    assert count_homes(make_speed(0.9), make_speed(1.1), make_speed(1.2), None) == equal
    assert count_homes(make_speed(slowdown=8.0), make_speed(rows=90), make_speed(), make_speed()) == equal
    one_slow = count_homes(*[make_speed(4.0), *[make_speed()] * 3])
    share = 1.5**-3 / (3 + 1.5**-3)
    assert one_slow[0] == pytest.approx(4000 * share, rel=0.1)
    assert all(now >= before for now, before in zip(one_slow[1:], equal[1:], strict=True)), "no home moved between them"
    one_fast = count_homes(*[make_speed(0.25), *[make_speed()] * 3])
    assert one_fast[0] == pytest.approx(4000 * 1.5**3 / (3 + 1.5**3), rel=0.1)


def test_a_slow_worker_that_decodes_much_gets_little() -> None:
    slow, fast = make_speed(10.0, rows=64), make_speed()
    beats = [make_beat("slow", [0, 2], lasts_s=1e9, speed=slow), make_beat("fast", [1, 3], lasts_s=1e9, speed=fast)]
    placer, got = placer_of(*beats), Counter[str]()
    for number in range(500):
        request = Request(id=f"r{number}", prompt=f"question {number} " * 30)
        got[placer.choose_partition(chain_prompt(request), range(4), 10.0 * number).worker] += 1
    assert got["slow"] <= 5


def order_by_hash(home: str, workers: Iterable[str]) -> list[str]:
    """Return workers as a home's hash has them."""
    return sorted(workers, key=lambda worker: hashlib.sha256(home.encode() + worker.encode()).digest())


def test_a_worker_with_several_partitions_gets_a_home_in_one() -> None:
    placer = placer_of(make_beat("a", [0, 2, 5], lasts_s=1e3))
    found = [placer.choose_partition(make_prompt(f"p{number % 9}", 1), range(8), 0.0).partition for number in range(90)]
    assert found == [choose_by_hash(f"p{number % 9}".encode(), [0, 2, 5]) for number in range(90)]


@pytest.mark.proof
@pytest.mark.parametrize(
    "beats",
    [
        [],
        [make_beat("a", [0], lasts_s=1.0)],  # too old
        [make_beat("a", [])],  # it reads nothing
        [make_beat("a", [3])],  # its partition has no leader
    ],
)
def test_where_no_heartbeat_helps_the_hash_chooses(beats: list[WorkerBeat]) -> None:
    placer = placer_of(*beats)
    placed = placer.choose_partition(make_prompt("p", 1), [0, 1, 2], 1.0)
    assert placed == Placement(choose_by_hash(b"p", [0, 1, 2]))
    assert json.loads(placed.describe_choice()) == {"partition": placed.partition, "why": "hash"}


def test_the_hash_spreads_texts_that_begin_alike_and_keeps_chats_together() -> None:
    placer, first = placer_of(), "x" * PIECE_CHARS

    def choose(**fields: Any) -> int:
        return placer.choose_partition(make_chain(**fields), range(16), 0.0).partition

    assert len({choose(prompt=f"{first} {number}") for number in range(200)}) == 16
    assert len({choose(token_ids=[*range(64), number]) for number in range(200)}) == 16
    assert len({choose(prompt=f"{first} {number}", session="s") for number in range(20)}) == 1
    assert len({choose(messages=make_chat("question", "answer", f"{number}")) for number in range(20)}) == 1


def test_token_ids_in_place_of_a_text_are_chained_as_those_of_a_prompt() -> None:
    ids = [*range(100)]
    chain = make_chain(texts=[ids])
    assert chain == make_chain(token_ids=ids)
    assert (chain.is_tokens, count_prompt_chars(make_request(None, {"texts": ["a", ids]}))) == (True, 0)


def test_a_worker_that_is_gone_or_silent_gets_nothing() -> None:
    placer, asked = placer_of(make_beat("a", [0]), make_beat("b", [1], waiting=9000)), make_prompt("p", 500)
    assert placer.choose_partition(asked, [0, 1], 1.0).worker == "a"
    placer.note_beats([make_beat("a", [0]), make_beat("b", [1], waiting=9000, at_s=2.0)])
    assert placer.choose_partition(asked, [0, 1], 3.0).worker == "b", "the other one's is three periods old"
    placer.note_beats([make_beat("b", [1], waiting=9000, at_s=3.0)])
    assert placer.choose_partition(asked, [0, 1], 3.0).costs == in_s(b=9000 + 500)


def test_what_was_sent_is_remembered_for_a_while_and_not_without_end() -> None:
    placer, asked = placer_of(make_beat("a", [0], lasts_s=1e9)), make_prompt("p", 100)
    placer.choose_partition(asked, [0], 0.0)
    assert placer.choose_partition(asked, [0], MEMORY_S).num_cached == 100
    assert placer.choose_partition(asked, [0], 2 * MEMORY_S + 1).num_cached == 0
    lengths = range(1, MAX_LINKS + 1)
    for number in range(2 * MAX_REMEMBERED_LINKS // MAX_LINKS):
        placer.choose_partition(make_prompt(f"p{number}", *lengths), [0], 1000.0)
    assert len(placer._memory._sent) <= MAX_REMEMBERED_LINKS
    placer.choose_partition(make_prompt("last", 1), [0], 1001.0 + MEMORY_S)
    assert len(placer._memory._sent) == 1, "its link"
    for number in range(100):  # each start of a worker without a set name has a new one
        placer.note_beats([make_beat(f"w{number}", [0], lasts_s=1e9)])
        placer.choose_partition(make_prompt("always", 1), [0], 2000.0)
    assert len(next(reversed(placer._memory._sent.values()))) == 1


@pytest.mark.proof
def test_chats_with_one_long_system_prompt_keep_their_workers_and_load_is_even() -> None:
    """200 of them, with four turns, over two producers at random, and heartbeats that are half a second late.

    Each worker computes 2,000 tokens a second, which is about twice what comes.
    """
    order, system = random.Random(1), {"role": "system", "content": "Be kind. " * 900}
    placers, queues, computed = [Placer(), Placer()], Counter[int](), Counter[int]()
    late: list[list[WorkerBeat]] = []
    chats: list[list[dict[str, str]]] = [[system] for _ in range(200)]
    workers: list[list[int]] = [[] for _ in chats]
    turns = [number for _ in range(4) for number in order.sample(range(200), 200)]
    for tick, number in enumerate(turns):
        now_s = tick / 20
        if tick % 10 == 0:
            queues = Counter({one: max(0, queues[one] - 1000) for one in range(4)})
            late.append([make_beat(str(one), [one], queues[one], at_s=now_s) for one in range(4)])
            for placer in placers:
                placer.note_beats(late[-2] if len(late) > 1 else [])
        turn = len(workers[number])
        chats[number].append({"role": "user", "content": f"chat {number} turn {turn} " + "word " * 150})
        worker = order.choice(placers).choose_partition(make_chain(messages=chats[number]), range(4), now_s).partition
        chats[number].append({"role": "assistant", "content": "answer " * 30})
        has_it = bool(workers[number]) and workers[number][-1] == worker
        num_tokens = 200 if has_it or not turn else 250 * (turn + 1)
        queues[worker] += num_tokens
        computed[worker] += num_tokens
        workers[number].append(worker)
    kept = sum(one == other for mine in workers for one, other in pairwise(mine))
    assert kept >= 0.9 * 200 * 3
    assert max(computed.values()) <= 1.2 * sum(computed.values()) / 4


def test_it_is_told_what_was_considered() -> None:
    placer = placer_of(*(make_beat(f"w{number:02}", [number], waiting=1000 * number) for number in range(30)))
    told = json.loads(placer.choose_partition(make_prompt("p", 100), range(30), 0.0).describe_choice())
    assert (told["worker"], told["why"], told["cached"]) == (
        "w00",
        "home" if told["home"] == "w00" else "least work left",
        0,
    )
    assert list(told["costs"].items())[:2] == [("w00", 0.1), ("w01", 1.1)]
    assert len(told["costs"]) == 16


# Jobs


def make_job_beat(
    worker: str, partitions: Sequence[int], num_rows: int = 0, waiting: int = 0, free: int = 100, *, at_s: float = 0.0
) -> WorkerBeat:
    """Return the heartbeat of a worker that decodes alone, whose step takes 20 ms and one for each row."""
    nothing: dict[PriorityClass, Sequence[int]] = {"interactive": (), "batch": ()}
    read: dict[PriorityClass, Sequence[int]] = {"interactive": partitions, "batch": ()}
    tokens: dict[PriorityClass, int] = {"interactive": 0, "batch": 0}
    speed = make_speed(rows=num_rows)
    return WorkerBeat(worker, at_s, at_s + 3.0, nothing, tokens, None, speed, JobLoad(read, waiting, free))


@pytest.mark.parametrize(
    ("rows", "waiting", "free", "chosen"),
    [
        ((3, 4), (0, 0), (100, 100), "a"),
        ((4, 3), (0, 0), (100, 100), "b"),
        ((3, 4), (2, 0), (100, 100), "b"),  # what waits will be rows
        ((3, 4), (0, 0), (9, 100), "b"),  # no room for ten blocks
        ((3, 4), (0, 0), (9, 9), "a"),  # room nowhere
    ],
)
def test_a_job_goes_where_steps_take_least_among_those_with_room(
    rows: tuple[int, int], waiting: tuple[int, int], free: tuple[int, int], chosen: str
) -> None:
    placer = placer_of(*(make_job_beat("ab"[one], [one], rows[one], waiting[one], free[one]) for one in (0, 1)))
    found = placer.choose_job_partition(JobNeed("interactive", 10), "r", range(3), 0.0)
    assert found == "ab".index(chosen)
    assert placer.choose_job_partition(JobNeed("batch", 10), "r", range(3), 0.0) is None, "nobody reads those"


def test_jobs_that_were_sent_count_until_a_heartbeat_has_them() -> None:
    beats = [make_job_beat("a", [0]), make_job_beat("b", [1], num_rows=2, free=11)]
    placer, need = placer_of(*beats), JobNeed("interactive", 5)

    def choose(now_s: float) -> int | None:
        return placer.choose_job_partition(need, "r", range(2), now_s)

    chosen = [choose(0.5) for _ in range(6)]
    assert chosen[:2] == [0, 0], "as it has two rows fewer"
    assert Counter(chosen) == {0: 4, 1: 2}
    assert [choose(0.5) for _ in range(3)] == [0, 0, 0], "the other one has no room for a third"
    placer.note_beats([make_job_beat("a", [0], num_rows=9, at_s=1.0), make_job_beat("b", [1], num_rows=2, at_s=1.0)])
    assert choose(1.5) == 1
    assert choose(4.1) is None, "heartbeats are too old"


def test_a_job_does_not_return_to_its_sender_while_another_worker_reads_jobs() -> None:
    need, own, other = JobNeed("interactive", 10, "a"), make_job_beat("a", [0]), make_job_beat("b", [1], 9, free=0)
    assert placer_of(own, other).choose_job_partition(need, "r", range(2), 0.0) == 1
    assert placer_of(own).choose_job_partition(need, "r", range(2), 0.0) == 0, "nobody else reads jobs"


def test_beside_a_worker_that_does_not_tell_its_jobs_the_hash_places_them() -> None:
    older = replace(make_job_beat("b", [1]), jobs=None)
    placer = placer_of(make_job_beat("a", [0]), older)
    assert placer.choose_job_partition(JobNeed("interactive", 1), "r", range(2), 0.0) is None


def test_workers_that_decode_alone_are_no_measure_for_those_that_read_requests() -> None:
    decode = replace(make_job_beat("d", [0]), speed=make_speed(100.0))
    placer = placer_of(decode, make_beat("a", [0], speed=make_speed()), make_beat("b", [1]))
    costs = placer.choose_partition(make_prompt("p", 100), [0, 1], 0.0).costs
    assert costs["a"] == costs["b"] == pytest.approx(0.12)
