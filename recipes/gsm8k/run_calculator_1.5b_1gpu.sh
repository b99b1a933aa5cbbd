#!/usr/bin/env bash
# GSM8K with a calculator, Qwen2.5-1.5B-Instruct on one GPU of 48 GB: the model may call the tool in several turns.
# Data first:  python recipes/gsm8k/make_data.py --out outputs/gsm8k/data
set -euo pipefail

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_1.5b_1gpu.sh" \
    actor_rollout_ref.rollout.multi_turn.tools=[calculator] \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6 \
    actor_rollout_ref.rollout.multi_turn.max_consecutive_invalid_tool_calls=3 \
    trainer.log_val_generations=3 \
    trainer.experiment_name=calculator-1.5b \
    "$@"
