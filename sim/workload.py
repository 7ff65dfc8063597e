"""The requests of the equality tests, and the undivided model's answers to them."""

import base64
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    BertConfig,
    BertModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model, load_stage_models
from penstock.engine.loading.vector_files import open_checkpoint
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.pictures.reader import PictureReader
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.vectors import Floats, normalize_vectors
from penstock.engine.weights.files import DEMO_MODEL
from penstock.grammar.engine import ENGINE_VERSION
from penstock.grammar.state import GrammarState
from penstock.messages import ChatMessage, EmbedOptions, Picture, Request, Sampling, Text, Vectors
from penstock.pictures.decoding import decode_picture
from penstock.prefill_worker.tokenize import PromptTokenizer
from penstock.worker.grammars import GrammarCompiler
from tools.seeing import save_seeing_model
from tools.tiny import build_tiny_model

if TYPE_CHECKING:
    from penstock.embed_worker.model import EmbedModel

MAX_TOKENS = 24
ENGINE_SETTINGS = EngineSettings(dtype="float32", device="cpu", max_step_tokens=128, pool_mb=64)
TOOL_MODEL = DEMO_MODEL.parent / "tool_model"


@cache
def load_demo_model() -> LoadedModel:
    """Return the model that ships with the project, loaded once."""
    return load_model(ENGINE_SETTINGS)


@cache
def load_native_demo_model() -> LoadedModel:
    """Return the same model on the native kernels, as workers run it: a step takes a fifth of the time."""
    return accelerate_model(load_model(ENGINE_SETTINGS))


@cache
def load_tool_model() -> LoadedModel:
    """Return the model that calls tools, loaded once."""
    return load_model(ENGINE_SETTINGS.model_copy(update={"model": str(TOOL_MODEL)}))


SPLIT_FORMS = {"PENSTOCK_ENGINE_PREFILL_WEIGHTS": "bf16", "PENSTOCK_ENGINE_WEIGHTS": "int4"}
"""Settings with which prompts are computed with weights as they are stored, and answers with weights in 4 bits."""


@cache
def load_split_model() -> LoadedModel:
    """Return the model that ships with the project as `SPLIT_FORMS` says, loaded once."""
    return load_stage_models(ENGINE_SETTINGS.model_copy(update={"prefill_weights": "bf16", "weights": "int4"}))


@cache
def make_state_model() -> Path:
    """Write a tiny random model whose layers keep states, or K and V, in turn; return its directory.

    It has the demo model's tokenizer. Each process writes its own, with the same bytes.
    """
    vocabulary = load_demo_model().vocab_size
    config = Lfm2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv", "full_attention"], num_hidden_layers=4,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    directory = Path(tempfile.mkdtemp(prefix="penstock-states-"))
    build_tiny_model(Lfm2ForCausalLM, config, 2, torch.device("cpu")).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory


@cache
def load_state_model() -> LoadedModel:
    """Return the model whose layers keep states, loaded once."""
    return load_model(ENGINE_SETTINGS.model_copy(update={"model": str(make_state_model())}))


@cache
def make_vector_model() -> Path:
    """Write a tiny random model that generates text and computes vectors of texts; return its directory.

    It has the demo model's tokenizer. Each process writes its own, with the same bytes.
    """
    config = Qwen3Config(
        vocab_size=load_demo_model().vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, bos_token_id=0,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    directory = Path(tempfile.mkdtemp(prefix="penstock-vectors-"))
    build_tiny_model(Qwen3ForCausalLM, config, 2, torch.device("cpu")).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    write_modules(directory, config.hidden_size, "lasttoken", 512)
    return directory


def write_modules(directory: Path, size: int, pooling: str, max_length: int) -> None:
    """Write what sentence-transformers reads beside a model: vectors of this size, pooled so, with a length of 1."""
    names = ("Transformer", "Pooling", "Normalize")
    folders = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{name}"}
        for index, (name, folder) in enumerate(zip(names, folders, strict=True))
    ]
    for folder in folders[1:]:
        (directory / folder).mkdir(exist_ok=True)
    pooled = {"word_embedding_dimension": size, f"pooling_mode_{pooling}": True}
    for name, content in {
        "modules.json": modules, "sentence_bert_config.json": {"max_seq_length": max_length},
        f"{folders[1]}/config.json": pooled,
    }.items():  # fmt: skip
        (directory / name).write_text(json.dumps(content))


@cache
def load_vector_model() -> LoadedModel:
    """Return the model that also computes vectors, loaded once."""
    return load_model(ENGINE_SETTINGS.model_copy(update={"model": str(make_vector_model())}))


@cache
def make_seeing_model() -> Path:
    """Write a tiny random model that sees pictures; return its directory. Each process writes the same bytes."""
    return save_seeing_model(Path(tempfile.mkdtemp(prefix="penstock-seeing-")))


