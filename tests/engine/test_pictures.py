"""Prompts with pictures get the tokens of `generate()`, in chunks, in batches, and where only their KV is known."""

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model, open_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.loading.proof import prove_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import compute_tokens
from penstock.engine.pictures.rows import Pictures, PromptPicture, See, SeenPicture, find_spans
from penstock.engine.pictures.vision import Vision
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.serving import ServingEngine
from penstock.engine.steps import hooks
from penstock.engine.weights.files import find_weight_files, ignore_progress
from penstock.engine.weights.module import build_skeleton, count_bytes, load_module
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import InvalidRequest, ModelError, PicturesNeeded, SequenceFailed
from penstock.kvstore.block import BlockHasher, Span
from penstock.kvstore.store import KVStore, StoreLayout
from tests.engine.helpers import BLOCK, GREEDY, GivenDrafts, run_sequences, sequence
from tests.engine.test_seeing import IMAGE_TOKEN, SEEING, TEXT, save_seeing
from tools.handover import export_blocks, import_blocks

GRID = (1, 4, 6)
HAS_AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "paddleocr_vl")
TILED = ("idefics3", "smolvlm")
"""Their pixels have a dimension for the tiles of all pictures of a prompt."""
NEW = 12


def draw_pixels(name: str, seed: int) -> dict[str, Tensor]:
    """Return what a processor would give of a picture."""
    chance = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    if name in HAS_AXES:
        shape = (96, 3, 14, 14) if name == "paddleocr_vl" else (96, 3 * 2 * 14 * 14)
        return {"pixel_values": draw(*shape), "image_grid_thw": torch.tensor([[1, 8, 12]])}
    if name in ("mistral3", "lighton_ocr", "pixtral"):
        return {"pixel_values": draw(1, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]])}
    if name in ("llava_next", "llava_onevision"):
        return {"pixel_values": draw(1, 3, 3, 56, 56), "image_sizes": torch.tensor([[90, 50]])}
    return {"pixel_values": draw(1, 1, 3, 56, 56) if name in TILED else draw(1, 3, 56, 56)}


