#!/usr/bin/env bash
# run.sh VERSION PART…: on a GPU machine without a network, in the root of the checkout: join parts that
# `python -m tools.gpu.pack` has made, and run `make gpu-check` with vLLM once all are there. A call for each part:
#
#     bash tools/gpu/run.sh 0.32.0 1        with .gpu/0.32.0/1 carried beside the checkout
#     bash tools/gpu/run.sh 0.32.0 2        with .gpu/0.32.0/2, at once: the machine keeps the first one meanwhile
#
# PYTHON (python3.12 with torch and transformers), SITE (where the packages go), GPU_ARGUMENTS (further ones of the
# check, as `--minutes 8`), and OUT (where gpu.json goes, which is written again as each part of the check ends).
set -euo pipefail
version=${1:?usage: tools/gpu/run.sh VERSION PART…}
shift
python=${PYTHON:-python3} site=${SITE:-/tmp/penstock-site} begun=$SECONDS

join_part() { # join_part FOLDER: unpack its archives, all at once, if they are not there yet and have their checksums
    local mark archive child children=()
    mark=$site/.part-$(sha256sum <"$1/SHA256SUMS" | cut -c 1-16)
    if [ -e "$mark" ]; then return 0; fi
    (cd "$1" && sha256sum --quiet -c SHA256SUMS)
    for archive in "$1"/*.tar.xz; do
        case $archive in */checkout-*) folder=. ;; *) folder=$site ;; esac
        "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' \
            "$archive" "$folder" &
        children+=($!)
    done
    for child in "${children[@]}"; do wait "$child"; done
    touch "$mark"
}

mkdir -p "$site/vllm/vllm_flash_attn" # which several archives have
for part in "$@"; do join_part ".gpu/$version/$part"; done
echo "joined $* in $((SECONDS - begun)) s: $(du -sh "$site" | cut -f 1) in $site"
if [ ! -d "$site/redis" ] || [ ! -e "$site/vllm/_C_stable_libtorch.abi3.so" ]; then
    echo "run.sh: the other parts are missing: call it with them"
    exit 0
fi
# Modules are compiled once, by all cores: else each worker does it.
"$python" -m compileall -q -j 0 "$site" core kvstore engine worker cli >/dev/null 2>&1 || true
PYTHONPATH=$site make gpu-check GPU_PYTHON="$python" \
    GPU_ARGUMENTS="--engine vllm --json ${OUT:-.}/gpu.json ${GPU_ARGUMENTS:-}"
