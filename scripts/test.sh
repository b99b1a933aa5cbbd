#!/usr/bin/env bash
# bash scripts/test.sh [--all] [pytest arguments]: installs what is missing, then runs the tests that need no GPU and
# take no longer than they must. --all adds the slow ones: model families, kills, long statistics.
# Paths among the arguments start at the top of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

select="not gpu and not slow"
if [[ ${1:-} == --all ]]; then
    select="not gpu"
    shift
fi
bash scripts/install.sh --dev
# Tests start a Ray of their own and log to no account.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY
exec .venv/bin/python -m pytest -m "$select" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