@dataclass
class Prompt:
    """A prompt, and its pictures as rows and for `generate()`."""

    token_ids: list[int]
    pictures: list[PromptPicture] = field(default_factory=list)
    pixels: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        """Where the rows are."""
        return Pictures(self.token_ids, self.pictures).spans

    def join_pixels(self, name: str) -> dict[str, Tensor]:
        """Return the keyword arguments of `generate()`."""
        dim = 1 if name in TILED else 0
        found = {key: torch.cat([one[key] for one in self.pixels], dim) for key in (self.pixels or [{}])[0]}
        if found and name in HAS_AXES:
            found["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE_TOKEN) for token in self.token_ids]])
        return found


class Case:
    """A tiny model, its prompts, and what `generate()` answers."""

    def __init__(self, name: str, directory: Path, dtype: str = "float32") -> None:
        self.name = name
        self.settings = EngineSettings(
            model=str(save_seeing(name, directory)), max_step_tokens=48, pool_mb=16, threads=1, dtype=dtype,
            cache_dir=str(directory / "cache"),
        )  # fmt: skip
        model = load_model(self.settings)
        self.vision = Vision(model.module, model.stock_attention)
        self.num_rows = self._count_rows(model)
        self.prompts = self._make_prompts()
        self.expected = [self._generate(model, prompt) for prompt in self.prompts]
        self.second_turn = self._make_second_turn(self.prompts[1], self.expected[1])
        self.expected_second = self._generate(model, self.second_turn)
        self.has_right_positions = all(self._has_right_positions(model, prompt) for prompt in self.prompts)
        self.model = prove_model(model, self.settings)
        self.blind = open_model(self.settings, sees=False)
        pixels = [one for prompt in [*self.prompts, self.second_turn] for one in prompt.pixels]
        self.pixels = {self._name(one): one for one in pixels}

    def _count_rows(self, model: LoadedModel) -> int:
        with torch.inference_mode():
            module = model.module
            module.set_attn_implementation(model.stock_attention)
            output = getattr(module, "model", module).get_image_features(**draw_pixels(self.name, 0), return_dict=True)
        found = output.pooler_output
        return int(sum(one.numel() for one in found)) // int(TEXT["hidden_size"])

    def _make_prompts(self) -> list[Prompt]:
        """Two with a picture, one with two side by side, one with a picture twice, a text, one of pictures alone, and
        the first's ids with another picture.
        """
        chance = torch.Generator().manual_seed(5)

        def draw(num: int) -> list[int]:
            return torch.randint(20, 900, (num,), generator=chance).tolist()

        lengths = [(7, [1], 9), (40, [2], 21), (3, [3, 4], 5), (20, [1, 1], 7), (45, [], 0)]
        prompts = [self._make_prompt(draw(before), seeds, draw(after)) for before, seeds, after in lengths]
        # On three axes generate() goes on behind the last row, and the model behind the picture.
        prompts.append(self._make_prompt([], [5, 8], [1003] if self.name in HAS_AXES else []))
        first = prompts[0]
        at = first.spans[0].first
        return [*prompts, self._make_prompt(first.token_ids[:at], [6], first.token_ids[first.spans[-1].end :])]

    def _make_prompt(self, before: list[int], seeds: Sequence[int], after: list[int]) -> Prompt:
        prompt = Prompt(list(before))
        for seed in seeds:
            pixels = draw_pixels(self.name, seed)
            if self.name in HAS_AXES and len(prompt.token_ids) and prompt.token_ids[-1] == IMAGE_TOKEN:
                prompt.token_ids += [1003, 1002]  # the template has them, and positions need something between
            grid = GRID if self.name in HAS_AXES else None
            first = len(prompt.token_ids)
            prompt.token_ids += [IMAGE_TOKEN] * self.num_rows
            prompt.pictures.append(PromptPicture(self._name(pixels), first, self.num_rows, grid))
            prompt.pixels.append(pixels)
        prompt.token_ids += after
        return prompt

    def _make_second_turn(self, first: Prompt, answer: list[int]) -> Prompt:
        """Return a turn with a picture of its own behind another turn and its answer."""
        prompt = self._make_prompt([*first.token_ids, *answer, 30, 31], [9], [32])
        return Prompt(prompt.token_ids, first.pictures + prompt.pictures, first.pixels + prompt.pixels)

    @staticmethod
    def _name(pixels: dict[str, Tensor]) -> bytes:
        return hashlib.sha256(pixels["pixel_values"].numpy().tobytes()).digest()

    def _has_right_positions(self, model: LoadedModel, prompt: Prompt) -> bool:
        """Return whether positions are those of transformers, also behind the prompt."""
        if self.name not in HAS_AXES or not prompt.pictures:
            return True
        given, ids = prompt.join_pixels(self.name), torch.tensor([prompt.token_ids])
        right, delta = model.module.model.get_rope_index(
            ids, given["mm_token_type_ids"], given["image_grid_thw"], attention_mask=torch.ones_like(ids)
        )
        length = len(prompt.token_ids)
        found = np.array(Pictures(prompt.token_ids, prompt.pictures).find_positions(0, length + 2))
        behind = found[:, length:] == [length + int(delta), length + int(delta) + 1]
        return bool((right[:, 0].numpy() == found[:, :length]).all() and behind.all())

    @torch.inference_mode()
    def _generate(self, model: LoadedModel, prompt: Prompt) -> list[int]:
        module, ids = model.module, torch.tensor([prompt.token_ids])
        module.set_attn_implementation(model.stock_attention)
        if hasattr(module.model, "rope_deltas"):
            module.model.rope_deltas = None
        output = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            **prompt.join_pixels(self.name),
        )  # fmt: skip
        module.set_attn_implementation(hooks.ATTENTION_NAME)
        answer: list[int] = output[0, len(prompt.token_ids) :].tolist()
        return answer

    def see(self, name: bytes) -> "Future[SeenPicture]":
        """See a picture with the model's own vision part."""
        return self.vision.see(name, lambda: self.pixels[name], self.num_rows)

    def make_sequence(
        self, number: int, *, with_pixels: bool = True, given: Sequence[int] = (), see: See | None = None
    ) -> EngineSequence:
        """Return a prompt's sequence, with names of its blocks; behind the prompts comes the second turn."""
        prompt = [*self.prompts, self.second_turn][number]
        hasher = BlockHasher(bytes(32), bytes(16), BLOCK, spans=prompt.spans)
        pictures = None
        if prompt.spans:
            pictures = Pictures(prompt.token_ids, prompt.pictures, (see or self.see) if with_pixels else None)
        keys = [key.hash for key in hasher.hash_full_blocks(prompt.token_ids)]
        return sequence(
            prompt.token_ids, NEW, name=f"p{number}", block_keys=keys, pictures=pictures, output_token_ids=given
        )


