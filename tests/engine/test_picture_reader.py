"""Pictures become the pixels and the tokens that transformers' own processors make of text and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.memory import memory
from penstock.engine.pictures.reader import FAMILIES, PicturePrompt, PictureReader
from penstock.engine.pictures.rows import Pictures
from penstock.engine.pictures.vision import KEPT_BYTES, Pixels
from penstock.engine.weights.files import DEMO_MODEL
from penstock.engine.weights.module import build_skeleton, count_bytes
from penstock.errors import InvalidRequest, ModelLoadError, ModelUnavailable, PromptTooLong
from penstock.messages import Detail
from penstock.pictures.decoding import decode_picture
from tests.engine.helpers import run_sequences, sequence
from tests.engine.test_pictures import HAS_AXES
from tests.engine.test_seeing import ANY_RESOLUTION, SEEING
from tests.test_pictures import save
from tools.tiny import build_tiny_model

QWEN = {"image_token": "<|image_pad|>"}
QWEN3 = QWEN | {
    "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
}  # fmt: skip
INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
IMAGE = {"image_token": "<image>"}
CLIP = {"size": {"shortest_edge": 56}, "crop_size": 56}
LLAVA = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
SQUARES = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6}
PIXTRAL = {"patch_size": 14, "size": {"longest_edge": 224}}
PROCESSORS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, str]]] = {
    "qwen2_vl": ("Qwen2VLImageProcessorPil", {}, "Qwen2VLProcessor", {}, QWEN),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", {}, "Qwen2_5_VLProcessor", {}, QWEN),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", {}, "Qwen3VLProcessor", {}, QWEN3),
    "llava": ("CLIPImageProcessorPil", CLIP, "LlavaProcessor", LLAVA, IMAGE),
    "llava_next": ("LlavaNextImageProcessorPil", CLIP | ANY_RESOLUTION, "LlavaNextProcessor", LLAVA, IMAGE),
    "llava_onevision": (
        "LlavaOnevisionImageProcessorPil", {"size": {"height": 56, "width": 56}} | ANY_RESOLUTION,
        "LlavaOnevisionProcessor", {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}, IMAGE,
    ),
    "idefics3": ("Idefics3ImageProcessorPil", TILES, "Idefics3Processor", {"image_seq_len": 4}, {}),
    "smolvlm": ("SmolVLMImageProcessorPil", TILES, "SmolVLMProcessor", {"image_seq_len": 4}, {}),
    "mistral3": (
        "PixtralImageProcessorPil", PIXTRAL, "PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}, {},
    ),
    "pixtral": ("PixtralImageProcessorPil", PIXTRAL, "PixtralProcessor", {"patch_size": 14}, {}),
    "internvl": ("GotOcr2ImageProcessorPil", SQUARES, "InternVLProcessor", {"image_seq_length": 4}, INTERN),
    "vipllava": ("CLIPImageProcessorPil", CLIP, "LlavaProcessor", LLAVA, IMAGE),
    "lighton_ocr": (
        "PixtralImageProcessorPil", PIXTRAL, "LightOnOcrProcessor", {"patch_size": 14, "spatial_merge_size": 2},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    ),
    "deepseek_vl": (
        "DeepseekVLImageProcessorPil", {"size": {"height": 56, "width": 56}}, "DeepseekVLProcessor",
        {"num_image_tokens": 16}, IMAGE,
    ),
    "qwen3_vl_moe": ("Qwen2VLImageProcessorPil", {}, "Qwen3VLProcessor", {}, QWEN3),
    "paddleocr_vl": (
        "PaddleOCRVLImageProcessorPil", {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        "PaddleOCRVLProcessor", {}, QWEN,
    ),
}  # fmt: skip
"""By type of model: its image processor, its processor, and the special tokens, with sizes that suit tests."""
TILE_TOKENS = [
    "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
DETAILS: tuple[Detail, ...] = ("low", "high")
MISSING = {"mistral3": "torchvision", "pixtral": "torchvision", "smolvlm": "num2words"}
"""By type of model: what its processor imports, and not every installation has."""
MORE_TOKENS = {
    "idefics3": TILE_TOKENS,
    "smolvlm": TILE_TOKENS,
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
}


def draw_picture(seed: int, width: int, height: int) -> Image.Image:
    chance = np.random.default_rng(seed)
    return Image.fromarray(chance.integers(0, 256, (height, width, 3), np.uint8))


def save_processor(kind: str, directory: Path) -> Any:
    """Write the files of a processor with the demo model's tokenizer; return the model's configuration."""
    images, sizes, name, given, special = PROCESSORS[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=special)
    tokenizer.add_tokens(MORE_TOKENS.get(kind, []), special_tokens=True)
    tokenizer.save_pretrained(directory)
    getattr(transformers, images)(**sizes).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": name, **given}))
    make_config, about = SEEING[kind]
    about = {**about, "text_config": {**about["text_config"], "vocab_size": len(tokenizer)}}
    rows = [*MORE_TOKENS.get(kind, []), special.get("context_image_token") or special.get("image_token")][0]
    about["image_token_id"] = tokenizer.convert_tokens_to_ids(rows)
    if "vision_start_token" in special:
        about |= {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    return make_config(**about)


def save_seeing_model(kind: str, directory: Path) -> EngineSettings:
    """Write a tiny model with its processor; return the settings of an engine for it."""
    config = save_processor(kind, directory)
    auto: Any = transformers.AutoModelForImageTextToText
    model = build_tiny_model(auto._model_mapping[type(config)], config, 0, torch.device("cpu"))
    model.save_pretrained(directory)
    return EngineSettings(
        model=str(directory), dtype="float32", pool_mb=16, max_step_tokens=20, threads=1,
        cache_dir=str(directory / "cache"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_prompt_is_that_of_the_processors_own_call(kind: str, tmp_path: Path) -> None:
    if kind in MISSING:
        pytest.importorskip(MISSING[kind])
    reader = PictureReader(tmp_path, save_processor(kind, tmp_path))
    token = reader.processor.image_token
    pictures = [draw_picture(1, 130, 70), draw_picture(2, 60, 90)][: 1 if kind == "llava_onevision" else 2]
    text = f"In the beginning{token}God{token}created" if len(pictures) == 2 else f"In the beginning{token}created"
    ids = reader.processor.tokenizer(text)["input_ids"]
    given = list(zip([b"1" * 32, b"2" * 32], pictures, strict=False))
    prompt = reader.read_chat(ids, given)
    right = reader.processor(
        images=[pictures] if kind in ("idefics3", "smolvlm") else pictures, text=[text], return_tensors="pt"
    )
    assert prompt.token_ids == right["input_ids"][0].tolist()
    assert len(prompt.pixels) == len(pictures)
    spans = Pictures(prompt.token_ids, prompt.pictures).spans
    rows = [at for span in spans for at in range(span.first, span.end)]
    assert rows == [at for at, token_id in enumerate(prompt.token_ids) if token_id == reader.row_id]
    alone = prompt.pixels[prompt.pictures[0].name]
    stock = reader.processor(images=[pictures[0]], text=[token], return_tensors="pt")
    assert all(torch.equal(stock[name], x) for name, x in alone.items())
    assert all((picture.grid is not None) == (kind in HAS_AXES) for picture in prompt.pictures)
    assert reader.read_chat(ids, given) == (prompt.token_ids, prompt.pictures, {}), "pixels are not made again"
    for (digest, picture), told in zip(given, prompt.pictures, strict=True):
        again = reader.read_again(digest, picture, told.name)
        assert again.keys() == prompt.pixels[told.name].keys()
        assert all(torch.equal(x, again[key]) for key, x in prompt.pixels[told.name].items())


@pytest.mark.parametrize("kind", PROCESSORS)
def test_files_and_texts_give_the_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    """The whole way: the processor's own call and `generate()`, beside reader, vision and engine."""
    if kind in MISSING:
        pytest.importorskip(MISSING[kind])
    settings = save_seeing_model(kind, tmp_path)
    model = load_model(settings)
    reader, vision = model.picture_reader, model.vision
    assert reader is not None
    assert vision is not None
    token, picture = reader.processor.image_token, draw_picture(1, 130, 70)
    text = f"In the beginning{token}created"
    given = reader.processor(images=[picture], text=[text], return_tensors="pt")
    model.module.set_attn_implementation(model.stock_attention)
    right = model.module.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    engine = Engine(model, settings)
    prompt = reader.read_chat(reader.processor.tokenizer(text)["input_ids"], [(b"", picture)])
    second = draw_picture(2, 130, 70)
    other = reader.read_chat(reader.processor.tokenizer(text)["input_ids"], [(b"1", second)])

    def see(one: PicturePrompt) -> Pictures:
        (found,) = one.pictures

        def read() -> Pixels:
            return one.pixels[found.name] if one is prompt else reader.read_again(b"1", second, found.name)

        return Pictures(one.token_ids, one.pictures, lambda name: vision.see(name, read, found.num_rows))

    seqs = [
        sequence(one.token_ids, 8, name=name, block_keys=(), pictures=see(one))
        for name, one in (("a", prompt), ("b", other))
    ]
    answers = run_sequences(engine, seqs)
    assert answers[0] == right
    assert answers[0] != answers[1], "the picture makes no difference"
    vision.close()


