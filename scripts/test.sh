#!/usr/bin/env bash
# bash scripts/test.sh [pytest arguments]: installs what is missing, then runs every test that needs no GPU.
# Paths among the arguments start at the top of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh --dev
# Tests start a Ray of their own and report to nobody's account.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY
exec .venv/bin/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder "$@"
