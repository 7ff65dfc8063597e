"""GGUF files: their blocks are unpacked bit by bit as the format says, the model is that of the same safetensors."""

import ctypes
import math
import mmap
import re
import shutil
import statistics
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.gguf.gguf_file import BLOCKS, FLOAT_KINDS
from penstock.engine.gguf.gguf_model import describe_gguf
from penstock.engine.gguf.gguf_weights import GgufMatrix, unpack_blocks
from penstock.engine.kernels.packed import PackedEmbedding, PackedLinear, PackedLinears, WeightForm
from penstock.engine.loading import checkpoint
from penstock.engine.loading.loading import load_model, load_stage_models, open_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.model.accelerate import accelerate_model, compute_probe_logits
from penstock.engine.model.layer import NativeLayer
from penstock.engine.opening import open_engine
from penstock.engine.weights.files import check_model_here
from penstock.engine.weights.module import load_module
from penstock.engine.weights.quantized import take_quantization, unpack_weights
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError
from penstock.ingest.tokenizer import ModelTokenizers
from tests.draws import mark_some
from tests.engine.gguf_files import NUMBERS, GgufContent, convert_model, make_blocks, read_blocks
from tests.engine.header_fuzz import FORMS, fuzz_headers
from tests.engine.helpers import needs_kernels, run_sequences, save_model, sequence, use_instruction_set

oracle = pytest.importorskip("transformers.integrations.gguf.dequant")  # transformers before 5.23 has none
KINDS = ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q5_0", "BF16", "Q4_0", "F16", "Q5_1", "Q4_1", "F32"]
PROMPTS = [[5, 9, 200, 31, 7] * 5, [77, 78, 3]]


