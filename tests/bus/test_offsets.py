import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bus.kafka.offsets import (
    MAX_METADATA_BYTES,
    MAX_OFFSETS_AHEAD,
    NO_EPOCH,
    PartitionOffsets,
    decode_forgotten_end,
    decode_ranges,
    encode_ranges,
)


@st.composite
def logs(draw: st.DrawFn) -> list[int]:
    """Offsets as a reader sees them: ascending, with gaps."""
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9]), max_size=60))
    offset, found = draw(st.integers(0, 2**40)), []
    for step in steps:
        found.append(offset)
        offset += step
    return found


@given(logs(), st.randoms(use_true_random=False))
def test_a_restart_repeats_exactly_the_unfinished(log: list[int], rng: random.Random) -> None:
    finished: set[int] = set()
    committed, metadata = (log[0] if log else 0), ""
    for _ in range(3):  # three lives, each ended by a crash after its last commit
        offsets = PartitionOffsets(committed, metadata)
        rest = [offset for offset in log if offset >= committed]
        num_seen = rng.randint(0, len(rest))
        delivered = [offset for offset in rest[:num_seen] if offsets.note_delivered(offset)]
        assert delivered == [offset for offset in rest[:num_seen] if offset not in finished]
        done = rng.sample(delivered, rng.randint(0, len(delivered)))
        for offset in done:
            expected = offsets.build_commit([offset])
            offsets.finish_offsets([offset])
            offsets.check_integrity()
            assert offsets.build_commit() == expected
        finished.update(done)
        committed, metadata = offsets.build_commit()
        assert all(offset in finished for offset in log if offset < committed)


@given(logs())
def test_offset_after_the_last_delivered_is_committed_not_one_in_a_gap(log: list[int]) -> None:
    offsets = PartitionOffsets(log[0] if log else 0)
    for offset in log:
        assert offsets.note_delivered(offset)
        offsets.finish_offsets([offset])
        assert offsets.build_commit() == (offset + 1, "")


def test_markers_between_finished_messages_keep_one_run() -> None:
    offsets = PartitionOffsets(0)
    for offset in range(0, 4000, 2):
        assert offsets.note_delivered(offset)
    offsets.finish_offsets(range(2, 4000, 2))
    first, metadata = offsets.build_commit()
    assert first == 0
    assert len(metadata) < 30
    assert decode_ranges(metadata, 0) == [(1, 3998)]


@settings(max_examples=20)
@given(st.integers(0, 2**50), st.integers(1000, 5000))
def test_metadata_is_bounded_and_keeps_the_nearest(base: int, count: int) -> None:
    runs = [(base + 3 * number, base + 3 * number + 1) for number in range(1, count)]
    text = encode_ranges(runs, base)
    assert len(text) <= MAX_METADATA_BYTES
    kept = decode_ranges(text, base)
    assert kept == runs[: len(kept)]
    assert len(kept) > 900


@pytest.mark.parametrize(("every", "gap"), [(2, 1), (2, 7), (3, 1), (130, 1), (300, 1), (20_000, 1)])
def test_the_metadata_has_room_for_all_that_a_partition_may_have_finished(every: int, gap: int) -> None:
    """One of so many never finishes. Read on until it has to wait, then die: nothing that was finished comes again."""
    offsets, slow = PartitionOffsets(1000), set[int]()
    log: list[int] = []
    held: list[int] = []
    while offsets.window_usage < 1:
        log.append(log[-1] + gap if log else 1000)
        assert offsets.note_delivered(log[-1])
        held.append(log[-1])
        if len(held) == 500 or offsets.window_usage >= 1:
            slow.update(log[::every])
            offsets.finish_offsets(offset for offset in held if offset not in slow)
            held.clear()
    committed, metadata = offsets.build_commit()
    assert committed == 1000
    after = PartitionOffsets(committed, metadata)
    assert [offset for offset in log if after.note_delivered(offset)] == sorted(slow)
    assert len(log) > 1000


def test_what_is_far_ahead_goes_on_once_the_first_is_done() -> None:
    offsets = PartitionOffsets(0)
    assert offsets.window_usage == pytest.approx(0, abs=0.01)
    for offset in range(MAX_OFFSETS_AHEAD):
        assert offsets.note_delivered(offset)
        if offset:
            offsets.finish_offsets([offset])
    assert offsets.window_usage >= 1
    offsets.finish_offsets([0])
    assert offsets.window_usage == pytest.approx(0, abs=0.01)
    assert offsets.build_commit() == (MAX_OFFSETS_AHEAD, "")


