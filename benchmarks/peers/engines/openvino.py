"""OpenVINO GenAI: its pipeline with continuous batching, on a model converted without changing the weights' bf16."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workload import MAX_BATCH, Request


def prepare(model: Path, form: str = "") -> Path:
    """The converted model, beside the original; made once. `form`: `int8`, or `int4` in groups of 128."""
    target = model.with_name(f"{model.name}-openvino{form}")
    if not target.exists():
        scratch = model.with_name(f"{target.name}.unfinished")
        shutil.rmtree(scratch, ignore_errors=True)
        optimum = importlib.import_module("optimum.intel")
        # load_in_8bit would be its default for large models.
        how: dict[str, Any] = {"load_in_8bit": form == "int8"}
        if form == "int4":
            how = {"quantization_config": optimum.OVWeightQuantizationConfig(bits=4, group_size=128, sym=True)}
        exported = optimum.OVModelForCausalLM.from_pretrained(model, export=True, compile=False, **how)
        exported.save_pretrained(scratch)
        _convert_tokenizer(model, scratch)
        scratch.rename(target)
    return target


def _convert_tokenizer(model: Path, target: Path) -> None:
    openvino, tokenizers = map(importlib.import_module, ("openvino", "openvino_tokenizers"))
    original = importlib.import_module("transformers").AutoTokenizer.from_pretrained(model)
    names = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
    for name, converted in zip(names, tokenizers.convert_tokenizer(original, with_detokenizer=True), strict=True):
        openvino.save_model(converted, target / name)


def load(*, model: Path, threads: int, pool_mb: int) -> "OpenVINO":
    """bf16 for weights, computation and KV; the KV would be 8 bits by default."""
    genai = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = pool_mb // 1024, MAX_BATCH
    scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2048, False
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16",
                  "PERFORMANCE_HINT": "LATENCY"}  # fmt: skip
    return OpenVINO(genai, genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties))


class OpenVINO:
    """Driven step by step."""

    def __init__(self, genai: Any, pipeline: Any) -> None:
        self._genai, self._pipeline = genai, pipeline
        self._tensor = importlib.import_module("openvino").Tensor

    def run(self, requests: list[Request], on_step: Callable[[list[int]], None], temperature: float) -> list[list[int]]:
        """Submit all, and read what each step has made."""
        tokens: list[list[int]] = [[] for _ in requests]
        open_handles = {
            index: self._submit_request(index, *request, temperature) for index, request in enumerate(requests)
        }
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            told = []
            for index, handle in list(open_handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[index] += output.generated_ids
                        told += [index] * len(output.generated_ids)
                if len(tokens[index]) >= requests[index][1]:
                    del open_handles[index]
            on_step(told)
        return tokens

    def _submit_request(self, index: int, prompt: list[int], num_new: int, temperature: float) -> Any:
        config = self._genai.GenerationConfig(do_sample=temperature > 0, ignore_eos=True, max_new_tokens=num_new)
        if temperature > 0:
            config.temperature, config.rng_seed = temperature, index
        return self._pipeline.add_request(index, self._tensor(np.array([prompt], dtype=np.int64)), config)
