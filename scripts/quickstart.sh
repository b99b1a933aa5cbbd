#!/usr/bin/env bash
# A small language model learns by reinforcement learning to reason before it answers. No GPU is needed.
#
#   bash scripts/quickstart.sh [--agent | --tool | --images | --model MODEL] [--sglang] [--seed N] [key=value ...]
#
# It installs into .venv and calls `hybridrl quickstart`. With --agent the model learns to act over several turns: to
# find a number by guessing; with --tool to call a calculator; with --images to name the colour of pictures; with
# --model a pretrained one (a directory, or a name on the hub) learns to answer. With --sglang SGLang samples in place
# of vLLM. key=value is passed to `hybridrl train`, such as trainer.total_training_steps=10. All output is in outputs/;
# the warm start is kept there for the next call with the same seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/quickstart.sh
    exit
fi

arguments=() install=() venv=.venv
while (($#)); do
    case $1 in
        --sglang)
            install=(--sglang) venv=.venv-sglang
            arguments+=(actor_rollout_ref.rollout.name=sglang)
            ;;
        --agent | --tool | --images | *=*) arguments+=("$1") ;;
        --seed | --model) arguments+=("$1" "${2:-}") && shift ;;
        *)
            echo "quickstart.sh: unknown argument '$1'; see bash scripts/quickstart.sh --help" >&2
            exit 2
            ;;
    esac
    shift
done

echo "Install: torch, vLLM or SGLang, Ray and this package in $venv"
bash scripts/install.sh "${install[@]}"
exec "$venv/bin/hybridrl" quickstart "${arguments[@]}"