def save_plain(directory: Path, architecture: str = "llama", **given: Any) -> Path:
    """Write a random model that is large enough for blocks of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 512,
             "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-6}  # fmt: skip
    return save_model(directory, transformers.CONFIG_MAPPING[architecture](**{**sizes, **given}))


def load(model: Path, **given: Any) -> Any:
    return load_model(EngineSettings.model_validate({"model": str(model), "pool_mb": 64, **given}))


def answer(engine: Engine) -> list[list[int]]:
    return run_sequences(engine, [sequence(prompt, 20, name=str(prompt)) for prompt in PROMPTS])


def refuse(model: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(model)
    assert str(caught.value).startswith(f"cannot load model '{model}': ")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.settings.DEFAULT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GgufContent]:
    """A model with values of blocks, and what its file has."""
    directory = save_plain(tmp_path_factory.mktemp("made"))
    return directory, convert_model(directory, KINDS)


@pytest.fixture
def plain(made: tuple[Path, GgufContent], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "plain"))


@pytest.fixture
def content(made: tuple[Path, GgufContent]) -> GgufContent:
    return GgufContent(dict(made[1].metadata), dict(made[1].tensors))


# Blocks


@pytest.mark.proof
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in FLOAT_KINDS])
def test_blocks_are_what_the_format_says(kind: str) -> None:
    rng = np.random.default_rng(1)
    content = make_blocks(kind, 60, rng)
    size = BLOCKS[kind][1]
    content += b"\xff" * 4 + bytes(size - 4) if kind == "Q6_K" else bytes(size)
    largest, place = bytearray(b"\xff" * size), 208 if kind == "Q6_K" else 0
    for first in range(place, place + 2 * (1 + (kind.endswith("_1") or kind in ("Q4_K", "Q5_K"))), 2):
        struct.pack_into("<e", largest, first, 65504.0)
    content += bytes(largest)
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    mine, right = unpack_blocks(stored, kind).flatten(), read_blocks(kind, content)
    assert mine.dtype == torch.float32
    assert mine.numpy().tobytes() == right.tobytes()
    if NUMBERS[kind] in oracle.GGML_BLOCK:
        assert torch.equal(mine, oracle.dequantize(stored, NUMBERS[kind]))


# Models


@pytest.mark.parametrize(
    ("architecture", "dtype", "given"),
    [
        ("llama", "float32", {}),
        ("llama", "bfloat16", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen2", "float32", {"head_dim": 64}),
        ("qwen2", "bfloat16", {"head_dim": 64, "tie_word_embeddings": True}),
        ("qwen3", "float32", {"tie_word_embeddings": True}),
        ("qwen3", "bfloat16", {}),
    ],
)
def test_a_file_is_the_model_that_its_values_are(
    architecture: str, dtype: str, given: dict[str, Any], tmp_path: Path
) -> None:
    plain = save_plain(tmp_path / "plain", architecture, **given)
    folder = tmp_path / "file"
    folder.mkdir()
    file = convert_model(plain, KINDS).save(folder / "model-Q4_K_M.gguf", version=2 if given else 3)
    first, second = load(plain, dtype=dtype), load(folder if given else file, dtype=dtype)
    right, mine = first.module.state_dict(), second.module.state_dict()
    assert right.keys() == mine.keys()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in right.items())
    assert first.context_length == second.context_length
    assert first.vocab_size == second.vocab_size
    text = "The King  of 12,345 \n\tships; é 船"
    assert first.tokenizer(text).input_ids == second.tokenizer(text).input_ids
    assert second.tokenizer.decode(second.tokenizer(text).input_ids) == text
    assert second.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert 1 in second.eos_token_ids
    assert first.content_fingerprint != second.content_fingerprint
    assert second.content_fingerprint == load(file, dtype=dtype).content_fingerprint


@pytest.mark.parametrize("dtype", mark_some(["float32", "bfloat16"], pytest.mark.proof))
def test_tokens_are_those_of_the_same_safetensors(dtype: str, plain: Path, content: GgufContent) -> None:
    file = content.save(plain.parent / "model.gguf")
    answers = []
    for model in (plain, file):
        settings = EngineSettings.model_validate(
            {"model": str(model), "dtype": dtype, "weights": "bf16", "pool_mb": 64}
        )
        answers.append(answer(open_engine(settings)))
    assert answers[0] == answers[1]


# What stays as it is in the file


@needs_kernels
@pytest.mark.parametrize("isa", ["auto", "avx2"])
@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")])
def test_blocks_are_computed_with_as_they_are(architecture: str, dtype: str, isa: str, tmp_path: Path) -> None:
    """Logits are nearly those of the values that the blocks stand for, and these values do not stay in memory."""
    plain = save_plain(tmp_path / "plain", architecture, head_dim=64, tie_word_embeddings=architecture == "qwen3")
    file = convert_model(plain, ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q5_0"]).save(tmp_path / "model.gguf")
    given = {"model": str(file), "dtype": dtype, "pool_mb": 64, "isa": isa}
    with use_instruction_set("" if isa == "auto" else isa):
        whole, packed = (
            open_model(EngineSettings.model_validate({**given, "weights": weights})) for weights in ("bf16", "auto")
        )
        assert (whole.weight_form, packed.weight_form) == ("", "gguf")
        assert whole.fingerprint != packed.fingerprint
        right, mine = compute_probe_logits(whole), compute_probe_logits(packed)
        assert (mine - right).square().mean().sqrt() <= 0.06 * right.std()
        assert packed.native is not None
        assert packed.native.body is not None
        stored = sum(one.packed.form == WeightForm.GGUF for one in find_groups(packed.module))
        assert stored == 2 * 4 + 1  # the layers' groups, and the output layer
        assert isinstance(packed.module.model.embed_tokens, PackedEmbedding)


def find_groups(module: nn.Module) -> list[PackedLinears]:
    """The packed groups of a model, each once."""
    groups = list[PackedLinears]()
    for part in module.modules():
        groups += part.groups if isinstance(part, NativeLayer) else []
        groups += [part.group] if isinstance(part, PackedLinear) and isinstance(part.group, PackedLinears) else []
    return groups


def count_resident_bytes(tensor: Tensor) -> int:
    """How much of a tensor is in memory."""
    size = -(-tensor.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * size)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found) == 0
    return mmap.PAGESIZE * sum(one & 1 for one in found)


def count_mapped_bytes(path: Path) -> int:
    """How much of a file's mappings is in this process's memory."""
    lines, num_bytes, is_inside = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        if "-" in line.split()[0]:
            is_inside = line.endswith(str(path))
        elif is_inside and line.startswith("Rss:"):
            num_bytes += 1024 * int(line.split()[1])
    return num_bytes


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux what is in memory")
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_more_than_one_matrix_is_in_memory_beside_the_packed_ones(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the blocks stand for nor the file's own pages: the model is not held twice at any time."""
    plain = save_plain(tmp_path / "plain", head_dim=64, num_hidden_layers=4, tie_word_embeddings=is_tied)
    file = convert_model(plain, ["Q4_K", "Q6_K", "Q8_0"]).save(tmp_path / "model.gguf")
    filled, resident, mapped = dict[int, Tensor](), list[int](), list[int]()
    fill, pack = GgufMatrix.fill_weight, PackedLinears._pack_gguf

    def note_fill(self: GgufMatrix, out: Tensor, *stored: Tensor, **given: Any) -> None:
        mapped.append(count_mapped_bytes(file))
        fill(self, out, *stored, **given)
        filled[out.data_ptr()] = out
        resident.append(sum(map(count_resident_bytes, filled.values())))

    def note_pack(*given: Any) -> None:
        mapped.append(count_mapped_bytes(file))
        pack(*given)

    monkeypatch.setattr(GgufMatrix, "fill_weight", note_fill)
    monkeypatch.setattr(PackedLinears, "_pack_gguf", note_pack)
    model = open_model(EngineSettings(model=str(file), pool_mb=64, dtype="bfloat16"))
    assert model.weight_form == "gguf"
    assert len(filled) == 4 * 7 + (1 if is_tied else 2)
    assert max(resident) <= max(one.nbytes for one in filled.values())
    assert not any(map(count_resident_bytes, filled.values()))
    # Not at each time: parts of one group are read one after the other.
    assert statistics.median(mapped) <= file.stat().st_size / 8
    assert isinstance(model.module.model.embed_tokens, PackedEmbedding)


