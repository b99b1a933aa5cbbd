#!/usr/bin/env bash
# A small language model learns by reinforcement learning to reason before it answers. No GPU is needed.
#
#   bash scripts/quickstart.sh [--agent | --tool] [--sglang] [--seed N] [key=value ...]
#
# With --agent it learns to act over several turns: to find a number by guessing. With --tool it learns to call a
# calculator. With --sglang SGLang samples in place of vLLM. key=value is passed to main_ppo, such as
# trainer.total_training_steps=10. All output is in outputs/quickstart, outputs/agent or outputs/tool; the warm start is
# kept there for the next call with the same seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage_error() {
    echo "quickstart.sh: $1. Usage: bash scripts/quickstart.sh [--agent | --tool] [--sglang] [--seed N] [key=value ...]" >&2
    exit 2
}

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//p}' scripts/quickstart.sh
    exit
fi

out=outputs/quickstart make=make_data.py warmup=warmup train=train show=show.py
demonstrations="most of them lazy and some careless" learning="sample 8 responses per problem, reinforce the right ones"
seed=0 overrides=() install=() python=.venv/bin/python engine=vLLM
while (($#)); do
    case $1 in
        --seed)
            [[ ${2:-} =~ ^[0-9]+$ ]] || usage_error "--seed needs a number"
            seed=$2 && shift 2
            ;;
        --agent)
            out=outputs/agent make=make_games.py warmup=agent_warmup train=agent show=show_games.py
            demonstrations="games of poor players" learning="play 8 games per number, reinforce the short ones"
            shift
            ;;
        --tool)
            out=outputs/tool make=make_products.py warmup=tool_warmup train=tool show=show_products.py
            demonstrations="most of them guesses without the tool"
            learning="sample 8 responses per problem, reinforce the right ones"
            shift
            ;;
        --sglang)
            install=(--sglang) python=.venv-sglang/bin/python engine=SGLang
            overrides+=(actor_rollout_ref.rollout.name=sglang) && shift
            ;;
        *=*)
            file=${1#*=} && file=${file%%:*}
            [[ $file != *.py || -f $file ]] || usage_error "$1: there is no file $file"
            overrides+=("$1") && shift
            ;;
        *) usage_error "unknown argument '$1'" ;;
    esac
done

bold="" plain=""
if [[ -t 1 ]]; then bold=$'\e[1m' plain=$'\e[0m'; fi

stage() {
    printf '\n%s%s%s\n' "$bold" "$*" "$plain"
}

run() { # print a command in a form that can be copied, and run it
    printf '$' && printf ' %q' "$@" && printf '\n'
    "$@"
}

warmup_key() { # a hash of the files that the warm start depends on
    cat recipes/quickstart/{make_data.py,warmup.yaml,"$make",$warmup.yaml} conf/*.yaml conf/*/*.yaml \
        hybridrl/{core/trainer,runs/sft}.py hybridrl/{data,core/training}/*.py |
        sha256sum | sed "s/-/seed $seed/"
}

stage "1/5  Install: torch, $engine, Ray and this package in ${python%/bin/python}"
run bash scripts/install.sh "${install[@]}"
SECONDS=0

# What reinforcement learning would reject is known before the warm start, which takes minutes.
if ((${#overrides[@]})) && ! checked=$($python -m hybridrl.doctor --config-only --config-path recipes/quickstart \
    --config-name $train "${overrides[@]}" 2>&1); then
    printf '%s\n' "$checked" >&2
    usage_error "these values are rejected"
fi

if [[ $(cat $out/warmup/key 2>/dev/null) == "$(warmup_key)" ]]; then
    stage "2/5  Data and 3/5  Warm start: kept from an earlier call"
    echo "To create them again: rm -r $out/warmup"
else
    rm -rf $out/{data,warmup}
    stage "2/5  Data: a tiny model with its tokenizer, demonstrations for the warm start, problems to solve"
    run $python recipes/quickstart/$make --out $out/data --seed "$seed"

    stage "3/5  Warm start: supervised fine-tuning on demonstrations, $demonstrations"
    run $python -m hybridrl.main_sft --config-path recipes/quickstart --config-name $warmup trainer.seed="$seed"
    warmup_key >$out/warmup/key
fi
warm_start_seconds=$SECONDS

stage "4/5  Reinforcement learning: $learning"
run $python -m hybridrl.main_ppo --config-path recipes/quickstart --config-name $train trainer.seed="$seed" "${overrides[@]}"

stage "5/5  Results"
$python recipes/quickstart/$show $out --warm-start-seconds $warm_start_seconds --seconds $SECONDS