def test_what_was_finished_before_the_log_was_cut_is_not_passed_over_in_what_came_since() -> None:
    before = PartitionOffsets(10)
    for offset in range(10, 20):
        assert before.note_delivered(offset, epoch=4)
    before.finish_offsets([12, 13, 16, 17, 18])
    place, metadata = before.build_commit()
    assert place == 10
    uncut = PartitionOffsets(place, metadata, epoch=4)
    epochs = {offset: 4 if offset < 19 else 5 for offset in range(10, 22)}  # another leader, and nothing lost
    assert [one for one in epochs if uncut.note_delivered(one, epochs[one])] == [10, 11, 14, 15, 19, 20, 21]
    cut = PartitionOffsets(place, metadata, epoch=4)
    epochs = {offset: 4 if offset < 13 else 5 for offset in range(10, 22)}
    assert [one for one in epochs if cut.note_delivered(one, epochs[one])] == [10, 11, *range(13, 22)]
    cut.check_integrity()
    unknown = PartitionOffsets(place, metadata)
    assert [one for one in epochs if unknown.note_delivered(one, epochs[one])] == [10, 11, 14, 15, 19, 20, 21]


def test_a_commit_has_the_newest_epoch_of_all_that_it_calls_finished() -> None:
    """Else its reader would believe that the log was cut, and begin what is finished again."""
    metadata = encode_ranges([(16, 18)], 10)
    offsets, unknown = PartitionOffsets(10, metadata, epoch=4), PartitionOffsets(10, metadata)
    assert (offsets.commit_epoch, unknown.commit_epoch) == (4, NO_EPOCH)
    for one in (offsets, unknown):
        assert one.note_delivered(10, epoch=2)
        one.finish_offsets([10])
        assert one.build_commit()[1], "what is finished behind it goes on with the commit"
    assert (offsets.commit_epoch, unknown.commit_epoch) == (4, NO_EPOCH)
    for one in (offsets, unknown):
        for offset in range(11, 19):
            one.note_delivered(offset, epoch=2 if offset < 14 else 4)
        assert one.commit_epoch == 4
        one.note_delivered(19)  # it cannot be unpacked
        assert one.commit_epoch == NO_EPOCH
        one.note_delivered(20, epoch=5)
        assert one.commit_epoch == 5
        one.skip_to(22)
        assert one.commit_epoch == NO_EPOCH


def test_an_end_beyond_the_last_message_is_passed_over() -> None:
    offsets = PartitionOffsets(5)
    assert offsets.note_delivered(5)
    assert offsets.skip_to(8)
    assert not offsets.skip_to(8)
    assert offsets.build_commit([5]) == (8, "")
    assert offsets.build_commit()[0] == 5
    offsets.finish_offsets([5])
    offsets.check_integrity()
    assert offsets.build_commit() == (8, "")
    assert not offsets.note_delivered(7)
    assert offsets.note_delivered(8)


@given(st.text())
def test_foreign_metadata_means_nothing_is_finished(text: str) -> None:
    assert decode_ranges(text, 5) == []
    assert decode_ranges(None, 5) == []


@given(st.binary())
def test_damaged_metadata_never_raises(raw: bytes) -> None:
    decode_ranges("penstock1:" + raw.hex(), 0)


def test_a_commit_names_the_end_behind_which_none_was_forgotten_until_it_is_passed() -> None:
    offsets, told = PartitionOffsets(10, "", forgotten_end=13), list[tuple[int, int, list[tuple[int, int]]]]()
    for offset in range(10, 15):
        offsets.note_delivered(offset)
    for finished in (11, 10, 12, 13):
        offsets.finish_offsets([finished])
        committed, metadata = offsets.build_commit()
        told.append((committed, decode_forgotten_end(metadata), decode_ranges(metadata, committed)))
    assert told == [(10, 13, [(11, 11)]), (12, 13, []), (13, 0, []), (14, 0, [])]
    assert [decode_forgotten_end(text) for text in ("", "penstock1:AA==", "penstock1:;x", "other;7")] == [0, 0, 0, 0]
