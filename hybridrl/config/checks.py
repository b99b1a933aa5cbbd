"""What a configuration leaves open is settled; what cannot work is refused, all of it at once, with the way out.

Knows the keys and this machine; loads no model, data or reward.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridrl.config.error import ConfigError
from hybridrl.config.machine import Machine, this_machine
from hybridrl.config.schema import (
    DataConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    TrainerConfig,
)

Note = Callable[[str], None]

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
DTYPES |= {"fp32": "float32", "float32": "float32"}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_FORMS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


class Refusals:
    """Collects what is wrong, so that a user meets all of it in one message."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, wrong: bool, line: str) -> None:
        if wrong:
            self.lines.append(line)

    def choice(self, key: str, value: object, choices: Iterable[str], *, or_path: bool = False) -> None:
        own = or_path and ":" in str(value)
        ways = " | ".join(choices) + (" | path/to/file.py:function" if or_path else "")
        self.add(value not in choices and not own, f"{key}={value}: choose {ways}")

    def at_least(self, key: str, value: float, least: float) -> None:
        self.add(value < least, f"{key}={value}: must be at least {least}")

    def close(self) -> None:
        if self.lines:
            raise ConfigError("\n".join(self.lines))


def settle_ppo(config: PPOConfig, note: Note, machine: Machine | None = None) -> None:
    """Fill in what follows from the machine and from other keys; raise ConfigError for what cannot work."""
    wrong = Refusals()
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    _settle_trainer(config.trainer, config.ray_kwargs.ray_init, wrong, machine or this_machine())
    _settle_data(config.data, wrong)
    wrong.choice("data.truncation", config.data.truncation, ("error", "left", "right", "middle"))
    wrong.at_least("data.max_prompt_length", config.data.max_prompt_length, 1)
    wrong.at_least("data.max_response_length", config.data.max_response_length, 1)
    rollout.max_model_len = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    _check_model("actor_rollout_ref.model.path", model, rollout.max_model_len, wrong)
    _settle_fsdp(
        "actor_rollout_ref.actor.fsdp_config",
        config.actor_rollout_ref.actor.fsdp_config,
        config.trainer,
        wrong,
    )
    _check_optimizer("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim, wrong)
    _settle_actor(config, note, wrong)
    _settle_rollout(config, note, wrong)
    _check_reward_and_algorithm(config, note, wrong)
    wrong.close()


def settle_sft(config: SFTConfig, note: Note, machine: Machine | None = None) -> None:
    """Fill in what follows from the machine and from other keys; raise ConfigError for what cannot work."""
    wrong = Refusals()
    _settle_trainer(config.trainer, config.ray_kwargs.ray_init, wrong, machine or this_machine())
    _settle_data(config.data, wrong)
    wrong.choice("data.truncation", config.data.truncation, ("error", "left", "right"))
    _check_model("model.path", config.model, config.data.max_length, wrong)
    _settle_fsdp("engine.fsdp_config", config.engine.fsdp_config, config.trainer, wrong)
    _check_optimizer("optim", config.optim, wrong)
    wrong.close()


def _settle_trainer(
    trainer: TrainerConfig | SFTTrainerConfig, ray_init: dict[str, Any], wrong: Refusals, machine: Machine
) -> None:
    wrong.choice("trainer.device", trainer.device, ("auto", "cuda", "cpu"))
    if trainer.device == "auto":
        trainer.device = "cuda" if machine.gpus else "cpu"
    joins = bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))
    here = machine.gpus if trainer.device == "cuda" else min(machine.cores, 2)
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = max(here, 1)
    wrong.at_least("trainer.n_gpus_per_node", trainer.n_gpus_per_node, 1)
    wrong.at_least("trainer.nnodes", trainer.nnodes, 1)
    wrong.at_least("trainer.total_epochs", trainer.total_epochs, 1)
    if trainer.device == "cuda" and not joins:
        wrong.add(
            trainer.n_gpus_per_node > machine.gpus,
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: this machine has {machine.gpus} GPUs; "
            + (f"set trainer.n_gpus_per_node={machine.gpus}" if machine.gpus else "set trainer.device=cpu"),
        )
    # A slot on CPU costs processes and memory, not cores: 1.5 GiB was measured for the smallest models.
    most = max(machine.memory_bytes // (3 << 29), 1)
    wrong.add(
        trainer.device == "cpu" and trainer.n_gpus_per_node > most,
        f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: free memory is enough for {most} slots on CPU",
    )
    if trainer.total_training_steps is not None:
        wrong.at_least("trainer.total_training_steps", trainer.total_training_steps, 1)


def _settle_data(data: DataConfig | SFTDataConfig, wrong: Refusals) -> None:
    data.train_files, data.val_files = _as_list(data.train_files), _as_list(data.val_files)
    wrong.at_least("data.train_batch_size", data.train_batch_size, 1)
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for file in files:
            wrong.add(not Path(file).is_file(), f"{key}={file}: there is no such file{_beside(Path(file))}")


def _as_list(files: Any) -> list[str]:
    listed = [] if files is None else [files] if isinstance(files, str) else list(files)
    return [os.path.expanduser(str(file)) for file in listed]


def _beside(path: Path) -> str:
    """What lies where the path was looked for, as a hint."""
    if not path.parent.is_dir():
        return f" (nor the directory {path.parent})"
    found = sorted(item.name for item in path.parent.iterdir() if item.suffix in (".parquet", ".json", ".jsonl"))
    return f" (there are {', '.join(found[:5])})" if found else ""


def _check_model(key: str, model: ModelConfig, longest: int, wrong: Refusals) -> None:
    path = Path(os.path.expanduser(model.path))
    if path.is_dir():
        model.path = str(path)
        if not (path / "config.json").is_file():
            return wrong.add(True, f"{key}={path}: the directory has no config.json, so it is no Hugging Face model")
        limit = json.loads((path / "config.json").read_text()).get("max_position_embeddings")
        limit = model.override_config.get("max_position_embeddings", limit)
        wrong.add(
            limit is not None and longest > limit,
            f"{key}={path}: the model takes {limit} positions, prompt plus answer may be {longest}; "
            "lower data.max_prompt_length or data.max_response_length",
        )
    else:
        local = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1
        wrong.add(local, f"{key}={model.path}: there is no such directory{_missing_parent(path)}")
    return None


def _missing_parent(path: Path) -> str:
    while not path.exists():
        path, missing = path.parent, path
    return f" ({missing} does not exist)"


def _settle_fsdp(key: str, fsdp: FSDPConfig, trainer: TrainerConfig | SFTTrainerConfig, wrong: Refusals) -> None:
    ranks = (trainer.n_gpus_per_node or 1) * trainer.nnodes
    size = ranks if fsdp.fsdp_size in (-1, 0) else min(fsdp.fsdp_size, ranks)
    wrong.add(ranks % max(size, 1) != 0, f"{key}.fsdp_size={fsdp.fsdp_size}: must divide the {ranks} devices")
    fsdp.fsdp_size = size
    fsdp.dtype = fsdp.dtype or _unset_dtype(trainer)
    for name, value in (("dtype", fsdp.dtype), ("model_dtype", fsdp.model_dtype)):
        wrong.choice(f"{key}.{name}", value, DTYPES)
    fsdp.dtype, fsdp.model_dtype = DTYPES.get(fsdp.dtype, ""), DTYPES.get(fsdp.model_dtype, "")


def _unset_dtype(trainer: TrainerConfig | SFTTrainerConfig) -> str:
    return "bfloat16" if trainer.device == "cuda" else "float32"


def _check_optimizer(key: str, optim: OptimizerConfig, wrong: Refusals) -> None:
    wrong.choice(f"{key}.optimizer", optim.optimizer, ("AdamW", "Muon"))
    wrong.choice(f"{key}.lr_scheduler_type", optim.lr_scheduler_type, ("constant", "linear", "cosine"))
    wrong.add(optim.lr < 0, f"{key}.lr={optim.lr}: must not be negative")
    wrong.add(len(optim.betas) != 2, f"{key}.betas={optim.betas}: AdamW takes two numbers")


def _settle_actor(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    wrong.choice(f"{key}.strategy", actor.strategy, ("fsdp", "fsdp2"))
    wrong.choice(f"{key}.policy_loss.loss_mode", actor.policy_loss.loss_mode, ("vanilla",), or_path=True)
    wrong.choice(f"{key}.loss_agg_mode", actor.loss_agg_mode, AGGREGATIONS)
    wrong.choice(f"{key}.kl_loss_type", actor.kl_loss_type.removesuffix("+"), KL_FORMS)
    wrong.at_least(f"{key}.ppo_mini_batch_size", actor.ppo_mini_batch_size, 1)
    wrong.at_least(f"{key}.ppo_epochs", actor.ppo_epochs, 1)
    wrong.at_least(f"{key}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, 1)
    if actor.ppo_mini_batch_size > config.data.train_batch_size:
        note(
            f"{key}.ppo_mini_batch_size={actor.ppo_mini_batch_size} is more than data.train_batch_size="
            f"{config.data.train_batch_size}: one update a step"
        )
        actor.ppo_mini_batch_size = config.data.train_batch_size
    actor.clip_ratio_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    actor.clip_ratio_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    actor.loss_scale_factor = actor.loss_scale_factor or float(config.data.max_response_length)


def _settle_rollout(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    rollout, trainer, key = config.actor_rollout_ref.rollout, config.trainer, "actor_rollout_ref.rollout"
    wrong.choice(f"{key}.name", rollout.name, ("vllm",))
    if rollout.mode != "async":
        note(f"{key}.mode={rollout.mode} has no effect: requests always enter and leave the engine one by one")
        rollout.mode = "async"
    for name in ("n", "max_num_seqs", "max_num_batched_tokens", "tensor_model_parallel_size"):
        wrong.at_least(f"{key}.{name}", vars(rollout)[name], 1)
    wrong.at_least(f"{key}.temperature", rollout.temperature, 0)
    rollout.dtype = DTYPES.get(rollout.dtype or _unset_dtype(trainer), "")
    wrong.choice(f"{key}.dtype", rollout.dtype, set(DTYPES.values()))
    size, devices = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node or 1
    wrong.add(
        devices % size != 0,
        f"{key}.tensor_model_parallel_size={size}: must divide trainer.n_gpus_per_node={devices}",
    )
    wrong.add(
        trainer.device == "cpu" and size > 1 and devices > size,
        f"{key}.tensor_model_parallel_size={size} with trainer.n_gpus_per_node={devices}: on CPU a single engine can "
        f"span slots; set trainer.n_gpus_per_node={size}",
    )
    need = rollout.prompt_length + rollout.response_length
    wrong.add(
        (rollout.max_model_len or need) < need,
        f"{key}.max_model_len={rollout.max_model_len}: prompt plus answer may be {need} tokens "
        "(data.max_prompt_length + data.max_response_length)",
    )
    wrong.add(
        not rollout.do_sample and rollout.n > 1,
        f"{key}.do_sample=false: all n={rollout.n} answers would be equal",
    )


def _check_reward_and_algorithm(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    reward, algorithm, actor = config.reward, config.algorithm, config.actor_rollout_ref.actor
    wrong.choice("reward.on_error", reward.on_error, ("exclude", "zero", "stop"))
    wrong.choice("reward.reward_manager.name", reward.reward_manager.name, ("naive",))
    wrong.add(reward.timeout <= 0, f"reward.timeout={reward.timeout}: must be more than 0 seconds")
    wrong.choice("algorithm.adv_estimator", algorithm.adv_estimator, ("grpo",), or_path=True)
    wrong.choice("algorithm.kl_penalty", algorithm.kl_penalty, KL_FORMS)
    wrong.choice("algorithm.kl_ctrl.type", algorithm.kl_ctrl.type, ("fixed", "adaptive"))
    if algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.rollout.n == 1:
        note(
            "actor_rollout_ref.rollout.n=1: in a GRPO group of one every advantage is 0, so nothing can be learnt; "
            "set actor_rollout_ref.rollout.n=8"
        )
    if algorithm.kl_ctrl.kl_coef != 0.001 and not algorithm.use_kl_in_reward:
        note("algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward=true")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        note("KL against the reference policy counts twice: in the reward and in the loss")
    if config.trainer.test_freq > 0 and not config.data.val_files:
        note("trainer.test_freq has no effect without data.val_files")
