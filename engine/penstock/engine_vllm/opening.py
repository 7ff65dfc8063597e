"""Loads a model into vLLM, in this process or with ranks in processes of their own."""

import argparse
import copy
import logging
import os
import shlex
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.loading.description import (
    as_load_errors,
    find_context_length,
    find_eos_token_ids,
    load_config,
    load_tokenizer,
    prepare_transformers,
)
from penstock.engine.loading.dtype import choose_dtype
from penstock.engine.loading.proof import draw_proof_tokens
from penstock.engine.memory.memory import MIN_POOL_MB, check_memory
from penstock.engine.model.compare import find_tolerance, measure_error
from penstock.engine.scheduling.scheduler import WAITING_STEPS
from penstock.engine.sequence import Sequence
from penstock.engine.text.response_template import find_response_template
from penstock.engine.weights.files import Progress, find_model, find_weight_files, ignore_progress
from penstock.engine.weights.fingerprint import compute_fingerprint, hash_files
from penstock.engine.weights.load_cache import LoadCache
from penstock.engine.weights.module import build_skeleton, count_bytes, load_generation_config, load_module
from penstock.engine.weights.quantized import take_quantization
from penstock.engine.weights.weights import MappedWeights
from penstock.engine_vllm.adapters import load_adapters, make_arguments, read_adapters
from penstock.engine_vllm.blocks import RankBlocks, combine_ranks
from penstock.errors import DependencyMissing, EngineCheckFailed, ModelLoadError
from penstock.messages import Sampling

if TYPE_CHECKING:
    from penstock.engine_vllm.core import VllmCore

log = logging.getLogger("penstock.engine")

CPU_BLOCK_SIZE = 32
"""vLLM's attention on a CPU takes multiples of this many tokens as a block."""
CPU_LATENT_SIZE = 512 + 64
"""Numbers of a latent and of its part with positions, which vLLM's latent attention on a CPU takes."""
TRIED_VERSIONS = ("0.32.0",)
"""The versions of vLLM that the engine's contract was run on."""
CPU_LATENT_ARGUMENTS: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""Arguments for latent attention on a CPU: vLLM's own operation there turns the positions of its queries wrongly."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler is in this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another interface
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the last token of a sequence has no place in vLLM's own limit
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes all cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OWN_ARGUMENTS = {
    "async_scheduling": "steps follow each other here",
    "block_size": "set PENSTOCK_ENGINE_BLOCK_SIZE",
    "config": "give the arguments themselves",
    "disable_hybrid_kv_cache_manager": "blocks of all layers have one name here",
    "disable_log_stats": "the workers' own metrics are exported",
    "dtype": "set PENSTOCK_ENGINE_DTYPE",
    "default_mm_loras": "set PENSTOCK_ENGINE_ADAPTERS",
    "enable_lora": "set PENSTOCK_ENGINE_ADAPTERS",
    "enable_prefix_caching": "prefixes are found by the names of blocks",
    "kv_cache_memory_bytes": "set PENSTOCK_ENGINE_POOL_MB",
    "kv_offloading_backend": "KV goes through the stores of this project",
    "kv_offloading_size": "KV goes through the stores of this project",
    "kv_transfer_config": "KV goes through the stores of this project",
    "lora_target_modules": "an adapter is computed whole",
    "logits_processors": "tokens are drawn by this project's sampler",
    "max_cpu_loras": "all of PENSTOCK_ENGINE_ADAPTERS are loaded at the start",
    "max_lora_rank": "it follows from PENSTOCK_ENGINE_ADAPTERS",
    "max_loras": "all of PENSTOCK_ENGINE_ADAPTERS are loaded at the start",
    "max_model_len": "a sequence may have the model's whole context",
    "max_num_batched_tokens": "set PENSTOCK_SLO_INTERACTIVE_GAP_S, or PENSTOCK_ENGINE_MAX_STEP_TOKENS",
    "max_num_seqs": "set PENSTOCK_ENGINE_MAX_BATCH",
    "model": "set PENSTOCK_ENGINE_MODEL",
    "model_tag": "set PENSTOCK_ENGINE_MODEL",
    "scheduler_cls": "the order of requests is the workers' own",
    "scheduling_policy": "the order of requests is the workers' own",
    "seed": "each request has its own",
    "speculative_config": "tokens are drawn by this project's sampler, one in a step",
    "tokenizer": "the model's own is used",
    "tokenizer_mode": "the model's own is used",
    "tokenizer_revision": "the model's own is used",
    "trust_remote_code": "code of models is not run",
    "worker_cls": "this project's methods are added to vLLM's worker",
    "override_generation_config": "requests and the model say how tokens are drawn",
    "worker_extension_cls": "this project's methods are added to vLLM's worker",
    "data_parallel_size": "start more workers",
    "prefill_context_parallel_size": "a block of KV is not cut between its tokens",
    "decode_context_parallel_size": "a block of KV is not cut between its tokens",
}
"""Arguments of vLLM that PENSTOCK_ENGINE_VLLM_ARGS may not have, and why or what to do."""
PLACING_ARGUMENTS = frozenset({
    "tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "disable_custom_all_reduce",
    "max_parallel_loading_workers", "gpu_memory_utilization", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
})  # fmt: skip
"""Arguments that say where the model is computed. All others are part of the fingerprint."""


