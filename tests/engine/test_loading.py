"""Loading reads the weights in place, and refuses every kind of damage with one line that says what is wrong."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from penstock.cli.up import load_engine_settings
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.limits import max_length
from penstock.engine.loading.description import as_load_errors, load_tokenizer
from penstock.engine.loading.loading import load_model, open_model
from penstock.engine.loading.proof import as_check_failures
from penstock.engine.memory import memory
from penstock.engine.memory.memory import count_available_bytes, count_total_bytes
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.file_checks import _has_tokenizer_class, check_description, parse_tables
from penstock.engine.weights.files import check_model_here, ignore_progress
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import (
    EngineCheckFailed,
    InternalError,
    InvalidRequest,
    ModelLoadError,
    ModelUnavailable,
    PromptTooLong,
    choose_load_error,
)
from penstock.names import Pipeline
from sim.forked import fork_process, run_penstock
from sim.waiting import PATIENCE_S
from tests.commands import HERE
from tests.draws import draw_cases, mark_some
from tests.engine.helpers import sequence
from tests.engine.hostile_files import LOADED, MAX_MIB, REFUSED, judge_hostile_file, list_hostile_files

WEIGHTS, PART = "model.safetensors", "model-00001-of-00002.safetensors"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
WORKS = (
    ": (use|fetch them|merge it|take it out|name|give it)|docs/models.md|PENSTOCK_|can(not)? be served|: there is no "
    "|: no device "
)
"""What would work, in the words of a refusal; or that a kind of model cannot be served, or what is not there."""


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


def _load(directory: Path, **given: object) -> None:
    load_model(EngineSettings.model_validate({"model": str(directory), **given}))


def _refused(directory: Path, message: str, **given: object) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        _load(directory, **given)
    assert str(caught.value).startswith(f"cannot load model '{directory}': ")
    assert "\n" not in str(caught.value)
    assert re.search(WORKS, str(caught.value))


def _configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Values


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name",
    ["embed_tokens", "norm", "layers.0.input_layernorm", "layers.1.self_attn.k_proj", "layers.1.mlp.down_proj"],
)
def test_weights_that_are_no_numbers_are_found_before_anything_is_served(copy: Path, name: str, value: float) -> None:
    """The proof finds them where they count in each token; in one word's embedding they fail that word's requests."""
    tensors = load_file(copy / WEIGHTS)
    tensors[f"model.{name}.weight"].view(-1)[::7] = value
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=rf"model.{name}.weight in {WEIGHTS} has values that are no finite numbers"
    ):
        open_model(EngineSettings(model=str(copy), pool_mb=1))


def test_a_configuration_that_makes_no_numbers_of_good_weights_is_named(copy: Path) -> None:
    _configure(copy, rms_norm_eps=-1.0)
    with pytest.raises(ModelLoadError, match=r"though its weights are: a number in config\.json is wrong"):
        open_model(EngineSettings(model=str(copy), pool_mb=1, dtype="float32"))


# Memory and progress


def test_progress_moves_with_the_bytes(tiny_dir: Path) -> None:
    seen: dict[str, list[float]] = {}
    load_model(EngineSettings(model=str(tiny_dir)), lambda what, done: seen.setdefault(what, []).append(done))
    assert set(seen) == {"reading weights", "loading weights"}
    sizes = [tensor.nbytes for tensor in load_file(tiny_dir / WEIGHTS).values()]
    steps = [b - a for a, b in zip([0.0, *seen["loading weights"]], seen["loading weights"], strict=False)]
    assert sorted(round(step * sum(sizes)) for step in steps) == sorted(sizes)
    assert all(done[-1] == 1.0 for done in seen.values())


def test_weights_in_the_files_own_dtype_are_not_copied(tiny_dir: Path) -> None:
    model = load_model(EngineSettings(model=str(tiny_dir)))
    weight = model.module.lm_head.weight
    with torch.inference_mode():
        stored = weight[0, 0].item()
        weight[0, 0] = 5
        model.weights.drop_tensor_pages(weight)
        assert weight[0, 0].item() == stored  # it came from the file again


def test_letting_go_spares_what_is_no_view_of_a_file(tiny_dir: Path) -> None:
    weights = MappedWeights([tiny_dir / WEIGHTS])
    own = torch.ones(1 << 20)
    weights.drop_tensor_pages(own)
    assert own.sum() == 1 << 20


# Damaged weights


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, header: content[:0],
        lambda content, header: content[:7],
        lambda content, header: content[: 8 + header // 2],
        lambda content, header: content[: 8 + header],
        lambda content, header: content[: (8 + header + len(content)) // 2],
        lambda content, header: content[:-1],
        lambda content, header: content + b"x",
        lambda content, header: b"no tensors in here" * 99,
        lambda content, header: b"\xff" * 8 + b"{}",
        lambda content, header: bytes(4096),
    ],
)
def test_weights_that_are_cut_off_or_no_weights(copy: Path, damage: Callable[[bytes, int], bytes]) -> None:
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(damage(content, int.from_bytes(content[:8], "little")))
    _refused(copy, f"{WEIGHTS} is damaged or cut off")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.view(torch.int32), "is of type I32"),
        (lambda tensor: tensor.T.contiguous(), r"is \[32, 64\] in the weights, and \[64, 32\] by config.json"),
    ],
)
def test_a_tensor_of_another_type_or_shape(
    copy: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    tensors = load_file(copy / WEIGHTS)
    name = "model.layers.0.mlp.gate_proj.weight"
    save_file({**tensors, name: change(tensors[name])}, copy / WEIGHTS, {"format": "pt"})
    _refused(copy, f"{name} {message}")


def test_weights_in_two_files(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, copy / file, {"format": "pt"})
    (copy / WEIGHTS).unlink()
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, held in parts.items() for name in held}}))
    model = load_model(EngineSettings(model=str(copy)))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.module.state_dict().items())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    _refused(copy, f"the weights lack {len(parts['b.safetensors'])} tensors")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"x": 1}}',
        '{"weight_map": {"x": "none.safetensors"}}',
        '{"weight_map": {"x": "../model/model.safetensors"}}',
        '{"weight_map": {"x": "/etc/passwd"}}',
    ],
)
def test_an_index_that_is_none(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    _refused(copy, "is not a weight index|which is not there|which is not in the model's directory")


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (OSError(errno.EIO, "Input/output error"), False), (OSError(errno.ENOSPC, "No space left"), False),
        (PermissionError(errno.EACCES, "Permission denied"), True), (OSError("its words alone"), True),
        (MemoryError(), False), (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: an illegal instruction"), False), (ConnectionResetError(), False),
        (RuntimeError("shape '[2]' is invalid"), True),
        (RuntimeError("Expected one of cpu, cuda"), True), (KeyError("hidden_size"), True),
        (ModelUnavailable("the hub is away"), False), (ModelLoadError("it is cut off"), True),
    ],
)  # fmt: skip
def test_only_what_a_restart_cannot_mend_ends_with_the_status_of_a_model_that_cannot_be_loaded(
    error: BaseException, is_final: bool, demo: LoadedModel
) -> None:
    """By itself, and as the cause of what says where it was."""

    def fail() -> None:
        raise error

    def fail_within() -> None:
        try:
            fail()
        except BaseException as cause:
            raise ModelLoadError("x cannot be read") from cause

    for raised in (fail, fail_within):
        with pytest.raises(ModelLoadError, match="cannot load model 'x'") as caught, as_load_errors("x"):
            raised()
        assert (caught.value.exit_status == 78) == is_final
    with pytest.raises(ModelLoadError, match="does not run on this engine") as caught, as_check_failures(demo):
        fail()
    assert isinstance(caught.value, EngineCheckFailed) == is_final


def test_weights_replaced_while_they_are_read(copy: Path) -> None:
    def meddle(what: str, done: float) -> None:
        if (what, done) == ("loading weights", 1.0):
            (copy / "new").write_bytes((copy / WEIGHTS).read_bytes())
            (copy / "new").replace(copy / WEIGHTS)

    with pytest.raises(ModelUnavailable, match="written to while it was loaded"):
        load_model(EngineSettings(model=str(copy)), meddle)


# A configuration that lies


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        *[
            ({name: value}, r"model\.\S+weight is \[\d+, \d+\] in the weights, and \[\d+, \d+\] by config.json")
            for name, value in {
                "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "vocab_size": 2048, "intermediate_size": 128,
            }.items()
        ],
        ({"num_hidden_layers": 1}, "more layers than config.json says: model.layers.1."),
        ({"num_hidden_layers": 3}, "the weights lack 9 tensors, model.layers.2."),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"hidden_size": 0}, "by config.json|describes no model"),
        ({"num_key_value_heads": 0}, "describes no model that can be built"),
        ({"hidden_act": "nothing"}, "describes no model that can be built"),
        ({"vocab_size": 2**40}, r"embed_tokens.weight is \[\d+, 32\] in the weights, and \[1099511627776, 32\]"),
        ({"model_type": "qwen3"}, "the weights lack 4 tensors"),
        ({"num_hidden_layers": 10**6}, "says num_hidden_layers 1,000,000, and no model has more than 4,096"),
        ({"num_hidden_layers": 4000}, "more than 1,084 tensors, and the weights have far fewer"),
        ({"num_attention_heads": 10**12}, "says num_attention_heads 1,000,000,000,000, and no model has more"),
        ({"num_labels": 10**9}, "says num_labels 1,000,000,000, and no model has more"),
        ({"text_config": {"num_experts": 10**7}}, "says num_experts 10,000,000, and no model has more"),
        ({"max_position_embeddings": 2**62}, "is the context of no model"),
        ({"model_type": "mixtral", "num_local_experts": 4000}, "config.json describes|in the weights"),
        ({"model_type": "gptj", "max_position_embeddings": 2**24}, "the tables that config.json asks for take"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is of BertForMaskedLM, which generates no"),
        ({"model_type": "roberta", "architectures": None}, "is an encoder, which fills in masks"),
        ({"model_type": "its_own", "auto_map": {"AutoConfig": "x.Y"}}, "is code of its authors .*which is never run"),
        ('{"model_type": "llama", "a": ' + "[" * 200_000, "is not JSON"),
        ({"attn_implementation": "someone/else"}, "attn_implementation 'someone/else', which is code of the hub"),
        ({"model_type": "clip"}, "'clip', which is no causal language model"),
        ({"model_type": "llama", "is_encoder_decoder": True}, "is an encoder-decoder model"),
        ({"model_type": "mamba"}, "keep no keys and values"),
        ({"model_type": "recurrent_gemma"}, "keeps its recurrent state in its modules"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": None}, "has no model_type"),
        ("{", "is not JSON"),
        ("[]", "no model_type"),
        ("{}", "no model_type"),
    ],
)  # fmt: skip
def test_a_config_that_lies_or_is_none(copy: Path, lie: dict[str, object] | str, message: str) -> None:
    (copy / "config.json").write_text(lie) if isinstance(lie, str) else _configure(copy, **lie)
    _refused(copy, message)


def as_cached(copy: Path) -> None:
    (copy / "config.json").unlink()
    (copy / "snapshots" / "c0ffee").mkdir(parents=True)


def as_file(copy: Path, content: bytes) -> None:
    shutil.rmtree(copy)
    copy.write_bytes(content)


IN_THE_TABLE: dict[str, Callable[[Path], object]] = {
    "T5, BART": lambda copy: _configure(copy, model_type="t5"),
    "BERT, an embedder": lambda copy: _configure(copy, model_type="bert", architectures=None),
    "code of its authors": lambda copy: _configure(copy, model_type="its_own", auto_map={"AutoConfig": "x.Y"}),
    "no tokenizer": lambda copy: (copy / "tokenizer.json").unlink(),
    "half a download": lambda copy: os.truncate(copy / WEIGHTS, 5000),
    "a clone without Git LFS": lambda copy: (copy / WEIGHTS).write_bytes(LFS_POINTER),
    "pickles alone": lambda copy: (copy / WEIGHTS).rename(copy / "pytorch_model.bin"),
    "parts without their index": lambda copy: (copy / WEIGHTS).rename(copy / PART),
    "a directory of the hub's cache": as_cached,
    "a GGUF file by another name": lambda copy: as_file(copy, b"GGUF"),
    "a LoRA adapter": lambda copy: (copy / "config.json").rename(copy / "adapter_config.json"),
}


@pytest.mark.parametrize("case", IN_THE_TABLE)
def test_the_page_has_the_words_that_are_printed(case: str, copy: Path) -> None:
    rows = re.findall(r"^\| (.+?) \| `+(.+?)`+ \|$", (HERE / "docs" / "your-model.md").read_text("utf-8"), re.MULTILINE)
    elsewhere = {"GGUF files alone on the hub", "no right to read it", "a cut GGUF file"}
    assert dict(rows).keys() == {*IN_THE_TABLE, *elsewhere}
    words = re.sub(r"\d[\d,]+", r"[\\d,]+", re.escape(dict(rows)[case]).replace("…", ".*"))
    IN_THE_TABLE[case](copy)
    with pytest.raises(ModelLoadError) as caught:
        check_model_here(str(copy))
    assert re.fullmatch(words, str(caught.value))


@pytest.mark.parametrize(
    ("damage", "message"),
    mark_some(
        [
            (shutil.rmtree, "there is no directory"),
            (lambda copy: (copy / "config.json").unlink(), "no config.json"),
            (lambda copy: (copy / WEIGHTS).unlink(), "no .safetensors"),
            (
                lambda copy: _configure(copy, model_type="no_such_thing"),
                "transformers knows no model_type 'no_such_thing'",
            ),
            (lambda copy: _configure(copy, model_type="t5"), "is an encoder-decoder model"),
            (
                lambda copy: _configure(copy, model_type="bert", architectures=["BertModel"]),
                "is an encoder, which fills",
            ),
            (lambda copy: (copy / "config.json").rename(copy / "adapter_config.json"), "has an adapter .LoRA. alone"),
            (
                lambda copy: os.truncate(copy / WEIGHTS, 5000),
                "damaged or cut off: it has 5,000 bytes, and its header says",
            ),
            (lambda copy: os.truncate(copy / WEIGHTS, 20), "damaged or cut off: its header is not within"),
            (lambda copy: (copy / WEIGHTS).write_bytes(b"<html>" * 99), "damaged or cut off: its header is"),
            (lambda copy: (copy / WEIGHTS).write_bytes(LFS_POINTER), "is a pointer of Git LFS"),
            (lambda copy: (copy / WEIGHTS).rename(copy / "pytorch_model.bin"), "pytorch_model.bin may run code"),
            (
                lambda copy: (copy / WEIGHTS).rename(copy / PART),
                f"no {WEIGHTS}.index.json, which says what is in {PART}",
            ),
            (as_cached, "is the hub's cache of a model: name it as on the hub, or .*/snapshots/c0ffee"),
            (
                lambda copy: as_file(copy, b"GGUF"),
                "is a GGUF file: give it, or a link to it, a name that ends with .gguf",
            ),
            (lambda copy: as_file(copy, b"PK"), "is a file, and no GGUF file: name the directory"),
            (lambda copy: (copy / "tokenizer.json").unlink(), "no usable tokenizer in .*no tokenizer.json"),
            (lambda copy: (copy / "tokenizer.json").write_text("{"), "no usable tokenizer in .*is not JSON"),
            (
                lambda copy: (copy / "tokenizer.json").write_text('{"added_tokens": []}'),
                "has no `model`, so it is none",
            ),
        ],
        pytest.mark.proof,
        3,
    ),
)
def test_what_cannot_be_loaded_is_seen_before_anything_is(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    check_model_here(str(copy))
    damage(copy)
    with pytest.raises(ModelLoadError, match=message):
        check_model_here(str(copy))
    _refused(copy, message)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root reads everything, so it is another user in this context."""
    if own := os.getuid():
        yield
        return
    os.setresuid(65534, 65534, own)
    try:
        yield
    finally:
        os.setresuid(own, own, own)


