# An image for GPUs:    docker build -t hybridrl .
#   run it with         docker run --gpus all --ipc=host -it hybridrl
# An image for a CPU:   docker build -t hybridrl-cpu --build-arg DEVICE=cpu --build-arg BASE=ubuntu:24.04 .
#   run it with         docker run --ipc=host -it hybridrl-cpu
# --ipc=host: new weights go from trainer to engine through shared memory, of which Docker gives 64 MB.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}
ARG DEVICE=cuda

# Triton compiles its launchers with gcc against Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --shell /bin/bash trainer && install -d -o trainer /opt/hybridrl
USER trainer
WORKDIR /opt/hybridrl

# Dependencies before code: a change of the code alone builds in seconds. A GPU is not visible while an image is built,
# hence the argument.
COPY --chown=trainer LICENSE README.md hybridrl_torchvision.py pyproject.toml setup.py ./
COPY --chown=trainer scripts/install.sh scripts/install.sh
COPY --chown=trainer hybridrl/__init__.py hybridrl/__init__.py
RUN PIP_NO_CACHE_DIR=1 bash scripts/install.sh "$DEVICE"
COPY --chown=trainer conf conf
COPY --chown=trainer docs docs
COPY --chown=trainer recipes recipes
COPY --chown=trainer scripts scripts
COPY --chown=trainer hybridrl hybridrl
# The packages are known only now.
RUN .venv/bin/pip install --no-deps --no-cache-dir -e .

ENV PATH=/opt/hybridrl/.venv/bin:$PATH
CMD ["bash"]
