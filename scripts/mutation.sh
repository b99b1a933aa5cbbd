#!/usr/bin/env bash
# bash scripts/mutation.sh [--seed N] [--count N] [--jobs N] [--only NUMBER ...]: mutation testing, not in .ci/run.
# Changes one place of the arithmetic at a time, in a temporary copy of the checkout, and runs the quick tests of the
# changed file, which have to fail: 300 mutants drawn by a seed, and the faults of scripts/kernel_faults.yaml. Prints a
# line for each, then what survived, with its difference; fails below 90 % killed, or if a fault of a kernel survives.
# Needs .venv with the tests' tools (bash scripts/install.sh --dev); installs mutmut in a temporary directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/mutation.sh
    exit
fi

# Tests start a Ray of their own and log to no account.
unset RAY_ADDRESS RAY_NAMESPACE WANDB_API_KEY
exec .venv/bin/python scripts/mutation.py "$@"
