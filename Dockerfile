# The image for training on NVIDIA GPUs; docs/cluster.md uses it on Kubernetes. Build it in this folder:
#
#   docker build --tag grpo-vlm .
#   mkdir -p runs && sudo chown 1001 runs    # 1001 is the user in the image
#   docker run --gpus all --shm-size 16g --volume "$PWD/runs:/app/runs" grpo-vlm ./run.sh vqa --smoke
#
# Not tested: the project was built where no Docker and no image registry could be reached. Only hadolint has read it.
#
# pip's torch 2.11.0 is built for CUDA 13.0 and brings CUDA's libraries with it. Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# torch.compile and Triton compile C code that includes Python's header files.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc=4:13.2.0-* \
        libc6-dev=2.39-* \
        python3.12-dev=3.12.3-* \
        python3.12-venv=3.12.3-* \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 grpo && install --directory --owner=grpo /app /app/runs
USER 1001
WORKDIR /app

# The packages have a layer of their own, which is built again only if the requirements or run.sh change.
COPY --chown=1001 requirements.txt requirements-gpu.txt run.sh ./
RUN GPU=1 PYTHON=python3.12 PIP_NO_CACHE_DIR=1 ./run.sh setup
COPY --chown=1001 . .

# vLLM's FlashInfer sampler is compiled at start-up with nvcc, which this image does not have.
ENV VLLM_USE_FLASHINFER_SAMPLER=0
CMD ["./run.sh"]