def test_a_matrix_is_counted_as_packed_if_the_kernels_know_those_beside_it(tmp_path: Path) -> None:
    content, saved = convert_model(save_plain(tmp_path / "plain", num_hidden_layers=1), ["Q8_0"]), list[int]()
    for kind, size in (("Q8_0", 34), ("Q4_1", 20)):
        _, shape, _ = content.tensors["blk.0.attn_v.weight"]
        content.tensors["blk.0.attn_v.weight"] = (kind, shape, bytes(math.prod(shape) // 32 * size))
        file = content.save(tmp_path / f"{kind}.gguf")
        weights, config = MappedWeights([file]), transformers.AutoConfig.from_pretrained(describe_gguf(file, tmp_path))
        unpack_weights(weights, take_quantization(config), torch.float32)
        assert weights.count_saved_bytes() == 0
        weights.keeps_blocks = True
        saved.append(weights.count_saved_bytes())
    attention = 256 * (2 * 128 + 2 * 64)  # matrices of queries and outputs, of keys and values
    matrices = 2 * 1024 * 256 + 3 * 512 * 256 + attention
    largest = 4 * 1024 * 256
    assert saved[0] == matrices * 4 - largest - matrices * 34 // 32
    assert saved[1] == saved[0] - attention * 4 + attention * 34 // 32


@needs_kernels
def test_values_that_are_not_finite_are_found_where_blocks_stay_in_the_file(plain: Path, content: GgufContent) -> None:
    content.tensors["blk.0.ffn_up.weight"] = ("Q8_0", [512, 256], b"\x00\x7c" * 69632)
    file = content.save(plain.parent / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"up_proj.weight cannot be unpacked: .*not finite"):
        open_model(EngineSettings(model=str(file), pool_mb=64))


@needs_kernels
def test_a_weight_that_is_copied_before_it_is_read_is_noticed(
    plain: Path, content: GgufContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_copies(*given: Any, **named: Any) -> Any:
        module = load_module(*given, **named)
        module.lm_head.weight = nn.Parameter(module.lm_head.weight.clone(), requires_grad=False)
        return module

    content.tensors["output.weight"] = ("Q8_0", [1024, 256], make_blocks("Q8_0", 8192, np.random.default_rng(2)))
    file = content.save(plain.parent / "model.gguf")
    monkeypatch.setattr(checkpoint, "load_module", load_copies)
    with pytest.raises(ModelLoadError, match=r"lm_head.weight was copied while it was loaded"):
        load(file)


@needs_kernels
def test_types_without_products_are_unpacked_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = save_plain(tmp_path / "plain", num_hidden_layers=1)
    kinds = ["Q8_0"] * 7 + ["Q4_1"]
    model = load(convert_model(plain, kinds).save(tmp_path / "model.gguf"))
    with caplog.at_level("INFO", logger="penstock.engine"):
        assert accelerate_model(model).weight_form == "gguf"
    assert re.search("unpacking blocks of .*Q4_1", caplog.text)
    with use_instruction_set("plain"), caplog.at_level("INFO", logger="penstock.engine"):
        assert accelerate_model(load(tmp_path / "model.gguf", isa="plain")).weight_form == ""
    assert "unpacking the file's blocks: the kernels cannot multiply with them on plain" in caplog.text


@needs_kernels
def test_blocks_are_kept_in_a_file_of_packed_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = save_plain(tmp_path / "plain", head_dim=64, tie_word_embeddings=True)
    file = convert_model(plain, ["Q4_K", "Q6_K"]).save(tmp_path / "model.gguf")
    settings = EngineSettings.model_validate({"model": str(file), "pool_mb": 64})
    before = answer(open_engine(settings))
    pack_model(settings)
    with caplog.at_level("INFO", logger="penstock.engine"):
        engine = open_engine(settings)
    assert "weights are mapped from" in caplog.text
    assert engine.model.weight_form == "gguf"
    assert answer(engine) == before


@needs_kernels
def test_prompts_and_answers_may_have_the_blocks_and_their_values(plain: Path, content: GgufContent) -> None:
    file = content.save(plain.parent / "model.gguf")
    settings = EngineSettings.model_validate({"model": str(file), "prefill_weights": "bf16", "pool_mb": 64})
    model = load_stage_models(settings)
    assert model.stage_forms == ("", "gguf")
    assert load_stage_models(settings, only_prompts=True).fingerprint == model.fingerprint
    other = settings.model_copy(update={"weights": "bf16", "prefill_weights": "auto"})
    assert load_stage_models(other, only_prompts=True).stage_forms == ("gguf", "")


def test_the_rotary_embedding_of_llama_3(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    plain = save_plain(tmp_path / "plain", rope_parameters=scaling, head_dim=64, max_position_embeddings=131072)
    content = convert_model(plain, ["F32"])
    factors = _list_factors(64, 500000.0, 32.0)
    content.tensors["rope_freqs.weight"] = ("F32", [32], struct.pack("<32f", *factors))
    first, second = load(plain), load(content.save(tmp_path / "model.gguf"))
    assert second.config.rope_parameters == scaling
    assert torch.equal(first.module.model.rotary_emb.inv_freq, second.module.model.rotary_emb.inv_freq)
    content.tensors["rope_freqs.weight"] = ("F32", [32], struct.pack("<32f", *factors[:31], math.inf))
    refuse(content.save(tmp_path / "infinite.gguf"), "rope_freqs.weight in .* a factor that is no number")
    factors[3] = 2.0
    content.tensors["rope_freqs.weight"] = ("F32", [32], struct.pack("<32f", *factors))
    refuse(content.save(tmp_path / "other.gguf"), "rope_freqs.weight that are not those of Llama 3.1")
    content.tensors["rope_freqs.weight"] = ("F32", [16], bytes(64))
    refuse(content.save(tmp_path / "short.gguf"), r"rope_freqs.weight is \[16\] of F32")


def _list_factors(head_dim: int, base: float, factor: float) -> list[float]:
    """The factors, as those who convert a model write them."""
    found = []
    for place in range(0, head_dim, 2):
        wave = 2 * math.pi * base ** (place / head_dim)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


async def test_a_gateway_has_the_tokenizer_of_a_file(
    plain: Path, content: GgufContent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(plain.parent))
    file = content.save(plain.parent / "model.gguf")
    tokenizers = ModelTokenizers()
    try:
        answers = [
            await tokenizers.encode_text(str(model), "To be, or not", special=True, with_strs=False)
            for model in (plain, file)
        ]
    finally:
        await tokenizers.close()
    assert answers[0].token_ids == answers[1].token_ids


def test_a_description_is_written_once_for_each_header(plain: Path, content: GgufContent) -> None:
    file = content.save(plain.parent / "model.gguf")
    for _ in range(2):
        load(file)
    assert len(list((plain.parent / "cache" / "gguf").iterdir())) == 1
    content.metadata["llama.context_length"] = 256
    content.save(file)
    assert load(file).context_length == 256


def test_where_llama_cpp_begins_a_text_with_a_token_the_tokenizer_does(plain: Path, content: GgufContent) -> None:
    content.metadata |= {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 7}
    content.metadata.pop("tokenizer.ggml.add_bos_token", None)
    tokenizer = load(content.save(plain.parent / "silent.gguf")).tokenizer
    assert tokenizer("In")["input_ids"][0] == 7
    content.metadata["tokenizer.ggml.add_bos_token"] = False
    tokenizer = load(content.save(plain.parent / "without.gguf")).tokenizer
    assert tokenizer("In")["input_ids"][0] != 7


def test_a_cache_that_cannot_be_written(plain: Path, content: GgufContent) -> None:
    (plain.parent / "cache").write_text("no directory")
    refuse(
        content.save(plain.parent / "model.gguf"),
        "cache cannot be written to, where a description of model.gguf is to be kept: PENSTOCK_ENGINE_CACHE_DIR",
    )


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "the architecture 'gemma3'.*with one of llama, qwen2, qwen3, or"),
        ({"general.architecture": 5}, "general.architecture '5', which is no str"),
        ({"split.count": 3}, "a part of the tensors.*llama-gguf-split"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn'"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window 4096"),
        ({"llama.expert_count": 8}, "llama.expert_count 8"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count 16 beside heads of 32"),
        ({"llama.block_count": 3}, "tensors of 2 layers"),
        ({"llama.block_count": 0}, "llama.block_count 0"),
        ({"llama.block_count": True}, "llama.block_count 'True', which is no int"),
        ({"llama.embedding_length": 512}, r"is \[\d+, 256\] in the weights, and \[\d+, 512\] by config.json"),
        ({"llama.context_length": None}, "has no llama.context_length"),
        ({"llama.rope.freq_base": math.inf}, "rope.freq_base inf"),
        ({"llama.rope.freq_base": 1e-60}, "rope.freq_base"),
        ({"llama.attention.key_length": 33}, "heads of 33"),
        ({"tokenizer.ggml.pre": "smollm"}, "tokenizer.ggml.pre 'smollm'.*a known way of splitting texts"),
        ({"general.alignment": 12}, "its alignment is '12'"),
        ({"tokenizer.ggml.model": "none"}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "has no usable tokenizer .*bert"),
        ({"tokenizer.ggml.merges": ["a b", "ab c"]}, "has no usable tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "has no usable tokenizer"),
    ],
)  # fmt: skip
def test_what_a_header_says_that_cannot_be_served(
    changes: dict[str, Any], message: str, plain: Path, content: GgufContent
) -> None:
    for key, value in changes.items():
        content.metadata[key] = value
        if value is None:
            del content.metadata[key]
    refuse(content.save(plain.parent / "model.gguf"), message)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.0.attn_q.weight", ("Q3_K", [128, 256], bytes(99)), "stored as type 99, which.*Q4_K_M or Q8_0"),
        ("blk.0.attn_q.bias", ("F32", [128], bytes(512)), "the tensor 'blk.0.attn_q.bias'"),
        ("blk.0.attn_q.weight", ("F32", [128], bytes(512)), r"blk.0.attn_q.weight is \[128\].*no matrix"),
        ("blk.0.attn_q.weight", ("Q8_0", [128, 250], bytes(32000)), r"is \[128, 250\] in blocks of 32"),
        ("blk.0.attn_q.weight", ("F32", [126, 256], bytes(129024)), r"is \[126, 256\] in the weights"),
        ("token_embd.weight", None, "no matrix token_embd.weight"),
        ("blk.1.ffn_up.weight", None, "lack 1 tensors, model.layers.1.mlp.up_proj.weight"),
        ("blk.0.ffn_up.weight", ("Q8_0", [512, 256], b"\x00\x7c" * 69632), "up_proj.weight cannot be.*not finite"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_served(
    name: str, tensor: tuple[str, list[int], bytes] | None, message: str, plain: Path, content: GgufContent
) -> None:
    if tensor is None:
        del content.tensors[name]
    else:
        content.tensors[name] = tensor
    refuse(content.save(plain.parent / "model.gguf"), message)


@pytest.mark.proof
def test_what_is_no_gguf_file_is_seen_before_anything_is_loaded(plain: Path, content: GgufContent) -> None:
    folder = plain.parent / "files"
    folder.mkdir()
    file = content.save(folder / "one.gguf")
    check_model_here(str(file))
    check_model_here(str(folder))
    content.save(folder / "two.gguf")
    whole = file.read_bytes()
    for name, damaged, message in (
        ("absent.gguf", None, "there is no file"),
        ("empty.gguf", b"", "damaged or cut off: it has 0 bytes"),
        ("cut.gguf", whole[:-64], "damaged or cut off: .* is not within"),
        ("half.gguf", whole[:2000], "header ends before it is complete"),
        ("other.gguf", b"PK" + whole[2:], "does not begin with GGUF"),
        ("big.gguf", whole[:4] + struct.pack(">I", 3) + whole[8:], "version 50331648 of GGUF"),
    ):
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        with pytest.raises(ModelLoadError, match=message):
            check_model_here(str(folder / name))
    with pytest.raises(ModelLoadError, match=r"has 7 GGUF files: name one, such as .*big.gguf"):
        check_model_here(str(folder))
    shutil.copy(plain / "model.safetensors", folder)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(plain / name, folder)
    check_model_here(str(folder))  # weights in safetensors come first


def test_a_cache_that_cannot_be_written_is_named_before_anything_is_loaded(
    content: GgufContent, tmp_path: Path
) -> None:
    file, cache = content.save(tmp_path / "one.gguf"), tmp_path / "cache"
    check_model_here(str(file), cache=cache)
    assert not cache.exists()
    (tmp_path / "blocked").touch()
    with pytest.raises(
        ModelLoadError, match=r"blocked cannot be written to, where .* one\.gguf .*PENSTOCK_ENGINE_CACHE_DIR"
    ):
        check_model_here(str(file), cache=tmp_path / "blocked" / "cache")
    described = describe_gguf(file, cache)
    described.parent.chmod(0o555)
    check_model_here(str(file), cache=cache)  # it was written before


def test_nan_among_plain_values_is_as_in_safetensors(plain: Path, content: GgufContent) -> None:
    """Plain values of either form are not looked at."""
    kind, shape, raw = content.tensors["output_norm.weight"]
    content.tensors["output_norm.weight"] = (kind, shape, struct.pack("<f", math.nan) + raw[4:])
    tensors = load_file(plain / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    for model in (plain, content.save(plain.parent / "model.gguf")):
        assert load(model).module.model.norm.weight[0].isnan()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_headers_are_read_or_refused(form: str, seed: int, tmp_path: Path) -> None:
    seen = fuzz_headers(tmp_path, form, 250, seed)
    assert seen["read"] >= 1
    assert seen["refused"] >= 100
