"""From configuration sections to plain values: a run's algorithm, models, updates, sampling parameters, and the
fingerprints of what determines responses and scores."""

import hashlib
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import code_fingerprint, fingerprint, flatten
from hybridrl.config import ConfigError, SFTConfig
from hybridrl.config.catalog import ACTOR_KEYS, BYPASS_LOSSES, ESTIMATOR_KEYS, PARAMETERS, SFT_POLICY_LOSS, disturbances
from hybridrl.config.compose import OWN
from hybridrl.config.custom_code import script_path
from hybridrl.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
)
from hybridrl.config.schema_parts import RewardConfig, RolloutConfig, RolloutCorrectionConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import bind, find_estimator, find_policy_loss
from hybridrl.core.algorithms.batch_metrics import LIMITS, Agreement
from hybridrl.core.algorithms.objective import KLWeight
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.rollout import Sampling
from hybridrl.core.rounding import coarser
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import MicroBatchBudget
from hybridrl.core.training.worker import LearnerConfig, WorkerConfig
from hybridrl.core.training.worker_group import SKIPPED_UPDATES, CriticPlan, PolicyPlan, UpdatePlan

SCRIPT = re.compile(r"(.+\.py)(?::\w+)?")  # with the name of a function or without

# Estimates of the divergence that may reject tokens or rows: verl's names (August 2026).
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


def ppo_worker_config(config: PPOConfig, algorithm: Algorithm, directory: Path, steps: int) -> WorkerConfig:
    section, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
    actor, ref = section.actor, section.ref
    # With LoRA the policy without its adapter is the reference, unless another model is named.
    separate = not section.model.lora_rank or ref.model.path != section.model.path
    policy_steps = steps - max(config.trainer.critic_warmup - 1, 0)
    per_step, critic_per_step = policy_updates(section).updates(prompts), critic_updates(critic).updates(prompts)
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
    """Return the configuration with the absolute path of a custom schedule, which workers find from any directory."""
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
        correction=build_correction(correction),
        bypass=correction.bypass_mode,
    )


def build_correction(config: RolloutCorrectionConfig) -> RolloutCorrection | None:
    """The correction for the difference between rollout engine and trainer, or None; ConfigError for invalid bounds."""
    if config.rollout_is is None and not config.rollout_rs:
        return None
    key = "algorithm.rollout_correction"
    try:
        lower, upper = parse_threshold(config.rollout_is_threshold)
    except ValueError as error:
        raise ConfigError(f"{key}.rollout_is_threshold={config.rollout_is_threshold}: {error}") from error
    try:
        rejections = parse_rejections(config.rollout_rs, config.rollout_rs_threshold)
    except ValueError as error:
        keys = f"{key}.rollout_rs={config.rollout_rs} with rollout_rs_threshold={config.rollout_rs_threshold}"
        raise ConfigError(f"{keys}: {error}") from error
    return RolloutCorrection(config.rollout_is, lower, upper, config.rollout_is_batch_normalize, rejections)


def parse_rejections(
    options: str | list[str] | None, thresholds: str | float | list[str] | list[float] | None
) -> tuple[Rejection, ...]:
    """Rejections from names and bounds, each a list or text with commas; one bound may apply to all. Raises ValueError,
    with a message for the user."""
    names, bounds = list(dict.fromkeys(_parts(options))), _parts(thresholds)
    if not names:
        return ()
    for name in names:
        if name not in REJECTIONS:
            raise ValueError(f"rollout_rs names {name!r}, which is not one of {', '.join(REJECTIONS)}")
    if len(bounds) not in (1, len(names)):
        example = ",".join("0.5_2.0" if name.endswith("k1") else "0.01" for name in names)
        raise ValueError(
            f"rollout_rs_threshold has {len(bounds)} bounds for rollout_rs={','.join(names)}: "
            f"give one for all or one for each, such as '{example}'"
        )
    if len(bounds) == 1:
        bounds *= len(names)
    rejections = []
    for name, bound in zip(names, bounds, strict=True):
        if name.endswith("k1"):
            try:
                lower, upper = parse_threshold(bound)
            except ValueError as error:
                raise ValueError(f"rollout_rs_threshold of {name}: {error}") from None
            rejections.append(Rejection(name, 1 / upper if lower is None else lower, upper))
        elif 0 < _number(bound) < math.inf:
            rejections.append(Rejection(name, None, _number(bound)))
        else:
            raise ValueError(f"rollout_rs_threshold of {name} is {bound!r}: give one positive number, such as 0.01")
    return tuple(rejections)