@pytest.fixture(scope="module", params=[*SEEING])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = Case(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.vision.close()


def test_mixed_batches_in_chunks_give_the_tokens_of_generate(case: Case) -> None:
    assert len({token for answer in case.expected for token in answer}) > 12
    assert case.prompts[0].token_ids == case.prompts[-1].token_ids
    assert case.expected[0] != case.expected[-1], "the picture makes no difference"
    assert case.has_right_positions
    engine = Engine(case.model, case.settings)
    assert run_sequences(engine, [case.make_sequence(at) for at in range(len(case.prompts))]) == case.expected


def test_an_engine_without_pixels_goes_on_from_kv_and_positions(case: Case) -> None:
    """Blocks inside pictures are found by their names; the partial block at the end comes with them."""
    first, second = (Engine(model, case.settings) for model in (case.model, case.blind))
    seqs = [case.make_sequence(at) for at in range(len(case.prompts))]
    run_sequences(first, seqs, remove=False)
    copies = []
    for at, seq in enumerate(seqs):
        copy = case.make_sequence(at, with_pixels=False, given=case.expected[at][:1])
        assert import_blocks(second, copy, export_blocks(first, seq)) == len(copy.block_keys)
        copies.append(copy)
    assert run_sequences(second, copies) == case.expected


def test_a_model_that_need_not_see_has_decoder_and_head_alone(case: Case) -> None:
    """Its KV is that of the whole model."""
    whole = load_model(case.settings)
    weights, has_vision = MappedWeights(find_weight_files(Path(case.settings.model))), count_bytes(whole.module)
    skeleton = build_skeleton(whole.config, torch.float32, sees=False)
    module = load_module(skeleton, whole.config, weights, torch.device("cpu"), ignore_progress, sees=False)
    parts = whole.module.get_decoder(), whole.module.lm_head
    wanted = {one for part in parts for one in part.parameters()} | {*whole.module.model.parameters(recurse=False)}
    assert sum(one.numel() for one in module.parameters()) == sum(one.numel() for one in wanted)
    assert count_bytes(skeleton) == count_bytes(module) < has_vision
    assert 0 < weights._num_bytes_read < weights.num_bytes
    assert case.blind.fingerprint == case.model.fingerprint == whole.fingerprint
    assert case.blind.vision is None


def test_a_second_turn_goes_on_from_the_kv_of_the_first(case: Case) -> None:
    engine, asked = Engine(case.model, case.settings), set[bytes]()
    assert run_sequences(engine, [case.make_sequence(1)]) == [case.expected[1]]

    def see(name: bytes) -> Future[SeenPicture]:
        asked.add(name)
        return case.see(name)

    turn = case.make_sequence(len(case.prompts), see=see)
    assert run_sequences(engine, [turn]) == [case.expected_second]
    assert turn.num_cached_tokens > case.prompts[1].spans[-1].end
    assert asked == {case.second_turn.pictures[1].name}


def test_an_engine_without_pixels_says_whose_are_needed(case: Case) -> None:
    engine = Engine(case.model, case.settings)
    bad, text = case.make_sequence(0, with_pixels=False), case.make_sequence(4)
    engine.add_sequence(bad)
    engine.add_sequence(text)
    with pytest.raises(SequenceFailed) as caught:
        engine.step()
    assert caught.value.seq is bad
    assert isinstance(caught.value.error, PicturesNeeded)
    engine.remove_sequence(bad)
    while engine.has_work():
        engine.step()
    assert text.output_token_ids == case.expected[4]


def test_without_native_kernels_tokens_are_the_same(case: Case) -> None:
    engine = Engine(load_model(case.settings), case.settings)
    assert engine.model.native is None
    assert run_sequences(engine, [case.make_sequence(at) for at in range(len(case.prompts))]) == case.expected


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found = Case("llava", tmp_path_factory.mktemp("serving"))
    yield found
    found.vision.close()


@contextmanager
def open_servers(case: Case, directory: Path, num: int) -> Iterator[list[ServingEngine]]:
    """Open engines over one KV store."""
    settings = KVSettings(shared_mb=16, shared_dir=str(directory), redis_mb=0)
    store = KVStore.open(StoreLayout.from_model(case.model), settings, "", "pictures")
    store.set_compute_speed(lambda: 1e-3)  # to read is always faster
    servers = [ServingEngine(Engine(case.model, case.settings), store) for _ in range(num)]
    yield servers
    for server in servers:
        server.close()
    store.close()


def add_prompt(
    server: ServingEngine, case: Case, number: int, see: See | None, *, tenant: str = "tenant", **given: Any
) -> EngineSequence:
    """Add a prompt as a request; `see` sees its pictures."""
    prompt = case.prompts[number]
    blocks = server.hash_prompt(tenant, prompt.token_ids, prompt.spans)
    pictures = Pictures(prompt.token_ids, prompt.pictures, see) if prompt.pictures else None
    values: dict[str, Any] = {"sampling": GREEDY, "seed": 7, "max_new_tokens": NEW, **given}
    seq = EngineSequence(f"p{number}", prompt.token_ids, blocks=blocks, pictures=pictures, **values)
    server.add_request(seq)
    return seq


def serve_until(server: ServingEngine, seq: EngineSequence, num_new: int = NEW) -> list[int]:
    """Serve until a request is through, and store what it has."""
    while seq.num_output_tokens < num_new:
        list(server.collect_events())
        if server.begin_step():
            server.finish_step()
        else:
            server.wait_for_event()
    server.finish_request(seq.id)
    while server.is_moving_blocks():
        list(server.collect_events())
        server.wait_for_event()
    return seq.output_token_ids


def test_steps_go_on_while_the_model_sees_a_picture(llava: Case, tmp_path: Path) -> None:
    unseen: Future[SeenPicture] = Future()
    with open_servers(llava, tmp_path, 1) as (server,):
        seq, text = add_prompt(server, llava, 0, lambda _: unseen), add_prompt(server, llava, 4, None)
        while text.num_output_tokens < NEW:
            list(server.collect_events())
            if server.begin_step():
                server.finish_step()
        assert text.output_token_ids == llava.expected[4]
        assert (seq.num_computed_tokens, server.has_work(), server.is_moving_blocks()) == (0, False, True)
        server.finish_request(text.id)
        threading.Thread(target=lambda: unseen.set_result(llava.see(llava.prompts[0].spans[0].name).result())).start()
        assert serve_until(server, seq) == llava.expected[0]


def test_a_picture_whose_kv_is_found_is_not_seen_again(llava: Case, tmp_path: Path) -> None:
    """Another engine reads the blocks; with the same ids and another picture it finds those before the picture."""
    asked: list[bytes] = []

    def see(name: bytes) -> Future[SeenPicture]:
        asked.append(name)
        return llava.see(name)

    with open_servers(llava, tmp_path, 2) as (first, second):
        assert serve_until(first, add_prompt(first, llava, 1, see)) == llava.expected[1]
        assert set(asked) == {llava.prompts[1].spans[0].name}
        asked.clear()
        again = add_prompt(second, llava, 1, see)
        assert serve_until(second, again) == llava.expected[1]
        assert (asked, again.num_cached_tokens) == ([], (len(again.blocks.prompt_keys()) - 1) * BLOCK)
        assert serve_until(second, add_prompt(second, llava, 0, see)) == llava.expected[0]
        other = add_prompt(second, llava, -1, see)
        assert serve_until(second, other) == llava.expected[-1]
        assert other.num_cached_tokens == 0
        assert set(asked) == {llava.prompts[number].spans[0].name for number in (0, -1)}


def test_a_job_whose_last_block_is_in_a_picture_needs_no_pixels(llava: Case, tmp_path: Path) -> None:
    """The partial block comes with it: an engine that could see has nothing to."""
    asked: list[bytes] = []

    def see(name: bytes) -> Future[SeenPicture]:
        asked.append(name)
        return llava.see(name)

    prompt, answer = llava.prompts[2], llava.expected[2]
    assert len(prompt.token_ids) // BLOCK * BLOCK < prompt.spans[-1].end < len(prompt.token_ids)
    with open_servers(llava, tmp_path, 2) as (first, second):
        seq = add_prompt(first, llava, 2, llava.see, lease_owner="job", max_new_tokens=1, was_handed_off=False)
        assert serve_until(first, seq, 1) == answer[:1]
        job = add_prompt(second, llava, 2, see, output_token_ids=answer[:1])
        assert serve_until(second, job) == answer
    assert not asked


def test_what_cannot_be_seen_fails_its_request_alone(llava: Case, tmp_path: Path) -> None:
    pixels = {name: x * torch.nan for name, x in draw_pixels("llava", 1).items()}
    with open_servers(llava, tmp_path, 1) as (server,):
        seq = add_prompt(server, llava, 0, lambda _: llava.vision.see(b"nan", lambda: pixels, llava.num_rows))
        text = add_prompt(server, llava, 4, None)
        with pytest.raises(SequenceFailed, match="not a number") as caught:
            serve_until(server, seq)
        assert type(caught.value.error) is ModelError
        server.remove_request(seq.id)
        assert serve_until(server, text) == llava.expected[4]
    with pytest.raises(ModelError, match=f"sees {llava.num_rows} rows in a picture for which the prompt has 3"):
        llava.vision.see(b"three", lambda: draw_pixels("llava", 1), 3).result()


def test_a_picture_that_cannot_be_read_is_read_once(llava: Case) -> None:
    reads: list[bytes] = []

    def read() -> dict[str, Tensor]:
        reads.append(b"")
        raise ModelError("its file is gone")

    seq = llava.make_sequence(0, see=lambda name: llava.vision.see(b"gone" + name, read, llava.num_rows))
    with pytest.raises(SequenceFailed, match="its file is gone"):
        run_sequences(Engine(llava.model, llava.settings), [seq])
    assert len(reads) == 1


def test_what_was_seen_is_kept_within_its_bound(llava: Case) -> None:
    pixels = [draw_pixels("llava", seed) for seed in range(3)]
    size = llava.see(llava.prompts[0].spans[0].name).result().num_bytes
    vision = Vision(llava.vision._module, llava.model.stock_attention, kept_bytes=2 * size)

    def see(number: int) -> SeenPicture:
        return vision.see(bytes([number]), lambda: pixels[number], llava.num_rows).result()

    first, second = see(0), see(1)
    assert see(0) is first
    see(2)
    vision.close()  # behind all that is to be seen
    assert see(0) is first
    with pytest.raises(RuntimeError):
        see(1)
    assert not torch.equal(first.rows, second.rows)


def test_penalties_and_drafts_leave_rows_of_pictures_out(llava: Case) -> None:
    seq = llava.make_sequence(2)
    others = set(seq.token_ids) - {IMAGE_TOKEN}
    assert set(seq.count_tokens().token_ids.tolist()) == others
    start = llava.prompts[2].token_ids[:3]
    ids = [*start, *[IMAGE_TOKEN] * 8, 5, *start]
    seq = sequence(ids, pictures=Pictures(ids, [PromptPicture(b"", 3, 8)]))
    assert seq.drafter.propose_tokens(seq.token_ids, None, 4) == ([], [])
    plain = sequence(seq.token_ids)
    assert plain.drafter.propose_tokens(plain.token_ids, None, 4)[0] == [IMAGE_TOKEN] * 4


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_after_a_preemption_rows_are_computed_again_and_not_seen_again(name: str, tmp_path: Path) -> None:
    """They stay with their request, whatever the vision part keeps."""
    case, asked = Case(name, tmp_path), list[bytes]()

    def see(name: bytes) -> Future[SeenPicture]:
        asked.append(name)
        return case.see(name)

    engine, seq = Engine(case.model, case.settings), case.make_sequence(2, see=see)
    seq.block_keys = []  # nothing of it is found in the pool
    engine.add_sequence(seq)
    while seq.num_output_tokens < 3:
        engine.step()
    engine.scheduler.preempt_sequence(seq)
    while engine.has_work():
        engine.step()
    assert (seq.num_preemptions, seq.output_token_ids) == (1, case.expected[2])
    assert asked == [picture.name for picture in case.prompts[2].pictures]
    case.vision.close()


def test_no_step_waits_for_a_picture(llava: Case) -> None:
    """As of a request whose blocks were found, and are gone when it begins."""
    unseen: Future[SeenPicture] = Future()
    engine, text = Engine(llava.model, llava.settings), llava.make_sequence(4)
    seq = llava.make_sequence(0, see=lambda _: unseen)
    engine.add_sequence(seq)
    assert not engine.begin_step()
    engine.add_sequence(text)
    while text.num_output_tokens < NEW:
        engine.step()
    assert (text.output_token_ids, seq.num_computed_tokens) == (llava.expected[4], 0)
    engine.remove_sequence(text)
    unseen.set_result(llava.see(llava.prompts[0].spans[0].name).result())
    while engine.has_work():
        engine.step()
    assert seq.output_token_ids == llava.expected[0]


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_drafts_behind_pictures_change_no_token(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    engine, seqs = Engine(case.model, case.settings), [case.make_sequence(at) for at in range(len(case.prompts))]
    for seq, answer in zip(seqs, case.expected, strict=True):
        seq.drafter = GivenDrafts(seq.num_prompt_tokens, answer, random.Random(3))
    assert run_sequences(engine, seqs) == case.expected
    assert 0 < engine.num_accepted_tokens < engine.num_drafted_tokens
    case.vision.close()


def test_another_tenant_finds_nothing_of_a_picture(llava: Case, tmp_path: Path) -> None:
    with open_servers(llava, tmp_path, 1) as (server,):
        for tenant, num_cached in (("tenant", 0), ("other", 0), ("other", BLOCK)):
            seq = add_prompt(server, llava, 1, llava.see, tenant=tenant)
            assert serve_until(server, seq) == llava.expected[1]
            assert bool(seq.num_cached_tokens) == bool(num_cached)


def test_a_packed_file_serves_a_model_with_and_without_its_vision_part(llava: Case) -> None:
    settings = llava.settings.model_copy(update={"packed": str(pack_model(llava.settings).path)})
    sizes = []
    for sees in (True, False):
        model = open_model(settings, sees=sees)
        sizes.append(count_bytes(model.module))
        assert model.fingerprint == llava.model.fingerprint
        assert run_sequences(Engine(model, settings), [llava.make_sequence(4)]) == [llava.expected[4]]
    assert sizes[1] < sizes[0]


def test_a_packed_file_has_the_part_that_sees(llava: Case) -> None:
    settings = llava.settings.model_copy(update={"weights": "bf16", "dtype": "bfloat16"})
    pixels = draw_pixels("llava", 1)
    found = []
    for _ in range(2):
        model = open_model(settings)
        vision = Vision(model.module, model.stock_attention)
        found.append(vision.see(b"", lambda: pixels, llava.num_rows).result().rows)
        vision.close()
        pack_model(settings)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_in_bfloat16_logits_have_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """Steps with rows of pictures compute layer by layer, and others in one call."""
    case = Case(name, tmp_path, "bfloat16")
    assert case.model.is_batch_invariant
    alone = [compute_in_chunks(case, [at], 1000)[0] for at in range(len(case.prompts))]
    for chunk in (1000, 17):
        together = compute_in_chunks(case, range(len(case.prompts)), chunk)
        assert all(map(torch.equal, alone, together))
    case.vision.close()


def compute_in_chunks(case: Case, numbers: Sequence[int], chunk: int) -> list[Tensor]:
    """Return the last logits of prompts that are computed together in chunks."""
    seqs, runner = [case.make_sequence(at) for at in numbers], case.model.create_runner(case.settings, 100)
    for place, seq in enumerate(seqs):
        seq.block_table = list(range(10 * place, 10 * place + 10))
    found: dict[EngineSequence, Tensor] = {}
    while left := [seq for seq in seqs if seq.num_pending_tokens]:
        plan = [(seq, min(chunk, seq.num_pending_tokens)) for seq in left]
        ends = [seq for seq, num in plan if num == seq.num_pending_tokens]
        with torch.inference_mode():
            logits = compute_tokens(runner, sorted(plan, key=lambda item: item[1] > 1))
        found |= zip(sorted(ends, key=lambda seq: dict(plan)[seq] > 1), logits, strict=True)
    return [found[seq] for seq in seqs]


def test_rows_of_a_picture_may_have_other_tokens_between_them() -> None:
    """A text that has such a token behind them is text."""
    ids = [5, 9, 9, 6, 9, 9, 9, 9, 7]
    assert find_spans(ids, PromptPicture(b"a", 1, 4)) == [Span(1, 2, b"a", 0), Span(4, 2, b"a", 2)]
    with pytest.raises(InvalidRequest, match="6 of the 7 rows of the picture at token 1"):
        find_spans(ids, PromptPicture(b"a", 1, 7))
