#!/usr/bin/env bash
# GSM8K with a calculator, Qwen2.5-7B-Instruct on eight GPUs of 80 GB: the model may call the tool in several turns.
# Data first:  python recipes/gsm8k/make_data.py --out outputs/gsm8k/data
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_7b_8gpu.sh" \
    actor_rollout_ref.rollout.multi_turn.tools=[calculator] \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6 \
    actor_rollout_ref.rollout.multi_turn.max_consecutive_invalid_tool_calls=3 \
    trainer.log_val_generations=3 \
    trainer.experiment_name=calculator-7b \
    "$@"