def test_the_pixels_are_those_of_the_stock_processor(tmp_path: Path) -> None:
    """Of one that loads whole: ours leaves nothing out but videos."""
    config = save_processor("llava", tmp_path)
    stock = transformers.AutoProcessor.from_pretrained(tmp_path, backend="pil")
    picture = draw_picture(1, 130, 70)
    prompt = PictureReader(tmp_path, config).read_chat([5, stock.image_token_id, 6], [(b"", picture)])
    right = stock(images=[picture], text=["<image>"], return_tensors="pt", add_special_tokens=False)
    (pixels,) = prompt.pixels.values()
    assert torch.equal(pixels["pixel_values"], right["pixel_values"])
    assert prompt.token_ids == [5, *right["input_ids"][0].tolist(), 6]


def test_names_tell_pictures_sizes_and_settings_apart(tmp_path: Path) -> None:
    names = set()
    for number, sizes in enumerate([{}, {"do_normalize": False}]):
        directory = tmp_path / str(number)
        config = save_processor("llava", directory)
        transformers.CLIPImageProcessorPil(**PROCESSORS["llava"][1], **sizes).save_pretrained(directory)
        reader = PictureReader(directory, config)
        for digest, height in [(b"1", 60), (b"2", 60), (b"1", 61)]:
            prompt = reader.read_chat([config.image_token_id], [(digest, draw_picture(1, 60, height))])
            names |= {picture.name for picture in prompt.pictures}
    assert len(names) == 6


