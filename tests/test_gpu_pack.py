"""What is packed for a GPU machine: the code that its GPU runs, in parts that are joined there."""

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.fatbin import prune_library
from tools.gpu.pack import ROOT, sort_into_groups, split_archives, write_archive

PTX, MACHINE_CODE = 1, 2


def make_entry(kind: int, architecture: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIIIQ", kind, 0x101, 40, len(code), 0, 0, 0, architecture, 0) + code


def make_container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def make_library(content: bytes) -> bytes:
    """Return an ELF file with three sections: none, the GPU code, and the names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    start, table = 64, 64 + len(content) + len(names)
    header = bytearray(start)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    sections = [(0, 0, 0), (1, start, len(content)), (12, start + len(content), len(names))]
    described = (struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0) for name, at, size in sections)
    return bytes(header) + content + names + b"".join(described)


def test_a_library_keeps_what_the_architecture_runs() -> None:
    """Of each container: its own code, else an older one's of its generation, else PTX; and all stays in its place."""
    kept = [
        make_entry(MACHINE_CODE, 90, b"for ninety......"),
        make_entry(MACHINE_CODE, 80, b"for eighty......"),
        make_entry(PTX, 75, b"text for seventy"),
    ]
    others = make_entry(MACHINE_CODE, 100, b"for a hundred..."), make_entry(PTX, 80, b"older text......")
    before = [
        make_container(others[0], kept[0], kept[1], others[1]),
        make_container(others[0], kept[1]),
        make_container(others[0], kept[2]),
    ]
    found = prune_library(make_library(b"".join(before)), 90)
    after = [make_container(kept[0]), make_container(), make_container(kept[2])]
    right = b"".join(new.ljust(len(old), b"\0") for old, new in zip(before, after, strict=True))
    assert found == make_library(right)
    of_eighty = prune_library(make_library(before[1]), 86)
    assert of_eighty == make_library(make_container(kept[1]).ljust(len(before[1]), b"\0"))


def test_code_in_another_form_is_refused() -> None:
    library = make_library(make_container(make_entry(PTX, 80, b"whole...........")[:-8]))
    with pytest.raises(ValueError, match="form that is not known"):
        prune_library(library, 90)


def test_archives_are_split_evenly_or_refused() -> None:
    sizes = {"python": 5, "kernels": 13, "mixtures": 12, "attention": 8, "packages": 20}
    first, second = split_archives(sizes, 30)
    assert sorted([*first, *second]) == sorted(sizes)
    assert max(sum(sizes[name] for name in part) for part in (first, second)) <= 30
    with pytest.raises(SystemExit, match="fit beside the checkout"):
        split_archives(sizes, 28)
    groups = sort_into_groups(["vllm/_moe_C.abi3.so", "vllm/vllm_flash_attn/_fa3.so", "vllm/_C.so", "vllm/a.py"])
    assert groups == {
        "attention": ["vllm/vllm_flash_attn/_fa3.so"], "mixtures": ["vllm/_moe_C.abi3.so"], "kernels": ["vllm/_C.so"],
        "python": ["vllm/a.py"],
    }  # fmt: skip


def test_a_part_is_joined_once_and_only_whole(tmp_path: Path) -> None:
    part, made = tmp_path / ".gpu" / "1.0" / "1", tmp_path / "made"
    part.mkdir(parents=True)
    (made / "redis").mkdir(parents=True)
    (made / "redis" / "module.py").write_text("whole")
    write_archive(part / "site-packages.tar.xz", made, ["redis/module.py"])

    def join() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "tools" / "gpu" / "run.sh"), "1.0", "1"], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "SITE": str(tmp_path / "site"), "PYTHON": sys.executable}, check=False,
        )  # fmt: skip

    (part / "SHA256SUMS").write_text(f"{'0' * 64}  site-packages.tar.xz\n")
    assert join().returncode != 0
    assert not (tmp_path / "site" / "redis").exists()
    digest = hashlib.sha256((part / "site-packages.tar.xz").read_bytes()).hexdigest()
    (part / "SHA256SUMS").write_text(f"{digest}  site-packages.tar.xz\n")
    joined = join()
    assert joined.returncode == 0, joined.stderr
    assert "the other parts are missing" in joined.stdout
    module = tmp_path / "site" / "redis" / "module.py"
    assert module.read_text() == "whole"
    module.write_text("changed since")
    assert join().returncode == 0
    assert module.read_text() == "changed since"