def open_vllm_core(
    settings: EngineSettings, report: Progress = ignore_progress, *, gap_s: float | None = None
) -> "VllmCore":
    """Load the model into vLLM. With `gap_s`, the longest gap of answers, the tokens of a step follow from its rate.

    Raises `ModelLoadError`, and `DependencyMissing` where vLLM is not installed.
    """
    os.environ |= {"OMP_NUM_THREADS": str(settings.num_threads)} | ENVIRONMENT
    torch.set_num_threads(settings.num_threads)  # vLLM does not let anybody change it afterwards
    try:
        import vllm
    except ImportError as error:
        raise DependencyMissing(f"PENSTOCK_ENGINE_KIND=vllm needs vLLM ({error})") from None
    if vllm.__version__.partition("+")[0] not in TRIED_VERSIONS:
        tried = " and ".join(TRIED_VERSIONS)
        log.warning("vLLM %s was not tried here: parts of it are used that may change, use %s", vllm.__version__, tried)
    with as_load_errors(settings.model):
        core = _open_core(settings, report, vllm.__version__, 1 if gap_s is None else WAITING_STEPS)
        if gap_s is not None:
            core.choose_step_tokens(gap_s)
            log.info("%s: a step has up to %d tokens", settings.model, core.max_step_tokens)
        return core


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ModelLoadError(f"PENSTOCK_ENGINE_VLLM_ARGS: {message}")


