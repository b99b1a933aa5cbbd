#!/usr/bin/env bash
# bash scripts/test.sh [--sglang] [--all | --drills] [pytest arguments]: installs what is missing, then runs the tests
# that need no GPU and take no longer than they must. --all adds the slow ones: model families, kills, long statistics.
# --drills runs others: engines, ranks and machines that hang, lack memory or differ from one another, and benchmarks.
# --sglang runs those of real engines with SGLang, in .venv-sglang. Paths start at the top of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/test.sh
    exit
fi

venv=.venv engine=() files=() slow=()
if [[ ${1:-} == --sglang ]]; then
    shift
    export HYBRIDRL_TEST_ENGINE=sglang
    venv=.venv-sglang engine=(--sglang) files=(tests/integration/test_{engine,sglang}.py)
    slow=(tests/integration/test_{deterministic,lora,separate,tensor_parallel}.py)
fi
select="not gpu and not slow and not drill"
case ${1:-} in
--all) select="not gpu and not drill" files+=("${slow[@]}") && shift ;;
--drills) select="drill" && shift ;;
esac
[[ $* != *.py* ]] || files=() # others are chosen
bash scripts/install.sh --dev "${engine[@]}"
# Tests start a Ray of their own and log to no account; the processes that they start share what is compiled.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY PYTHONDONTWRITEBYTECODE
exec $venv/bin/python -m pytest -m "$select" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "${files[@]}" "$@"