@cache
def draw_pictures() -> list[bytes]:
    """Return the files of a few pictures of few pixels, which differ in their colours alone."""
    files = []
    for seed in range(4):
        file = io.BytesIO()
        Image.frombytes("RGB", (40, 30), random.Random(seed).randbytes(3 * 40 * 30)).save(file, "PNG")
        files.append(file.getvalue())
    return files


def make_seeing_requests(count: int, max_tokens: int) -> list[tuple[Request, "ExpectedAnswer"]]:
    """Return chats with one picture or two, and what `generate()` of transformers answers; all greedy.

    Every second has the files in its message. Those of the others have to be in the store.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(make_seeing_model(), dtype="float32")
    processor = PictureReader(make_seeing_model(), model.config).processor
    words, found = _make_text_tokens(random.Random(3), 400), list[tuple[Request, ExpectedAnswer]]()
    for number in range(count):
        chance = random.Random(number)
        texts = [load_demo_model().tokenizer.decode(words[: chance.choice([3, 20, 200])]) for _ in range(2)]
        files = chance.choices(draw_pictures(), k=1 + number % 2)
        shown = [
            Picture(
                digest=hashlib.sha256(file).hexdigest(),
                data=base64.b64encode(file).decode() if number % 4 < 2 else None,
            )
            for file in files
        ]
        sampling = Sampling(max_tokens=1 if number % 8 == 0 else max_tokens, temperature=0.0, ignore_eos=True)
        content: list[str | Picture] = [texts[0], *shown, texts[1]]
        chat = [ChatMessage(role="user", content=content)]
        text = texts[0] + processor.image_token * len(files) + texts[1]
        images = [decode_picture(file, 10_000, None) for file in files]
        given = processor(images=images, text=[text], return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**given, max_new_tokens=sampling.max_tokens, do_sample=False, eos_token_id=None)
        tokens = list(map(int, answer[0, given["input_ids"].shape[1] :]))
        state = Detokenizer(processor.tokenizer, sampling, frozenset(), sampling.max_tokens)
        said = "".join(state.add_token(token)[0] for token in tokens)
        found.append(
            (Request(id=f"chaos-{number}", messages=chat, sampling=sampling), ExpectedAnswer(tokens, said, "length"))
        )
    return found


ModelLoader = Callable[[], LoadedModel]
"""`load_demo_model`, or another of the functions with such names."""


@cache
def _load_native_vector_model() -> LoadedModel:
    return accelerate_model(load_model(ENGINE_SETTINGS.model_copy(update={"model": str(make_vector_model())})))


def compute_vectors(texts: Iterable[Text]) -> Vectors:
    """Return the vectors of texts by that model, each by an engine that has nothing else to do."""
    model, found = _load_native_vector_model(), list[Floats]()
    assert model.text_reader is not None
    for row in model.text_reader.read_texts(list(texts), EmbedOptions()):
        engine = Engine(model, ENGINE_SETTINGS)
        seq = EngineSequence("alone", row.token_ids, sampling=Sampling(), seed=0, max_new_tokens=1, is_pooled=True)
        engine.add_sequence(seq)
        while engine.has_work():
            engine.step()
        assert seq.vector is not None
        found.append(normalize_vectors(seq.vector[None])[0])
    return Vectors.pack_floats(b"".join(one.tobytes() for one in found), len(found[0]))


@cache
def make_encoder() -> Path:
    """Write a tiny random encoder, which `embed` workers compute; return its directory. It has the demo model's
    tokenizer.
    """
    config = BertConfig(
        vocab_size=load_demo_model().vocab_size, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=512,
    )  # fmt: skip
    directory = Path(tempfile.mkdtemp(prefix="penstock-encoder-"))
    build_tiny_model(BertModel, config, 2, torch.device("cpu")).save_pretrained(directory)
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    write_modules(directory, config.hidden_size, "mean_tokens", 512)
    return directory


@cache
def _open_encoder() -> "EmbedModel":
    from penstock.embed_worker.model import EmbedModel  # imports sentence-transformers, which takes seconds

    return EmbedModel(open_checkpoint(str(make_encoder())), EngineSettings(device="cpu", threads=1))


def encode_texts(texts: Sequence[str]) -> Vectors:
    """Return the vectors of texts by that encoder, each computed alone."""
    model = _open_encoder()
    found = [model.compute_rows([row]) for row in model.read_texts(texts, EmbedOptions())]
    return Vectors.pack_floats(b"".join(one.tobytes() for one in found), found[0].shape[1])


@cache
def _open_compiler(load: ModelLoader) -> GrammarCompiler:
    return GrammarCompiler(load())


def start_grammar(sampling: Sampling, load: ModelLoader = load_demo_model) -> GrammarState | None:
    """Return the state of a request's grammar before its first token; None without one."""
    if sampling.grammar is None:
        return None
    checked = sampling.grammar.model_copy(update={"engine": ENGINE_VERSION})
    return GrammarState(_open_compiler(load).compile_grammar(checked))