def parse_vllm_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of `vllm serve` that the text has, by their names in Python.

    Raises `ModelLoadError` for unknown ones, and for those that this project gives itself.
    """
    from vllm import EngineArgs

    parser = EngineArgs.add_cli_args(
        _Parser(
            prog="PENSTOCK_ENGINE_VLLM_ARGS", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
    )
    for action in parser._actions:  # noqa: SLF001 - what is not given is not in the result
        action.default = argparse.SUPPRESS
    given: dict[str, Any] = vars(parser.parse_args(shlex.split(text)))
    for name in sorted(given.keys() & OWN_ARGUMENTS.keys()):
        raise ModelLoadError(f"PENSTOCK_ENGINE_VLLM_ARGS: --{name.replace('_', '-')}: {OWN_ARGUMENTS[name]}")
    return given


def _open_core(settings: EngineSettings, report: Progress, version: str, num_usual_steps: int) -> "VllmCore":
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from penstock.engine_vllm.core import VllmCore, VllmModel
    from penstock.engine_vllm.executor import keep_all_tokens
    from penstock.engine_vllm.sampler import PenstockSampler
    from penstock.engine_vllm.scheduler import PreemptingScheduler

    is_cpu = bool(current_platform.is_cpu())
    given = parse_vllm_arguments(settings.vllm_args)
    is_batch_invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    _check_settings(settings, given, is_cpu=is_cpu, is_batch_invariant=is_batch_invariant)
    prepare_transformers()
    directory = find_model(settings.model, report, settings.find_cache_directory())
    files = find_weight_files(directory)
    if files[0].suffix == ".gguf":
        raise ModelLoadError("vLLM is not given GGUF files here: use the model in safetensors")
    config = load_config(directory)
    tokenizer = load_tokenizer(directory)
    context_length = find_context_length(config, tokenizer)
    _check_rope(config, context_length)
    _check_indexer(config)
    dtype = choose_dtype(settings.dtype, config, torch.device("cpu" if is_cpu else "cuda")).dtype
    has_latents = getattr(config.get_text_config(), "kv_lora_rank", None) is not None
    if has_latents and settings.adapters:
        raise ModelLoadError(
            "PENSTOCK_ENGINE_ADAPTERS: vLLM computes latent attention (MLA) without matrices of adapters: leave it out"
        )
    adapters = read_adapters(settings.find_adapters(), config)
    weights = MappedWeights(files)
    # vLLM goes by the length of the context where it is not told.
    scales = vars(config.get_text_config()).keys() & {"attn_temperature_tuning"}
    args = EngineArgs(
        model=str(directory),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=context_length + 1,
        max_num_seqs=settings.max_batch,
        max_num_batched_tokens=max(num_usual_steps * settings.max_step_tokens, settings.max_batch),
        scheduling_policy="priority",
        block_size=settings.block_size,
        kv_cache_memory_bytes=(settings.pool_mb or MIN_POOL_MB) * 2**20,
        enable_prefix_caching=True,
        async_scheduling=False,
        disable_log_stats=True,
        logits_processors=[PenstockSampler],
        scheduler_cls=PreemptingScheduler,
        worker_extension_cls="penstock.engine_vllm.rank.RankExtension",
        override_generation_config={name: getattr(config.get_text_config(), name) for name in scales},
        seed=0,
        **({"enforce_eager": True} if is_cpu else {})
        | (CPU_LATENT_ARGUMENTS if is_cpu and has_latents else {})
        | make_arguments(adapters, is_cpu=is_cpu)
        | given,
    )
    vllm_config = args.create_engine_config()
    if is_latent := bool(vllm_config.model_config.use_mla):
        _check_latents(vllm_config, is_cpu=is_cpu)
    core = EngineCore(vllm_config, keep_all_tokens(Executor.get_class(vllm_config)), log_stats=False)
    _check_layers(core.scheduler.kv_cache_config.kv_cache_groups)
    call_ranks = core.model_executor.collective_rpc
    call_ranks("penstock_make_receive_buffer")
    num_heads = 1 if is_latent else vllm_config.model_config.get_total_num_kv_heads()
    layout, slices = combine_ranks(call_ranks("penstock_describe_kv"), settings.block_size, num_heads)
    shaping = sorted((name, repr(value)) for name, value in given.items() if name not in PLACING_ARGUMENTS)
    if is_batch_invariant:
        shaping.append(("VLLM_BATCH_INVARIANT", "1"))
    device_name = current_platform.get_device_name()
    form = f"penstock kv layout of vllm {version}\n{device_name} {shaping}\n{layout}"
    load_cache = LoadCache(settings.find_cache_directory())
    model = VllmModel(
        settings.model,
        tokenizer,
        find_response_template(tokenizer, config.model_type, settings.response_template),
        find_eos_token_ids(load_generation_config(directory), config, tokenizer),
        context_length,
        config.get_text_config().vocab_size,
        compute_fingerprint(directory, files, hash_files(files, report, load_cache), config, form),
        " ".join([f"{args.dtype} in vLLM {version} on {device_name}", *(f"{name}={value}" for name, value in shaping)]),
        layout,
        is_batch_invariant=is_batch_invariant,
        adapters={name: adapter.digest for name, adapter in adapters.items()},
    )
    ranks = RankBlocks(core.model_executor, layout, slices)
    opened = VllmCore(model, settings, core, ranks, load_adapters(core, adapters))
    _prove_once(opened, config, weights, dtype, load_cache)
    return opened


def _check_settings(
    settings: EngineSettings, given: Mapping[str, Any], *, is_cpu: bool, is_batch_invariant: bool
) -> None:
    """Raise `ModelLoadError` for settings, and arguments of vLLM, that it does not take here."""
    if settings.weights not in ("auto", "bf16"):
        raise ModelLoadError(f"PENSTOCK_ENGINE_WEIGHTS={settings.weights}: give vLLM's own --quantization in its place")
    if is_cpu and settings.block_size % CPU_BLOCK_SIZE:
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_BLOCK_SIZE={settings.block_size}: vLLM needs a multiple of {CPU_BLOCK_SIZE} on a CPU"
        )
    if is_cpu and is_batch_invariant:
        raise ModelLoadError("VLLM_BATCH_INVARIANT=1: vLLM has no such computation on a CPU: unset it")
    if is_cpu and given.get("enable_expert_parallel"):
        raise ModelLoadError("--enable-expert-parallel: vLLM has no kernel for a share of the experts on a CPU")


def _check_indexer(config: Any) -> None:
    """Raise `ModelLoadError` for a model that chooses the tokens that it attends to, such as DeepSeek V3.2 or GLM 5."""
    text = config.get_text_config()
    if getattr(text, "index_topk", None) is not None:
        raise ModelLoadError(
            f"{text.model_type} has sparse attention, whose indexer keeps numbers of its own for each token: blocks "
            "have no place for them here"
        )


def _check_latents(vllm_config: Any, *, is_cpu: bool) -> None:
    """Raise `ModelLoadError` for latent attention (MLA) that vLLM does not compute here, or without a prefix cache."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not (cache.enable_prefix_caching and vllm_config.scheduler_config.enable_chunked_prefill):
        raise ModelLoadError(
            "it has latent attention (MLA), for which vLLM has no prefix cache and no prefill in parts here: on a CPU "
            "it needs AMX, as Xeons have from the fourth generation on, and its backend AMX_MLA"
        )
    if is_cpu and model.dtype != torch.bfloat16:
        raise ModelLoadError(
            f"vLLM computes latent attention (MLA) on a CPU in bfloat16 alone, not in {model.dtype}: set "
            "PENSTOCK_ENGINE_DTYPE=bfloat16"
        )
    if is_cpu and (getattr(model.hf_text_config, "n_group", None) or 1) > 1:
        raise ModelLoadError(
            "it chooses its experts by groups (n_group in config.json), with which vLLM was seen to give other log "
            "probabilities on a CPU than transformers: use a GPU"
        )
    if is_cpu and (size := model.get_head_size()) != CPU_LATENT_SIZE:
        raise ModelLoadError(
            f"its latents have {size} numbers for each token, and vLLM's attention on a CPU takes {CPU_LATENT_SIZE}"
        )


