"""A model reads and computes texts as sentence-transformers does, and refuses what it cannot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModel

from penstock.config.settings import EngineSettings
from penstock.embed_worker.model import EmbedModel
from penstock.engine.loading.vector_files import is_for_embedding, open_checkpoint
from penstock.engine.vectors import Floats, cut_vectors
from penstock.errors import InvalidRequest, ModelLoadError, PromptTooLong, RequestError
from penstock.messages import EmbedOptions, Text
from tests.embed.checkpoints import (
    KINDS,
    draw_text,
    write_checkpoint,
    write_json,
    write_reranker,
    write_token_reranker,
)
from tests.embed.conftest import open_model

TEXTS = [draw_text(num, num) for num in (1, 2, 5, 11, 23, 37)]


def measure_cosine(some: Floats, others: Floats) -> float:
    """Return the least cosine between vectors at one place."""
    lengths = np.linalg.norm(some, axis=1) * np.linalg.norm(others, axis=1)
    return float(((some * others).sum(axis=1) / lengths).min())


def compute(model: EmbedModel, texts: Sequence[Text], **options: Any) -> Floats:
    return model.compute_rows(model.read_texts(texts, EmbedOptions(**options)))


@pytest.mark.parametrize("name", KINDS)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path, name)
    assert is_for_embedding(str(directory))
    found = compute(open_model(directory), TEXTS)
    theirs = SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    assert measure_cosine(found, theirs) >= 0.99999
    model = open_model(directory)
    ids = [row.token_ids for row in model.read_texts(TEXTS, EmbedOptions())]
    np.testing.assert_allclose(compute(model, ids), theirs, atol=1e-5)


def test_token_ids_are_read_as_they_are(tmp_path: Path) -> None:
    """A prompt that is left out of the mean is none of theirs, also beside a text that has it."""
    prompts = {"query": "bar fern "}
    directory = write_checkpoint(tmp_path, prompts=prompts, default_prompt_name="query")
    pooling = directory / "1_Pooling" / "config.json"
    write_json(pooling, json.loads(pooling.read_text()) | {"include_prompt": False})
    model, library = open_model(directory), SentenceTransformer(str(directory), device="cpu")
    ids = [row.token_ids for row in model.read_texts(TEXTS, EmbedOptions(prompt=""))]
    np.testing.assert_allclose(compute(model, ids), library.encode(TEXTS, prompt=""), atol=1e-5)
    first, second = model.read_texts([TEXTS[0], ids[0]], EmbedOptions())
    assert first.token_ids != second.token_ids == ids[0]
    assert first.shared != second.shared
    (end,), (start,) = (
        model.read_texts([[*range(200)]], EmbedOptions(truncate=side)) for side in ("end", "start")
    )  # fmt: skip
    assert (end.token_ids, start.token_ids) == ([*range(120)], [*range(80, 200)])
    with pytest.raises(PromptTooLong, match=r"texts\[0\] has 121 tokens"):
        model.read_texts([[5] * 121], EmbedOptions())
    size = model.card.vocab_size
    with pytest.raises(InvalidRequest, match=rf"texts\[1\]\[1\]: the model has no token {size}: its vocabulary has"):
        model.read_texts([[1], [2, size, size + 1]], EmbedOptions())
    with pytest.raises(InvalidRequest, match="prompt: token ids are read as they are"):
        model.read_texts([[1]], EmbedOptions(prompt="query"))


def test_scores_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    directory = write_reranker(tmp_path)
    assert is_for_embedding(str(directory))
    found = compute(open_model(directory), TEXTS, query=TEXTS[2])
    theirs = CrossEncoder(str(directory), device="cpu").predict([(TEXTS[2], text) for text in TEXTS])
    np.testing.assert_allclose(found[:, 0], theirs, atol=1e-6)
    assert np.ptp(theirs) > 0.01
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: token ids have no score"):
        compute(open_model(directory), ["a", [1]], query="why")


def test_a_decoder_scores_by_two_tokens_as_sentence_transformers_has_it(tmp_path: Path) -> None:
    directory = write_token_reranker(tmp_path)
    assert is_for_embedding(str(directory))
    model = open_model(directory)
    (row,) = model.read_texts(["dune"], EmbedOptions(query="cold"))
    assert model._tokenizer.decode(row.token_ids) == "<s>query: cold</s><s>document: dune</s><s>"
    theirs = CrossEncoder(str(directory), device="cpu").predict([(TEXTS[2], text) for text in TEXTS])
    np.testing.assert_allclose(compute(model, TEXTS, query=TEXTS[2])[:, 0], theirs, atol=1e-6)
    assert np.ptp(theirs) > 0.01


def test_the_longest_texts_are_read_whole(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "modernbert", max_length=8192, positions=8192)
    model, theirs = open_model(directory), SentenceTransformer(str(directory), device="cpu")
    tokens = len(model.read_texts([draw_text(9000)], EmbedOptions(truncate="end"))[0]) - 2
    texts = [" bar" * count for count in (tokens - 1, tokens)]
    assert [len(row) for row in model.read_texts(texts, EmbedOptions())] == [8191, 8192]
    assert measure_cosine(compute(model, texts), theirs.encode(texts)) >= 0.99999
    with pytest.raises(PromptTooLong, match="has 8,193 tokens"):
        model.read_texts([" bar" * (tokens + 1)], EmbedOptions())


def test_prompts_are_the_checkpoints(tmp_path: Path) -> None:
    prompts = {"query": "bar fern ", "document": "dune "}
    directory = write_checkpoint(tmp_path, prompts=prompts, default_prompt_name="query")
    model, theirs = open_model(directory), SentenceTransformer(str(directory), device="cpu")
    cases: tuple[tuple[str | None, Any], ...] = (
        (None, {}), ("document", {"prompt_name": "document"}), ("", {"prompt": ""}),
    )  # fmt: skip
    for name, told in cases:
        assert measure_cosine(compute(model, TEXTS, prompt=name), theirs.encode(TEXTS, **told)) >= 0.99999
    other = EmbedModel(model.checkpoint, EngineSettings(threads=1), "document")
    assert measure_cosine(compute(other, TEXTS), theirs.encode(TEXTS, prompt_name="document")) >= 0.99999
    with pytest.raises(InvalidRequest, match="document, query"):
        compute(model, TEXTS, prompt="passage")
    with pytest.raises(ModelLoadError, match="no prompt 'passage'"):
        EmbedModel(model.checkpoint, EngineSettings(threads=1), "passage")


def test_a_prompt_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, prompts={"query": "bar fern "})
    pooling = directory / "1_Pooling" / "config.json"
    write_json(pooling, json.loads(pooling.read_text()) | {"include_prompt": False})
    theirs = SentenceTransformer(str(directory), device="cpu").encode(TEXTS, prompt_name="query")
    assert measure_cosine(compute(open_model(directory), TEXTS, prompt="query"), theirs) >= 0.99999


def test_cut_vectors_have_length_one_again(bert: EmbedModel) -> None:
    whole = compute(bert, TEXTS)
    cut = cut_vectors(whole, 16)
    assert cut.shape == (len(TEXTS), 16)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1.0, atol=1e-6)
    assert measure_cosine(cut, whole[:, :16]) >= 0.99999


@pytest.mark.parametrize("first", ["short", "long"])
def test_long_texts_are_cut_where_the_request_says(bert: EmbedModel, first: str) -> None:
    texts = [draw_text(3), draw_text(200)] if first == "short" else [draw_text(200), draw_text(3)]
    with pytest.raises(PromptTooLong, match=rf"texts\[{int(first == 'short')}\] has .* the model reads 120"):
        compute(bert, texts)
    theirs = SentenceTransformer(str(bert.checkpoint.directory), device="cpu").encode(texts)
    assert measure_cosine(compute(bert, texts, truncate="end"), theirs) >= 0.99999
    (start,) = (row for row in bert.read_texts(texts, EmbedOptions(truncate="start")) if len(row) > 50)
    (end,) = (row for row in bert.read_texts(texts, EmbedOptions(truncate="end")) if len(row) > 50)
    whole = bert._tokenizer(draw_text(200))["input_ids"]
    assert (start.token_ids[1:-1], end.token_ids[1:-1]) == (whole[1:-1][-118:], whole[1:-1][:118])


def test_the_longest_text_is_the_one_that_the_checkpoint_says(tmp_path: Path) -> None:
    model = open_model(write_checkpoint(tmp_path, "roberta", max_length=500))
    assert model.card.max_length == 130  # its positions, without the one of padding
    (row,) = model.read_texts([draw_text(200)], EmbedOptions(truncate="end"))
    assert len(row) == 130
    assert np.isfinite(model.compute_rows([row])).all()


@pytest.mark.parametrize(
    ("texts", "options", "kind", "said"),
    [
        ([""], {}, InvalidRequest, r"texts\[0\] is empty"),
        (["bar", "a\0b"], {}, InvalidRequest, r"texts\[1\] has a NUL"),
        (["bar "] * 2 + ["bar " * 100_000], {}, PromptTooLong, r"texts\[2\] has"),
        (["bar"], {"query": "cold"}, InvalidRequest, "query: this pipeline's model computes vectors"),
        (["bar"], {"dimensions": 20}, InvalidRequest, "may be cut to 16, 32, not to 20"),
        (["bar"], {"dimensions": 64}, InvalidRequest, "may be cut to 16, 32, not to 64"),
    ],
)
def test_what_is_refused(
    bert: EmbedModel, texts: list[str], options: dict[str, Any], kind: type[RequestError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        compute(bert, texts, **options)


def test_what_a_reranker_refuses(reranker: EmbedModel) -> None:
    with pytest.raises(InvalidRequest, match="query is missing"):
        compute(reranker, TEXTS)
    with pytest.raises(InvalidRequest, match="dimensions"):
        compute(reranker, TEXTS, query="bar", dimensions=2)


def test_vectors_are_cut_only_where_the_checkpoint_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(write_checkpoint(tmp_path))
    with pytest.raises(InvalidRequest, match="vectors have 48, and may not be cut"):
        compute(model, TEXTS, dimensions=16)
    monkeypatch.setattr("penstock.engine.vectors.MAX_VECTOR_FLOATS", 48 * 5)
    with pytest.raises(InvalidRequest, match="288 numbers are more"):
        compute(model, TEXTS)


END_TOKENS = {
    "the template of tokenizer.json": ({"tokenizer_class": "LlamaTokenizer", "padding_side": "left"}, True),
    "add_eos_token": ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "padding_side": "left"}, False),
    "it is written already": ({"padding_side": "right"}, True),
}


@pytest.mark.parametrize("where", END_TOKENS)
def test_the_last_token_is_the_one_that_the_tokenizer_files_demand(tmp_path: Path, where: str) -> None:
    about, in_template = END_TOKENS[where]
    directory = write_checkpoint(tmp_path, "qwen3")
    said = directory / "tokenizer_config.json"
    write_json(said, json.loads(said.read_text()) | about)
    if not in_template:
        content = json.loads((directory / "tokenizer.json").read_text())
        write_json(directory / "tokenizer.json", content | {"post_processor": None})
    model = open_model(directory)
    rows = model.read_texts([TEXTS[0], draw_text(200)], EmbedOptions(truncate="end"))
    assert [row.token_ids[-1] for row in rows] == [2, 2]
    assert [row.token_ids.count(2) for row in rows] == [1, 1]
    assert len(rows[1]) == 120
    whole = AutoModel.from_pretrained(directory).eval()
    with torch.inference_mode():
        last = whole(torch.tensor([rows[0].token_ids])).last_hidden_state[0, -1:]
    assert measure_cosine(model.compute_rows(rows)[:1], last.numpy()) >= 0.99999


def test_nothing_is_unpickled_and_no_code_is_run(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "dense")
    modules = json.loads((directory / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    write_json(directory / "modules.json", [*modules, dense])
    (directory / "3_Dense").mkdir()
    (directory / "3_Dense" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelLoadError, match="convert it to safetensors"):
        open_checkpoint(str(directory))
    write_json(directory / "modules.json", [{**modules[0], "type": "modeling.Transformer"}, *modules[1:]])
    with pytest.raises(ModelLoadError, match=r"the module modeling\.Transformer, which is not run"):
        open_checkpoint(str(directory))
    write_json(directory / "modules.json", [*modules, {**dense, "path": "../elsewhere"}])
    with pytest.raises(ModelLoadError, match="not in the model's directory"):
        open_checkpoint(str(directory))
    other = write_checkpoint(tmp_path / "bin")
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="may run code, so it is never read"):
        open_checkpoint(str(other))


def test_what_is_no_such_checkpoint_is_refused(tmp_path: Path) -> None:
    assert not is_for_embedding("demo")
    assert not is_for_embedding(str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match="penstock worker auto"):
        open_checkpoint("demo")
    with pytest.raises(ModelLoadError, match="tells 3 classes apart"):
        open_model(write_reranker(tmp_path / "classes", num_labels=3))