def parse_threshold(text: str | float) -> tuple[float | None, float]:
    """Bounds on a ratio of probabilities, "upper" or "lower_upper", as (lower or None, upper). Raises ValueError, with
    a message for the user, unless 0 < lower <= 1 <= upper: equal probabilities are never out of bounds."""
    *lower, upper = (_number(part) for part in str(text).split("_"))
    if len(lower) > 1 or not all(0 < bound <= 1 for bound in lower) or not 1 <= upper < math.inf:
        raise ValueError(
            f"{text!r} does not bound a ratio of probabilities: give an upper bound of at least 1, such as 2.0, or a "
            f"lower and an upper one around 1, such as '0.5_5.0' (0.5_5 without quotes is read as the number 0.55)"
        )
    return (lower[0] if lower else None), upper


def _parts(value: str | float | list[str] | list[float] | None) -> list[str]:
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [part for item in items for text in str(item).split(",") if (part := text.strip())]


def _number(text: str) -> float:
    """NaN if the text is not a number; Python parses 0.5_2 as 0.52."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def build_policy_plan(config: PPOConfig) -> PolicyPlan:
    section = config.actor_rollout_ref
    model, fsdp = section.model, section.actor.fsdp_config
    budgets = [
        budget(
            model,
            fsdp,
            forward.log_prob_max_token_len_per_gpu,
            forward.log_prob_micro_batch_size_per_gpu,
            forward.log_prob_use_dynamic_bsz,
        )
        for forward in (section.rollout, section.ref)
    ]
    return PolicyPlan(
        policy_loss_config(section, config.algorithm.rollout_correction, config.own),
        policy_updates(section),
        *budgets,
        with_sum_pi_squared="sum_pi_squared" in find_estimator(config.algorithm.adv_estimator)[0].reads,
        # Activations are dropped at random only if the user configured it.
        disturbed=bool(model.lora_rank and model.lora.dropout) or bool(disturbances(model.override_config)),
        first_update=config.trainer.critic_warmup,
        correction=build_correction(config.algorithm.rollout_correction),
        agreement=build_agreement(section),
    )


def sft_policy_plan(config: SFTConfig) -> PolicyPlan:
    """One update per step with the negative log-likelihood as its loss."""
    size = budget(config.model, config.engine.fsdp_config, config.data.max_token_len_per_gpu, None, by_tokens=True)
    loss = LossConfig(SFT_POLICY_LOSS, "token-mean", scale=1.0, temperature=1.0, grad_clip=config.engine.grad_clip)
    updates = UpdatePlan(config.data.train_batch_size, epochs=1, shuffle=False, seed=0, budget=size)
    return PolicyPlan(loss, updates, log_prob_budget=size, reference_budget=size)


def build_agreement(section: ActorRolloutRefConfig) -> Agreement | None:
    """How far engine and trainer may differ; None if they compute different things: the engine returns the log-probs of
    the distribution that it samples from, which these settings truncate or modify."""
    rollout, limit = section.rollout, section.rollout.max_log_prob_gap
    types = (section.actor.fsdp_config.dtype or "float32", rollout.dtype or "float32")
    plain = (rollout.top_p, rollout.top_k, rollout.repetition_penalty, rollout.min_tokens) == (1.0, -1, 1.0, 0)
    if not (plain and rollout.do_sample and rollout.temperature > 0):
        return None
    rounded = coarser(*types)
    return Agreement(LIMITS[rounded] if limit is None else limit, rounded)


def policy_loss_config(
    section: ActorRolloutRefConfig, correction: RolloutCorrectionConfig, user_keys: dict[str, Any]
) -> LossConfig:
    actor, rollout, name = section.actor, section.rollout, section.actor.policy_loss.loss_mode
    bypass = build_correction(correction) if correction.bypass_mode else None
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


def policy_updates(section: ActorRolloutRefConfig) -> UpdatePlan:
    return _updates(section.actor, section.model, section.actor.fsdp_config)


def critic_updates(critic: CriticConfig) -> UpdatePlan:
    return _updates(critic, critic.model, critic.fsdp)


def _updates(section: ActorConfig | CriticConfig, model: ModelConfig, fsdp: FSDPConfig) -> UpdatePlan:
    rows, by_tokens = section.ppo_micro_batch_size_per_gpu, section.use_dynamic_bsz
    return UpdatePlan(
        prompts_per_update=section.ppo_mini_batch_size,
        epochs=section.ppo_epochs,
        shuffle=section.shuffle,
        seed=section.data_loader_seed,
        budget=budget(model, fsdp, section.ppo_max_token_len_per_gpu, rows, by_tokens),
    )


def build_critic_plan(critic: CriticConfig) -> CriticPlan:
    rows, by_tokens = critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz
    return CriticPlan(
        section=critic,
        updates=critic_updates(critic),
        value_budget=budget(critic.model, critic.fsdp, critic.forward_max_token_len_per_gpu, rows, by_tokens),
    )


def budget(model: ModelConfig, fsdp: FSDPConfig, tokens: int, rows: int | None, by_tokens: bool) -> MicroBatchBudget:
    """The token budget of a micro-batch, of all devices that compute it together, or a row budget."""
    slices, tensor, rows = fsdp.ulysses_sequence_parallel_size, fsdp.tensor_parallel_size, None if by_tokens else rows
    padded = not model.use_remove_padding
    return MicroBatchBudget(tokens * slices, rows, padded, devices=slices * tensor, tensor=tensor)


def engine_fingerprint(model: ModelConfig, rollout: RolloutConfig) -> str:
    """The fingerprint of what determines a response besides its request and the weights."""
    routes = ["routes"] if rollout.enable_rollout_routing_replay else []  # without them a response is no longer enough
    return fingerprint(rollout.dtype, asdict(rollout.engine_kwargs), model.override_config, model.lora_alpha, *routes)


def score_fingerprint(reward: RewardConfig, data: str) -> str:
    """The fingerprint of what determines a score besides the response. Of custom reward functions the files count, not
    what these import or read."""
    return fingerprint(asdict(reward), reward_code(reward), data, code_fingerprint())


def reward_files(reward: RewardConfig) -> list[Path]:
    """The files that custom reward functions are in."""
    scripts = (SCRIPT.fullmatch(str(value)) for value in flatten(asdict(reward)).values())
    return [file for script in scripts if script and (file := script_path(script[1])).is_file()]


def reward_code(reward: RewardConfig) -> list[str]:
    """The hashes of the files that custom reward functions are in."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in reward_files(reward)]


def contents_to_save(
    section: ActorRolloutRefConfig, critic: CriticConfig, algorithm: Algorithm
) -> dict[str, list[str]]:
    """The parts saved of each model: a reference has a state of its own only if it is refreshed."""
    contents = {"actor": section.actor.checkpoint.save_contents}
    if algorithm.uses_critic:
        contents["critic"] = critic.checkpoint.save_contents
    if algorithm.uses_reference and section.ref.refresh_freq > 0:
        contents["reference"] = ["model"]
    return contents


def training_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_tokens,
        ignore_eos=rollout.ignore_eos,
        stop=tuple(rollout.stop),
    )


def validation_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    validation = rollout.val_kwargs
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=validation.temperature,
        top_p=validation.top_p,
        top_k=validation.top_k,
        stop=tuple(rollout.stop),
    )
