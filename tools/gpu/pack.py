"""Packs what a GPU machine without a network needs to run vLLM behind this pipeline.

python -m tools.gpu.pack [--vllm 0.32.0]

Wheels for Python 3.12 are downloaded by the lists beside this file, each with its checksum: vLLM, packages that it
needs, and packages of the pipeline. torch, transformers and what else is in common images for GPUs is not packed. Of
vLLM's compiled code what an sm_90 GPU (H100, H200) runs is kept. The archives lie in two parts below `.gpu/VERSION`,
which git ignores, so that either part can be carried together with the checkout in one call of 63 MiB. Needs `strip`.

Version 0.26.0 is the one to fall back on where 0.32.0 does not start with the machine's torch. `tools/gpu/run.sh`
joins the parts on the machine, and runs the check there. It was never run on a GPU.
"""

import argparse
import fnmatch
import hashlib
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.gpu.fatbin import prune_library

HERE, ROOT = Path(__file__).parent, Path(__file__).parent.parent.parent
ARCHITECTURE, PYTHON = 90, "3.12"
GLIBC_VERSIONS = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 36, 38, 39)
"""pip matches the tag of a wheel exactly."""
NUM_PARTS, MAX_PART_BYTES, MAX_CALL_BYTES = 2, 60 * 2**20, 63 * 2**20
LEFT_OUT = (
    "vllm/vllm-rs", "vllm/_rust_tool_parser*", "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/_qutlass_C*",
    "vllm/_deepselect_C*", "vllm/_flashkda_C*", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
)  # fmt: skip
"""Compiled code for other servers, GPUs and number formats."""
GROUPS = {
    "attention": ("vllm/vllm_flash_attn/*.so",),
    "mixtures": ("vllm/_moe_C*.so", "vllm/_flashmla*.so"),
    "kernels": ("vllm/*.so",),
    "python": ("*",),
}
"""The archives of vLLM: a file is in the first whose pattern it has."""
STRIPPED = (
    "vllm/*.so",
    "zstandard/*.so",
    "httptools/*.so",
    "hiredis/*.so",
    "cbor2/*.so",
    "openai_harmony/*.so",
    "obstore/*.so",
)
"""Not the libraries that other wheels carry, which `strip` can break."""
EXECUTABLES = ("*.so", "*.so.*", "*/bin/*", "*-server", "*-cli", "*sentinel")
NATIVE = ("engine/penstock/engine/kernels/libpenstock.so", "kvstore/penstock/kvstore/native/libcopying.so")
"""Compiled by `make install`, and ignored by git."""


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path has one of these patterns; `*` stands for slashes too."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def download_wheels(lists: Iterable[str], folder: Path) -> None:
    """Download the wheels of these lists for the other machine's Python."""
    platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC_VERSIONS]
    given = [
        word for name in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64") for word in ("--platform", name)
    ]
    for name in lists:
        given += ["-r", str(HERE / f"{name}.txt")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
         "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder), *given],
        check=True,
    )  # fmt: skip


def unpack_wheels(folder: Path, target: Path) -> None:
    """Unpack wheels as `pip install --no-deps --target` does, less scripts and what is left out. The wheels go."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                _, _, inner = name.partition(".data/")
                place = inner.partition("/")[2] if inner.startswith(("purelib/", "platlib/")) else name
                if name.endswith("/") or (inner and place == name) or matches_any(place, LEFT_OUT):
                    continue
                path = target / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(prune_file(place, file.read(name)))
                if matches_any(place, EXECUTABLES):
                    path.chmod(0o755)
                if matches_any(place, STRIPPED):
                    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
        wheel.unlink()


def prune_file(place: str, content: bytes) -> bytes:
    """Return what is kept of a file."""
    return prune_library(content, ARCHITECTURE) if matches_any(place, ("vllm/*.so",)) else content


def write_archive(file: Path, folder: Path, places: list[str]) -> int:
    """Write an archive that is the same for the same files. Returns its bytes."""
    # Kernels of one library are much alike, tens of MiB apart.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 96 * 2**20}]
    with lzma.open(file, "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for place in sorted(places):
            about = archive.gettarinfo(str(folder / place), place)
            about.mtime = about.uid = about.gid = 0
            about.uname = about.gname = ""
            with (folder / place).open("rb") as content:
                archive.addfile(about, content)
    return file.stat().st_size


def list_places(folder: Path) -> list[str]:
    """Return the files below a folder, as paths in it."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def sort_into_groups(places: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each archive of vLLM."""
    found: dict[str, list[str]] = {name: [] for name in GROUPS}
    for place in places:
        found[next(name for name, patterns in GROUPS.items() if matches_any(place, patterns))].append(place)
    return found


def split_archives(sizes: dict[str, int], room: int) -> list[list[str]]:
    """Return the archives of each part: the largest first, each into the part that is the smallest by then."""
    parts: list[list[str]] = [[] for _ in range(NUM_PARTS)]
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        min(parts, key=lambda part: sum(sizes[one] for one in part)).append(name)
    largest = max(sum(sizes[name] for name in part) for part in parts)
    if largest > room:
        raise SystemExit(f"a part has {largest / 2**20:.1f} MiB, and {room / 2**20:.1f} fit beside the checkout")
    return parts


def count_checkout_bytes() -> int:
    """Return the bytes of what git does not ignore, which is carried with each part."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Pack what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.pack", description=(__doc__ or "").splitlines()[0])
    versions = sorted(path.stem.removeprefix("vllm_") for path in HERE.glob("vllm_*.txt"))
    parser.add_argument("--vllm", choices=versions, default=versions[-1])
    version = parser.parse_args().vllm
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as scratch, ProcessPoolExecutor(2) as processes:
        vllm, packages, packed = (Path(scratch, name) for name in ("vllm", "packages", "packed"))
        packed.mkdir()
        for lists, tree in (((f"vllm_{version}",), vllm), (("packages", "pipeline"), packages)):
            download_wheels(lists, Path(scratch, "wheels"))
            unpack_wheels(Path(scratch, "wheels"), tree)
        archives = {f"site-{name}": (vllm, places) for name, places in sort_into_groups(list_places(vllm)).items()}
        archives["site-packages"] = (packages, list_places(packages))
        if native := [place for place in NATIVE if (ROOT / place).is_file()]:
            archives["checkout-native"] = (ROOT, native)
        running = {
            name: processes.submit(write_archive, packed / f"{name}.tar.xz", *of)
            for name, of in archives.items()
            if of[1]
        }
        sizes, checkout_bytes = {name: one.result() for name, one in running.items()}, count_checkout_bytes()
        room = min(MAX_PART_BYTES, MAX_CALL_BYTES - checkout_bytes)
        for number, names in enumerate(split_archives(sizes, room), 1):
            folder, sums = ROOT / ".gpu" / version / str(number), []
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()
            for name in sorted(names):
                content = (packed / f"{name}.tar.xz").read_bytes()
                (folder / f"{name}.tar.xz").write_bytes(content)
                sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}.tar.xz\n")
            (folder / "SHA256SUMS").write_text("".join(sums))
            part_bytes = sum(sizes[name] for name in names)
            told = ", ".join(f"{name} {sizes[name] / 2**20:.1f}" for name in names)
            sys.stdout.write(
                f"{folder.relative_to(ROOT)}: {part_bytes / 2**20:.1f} MiB ({told}), "
                f"{(part_bytes + checkout_bytes) / 2**20:.1f} with the checkout\n"
            )


if __name__ == "__main__":
    main()
