#!/usr/bin/env bash
# GSM8K with a calculator, Qwen2.5-1.5B-Instruct on one GPU of 48 GB: the model may call the tool in several turns.
# Data first:  python recipes/gsm8k/make_data.py --out outputs/gsm8k/data
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH=$PWD/.venv/bin:$PATH

exec python -m hybridrl.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=outputs/gsm8k/data/train.parquet \
    data.val_files=outputs/gsm8k/data/test.parquet \
    data.train_batch_size=128 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.multi_turn.tools=[calculator] \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6 \
    actor_rollout_ref.rollout.multi_turn.max_consecutive_invalid_tool_calls=3 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=3 \
    trainer.test_freq=10 \
    trainer.save_freq=50 \
    trainer.log_val_generations=3 \
    trainer.project_name=gsm8k \
    trainer.experiment_name=calculator-1.5b \
    "$@"
