"""A process that says what the peak memory of loading was, over the size of the parameters."""

import shutil
import sys
from pathlib import Path

import torch
import transformers

from penstock.config.settings import EngineSettings
from penstock.engine.model import DEMO_MODEL, load_model
from penstock.engine.module import count_bytes


def main(directory: Path, dtype: str, packed: bool) -> None:
    """Make the model in the directory, load it, and print that."""
    _save(directory)
    load_model(EngineSettings())  # imports, and what the libraries keep
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    model = load_model(EngineSettings.model_validate({"model": str(directory), "dtype": dtype, "pool_mb": 1}))
    if packed:
        linears = [module for module in model.module.modules() if isinstance(module, torch.nn.Linear)]
        for linear in sorted(linears, key=lambda linear: -linear.weight.nbytes):
            weight = linear.weight
            linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            model.weights.drop_tensor_pages(weight)
            del weight
    sys.stdout.write(f"{(_status('VmHWM') - before) * 1024 / count_bytes(model.module):.3f}\n")


def _save(directory: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, intermediate_size=3072,
        vocab_size=2000, max_position_embeddings=256, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    torch.set_default_dtype(torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)


def _status(field: str) -> int:
    """A line of /proc/self/status, in kB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])
