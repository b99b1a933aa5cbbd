"""Values from several sections of a configuration: a run's algorithm, models and plan of the policy; and fingerprints
of the inputs of responses and scores."""

import hashlib
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import code_fingerprint, fingerprint, flatten
from hybridrl.config import ConfigError, SFTConfig
from hybridrl.config.catalog import ACTOR_KEYS, BYPASS_LOSSES, ESTIMATOR_KEYS, PARAMETERS, SFT_POLICY_LOSS, disturbances
from hybridrl.config.compose import OWN
from hybridrl.config.custom_code import script_path
from hybridrl.config.schema import ActorRolloutRefConfig, CriticConfig, ModelConfig, OptimizerConfig, PPOConfig
from hybridrl.config.schema_parts import AlgorithmConfig, RewardConfig, RolloutConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss
from hybridrl.core.algorithms.batch_metrics import LIMITS, Agreement
from hybridrl.core.algorithms.objective import KLWeight
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.rounding import coarser
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import MicroBatchBudget
from hybridrl.core.training.worker import LearnerConfig, WorkerConfig
from hybridrl.core.training.worker_group import SKIPPED_UPDATES, PolicyPlan, UpdatePlan

SCRIPT = re.compile(r"(.+\.py)(?::\w+)?")  # with the name of a function or without


def ppo_worker_config(config: PPOConfig, algorithm: Algorithm, directory: Path, steps: int) -> WorkerConfig:
    section, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
    actor, ref = section.actor, section.ref
    # With LoRA the policy without its adapter is the reference, unless another model is named.
    separate = not section.model.lora_rank or ref.model.path != section.model.path
    policy_steps = steps - max(config.trainer.critic_warmup - 1, 0)
    per_step, critic_per_step = UpdatePlan.of(section).updates(prompts), UpdatePlan.of(critic).updates(prompts)
    policy = LearnerConfig(section.model, actor.fsdp_config, located(actor.optim), policy_steps * per_step, per_step)
    values = LearnerConfig(critic.model, critic.fsdp, located(critic.optim), steps * critic_per_step, critic_per_step)
    return WorkerConfig(
        device=config.trainer.device,
        policy=policy,
        collective_timeout=section.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory.absolute() / SKIPPED_UPDATES),
        reference=ref if algorithm.uses_reference and separate else None,
        critic=values if algorithm.uses_critic else None,
        replays_routes=actor.router_replay.mode == "R3",
    )


def sft_worker_config(config: SFTConfig, directory: Path, steps: int) -> WorkerConfig:
    return WorkerConfig(
        device=config.trainer.device,
        policy=LearnerConfig(config.model, config.engine.fsdp_config, located(config.optim), steps),
        collective_timeout=config.engine.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory / SKIPPED_UPDATES),
    )


def located(config: OptimizerConfig) -> OptimizerConfig:
    """Return the configuration with the absolute path of a custom schedule, so that workers find it anywhere."""
    name = config.lr_scheduler_type
    return replace(config, lr_scheduler_type=str(Path(name).expanduser().absolute())) if ":" in name else config


def build_algorithm(config: PPOConfig) -> Algorithm:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    control, correction = algorithm.kl_ctrl, algorithm.rollout_correction
    entry, function = find_estimator(algorithm.adv_estimator)
    # Only here are the facts of a custom function known; the checks of the configuration do not import it.
    name = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if "values" in entry.reads and not config.critic.enable:
        raise ConfigError(f"{name} reads the critic's values", fix="set critic.enable=true")
    if "reward_parts" in entry.reads and not algorithm.gdpo_reward_keys:
        cause = f"{name} reads reward_parts: components of the reward, which are not named"
        raise ConfigError(cause, fix="name them in algorithm.gdpo_reward_keys, such as [format,accuracy]")
    if "sum_pi_squared" in entry.reads and correction.bypass_mode:
        cause = f"{name} reads sum_pi_squared, which is not computed in bypass mode"
        raise ConfigError(cause, fix="set algorithm.rollout_correction.bypass_mode=false")
    return Algorithm(
        estimator=bind(function, {key: vars(algorithm)[key] for key in ESTIMATOR_KEYS} | {OWN: config.own}),
        entry=entry,
        uses_critic=bool(config.critic.enable),
        kl_in_reward=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        kl_weight=KLWeight(control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon),
        kl_in_loss=actor.kl_loss_type if actor.use_kl_loss else None,
        correction=RolloutCorrection.of(algorithm),
        bypass=correction.bypass_mode,
    )


