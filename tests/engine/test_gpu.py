"""What runs on a GPU: all that can be held on a CPU with stand-ins (`no_gpu.py`), the rest marked `gpu`."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import fuse_model
from penstock.engine.attention import LayerAttention
from penstock.engine.cuda import trial
from penstock.engine.cuda.backend import CudaBackend, CudaRunner, CudaStorage
from penstock.engine.cuda.copies import BlockCopier
from penstock.engine.cuda.decode import DecodeGraphs, HostInputs, list_graph_sizes
from penstock.engine.cuda.sizing import choose_batch, run_largest_steps, size_pool
from penstock.engine.cuda.varlen import Windows, make_calls, pad_to_power_of_two
from penstock.engine.engine import Engine, Sampled
from penstock.engine.handover import export_blocks
from penstock.engine.loading import load_model
from penstock.engine.masks import MaskRule, find_window, get_visibility
from penstock.engine.model import LoadedModel
from penstock.engine.proof import prove_model
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import KVStorage
from penstock.errors import ModelLoadError, SequenceFailed
from penstock.messages import Sampling
from tests.engine.helpers import drain, hand_over, run_sequences, sequence, stage_blocks
from tests.engine.no_gpu import (
    TRIAL_BLOCKS,
    AtOnce,
    EmulatedBackend,
    Queues,
    TapeRecorder,
    model_on,
    recording,
    varlen_attn,
)

CPU = torch.device("cpu")
SAMPLED = Sampling(temperature=0.9, top_p=0.95)
SMALL = EngineSettings(max_batch=6, max_step_tokens=40, pool_mb=16)


@pytest.fixture(scope="module")
def prompts(demo: LoadedModel) -> list[list[int]]:
    """Of 1 to 90 tokens; two begin alike."""
    rng = random.Random(6)
    found = [[rng.randrange(demo.vocab_size) for _ in range(length)] for length in (1, 5, 16, 17, 33, 90, 40)]
    return [*found, found[-1][:32] + found[0]]


@pytest.fixture(scope="module")
def expected(demo: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return run_sequences(Engine(demo, SMALL), _seqs(prompts))


def _seqs(prompts: list[list[int]]) -> list[Sequence]:
    """Some greedy, some sampled, of different lengths."""
    return [
        sequence(p, 6 + 5 * n, name=str(n), sampling=SAMPLED if n % 3 else Sampling(temperature=0.0))
        for n, p in enumerate(prompts)
    ]


# Which layers


def test_all_layers_of_a_plain_model_are_taken(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    assert _windows(model) == {shape.layer: 0 for shape in demo.layout.layers}


def _windows(model: LoadedModel) -> Windows:
    assert isinstance(model.backend, CudaBackend)
    return model.backend.windows


def _refuses(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 256")


def _sees_too_much(*args: Any, seqused_k: Tensor, **kwargs: Any) -> Tensor:
    return varlen_attn(*args, seqused_k=seqused_k + 1, **kwargs)


def _overflows(*args: Any, block_table: Tensor, **kwargs: Any) -> Tensor:
    return varlen_attn(*args, block_table=block_table % (TRIAL_BLOCKS - 8), **kwargs)


def _knows_one_tile(*args: Any, seqused_k: Tensor, **kwargs: Any) -> Tensor:
    return varlen_attn(*args, seqused_k=seqused_k.clamp(max=120), **kwargs)


def _sees_too_little(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> Tensor:
    return varlen_attn(*args, window_size=(60, 0), **kwargs)


@pytest.mark.parametrize("kernel", [_refuses, _sees_too_much, _sees_too_little, _overflows, _knows_one_tile])
def test_a_kernel_that_cannot_or_is_wrong_is_not_used(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]
) -> None:
    assert _windows(model_on(monkeypatch, demo, kernel)) == {}


def test_no_layer_of_a_model_in_32_bits_is_taken(demo: LoadedModel) -> None:
    assert demo.dtype == torch.float32
    assert trial.find_varlen_windows(demo) == {}


@pytest.mark.parametrize(
    ("softcap", "sinks", "window", "found"),
    [(None, None, None, 0), (None, None, 7, 7), (30.0, None, None, None), (None, torch.zeros(4), None, None)],
)
def test_what_a_layer_may_have(
    demo: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    found: int | None,
) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    shape = model.layout.layers[0]
    how = LayerAttention(2 * shape.k_shape[0], 0.2, softcap, sinks, None, window)
    assert trial.try_layer(model, shape, how) == found


def _rule(visible: Callable[[Any, Any], Any]) -> MaskRule:
    return MaskRule(lambda batch, head, query, key: (key <= query) & visible(query, key))


def test_windows_are_found_in_rules() -> None:
    assert find_window(get_visibility(None, None), 100) == 0
    assert find_window(get_visibility(None, 100), 100) == 0  # it never hides anything
    assert find_window(get_visibility(None, 99), 100) == 99
    assert find_window(get_visibility(_rule(lambda query, key: key > query - 8), None), 100) == 8
    assert find_window(get_visibility(_rule(lambda query, key: key // 8 == query // 8), None), 100) is None


# Steps


def test_sizes_are_padded_to_powers_of_two() -> None:
    assert [pad_to_power_of_two(n) for n in (1, 2, 3, 4, 5, 31, 33)] == [1, 2, 4, 4, 8, 32, 64]


def test_a_step_is_two_calls_at_most() -> None:
    plan = []
    for length, computed, num, blocks in ((9, 8, 1, [4, 2, 7]), (1, 0, 1, [9]), (2, 1, 1, [5]), (12, 5, 6, [3, 1, 8])):
        seq = sequence([0] * length, block_keys=[])
        seq.num_computed_tokens, seq.block_table = computed, blocks
        plan.append((seq, num))
    singles, chunks = make_calls(plan, 4, CPU)
    rows = [[4, 2, 7], [9], [5], []]
    assert singles.tables.tolist() == [row + (row or [4])[:1] * (16 - len(row)) for row in rows]
    assert singles.lengths.tolist() == [9, 1, 2, 1]
    assert (singles.rows, singles.num_queries, singles.starts.tolist()) == (slice(0, 3), 4, [0, 1, 2, 3, 4])
    assert chunks.tables.tolist() == [[3, 1, 8] + [3] * 13]
    assert (chunks.lengths.tolist(), chunks.starts.tolist()) == ([11], [0, 6])
    assert (chunks.rows, chunks.num_queries, chunks.max_rows) == (slice(3, 9), 64, 64)


def test_steps_have_few_sizes() -> None:
    """Each other combination of sizes costs a plan of cuDNN's."""
    rng, keys = random.Random(2), set()
    for _ in range(300):
        plan = []
        for num in sorted([1] * rng.randrange(9) + [rng.randrange(2, 50) for _ in range(rng.randrange(1, 6))]):
            computed = rng.randrange(200)
            seq = sequence([0] * (computed + num), block_keys=[])
            seq.num_computed_tokens, seq.block_table = computed, list(range(-(-(computed + num) // 4)))
            plan.append((seq, num))
        calls = make_calls(sorted(plan, key=lambda item: item[1] > 1), 4, CPU)
        for call in calls:
            assert call.starts[-1] <= call.num_queries
            assert len(call.starts) == len(call.lengths) + 1 == len(call.tables) + 1
        keys |= {call.plan_key for call in calls}
    assert len(keys) <= 4 * 2 + 4 * 3 * 2  # sequences, then chunks, rows; and widths


@pytest.mark.parametrize("window", [0, 5])
def test_torch_takes_the_calls(window: int) -> None:
    """torch's own function, on tensors without content: names, order and shapes."""
    seqs = [_decoding([7, 3], 6), _decoding([5], 1), _decoding([1, 2, 4], 9)]
    parts = make_calls([(seq, 1) for seq in seqs] + [(_decoding([6, 8], 1), 7)], 4, CPU)
    pool = torch.empty(9, 2, 4, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    query = torch.empty(10, 4, 16, dtype=torch.bfloat16, device="meta")
    for part in parts:
        names = ("starts", "tables", "lengths")
        there = replace(part, **{name: getattr(part, name).to("meta") for name in names})
        out = there.compute_attention(query, pool, pool, 0.25, window)
        assert out.shape == (part.rows.stop - part.rows.start, 4, 16)


def test_tokens_are_the_torch_paths(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    engine = Engine(model, SMALL)
    first = sequence(prompts[5], 11)
    assert run_sequences(engine, [first], remove=False) == run_sequences(
        Engine(demo, SMALL), [sequence(prompts[5], 11)]
    )
    again = Engine(model, SMALL)
    assert run_sequences(again, [hand_over(engine, again, first)]) == [first.output_token_ids]
    assert run_sequences(Engine(model, SMALL), _seqs(prompts)) == expected


def test_sizes_without_a_plan_are_computed_by_torch(
    demo: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither the step fails nor any of its sequences, and decode steps of other sizes are recorded all the same."""
    refuses = False

    def kernel(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if refuses and len(query) in (4, 64):
            raise RuntimeError("cuDNN found no execution plan")
        return varlen_attn(query, *args, **kwargs)

    model = model_on(monkeypatch, demo, kernel)
    refuses = True
    engine, recorder = recording(model, SMALL)
    engine.storage.data[:-1].fill_(torch.nan)  # what a sequence may not read
    assert run_sequences(engine, _seqs(prompts)) == expected
    assert recorder.num_recorded == 3  # four sequences are computed as eight
    assert recorder.num_replayed > 20
    assert any("cuDNN found no execution plan" in record.message for record in caplog.records)


# Recorded decode steps


def test_sizes_of_recorded_steps() -> None:
    assert list_graph_sizes(1) == [1]
    assert list_graph_sizes(5) == [1, 2, 4, 8]
    assert list_graph_sizes(17) == [1, 2, 4, 8, 16, 24]
    assert list_graph_sizes(24) == [1, 2, 4, 8, 16, 24]


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_the_device_has_the_tables_of_each_step(demo: LoadedModel, num_blocks: int) -> None:
    """Rows are copied only if they changed, whoever comes and goes, and in both sets of inputs."""
    storage = KVStorage(demo.layout, 9, demo.device)
    windows = dict.fromkeys(storage.keys, 0)
    graphs = DecodeGraphs(storage, windows, max_batch=8, max_blocks=5, spare=8, recorder=TapeRecorder())
    rng, running = random.Random(num_blocks), [_decoding([n] * num_blocks, 1) for n in range(6)]
    for _ in range(60):
        if rng.random() < 0.3:
            running.pop(rng.randrange(len(running)))
        if len(running) < 2 or (rng.random() < 0.3 and len(running) < 8):
            running.insert(rng.randrange(len(running) + 1), _decoding([rng.randrange(8)] * num_blocks, 1))
        for seq in rng.sample(running, 1):
            if len(seq.block_table) < 5:
                seq.block_table.append(rng.randrange(8))
        host = graphs._host_inputs[graphs._turn]
        graphs._upload_inputs(running, 8)
        assert graphs._tables.tolist() == host.tables.tolist()


def test_recorded_steps_give_the_same_tokens(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine, recorder = recording(model_on(monkeypatch, demo, varlen_attn), SMALL)
    assert run_sequences(engine, _seqs(prompts)) == expected
    assert recorder.num_recorded == 4  # 1, 2, 4 and 8 sequences, before the first
    assert recorder.num_replayed > 20


def test_recorded_steps_survive_preemption(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine, recorder = recording(model_on(monkeypatch, demo, varlen_attn), SMALL)
    engine.pool._free = type(engine.pool._free)(range(10))  # blocks for less than all
    for seq in (seqs := _seqs(prompts)):
        engine.add_sequence(seq)
    drain(engine)
    assert [seq.output_token_ids for seq in seqs] == expected
    assert engine.scheduler.num_preemptions > 0
    assert recorder.num_replayed > 20


@pytest.mark.parametrize("is_recorded", [False, True])
def test_tokens_are_handled_while_the_next_step_is_computed(
    demo: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: list[list[int]],
    is_recorded: bool,
) -> None:
    """As a worker does it: sequences are removed, and others added, between the two halves of a step."""
    model = model_on(monkeypatch, demo, varlen_attn)
    engine = recording(model, SMALL)[0] if is_recorded else Engine(model, SMALL)
    assert engine.is_asynchronous
    # Each sequence could go on, as one may that ends with a word.
    seqs = [sequence(seq.token_ids, 200, name=seq.id, sampling=seq.sampling, seed=seq.seed) for seq in _seqs(prompts)]
    lengths = dict(zip(seqs, map(len, expected), strict=True))
    found: dict[Sequence, list[int]] = {seq: [] for seq in seqs}
    waiting, handled = list(seqs), list[Sampled]()
    while waiting or engine.has_work() or handled:
        has_begun = engine.begin_step()
        for item in handled:
            found[item.seq].append(item.token_id)
            if len(found[item.seq]) == lengths[item.seq]:
                engine.remove_sequence(item.seq)
                filler = stage_blocks(engine, [f"{item.seq.id} {n}".encode() for n in range(3)])  # what was its own
                for view in filler.views:
                    view[:] = bytes([85]) * len(view)
                engine.commit_staged_blocks(filler, 3)
        for seq in waiting[:2]:
            engine.add_sequence(seq)
        del waiting[:2]
        handled = engine.finish_step() if has_begun else []
    assert list(found.values()) == expected
    engine.pool.check_integrity()


def test_what_fails_when_it_is_launched_fails_when_it_is_finished(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = Engine(model_on(monkeypatch, demo, varlen_attn), SMALL)
    bad, *others = _seqs(prompts)
    run_step = engine.runner.run_step

    def fail(batch: StepBatch) -> Tensor:
        if any(seq is bad for seq, _ in batch.plan):
            raise RuntimeError("it fails")
        return run_step(batch)

    monkeypatch.setattr(engine.runner, "run_step", fail)
    for seq in (bad, *others):
        engine.add_sequence(seq)
    named = []
    while engine.has_work():
        assert engine.begin_step()
        try:
            engine.finish_step()
        except SequenceFailed as failed:
            named.append(failed.seq)
            engine.remove_sequence(failed.seq)
    assert named == [bad]
    assert [seq.output_token_ids for seq in others] == expected[1:]


def test_padding_writes_to_the_spare_block_only(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = recording(model_on(monkeypatch, demo, varlen_attn), SMALL)
    seqs = [sequence([n + 3] * 20, 6, name=str(n)) for n in range(3)]
    run_sequences(engine, seqs, remove=False)
    assert recorder.num_replayed > 0
    used = {block for seq in seqs for block in seq.block_table} | {engine.pool.num_blocks}
    written = {block for block, content in enumerate(engine.storage.data) if bool(content.any())}
    assert written == used


def test_what_cannot_be_recorded_is_run(
    demo: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def waits(*args: Any, **kwargs: Any) -> Tensor:
        return varlen_attn(*args, **kwargs) * (1 if float(args[0].sum()) else 2)

    engine, recorder = recording(model_on(monkeypatch, demo, waits), SMALL)
    assert run_sequences(engine, _seqs(prompts)) == expected
    assert recorder.num_recorded == 0
    assert [record.message for record in caplog.records] == [
        "decode steps are launched one kernel at a time: operation not permitted when stream is capturing"
    ]


def test_what_is_recorded_wrongly_is_run(
    demo: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forgets(recorder: TapeRecorder, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = work() * 1.1
        return lambda: result

    monkeypatch.setattr(TapeRecorder, "record_graph", forgets)
    engine, _ = recording(model_on(monkeypatch, demo, varlen_attn), SMALL)
    assert run_sequences(engine, _seqs(prompts)) == expected
    assert [record.message for record in caplog.records] == [
        "decode steps are launched one kernel at a time: a recorded step gives other logits than it did before"
    ]


def test_graphs_need_every_layer(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    windows = {layer: window for layer, window in _windows(model).items() if layer}
    storage = KVStorage(model.layout, 9, model.device)
    assert CudaBackend(windows).create_graphs(model, SMALL, storage, TapeRecorder()) is None


# The inputs of a recorded step


def _decoding(blocks: list[int], length: int) -> Sequence:
    seq = sequence([100 + length] * length, max_new_tokens=50, block_keys=[])
    seq.block_table, seq.num_computed_tokens = blocks, length - 1
    return seq


def _contents(host: HostInputs, size: int) -> list[Any]:
    return [x.tolist() for x in (host.numbers[:, :size], host.lengths[:size], host.tables[:size])]


def _anew(seqs: list[Sequence], size: int) -> list[Any]:
    host = HostInputs(8, 4, 4, 99, pinned=False)
    host.write_step(seqs, size)
    return _contents(host, size)


def test_rows_of_a_decode_step() -> None:
    seqs = [_decoding([7, 3], 6), _decoding([5], 1), _decoding([1, 2, 4], 9)]
    assert _anew(seqs, 4) == [
        [[106, 101, 109, 0], [5, 0, 8, 0], [3, 5, 4, 99], [1, 0, 0, 0]],
        [6, 1, 9, 1],
        [[7, 3, 99, 99], [5, 99, 99, 99], [1, 2, 4, 99], [99, 99, 99, 99]],
    ]


def test_only_what_changed_is_written() -> None:
    host = HostInputs(8, 4, 4, 99, pinned=False)
    seqs = [_decoding([7, 3], 6), _decoding([5], 4), _decoding([1, 2, 6], 9)]
    assert host.write_step(seqs, 4) == 3
    assert host.write_step(seqs, 4) == 0
    for seq in seqs:
        seq.token_ids.append(200)
        seq.num_computed_tokens += 1
    assert host.write_known_rows(seqs) == 2  # the second one's next block is not there yet
    seqs[1].block_table += [8]
    assert host.write_step(seqs, 4) == 1
    assert _contents(host, 4) == _anew(seqs, 4)


def test_rows_follow_who_leaves_and_who_comes() -> None:
    host = HostInputs(8, 4, 4, 99, pinned=False)
    seqs = [_decoding([n, n + 10, n + 20], 9 + n % 3) for n in range(6)]
    host.write_step(seqs, 8)
    for now in (seqs[1:], seqs[3:], [*seqs[3:], _decoding([55], 2)], [_decoding([2], 10 - 7)], seqs):
        host.write_step(now, pad_to_power_of_two(len(now)))
        assert _contents(host, pad_to_power_of_two(len(now))) == _anew(now, pad_to_power_of_two(len(now)))
    seqs[0].block_table = [70, 71, 72]  # preempted, and back
    host.write_step(seqs, 8)
    assert _contents(host, 8) == _anew(seqs, 8)


# Copies


def _copier(num_rows: int) -> tuple[Queues, BlockCopier, Tensor]:
    queues, rows = Queues(), torch.zeros(3, num_rows, 2, dtype=torch.int16)
    return queues, BlockCopier(queues, *rows), torch.zeros(6, 2, dtype=torch.int16)


def _payload(number: int) -> bytes:
    return number.to_bytes(2, "little") * 2


def test_a_step_reads_what_was_imported_before_it() -> None:
    queues, copier, pool = _copier(2)
    seen: list[list[int]] = []
    queues.compute(lambda: seen.append(pool[:, 0].tolist()))  # a step under way, which still reads the old content
    for block in range(6):
        copier.write_block(pool[block], _payload(block + 1))
    queues.compute(lambda: seen.append(pool[:, 1].tolist()))
    queues.finish()
    assert seen == [[0] * 6, [1, 2, 3, 4, 5, 6]]


def test_an_export_has_what_was_computed_before_it_and_nobody_waits_before_it_is_read() -> None:
    queues, copier, pool = _copier(2)
    done: list[str] = []
    queues.compute(lambda: pool.fill_(7))
    queues.compute(lambda: done.append("before"))
    copier.write_block(pool[1], _payload(5))
    first = copier.begin_download(pool[0])
    queues.compute(lambda: done.append("after"))
    second = copier.begin_download(pool[1])
    assert done == []
    assert (first.wait_for_content().tolist(), done) == ([7, 7], ["before"])
    assert second.wait_for_content().tolist() == [5, 5]
    queues.compute(lambda: pool.fill_(8))
    assert first.wait_for_content().tolist() == [7, 7]
    third = copier.begin_download(pool[2])  # there is no row left, so this one is waited for
    assert third.wait_for_content().tolist() == [8, 8]
    for download in (first, second, third):
        download.release()
    assert copier.begin_download(pool[1]).wait_for_content().tolist() == [8, 8]


def test_a_row_is_used_again_once_its_copy_is_done() -> None:
    queues, copier, pool = _copier(1)
    for number in range(5):
        download = copier.begin_download(pool[0])
        download.release()  # dropped before anybody read it
        landing = copier.begin_upload(1)
        assert landing.taken == [0]
        landing.rows[0].fill_(number)
        copier.finish_upload([pool[number]], landing)
    queues.finish()
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4, 0]


def test_a_step_reads_what_was_staged_before_it_and_none_under_way_does() -> None:
    queues, copier, pool = _copier(3)
    seen: list[list[int]] = []
    landing = copier.begin_upload(3)
    assert copier.num_free_uploads == 0
    assert copier.begin_upload(1).taken == []  # memory of its own
    queues.compute(lambda: seen.append(pool[:, 0].tolist()))  # a step under way: the blocks may be its sequences'
    for row, number in zip(landing.rows, (1, 2, 3), strict=True):
        row.fill_(number)
    copier.finish_upload([pool[4], pool[0]], landing)
    assert copier.num_free_uploads == 3
    queues.compute(lambda: seen.append(pool[:, 1].tolist()))
    queues.finish()
    assert seen == [[0] * 6, [2, 0, 0, 0, 1, 0]]


def test_loads_wait_for_memory_of_the_host(demo: LoadedModel) -> None:
    """A second load waits until the first is committed; one that is larger than all of it has memory of its own."""
    engine = Engine(replace(demo, backend=_CopyingBackend()), SMALL)
    first = engine.stage_blocks([b"1"])
    assert first is not None
    assert engine.stage_blocks([b"2", b"3"]) is None
    engine.commit_staged_blocks(first, 1)
    second = engine.stage_blocks([b"2", b"3", b"4"])
    assert second is not None
    assert len(second.views) == 3


class _CopyingBackend(CudaBackend):
    """A backend whose blocks are copied from and to other memory."""

    def create_runner(
        self, model: LoadedModel, settings: EngineSettings, num_blocks: int, num_states: int = 1
    ) -> CudaRunner:
        copier = BlockCopier(AtOnce(), *torch.zeros(3, 2, model.layout.block_elements, dtype=model.dtype))
        return CudaRunner(model.module, CudaStorage(model.layout, num_blocks, CPU, copier), {}, None)


def test_kv_comes_and_goes_through_memory_of_the_host(
    demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    model = replace(demo, backend=_CopyingBackend())
    first, second = Engine(model, SMALL), Engine(model, SMALL)
    done = _seqs(prompts)
    run_sequences(first, done, remove=False)
    assert [seq.output_token_ids for seq in done] == expected
    pinned = first.pin_block(done[5], 0)
    assert first.pool.count_pins(done[5].block_table[0]) == 2  # nothing else is written there while it is copied
    before = bytes(pinned.payload)
    first.storage.data[done[5].block_table[0]].fill_(3)
    assert bytes(pinned.payload) == before
    assert pinned.payload.readonly
    assert pinned.is_valid()
    first.unpin_block(pinned)
    assert first.pool.count_pins(done[5].block_table[0]) == 1
    first.storage.write_block(done[5].block_table[0], before)
    staged_blocks = stage_blocks(second, [b"else"])
    staged_blocks.views[0][:] = bytes(b"\1" * second.block_bytes)
    assert not second.storage.data.any()  # not before it is closed
    second.commit_staged_blocks(staged_blocks, 1)
    assert second.storage.data.any()
    copies = [hand_over(first, second, seq) for seq in done]
    assert run_sequences(second, copies) == expected
    assert all(copy.num_cached_tokens == copy.num_prompt_tokens for copy in copies)


# Fused parts


def test_norms_and_linear_layers_are_fused_and_give_the_same(
    demo: LoadedModel, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    model = replace(demo, module=copy.deepcopy(demo.module))
    num_layers = len(model.layout.layers)
    assert fuse_model(model) == (2 * num_layers + 1) + 2 * num_layers
    assert sum(type(part) is torch.nn.Linear for part in model.module.modules()) == 2 * num_layers + 1
    assert run_sequences(Engine(model, SMALL), _seqs(prompts)) == expected


def test_a_norm_that_does_something_else_stays(demo: LoadedModel) -> None:
    model = replace(demo, module=copy.deepcopy(demo.module))
    norm = model.module.get_submodule("model.norm")
    plain = norm.forward
    norm.forward = lambda x: plain(x) * 1.1
    fuse_model(model)
    assert model.module.get_submodule("model.norm") is norm


# How much a GPU takes


@dataclass
class _Memory:
    """A device's memory in which weights take 20 MiB and a step 3 MiB."""

    free: int

    def count_free_bytes(self) -> int:
        return self.free

    def count_total_bytes(self) -> int:
        return 4096 * 2**20

    def count_own_bytes(self) -> int:
        return 20 * 2**20

    def reset_peak(self) -> None:
        """It is always the same."""

    def count_peak_bytes(self) -> int:
        return 23 * 2**20


def test_defaults_of_a_gpu() -> None:
    """What is set holds."""
    assert _batch_of() == (256, 2048)
    assert _batch_of(max_batch=8) == (8, 2048)
    assert _batch_of(max_step_tokens=100) == (100, 100)
    assert _batch_of(max_batch=16, max_step_tokens=64) == (16, 64)


def _batch_of(**given: int) -> tuple[int, int]:
    chosen = choose_batch(EngineSettings(**given))  # type: ignore[arg-type]
    return chosen.max_batch, chosen.max_step_tokens


@pytest.mark.parametrize(
    ("free", "share", "pool_mb"), [(10**10, 0.9, 1615), (10**10, 0.6, 386), (2200 * 2**20, 0.9, 149)]
)
def test_the_pool_takes_what_the_largest_step_leaves(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch, free: int, share: float, pool_mb: int
) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    settings = EngineSettings(gpu_share=share, max_batch=6, max_step_tokens=40)
    assert size_pool(model, settings, _Memory(free)).pool_mb == pool_mb


def test_a_gpu_without_room_for_blocks_is_refused(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(monkeypatch, demo, varlen_attn)
    with pytest.raises(ModelLoadError, match="PENSTOCK_ENGINE_GPU_SHARE"):
        size_pool(model, EngineSettings(gpu_share=0.3, max_batch=6, max_step_tokens=40), _Memory(10**10))


def test_the_largest_steps(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[int]] = []

    class Watched(EmulatedBackend):
        def create_runner(
            self, model: LoadedModel, settings: EngineSettings, num_blocks: int, num_states: int = 1
        ) -> CudaRunner:
            runner = super().create_runner(model, settings, num_blocks, num_states)
            compute = runner.run_step

            def run_watched(batch: StepBatch) -> Tensor:
                steps.append([num for _, num in batch.plan])
                return compute(batch)

            monkeypatch.setattr(runner, "run_step", run_watched)
            return runner

    run_largest_steps(replace(demo, backend=Watched()), EngineSettings(max_batch=6, max_step_tokens=40))
    assert steps == [[6] * 6, [40]]


# On a GPU

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
on_gpu = pytest.mark.parametrize("block_size", [pytest.param(16, marks=needs_gpu), pytest.param(256, marks=needs_gpu)])


def _gpu(block_size: int, dtype: Literal["float32", "bfloat16"]) -> LoadedModel:
    """The demo model, checked and put on the GPU's kernels."""
    settings = EngineSettings(device="cuda", dtype=dtype, block_size=block_size)
    return prove_model(load_model(settings), settings)


def _settings(block_size: int) -> EngineSettings:
    return SMALL.model_copy(update={"block_size": block_size, "pool_mb": 128})


def _plain(prompts: list[list[int]], num_new: int) -> list[Sequence]:
    return [sequence(p, num_new, name=str(n), block_keys=[]) for n, p in enumerate(prompts)]


@on_gpu
def test_float32_tokens_are_the_cpus(demo: LoadedModel, prompts: list[list[int]], block_size: int) -> None:
    model = _gpu(block_size, "float32")
    assert _windows(model) == {}
    assert run_sequences(Engine(model, _settings(block_size)), _plain(prompts, 12)) == run_sequences(
        Engine(demo, SMALL), _plain(prompts, 12)
    )


@on_gpu
def test_16_bits_use_paged_attention_and_graphs(prompts: list[list[int]], block_size: int) -> None:
    model = _gpu(block_size, "bfloat16")
    assert _windows(model).keys() == {shape.layer for shape in model.layout.layers}
    engine = _recorded(model, block_size)
    run_sequences(engine, _plain(prompts, 24))
    graphs = _graphs(engine)
    assert [*graphs._replays] == [1, 2, 4, 8]


@torch.inference_mode()
def _recorded(model: LoadedModel, block_size: int) -> Engine:
    engine = Engine(model, _settings(block_size))
    engine.runner.record_steps(lambda done: None)
    return engine


def _graphs(engine: Engine) -> DecodeGraphs:
    assert isinstance(engine.runner, CudaRunner)
    assert engine.runner.graphs is not None
    return engine.runner.graphs


@on_gpu
@torch.inference_mode()
def test_a_replayed_step_is_a_launched_one(prompts: list[list[int]], block_size: int) -> None:
    engine = _recorded(_gpu(block_size, "bfloat16"), block_size)
    graphs = _graphs(engine)
    for seq in (seqs := _plain(prompts[2:5], 30)):
        engine.add_sequence(seq)
    for _ in range(12):
        engine.step()
    decoding = [seq for seq in seqs if seq.num_pending_tokens == 1]
    for seq in decoding:  # a block for the next token
        assert seq.num_computed_tokens < len(seq.block_table) * block_size
    replayed = graphs.run_step(decoding)[: len(decoding)].clone()
    launched = graphs._compute_step(4, engine.runner.compute_logits)[: len(decoding)]
    assert torch.equal(replayed, launched)


@on_gpu
def test_16_bit_tokens_are_nearly_the_torch_paths(prompts: list[list[int]], block_size: int) -> None:
    model = _gpu(block_size, "bfloat16")
    fast = run_sequences(Engine(model, _settings(block_size)), _plain(prompts, 12))
    slow = run_sequences(Engine(replace(model, backend=CudaBackend()), _settings(block_size)), _plain(prompts, 12))
    assert sum(a == b for a, b in zip(fast, slow, strict=True)) >= len(prompts) // 2


@on_gpu
def test_blocks_travel(demo: LoadedModel, prompts: list[list[int]], block_size: int) -> None:
    model = _gpu(block_size, "float32")
    engine, again = (Engine(model, _settings(block_size)) for _ in range(2))
    seq = sequence(prompts[5], 11, block_keys=[])
    run_sequences(engine, [seq], remove=False)
    payloads = export_blocks(engine, seq, len(prompts[5]) // block_size)
    copy = hand_over(engine, again, seq)
    assert run_sequences(again, [copy], remove=False) == [seq.output_token_ids]
    assert copy.num_cached_tokens == copy.num_prompt_tokens
    assert export_blocks(again, copy, len(payloads)) == payloads


@on_gpu
def test_a_pool_that_is_too_large_is_refused(block_size: int) -> None:
    with pytest.raises(Exception, match="not enough memory on cuda"):
        load_model(EngineSettings(device="cuda", pool_mb=10**7, block_size=block_size))
