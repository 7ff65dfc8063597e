"""The name under which KV blocks are exchanged: a hash over weights, configuration, block layout and, in 16 bits, the
arithmetic.

It protects against mistakes, not against attackers: two workers that were given different models, a file that was
damaged on its way, a directory that changed while it was read. An attacker who can choose the weights can choose the
tokens anyway. So the bulk goes through xxh3, at the speed of memory, and only its digests through SHA-256.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from penstock.engine.weights.files import Progress
from penstock.engine.weights.load_cache import LoadCache, describe_file

_READ_BYTES = 2**20  # few enough to stay in the processor's cache until they are hashed

_IRRELEVANT_FIELDS = {"_name_or_path", "_attn_implementation", "transformers_version", "dtype", "torch_dtype"}
"""The dtype is part of the layout, and the attention the engine's own."""


def hash_files(files: list[Path], report: Progress, load_cache: LoadCache) -> list[str]:
    """Return the xxh3-128 of each file, in hex. Each is read once, from start to end, or not if its hash is noted."""
    abouts = [describe_file(file) for file in files]
    noted = [about and load_cache.read_finding("hash", about) for about in abouts]
    unknown = [file for file, digest in zip(files, noted, strict=True) if not isinstance(digest, str)]
    found = iter(_hash_contents(unknown, report))
    digests = [digest if isinstance(digest, str) else next(found) for digest in noted]
    for file, about, digest in zip(files, abouts, digests, strict=True):
        if file in unknown and about is not None and describe_file(file) == about:
            load_cache.write_finding("hash", about, digest)
    report("reading weights", 1.0)
    return digests


def _hash_contents(files: list[Path], report: Progress) -> list[str]:
    total = sum(file.stat().st_size for file in files)
    done, found, piece = 0, [], memoryview(bytearray(_READ_BYTES))
    for file in files:
        digest = xxhash.xxh3_128()
        with file.open("rb", buffering=0) as content:
            while num_bytes := content.readinto(piece):
                digest.update(piece[:num_bytes])
                done += num_bytes
                report("reading weights", min(1.0, done / total))
        found.append(digest.hexdigest())
    return found


def compute_fingerprint(directory: Path, files: list[Path], digests: list[str], config: Any, layout: str) -> str:
    """Return the SHA-256, in hex, of the weights' names, sizes and digests, the configuration and the block layout.

    The configuration twice: as its file has it, and with all that transformers fills in where the file is silent, such
    as a rope base, which another version of it may do in another way.
    """
    combined = hashlib.sha256(f"{layout}\n".encode())
    combined.update((directory / "config.json").read_bytes())
    settled = json.dumps(
        _without_irrelevant_fields(config.to_dict()), sort_keys=True, default=lambda value: type(value).__name__
    )
    combined.update(f"\n{settled}".encode())
    for file, digest in zip(files, digests, strict=True):
        combined.update(f"\n{file.name} {file.stat().st_size} {digest}".encode())
    return combined.hexdigest()


def add_arithmetic(name: str, arithmetic: str) -> str:
    """Return the fingerprint of a 16-bit model with this arithmetic: other arithmetic rounds differently."""
    return hashlib.sha256(f"{name} {arithmetic}".encode()).hexdigest()


def _without_irrelevant_fields(values: Any) -> Any:
    """Return a configuration without fields that do not affect KV, such as the path it was read from."""
    if isinstance(values, dict):
        return {
            str(key): _without_irrelevant_fields(value)
            for key, value in values.items()
            if str(key) not in _IRRELEVANT_FIELDS
        }
    return [_without_irrelevant_fields(value) for value in values] if isinstance(values, list | tuple) else values