def build_policy_plan(config: PPOConfig) -> PolicyPlan:
    section = config.actor_rollout_ref
    model, fsdp = section.model, section.actor.fsdp_config
    budgets = [
        MicroBatchBudget.of(
            model,
            fsdp,
            forward.log_prob_max_token_len_per_gpu,
            forward.log_prob_micro_batch_size_per_gpu,
            forward.log_prob_use_dynamic_bsz,
        )
        for forward in (section.rollout, section.ref)
    ]
    return PolicyPlan(
        policy_loss_config(section, config.algorithm, config.own),
        UpdatePlan.of(section),
        *budgets,
        with_sum_pi_squared="sum_pi_squared" in find_estimator(config.algorithm.adv_estimator)[0].reads,
        # Activations are dropped at random only if the user configured it.
        stochastic=bool(model.lora_rank and model.lora.dropout) or bool(disturbances(model.override_config)),
        first_update=config.trainer.critic_warmup,
        correction=RolloutCorrection.of(config.algorithm),
        agreement=build_agreement(section),
    )


def sft_policy_plan(config: SFTConfig) -> PolicyPlan:
    """One update per step with the negative log-likelihood as its loss."""
    fsdp, tokens = config.engine.fsdp_config, config.data.max_token_len_per_gpu
    size = MicroBatchBudget.of(config.model, fsdp, tokens, None, by_tokens=True)
    loss = LossConfig(SFT_POLICY_LOSS, "token-mean", scale=1.0, temperature=1.0, grad_clip=config.engine.grad_clip)
    updates = UpdatePlan(config.data.train_batch_size, epochs=1, shuffle=False, seed=0, budget=size)
    return PolicyPlan(loss, updates, log_prob_budget=size, reference_budget=size)


def build_agreement(section: ActorRolloutRefConfig) -> Agreement | None:
    """The allowed difference between engine and trainer; None if sampling settings truncate or modify the distribution:
    the engine returns log-probs of the modified one, which the trainer does not compute."""
    rollout, limit = section.rollout, section.rollout.max_log_prob_gap
    types = (section.actor.fsdp_config.dtype or "float32", rollout.dtype or "float32")
    plain = (rollout.top_p, rollout.top_k, rollout.repetition_penalty, rollout.min_tokens) == (1.0, -1, 1.0, 0)
    if not (plain and rollout.do_sample and rollout.temperature > 0):
        return None
    rounded = coarser(*types)
    return Agreement(LIMITS[rounded] if limit is None else limit, rounded)


def policy_loss_config(
    section: ActorRolloutRefConfig, algorithm: AlgorithmConfig, user_keys: dict[str, Any]
) -> LossConfig:
    actor, rollout, name = section.actor, section.rollout, section.actor.policy_loss.loss_mode
    correction = algorithm.rollout_correction
    bypass = RolloutCorrection.of(algorithm) if correction.bypass_mode else None
    if correction.bypass_mode and BYPASS_LOSSES[correction.loss_type]:
        name = BYPASS_LOSSES[correction.loss_type]
    elif bypass is not None:
        bypass = replace(bypass, level=None)  # the ratio to the rollout's log-probs is in the policy loss already
    find_policy_loss(name)  # rejected here rather than in the workers
    return LossConfig(
        # Workers find a custom file from any directory.
        policy_loss=str(Path(name).expanduser().absolute()) if ":" in name else name,
        parameters={key: vars(actor)[key] for key in ACTOR_KEYS}
        | {key: vars(actor.policy_loss)[key] for key in PARAMETERS}
        | {OWN: user_keys},
        aggregation=actor.loss_agg_mode,
        scale=actor.loss_scale_factor or 1.0,
        temperature=rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0,
        grad_clip=actor.grad_clip,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef,
        kl_form=actor.kl_loss_type if actor.use_kl_loss else None,
        correction=bypass,
    )


def engine_fingerprint(model: ModelConfig, rollout: RolloutConfig) -> str:
    """Fingerprint of everything but request and weights that determines a response."""
    routes = ["routes"] if rollout.enable_rollout_routing_replay else []  # stored responses must then have them
    return fingerprint(rollout.dtype, asdict(rollout.engine_kwargs), model.override_config, model.lora_alpha, *routes)


def score_fingerprint(reward: RewardConfig, data: str) -> str:
    """Fingerprint of everything but the response that determines a score. Files of custom reward functions count, but
    not the files that these import or read."""
    return fingerprint(asdict(reward), reward_code(reward), data, code_fingerprint())


def reward_files(reward: RewardConfig) -> list[Path]:
    """The files of custom reward functions."""
    scripts = (SCRIPT.fullmatch(str(value)) for value in flatten(asdict(reward)).values())
    return [file for script in scripts if script and (file := script_path(script[1])).is_file()]


def reward_code(reward: RewardConfig) -> list[str]:
    """The hashes of the files of custom reward functions."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in reward_files(reward)]


def contents_to_save(
    section: ActorRolloutRefConfig, critic: CriticConfig, algorithm: Algorithm
) -> dict[str, list[str]]:
    """The parts saved of each model: a reference has its own state only if it is refreshed."""
    contents = {"actor": section.actor.checkpoint.save_contents}
    if algorithm.uses_critic:
        contents["critic"] = critic.checkpoint.save_contents
    if algorithm.uses_reference and section.ref.refresh_freq > 0:
        contents["reference"] = ["model"]
    return contents