@dataclass(frozen=True)
class ExpectedAnswer:
    """The answer that a request must get."""

    token_ids: list[int]
    text: str
    finish_reason: str


def make_requests(count: int, tag: str, max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Return requests with prompts of 1 to 600 tokens, a third on three shared prefixes; greedy and sampled in turn."""
    chance = random.Random(20261121)
    shared = [_make_text_tokens(chance, 400) for _ in range(3)]
    made = []
    for number in range(count):
        length = 1 + number * 599 // max(1, count - 1)
        token_ids = _make_text_tokens(chance, length)
        if number % 3 == 0 and length > 40:
            base = shared[number % 9 // 3]
            keep = min(length - 20, len(base))
            token_ids = base[:keep] + token_ids[keep:]
        greedy = number % 2 == 0
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0) if greedy else Sampling(
            max_tokens=max_tokens, temperature=0.9, top_k=50, top_p=0.95, seed=number
        )  # fmt: skip
        made.append(Request(id=f"{tag}-{number}", token_ids=token_ids, sampling=sampling, tenant=tag))
    return made


def _make_text_tokens(chance: random.Random, count: int) -> list[int]:
    """Return tokens of words that the model knows, so that its answers are not degenerate."""
    words = ["and", "the", "king", "of", "Israel", "said", "unto", "his", "people", "LORD", "land", "go", "bread"]
    token_ids: list[int] = []
    while len(token_ids) < count:
        sentence = " " + " ".join(chance.choices(words, k=12)) + (";" if chance.random() < 0.5 else ".")
        token_ids += load_demo_model().tokenizer(sentence)["input_ids"]
    return token_ids[:count]


def compute_answers(work: Iterable[Request], load: ModelLoader = load_demo_model) -> dict[str, ExpectedAnswer]:
    """Return each request's answer by the model.

    It is the plain model's by `generate()` if it is greedy and has no grammar, else that of an engine run alone; always
    this one if the model's weights are not those of its files.
    """
    reader, answers = PromptTokenizer(load()), {}
    for request in work:
        is_plain = request.sampling.temperature == 0 and request.sampling.grammar is None and not load().stage_forms
        prompt = tuple(reader.tokenize_prompt(request))
        tokens = (
            list(_generate_plain(load, prompt, request.sampling.max_tokens))
            if is_plain
            else _generate_with_engine(load, prompt, request.sampling.model_dump_json(), request.seed)
        )
        start = reader.find_answer_start(prompt) if request.sampling.special_text else ""
        answers[request.id] = _cut_answer(request.sampling, tokens, load, start)
    return answers


@cache
def _generate_plain(load: ModelLoader, token_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Return the plain model's tokens. Cached, as many tests need the same."""
    model = load()
    model.module.set_attn_implementation("sdpa")
    prompt = torch.tensor([token_ids])
    with torch.inference_mode():
        output = model.module.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
        )
    model.module.set_attn_implementation("penstock")
    return tuple(int(token) for token in output[0, prompt.shape[1] :])


@cache
def _generate_with_engine(load: ModelLoader, prompt: tuple[int, ...], sampling_json: str, seed: int) -> list[int]:
    """Return the tokens of an engine that has nothing else to do. Cached, as many tests need the same."""
    sampling = Sampling.model_validate_json(sampling_json)
    engine, grammar = Engine(load(), ENGINE_SETTINGS), start_grammar(sampling, load)
    seq = EngineSequence(
        "alone", list(prompt), sampling=sampling, seed=seed, max_new_tokens=sampling.max_tokens, grammar=grammar
    )
    engine.add_sequence(seq)
    while seq.num_output_tokens < seq.max_new_tokens and not seq.is_grammar_ended:
        engine.step()
    return seq.output_token_ids


def _cut_answer(sampling: Sampling, tokens: list[int], load: ModelLoader, start: str) -> ExpectedAnswer:
    """Cut an answer off where it ends."""
    model = load()
    state = Detokenizer(model.tokenizer, sampling, model.eos_token_ids, sampling.max_tokens, start)
    grammar = start_grammar(sampling, load)
    texts = []
    for number, token in enumerate(tokens, start=1):
        if grammar is not None:
            grammar.advance([token])
        text, finish = state.add_token(token, is_grammar_ended=grammar is not None and grammar.is_ended)
        texts.append(text)
        if finish is not None:
            return ExpectedAnswer(tokens[:number], "".join(texts), finish)
    raise AssertionError("the answer does not end")