def test_a_picture_of_low_detail_has_its_own_name_where_it_is_seen_otherwise(tmp_path: Path) -> None:
    config = save_processor("llava", tmp_path)
    reader = PictureReader(tmp_path, config)
    for width, num_names in ((513, 2), (512, 1)):
        data, names = save(draw_picture(1, width, 40), "PNG"), set[bytes]()
        for detail in DETAILS:
            picture = decode_picture(data, 10**6, detail)
            names |= {one.name for one in reader.read_chat([config.image_token_id], [(b"1", picture)]).pictures}
        assert len(names) == num_names


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="type gemma3 "):
        PictureReader(tmp_path, transformers.AutoConfig.for_model("gemma3"))
    assert "gemma3" not in FAMILIES
    config = save_processor("qwen2_vl", tmp_path)
    reader = PictureReader(tmp_path, config)
    config.image_token_id = 5
    with pytest.raises(ModelLoadError, match=r"which is not token 5 of config\.json"):
        PictureReader(tmp_path, config)
    with pytest.raises(InvalidRequest, match="the chat has 0 pictures, and its template has 1 places"):
        reader.read_chat([5, reader.row_id], [])
    small = draw_picture(1, 60, 60)
    with pytest.raises(InvalidRequest, match="more than the 1 pictures that its template has places for"):
        reader.read_chat([5, reader.row_id], [(b"", small)] * 2)
    with pytest.raises(PromptTooLong, match="maximum context length is 3 tokens"):
        reader.read_chat([reader.row_id] * 9, ((b"", small) for _ in range(1)), 3)  # no further one is read
    with pytest.raises(InvalidRequest, match=r"picture 1 of 1 cannot be read for this model: .*aspect ratio"):
        reader.read_chat([5, reader.row_id], [(b"", draw_picture(1, 900, 2))])


def test_a_model_reads_pictures_where_it_is_to_and_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot, one line says why, and texts are served."""
    settings = save_seeing_model("llava", tmp_path)
    caplog.set_level("INFO", "penstock.engine")
    assert load_model(settings).picture_reader is not None
    assert load_model(settings, sees=False).picture_reader is None
    assert "texts alone" not in caplog.text
    images = tmp_path / "preprocessor_config.json"
    content = images.read_text()
    damages = {
        ("CLIPImageProcessor", "UnknownProcessor"): "its processor of pictures cannot be loaded: Unrecognized",
        ('"rescale_factor": 0', '"rescale_factor": "x", "y": 0'): "picture 1 of 1 cannot be read for this model: ufunc",
    }
    for (right, wrong), reason in damages.items():
        caplog.clear()
        images.write_text(content.replace(right, wrong))
        model = load_model(settings)
        assert (model.picture_reader, model.vision) == (None, None)
        (line,) = [one.getMessage() for one in caplog.records if "texts alone" in one.getMessage()]
        assert reason in line
        assert len(line) < 500


def test_a_large_picture_and_what_is_kept_of_others_need_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = save_seeing_model("qwen2_vl", tmp_path)
    reader = load_model(settings).picture_reader
    assert reader is not None
    (pixels,) = reader.read_chat([reader.row_id], [(b"", draw_picture(1, 900, 900))]).pixels.values()
    assert reader.measure_most_bytes(4) > KEPT_BYTES + pixels["pixel_values"].nbytes
    monkeypatch.setattr(memory, "count_available_bytes", lambda _root=None: KEPT_BYTES)
    with pytest.raises(ModelUnavailable, match=r"the weights take \d MiB, pictures 3\d\d MiB, the KV pool 16 MiB"):
        load_model(settings)
    assert load_model(settings, sees=False).picture_reader is None


def test_a_decode_worker_has_a_fifth_less_weights_of_smolvlm_500m() -> None:
    text = {
        "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49280,
    }  # fmt: skip
    vision = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=4, tie_word_embeddings=False, pad_token_id=0
    )
    found = [count_bytes(build_skeleton(config, torch.bfloat16, sees=sees)) // 2**20 for sees in (True, False)]
    assert found == [967, 780]
