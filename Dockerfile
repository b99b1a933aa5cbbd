# CUDA image:  docker build -t hybridrl .
# Run it with  docker run --gpus all --ipc=host -it hybridrl
# --ipc=host: new weights go from trainer to engine as handles into shared memory, and Docker gives /dev/shm 64 MB.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Triton compiles its launchers with gcc against Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/hybridrl
COPY LICENSE README.md pyproject.toml setup.py ./
COPY conf conf
COPY hybridrl hybridrl
COPY recipes recipes
COPY scripts scripts
# A GPU is not visible while an image is built, hence the argument.
RUN PIP_NO_CACHE_DIR=1 bash scripts/install.sh cuda

ENV PATH=/opt/hybridrl/.venv/bin:$PATH
CMD ["bash"]
