#!/usr/bin/env bash
# bash scripts/test_cuda_install.sh [pytest arguments]: what can be proven of CUDA without a GPU. Installs the CUDA builds
# of torch and vLLM in .venv-cuda (9 GB on disk) with a stub of the driver's library, with which their compiled libraries
# load, and runs the tests of tests/gpu/test_install.py and what depends on the build. Of the oldest vLLM that pyproject.toml
# allows only the sources are fetched, for the signatures. KEEP=1 keeps the environment, which is removed otherwise. It
# does not use or change .venv, and .ci/run does not call it. PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/test_cuda_install.sh
    exit
fi

torch=2.13.0
vllm=0.32.0
oldest_vllm=0.26.0
home=.venv-cuda
python=$home/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

install_cuda() {
    "${PYTHON:-python3.11}" -m venv "$home"
    $python -m pip install --no-compile "torch===$torch" # a build for CPU, such as 2.13.0+cpu, satisfies == too
    $python -m pip install --no-compile "torch===$torch" "vllm==$vllm" -e ".[gpu,dev]"
    $python -c 'import sys, torch; sys.exit(not torch.version.cuda and "torch is not built for CUDA")'
}

# Every function that the compiled libraries take from the driver's: each fails, as without a device.
make_driver() {
    mkdir -p "$home/driver"
    for name in cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString \
        cuGetProcAddress_v2 cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap \
        cuMemRelease cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled; do
        echo "int $name(void) { return 100; }" # CUDA_ERROR_NO_DEVICE
    done >"$home/driver/libcuda.c"
    gcc -shared -fPIC -o "$home/driver/libcuda.so.1" "$home/driver/libcuda.c"
}

fetch_oldest() {
    $python -m pip download --no-deps --dest "$home/oldest" "vllm==$oldest_vllm"
    $python - "$home/oldest" <<'PYTHON'
import sys
from pathlib import Path
from zipfile import ZipFile

for wheel in Path(sys.argv[1]).glob("*.whl"):
    with ZipFile(wheel) as archive:
        archive.extractall(sys.argv[1], [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
PYTHON
}

[[ ${KEEP:-} ]] || trap 'rm -rf "$home"' EXIT
if [[ ! -e $home/installed ]]; then
    rm -rf "$home"
    install_cuda
    make_driver
    fetch_oldest
    touch "$home/installed"
fi
export LD_LIBRARY_PATH="$PWD/$home/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export VLLM_SOURCES="$PWD/$home/oldest/vllm"
$python -m pytest tests/gpu/test_install.py tests/core/rollout/test_vllm_surface.py tests/core/rollout/test_faked_gpu.py \
    tests/core/training/test_logit_kernels.py "$@"