def _prove_once(
    core: "VllmCore", config: Any, weights: MappedWeights, dtype: torch.dtype, load_cache: LoadCache
) -> None:
    """Compare vLLM with transformers over the prompt of the proof at load, unless it is noted that they agree.

    A warning says why a model cannot be compared, as where memory is short. Raises `EngineCheckFailed`.
    """
    name, about = core.model.name, {"fingerprint": core.model.fingerprint, "arithmetic": core.model.arithmetic}
    about["beside"] = "adapters" if core.model.adapters else ""  # vLLM computes with other layers where it has any
    if load_cache.read_finding("proof", about):
        return
    try:
        plain = copy.deepcopy(config)
        if take_quantization(plain) is not None or "quantization=" in core.model.arithmetic:
            raise ModelLoadError("its weights are quantised, which vLLM rounds in its own way")
        skeleton = build_skeleton(plain, dtype)
        check_memory(count_bytes(skeleton), 0, torch.device("cpu"))
        module = load_module(skeleton, plain, weights, torch.device("cpu"), ignore_progress)
    except ModelLoadError as error:
        log.warning("the tokens of %s in vLLM are not compared with those of transformers: %s", name, error)
        return
    tokens = draw_proof_tokens(config, core.model.vocab_size, core.model.context_length - 2)
    greedy = Sampling(temperature=0.0, logprobs=0)
    seq = Sequence("proof", tokens, sampling=greedy, seed=0, max_new_tokens=2, num_prompt_logprobs=0)
    core.add_sequence(seq)
    answer: list[float] = []
    while len(answer) < 2 and core.begin_step():
        answer += [one.logprobs.logprob for one in core.finish_step() if one.logprobs is not None]
    core.remove_sequence(seq)
    core.drop_cache()
    ids = torch.tensor([seq.token_ids])
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
    right = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    found = torch.tensor([one.logprob for one in seq.prompt_logprobs] + answer)
    off, allowed = measure_error(found, right, logits - logits.mean(-1, keepdim=True)), find_tolerance(dtype).logits
    if not off <= allowed:
        raise EngineCheckFailed(
            f"{name!r} ({type(module).__name__}) has other log probabilities in vLLM than by itself: they are off by "
            f"{off:.1%} of the logits' spread, and {dtype} allows {allowed:.0%}"
        )
    load_cache.write_finding("proof", about, found=True)


def _check_rope(config: Any, context_length: int) -> None:
    """Raise `ModelLoadError` for a model that vLLM would compute as one of another context.

    vLLM takes the factors of `longrope` by the longest sequence that it is told of, and that is one token more than the
    model's context here. It has the factors of `yarn` for the extended context alone, and reads past them.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    original = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if original == context_length:
        raise ModelLoadError(
            f"its context is the {original} tokens at which vLLM takes other factors for its positions: "
            "set max_position_embeddings in its config.json to one token less"
        )
    if rope.get("rope_type") == "yarn" and original and (extended := int(original * rope["factor"])) < context_length:
        raise ModelLoadError(
            f"its context is {context_length} tokens, and vLLM has factors for {extended}, to which yarn extends it: "
            "set max_position_embeddings in its config.json to no more"
        )


def _check_layers(groups: Items[Any]) -> None:
    """Raise `ModelLoadError` unless vLLM keeps the KV of all tokens in all layers, under one name a block."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ModelLoadError(
            f"it has several kinds of layers, whose blocks vLLM keeps apart ({kinds}): set PENSTOCK_ENGINE_KIND=own"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec) or spec.non_causal:
        raise ModelLoadError(f"vLLM keeps its KV in another way than that of plain attention: {type(spec).__name__}")