def test_what_cannot_be_read_is_named(tiny_dir: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        shutil.copytree(tiny_dir, place / "closed" / "model")
        for closed in (place / "closed", place / "closed" / "model"):
            closed.chmod(0)
            for model in (place / "closed" / "model", place / "closed" / "model" / "one.gguf"):
                with without_rights():
                    assert load_engine_settings(str(model), "", "").model == str(model)
                    with pytest.raises(ModelLoadError, match=f"^{model} cannot be read: Permission denied"):
                        check_model_here(str(model))
            closed.chmod(0o755)
        (place / "closed" / "model" / "config.json").chmod(0)
        with without_rights(), pytest.raises(ModelLoadError, match=r"model/config.json cannot be read: Permission"):
            check_model_here(str(place / "closed" / "model"))


def test_the_tables_that_are_read_as_text_are_those_of_transformers() -> None:
    read = parse_tables(Path(modeling_auto.__file__).read_text("utf-8"))
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        assert read[task] == getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").keys()


def test_a_name_of_the_hub_is_refused_where_it_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for no_proxy in ("", "localhost"):  # alone, it is no proxy
        monkeypatch.setenv("NO_PROXY", no_proxy)
        with pytest.raises(ModelUnavailable, match=r"not from the hub at http://127\.0\.0\.1:9: .*refused"):
            check_model_here("org/absent")
    with pytest.raises(ModelLoadError, match=r"no such directory, and not from the hub .*: Repo id must.*'a b'"):
        check_model_here("a b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for report in (None, ignore_progress):
        with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE") as caught:
            check_model_here("org/absent", report)
        assert choose_load_error(caught.value) is ModelLoadError


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gemma3_text"])
def test_no_tokenizer(copy: Path, model_type: str) -> None:
    """For some types transformers makes one up, without a vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    _configure(copy, model_type=model_type)
    _refused(copy, "no usable tokenizer")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "{}", "has no `model`, so it is none"),
        ("tokenizer.json", '[{"added_tokens": []}]', "has no `model`, so it is none"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
            "code of",
        ),
    ],
)
def test_a_tokenizer_that_is_none(copy: Path, name: str, content: str, message: str) -> None:
    (copy / name).write_text(content)
    _refused(copy, f"no usable tokenizer in .*{message}.*: use the tokenizer.json that was published")


OWN_CLASSES = sorted(
    name for name in dir(transformers)
    if name.endswith(("Tokenizer", "TokenizerFast", "TokenizerBase", "Backend")) and tokenizer_class_from_name(name)
)  # fmt: skip
"""The classes with which transformers reads a tokenizer of which its authors have code, too."""


def test_a_tokenizer_that_transformers_reads_by_a_class_of_its_own_is_not_refused(copy: Path) -> None:
    _configure(copy, model_type="gpt_oss")  # a type for which transformers names no tokenizer
    for name in ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2TokenizerFast"):
        about = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
        assert len(load_tokenizer(copy)) >= 1024
        check_description(copy)
    assert len(OWN_CLASSES) > 90
    assert [name for name in OWN_CLASSES if not _has_tokenizer_class(name)] == []
    assert not _has_tokenizer_class("Own")


def test_a_tokenizer_at_which_its_library_panics(copy: Path) -> None:
    """A panic is no `Exception` in Python."""
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "longer than any token"
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    _refused(copy, "no usable tokenizer")


# Memory that is not there


def test_an_unknown_device_and_a_pool_larger_than_memory(tiny_dir: Path) -> None:
    _refused(tiny_dir, "no device", device="toaster")
    message = r"the KV pool 1,000,000,000 MiB \(PENSTOCK_ENGINE_POOL_MB=1000000000\), and [\d,]+ MiB are available"
    _refused(tiny_dir, message, pool_mb=10**9)


def test_memory_that_others_have_may_be_there_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "count_available_bytes", lambda _: 100)
    monkeypatch.setattr(memory, "count_total_bytes", lambda: 10_000)
    for weights, kind in ((10_000, ModelUnavailable), (10_001, ModelLoadError)):
        with pytest.raises(ModelLoadError, match="not enough memory on cpu") as caught:
            memory.check_memory(weights, 0, torch.device("cpu"))
        assert type(caught.value) is kind


NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "available", "total"),
    [
        ({}, 4000 * 1024, 9000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n"}, 4000 * 1024, 9000 * 1024),
        (
            {"proc/self/cgroup": "0::/a/b\n", f"{NEW}/a/b/memory.max": "900", f"{NEW}/a/b/memory.current": "500",
             f"{NEW}/a/b/memory.stat": "anon 300\ninactive_file 120\nactive_file 60\n"},
            900 - 500 + 180, 900,
        ),
        (
            {"proc/self/cgroup": "0::/a/b\n", f"{NEW}/a/b/memory.max": "max", f"{NEW}/a/b/memory.current": "5",
             f"{NEW}/a/b/memory.stat": "anon 5\n", f"{NEW}/a/memory.max": "700", f"{NEW}/a/memory.current": "600",
             f"{NEW}/a/memory.stat": "anon 600\n"},
            100, 700,
        ),
        (
            {"proc/self/cgroup": "3:cpu,memory:/seen/outside\n0::/\n", f"{OLD}/memory.limit_in_bytes": "800",
             f"{OLD}/memory.usage_in_bytes": "500", f"{OLD}/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n"},
            350, 800,
        ),
        (
            {"proc/self/cgroup": "0::/\n", f"{NEW}/memory.max": "100", f"{NEW}/memory.current": "200",
             f"{NEW}/memory.stat": ""},
            0, 100,
        ),
    ],
)  # fmt: skip
def test_what_is_available(tmp_path: Path, files: dict[str, str], available: int, total: int) -> None:
    assert count_available_bytes(tmp_path) is count_total_bytes(tmp_path) is None, "a system that does not say"
    for name, content in {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert (count_available_bytes(tmp_path), count_total_bytes(tmp_path)) == (available, total)


# Files that nobody should trust


def _list_cases(model: Path) -> list[str]:
    return draw_cases(list_hostile_files(model), 12)


@pytest.mark.parametrize("name", _list_cases(Path()))
def test_a_hostile_file_takes_little_and_is_refused_in_words(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    found = judge_hostile_file(list_hostile_files(tiny_dir)[name], tmp_path)
    assert found["mib"] < MAX_MIB
    if found["outcome"] == REFUSED:
        assert found["words"].startswith("cannot load model ")
        assert re.search(WORKS, found["words"])
    assert found["outcome"] in (LOADED, REFUSED)


# The command line


def test_a_worker_ends_with_one_line(copy: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    os.truncate(copy / WEIGHTS, 5000)
    addresses = {"PENSTOCK_STREAM_URL": redis_url, "PENSTOCK_PIPELINE": pipeline.name}
    given = {**os.environ, **addresses, "PENSTOCK_ENGINE_MODEL": str(copy)}
    child = fork_process("worker", tmp_path / "log", run_penstock, "worker", "prefill", environment=given)
    assert child.wait(PATIENCE_S) == ModelLoadError.exit_status
    assert f"penstock: cannot load model '{copy}': {WEIGHTS} is damaged or cut off" in child.read_log_tail(1)
    assert "Traceback" not in child.read_log_tail(1000)


# The sequences that the engine of a loaded model does not take


def test_loading_prints_nothing(tiny_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(EngineSettings(model=str(tiny_dir)))
    assert (model.context_length, model.eos_token_ids, model.vocab_size) == (256, frozenset({1}), 1024)
    assert capfd.readouterr() == ("", "")


def test_what_the_engine_does_not_take(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1))
    with pytest.raises(PromptTooLong, match=r"length is 1024 tokens\. However, you requested 1025 tokens"):
        engine.add_sequence(sequence([5] * 1020, 5))
    with pytest.raises(PromptTooLong, match="KV blocks") as pool:
        engine.add_sequence(sequence([5] * 500, 5))
    assert f"maximum context length is {max_length(demo, demo.layout, engine.pool.num_blocks)} tokens" in str(
        pool.value
    )
    engine.check_sequence(sequence([5] * (max_length(demo, demo.layout, engine.pool.num_blocks) - 5), 5))
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.add_sequence(sequence([5, 5000]))
    odd = sequence([5] * 20)
    odd.tail_payload = b"short"
    with pytest.raises(InternalError, match="its tail payload must have"):
        engine.add_sequence(odd)
    odd = sequence([5] * 32)
    odd.tail_payload = bytes(engine.block_bytes)
    with pytest.raises(InternalError, match="ends with a full block"):
        engine.add_sequence(odd)
    assert not engine.has_work()


def test_a_pool_smaller_than_a_block(demo: LoadedModel) -> None:
    large = load_model(EngineSettings(block_size=1024))
    with pytest.raises(ModelLoadError, match="POOL_MB"):
        Engine(large, EngineSettings(block_size=1024, pool_mb=1))
