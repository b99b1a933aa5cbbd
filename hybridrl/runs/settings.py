"""Values from several sections of a configuration: a run's algorithm, models and plan of the policy; and fingerprints
of the inputs of responses and scores."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hybridrl import plugins
from hybridrl.checkpoint.resume import code_fingerprint, fingerprint, flatten
from hybridrl.config import ConfigError, SFTConfig
from hybridrl.config.catalog import (
    ACTOR_KEYS,
    BYPASS_LOSSES,
    ESTIMATOR_KEYS,
    EXACT_TEACHER,
    PARAMETERS,
    SAMPLED_KL,
    SAMPLED_TEACHER,
    SFT_POLICY_LOSS,
    TEACHER_REWARD,
    TOP_TEACHER,
    Divergence,
    Estimator,
    LossTerm,
    disturbances,
)
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
    ReferenceConfig,
    SFTDataConfig,
    WrapPolicyConfig,
)
from hybridrl.config.schema_parts import (
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from hybridrl.config.teachers import BASE, EXACT_FORMS, POLICY, TOP_FORM, DistillationConfig, TeacherConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.algorithm import ForwardSpec, Signal, bind, find_estimator, find_policy_loss, loss_terms
from hybridrl.core.algorithms.batch_metrics import LIMITS, Agreement
from hybridrl.core.algorithms.estimators import no_advantages
from hybridrl.core.algorithms.objective import KLWeight
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.carried import CONTEXT, TEACHER
from hybridrl.core.rounding import coarser
from hybridrl.core.training.building import WorkerConfig
from hybridrl.core.training.learner import Head, LearnerConfig, RankModel
from hybridrl.core.training.loading import load_settings
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import MicroBatchBudget, UpdatePlan
from hybridrl.core.training.vision import READS, VisionConfig, family_of
from hybridrl.core.training.worker_group import OLD_FIELDS, SKIPPED_UPDATES, PolicyPlan

REWARD_MODEL = "reward_model"
TEACHERS = "teacher."  # begins their names among a run's models
TAUGHT_BY = "teacher_log_probs"
DUAL_CLIP = 3.0  # verl's, for a sampled divergence as a reward
SCRIPT = re.compile(r"(.+\.py)(?::\w+)?")  # with the name of a function or without


def ppo_worker_config(
    config: PPOConfig, algorithm: Algorithm, directory: Path, steps: int, vision: VisionConfig | None = None
) -> WorkerConfig:
    """The training ranks of a run; with the `vision` of the policy if rows have pictures."""
    section = config.actor_rollout_ref
    models = {name: rank_model(name, config, steps) for name in algorithm.models}
    if vision is not None:
        models = {name: _seeing(model, vision, section.actor) for name, model in models.items()}
    return WorkerConfig(
        device=config.trainer.device,
        models=models,
        collective_timeout=section.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory.absolute() / SKIPPED_UPDATES),
        replays_routes=section.actor.router_replay.mode == "R3",
    )


def _seeing(model: RankModel, vision: VisionConfig, actor: ActorConfig) -> RankModel:
    """The model with the pictures of its rows, if it reads any; the processor of the policy is that of all models."""
    if model.head != "language" or family_of(load_settings(model.model)) is None:
        return model
    frozen = model.trained is not None and actor.freeze_vision_tower
    weight = vision.weight / 3 if frozen else vision.weight  # without the two thirds of the backward pass
    return replace(model, vision=replace(vision, frozen=frozen, weight=weight), reads=(*model.reads, *READS))


def rank_model(name: str, config: PPOConfig, steps: int = 1) -> RankModel:
    """A model of the training ranks for a run of `steps`: the one of a section, or a plug-in's."""
    section, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
    model, actor, ref, rollout = section.model, section.actor, section.ref, section.rollout
    match name:
        case "actor":
            per_step = UpdatePlan.of(section).updates(prompts)
            policy_steps = steps - max(config.trainer.critic_warmup - 1, 0)
            trained = LearnerConfig(located(actor.optim), policy_steps * per_step, per_step)
            budget = log_prob_budget(section, rollout)
            return RankModel(model, actor.fsdp_config, budget, trained=trained, reads=("routes",))
        case "reference":
            budget, fsdp = log_prob_budget(section, ref), actor.fsdp_config
            plain = replace(model, path=ref.model.path, lora_rank=0, lora_adapter_path=None)
            # With LoRA the policy without its adapter is the reference, unless another model is named.
            if model.lora_rank and ref.model.path == model.path:
                return RankModel(plain, fsdp, budget, weights="base")
            own, offloads = ref.fsdp_config.wrap_policy, ref.fsdp_config.param_offload
            fsdp = replace(_fitting(fsdp, plain, model), wrap_policy=own, offload_policy=offloads)
            return RankModel(plain, fsdp, budget, weights="copy" if ref.refresh_freq > 0 else "own")
        case "critic":
            per_step = UpdatePlan.of(critic).updates(prompts)
            trained = LearnerConfig(located(critic.optim), steps * per_step, per_step)
            sizes = critic.forward_max_token_len_per_gpu, critic.forward_micro_batch_size_per_gpu
            budget = MicroBatchBudget.of(critic.model, critic.fsdp, *sizes, critic.use_dynamic_bsz)
            return RankModel(critic.model, critic.fsdp, budget, "value", trained)
        case teacher if teacher.startswith(TEACHERS):
            return _teacher(config.distillation.teacher_models[teacher.removeprefix(TEACHERS)], section)
        case "reward_model":
            scored, fsdp = config.reward.reward_model, actor.fsdp_config
            plain = replace(model, path=scored.model_path, override_config={}, lora_rank=0, lora_adapter_path=None)
            fsdp = replace(_undivided(fsdp), offload_policy=ref.fsdp_config.param_offload)
            return RankModel(plain, fsdp, log_prob_budget(section, ref, fsdp), "score")
        case _:
            return plugins.load(f"model.{name}")(config)


def _teacher(teacher: TeacherConfig, section: ActorRolloutRefConfig) -> RankModel:
    model, own = section.model, teacher.model_path in (POLICY, BASE)
    plain = replace(model, path=model.path if own else teacher.model_path, lora_rank=0, lora_adapter_path=None)
    weights = "own"
    if teacher.model_path == POLICY:
        weights = "average" if teacher.ema else "live"
    elif teacher.model_path == BASE and model.lora_rank:
        weights = "base"
    reads, fsdp = (CONTEXT,) if teacher.reads_other else (), _fitting(section.actor.fsdp_config, plain, model)
    return RankModel(plain, fsdp, log_prob_budget(section, section.ref, fsdp), weights=weights, reads=reads)


def _fitting(fsdp: FSDPConfig, other: ModelConfig, policy: ModelConfig) -> FSDPConfig:
    """The policy's settings for another model; if its family differs, which names layers and has plans of dividing
    them, FSDP alone shards it."""
    divides = max(fsdp.tensor_parallel_size, fsdp.expert_parallel_size) > 1
    if other.path == policy.path or not (divides or fsdp.wrap_policy.transformer_layer_cls_to_wrap):
        return fsdp
    families = {load_settings(model).get_text_config().model_type for model in (other, policy)}
    return fsdp if len(families) == 1 else _undivided(fsdp)


def _undivided(fsdp: FSDPConfig) -> FSDPConfig:
    return replace(fsdp, tensor_parallel_size=1, expert_parallel_size=1, wrap_policy=WrapPolicyConfig([]))


def log_prob_budget(
    section: ActorRolloutRefConfig, forward: RolloutConfig | ReferenceConfig, fsdp: FSDPConfig | None = None
) -> MicroBatchBudget:
    sizes = forward.log_prob_max_token_len_per_gpu, forward.log_prob_micro_batch_size_per_gpu
    fsdp = fsdp or section.actor.fsdp_config
    return MicroBatchBudget.of(section.model, fsdp, *sizes, forward.log_prob_use_dynamic_bsz)


def sft_worker_config(config: SFTConfig, directory: Path, steps: int, head: Head = "language") -> WorkerConfig:
    fsdp, trained = config.engine.fsdp_config, LearnerConfig(located(config.optim), steps)
    budget = sft_budget(config.data, config.model, fsdp)
    return WorkerConfig(
        device=config.trainer.device,
        models={"actor": RankModel(config.model, fsdp, budget, head, trained)},
        collective_timeout=config.engine.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory / SKIPPED_UPDATES),
    )


def sft_budget(data: SFTDataConfig, model: ModelConfig, fsdp: FSDPConfig) -> MicroBatchBudget:
    return MicroBatchBudget.of(model, fsdp, data.max_token_len_per_gpu, None, by_tokens=True)


def located(config: OptimizerConfig) -> OptimizerConfig:
    """Return the configuration with the absolute path of a custom schedule, so that workers find it anywhere."""
    name = config.lr_scheduler_type
    return replace(config, lr_scheduler_type=str(Path(name).expanduser().absolute())) if ":" in name else config


def build_algorithm(config: PPOConfig) -> Algorithm:
    algorithm = config.algorithm
    control, correction = algorithm.kl_ctrl, algorithm.rollout_correction
    entry, function = find_estimator(algorithm.adv_estimator)
    if not config.distillation.rewarded:
        entry, function = Estimator("", ""), no_advantages
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
    if "greedy_rewards" in entry.reads and config.reward.reward_model.enable:
        cause = f"{name} samples a greedy response of each prompt once the others have their scores, which a reward "
        raise ConfigError(f"{cause}model gives at the end of sampling", fix="set algorithm.adv_estimator=rloo")
    terms = policy_terms(config.actor_rollout_ref.actor, correction, config.distillation)
    kl = algorithm.kl_penalty if algorithm.use_kl_in_reward else None
    built = Algorithm(
        estimator=bind(function, {key: vars(algorithm)[key] for key in ESTIMATOR_KEYS} | {OWN: config.own}),
        entry=entry,
        kl_in_reward=kl,
        kl_weight=KLWeight(control.kl_coef, control.target_kl if control.type == "adaptive" else None, control.horizon),
        correction=RolloutCorrection.of(algorithm),
        bypass=correction.bypass_mode,
        signals=tuple(_signals(config, entry, terms, sampled_kl=kl not in (None, "full"))),
        terms=terms,
        teachers=tuple(f"{TEACHERS}{name}" for name, each in config.distillation.teachers.items() if each.model_path),
        scorers=(REWARD_MODEL,) * config.reward.reward_model.enable,
    )
    copies = {f"{TEACHERS}{name}": (1, each.ema) for name, each in config.distillation.teachers.items() if each.ema}
    if (every := config.actor_rollout_ref.ref.refresh_freq) > 0 and "reference" in built.models:
        copies["reference"] = (every, 1.0)
    return replace(built, copies=copies)


def _signals(config: PPOConfig, entry: Estimator, terms: Sequence[LossTerm], *, sampled_kl: bool) -> Iterator[Signal]:
    """Yield log-probs of the reference for a KL, values of the critic, and plug-ins for fields that the estimator or a
    loss term reads."""
    temperature, named = training_temperature(config.actor_rollout_ref.rollout), plugins.names("signal")
    if sampled_kl or any(term.function == SAMPLED_KL.function for term in terms):
        yield Signal(("reference_log_probs",), "reference", ForwardSpec(temperature), timing="ref")
    if config.critic.enable:
        yield Signal(("values",), "critic")
    chooses = config.distillation.chooses or config.distillation.reads_contexts
    for number, (name, teacher) in enumerate(config.distillation.teachers.items()):
        if teacher.base_url or not _reads(terms, TAUGHT_BY):
            continue
        rows = (TEACHER, number) if chooses else None
        yield Signal((TAUGHT_BY,), f"{TEACHERS}{name}", ForwardSpec(temperature), rows, "teacher")
    for name in dict.fromkeys([*entry.reads, *(name for term in terms for name in term.reads)]):
        if name in named:
            yield plugins.load(f"signal.{name}")


def _reads(terms: Sequence[LossTerm], field: str) -> bool:
    return any(field in term.reads for term in terms)


def build_policy_plan(config: PPOConfig) -> PolicyPlan:
    section, algorithm = config.actor_rollout_ref, config.algorithm
    model, exact = section.model, algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
    spec = ForwardSpec(
        training_temperature(section.rollout),
        entropies=True,
        sum_pi_squared="sum_pi_squared" in find_estimator(algorithm.adv_estimator)[0].reads,
        against="reference" if exact else "",
    )
    return PolicyPlan(
        policy_loss_config(config),
        UpdatePlan.of(section),
        Signal(OLD_FIELDS, "actor", spec, timing="old_log_prob"),
        # Activations are dropped at random only if the user configured it.
        stochastic=bool(model.lora_rank and model.lora.dropout) or bool(disturbances(model.override_config)),
        first_update=config.trainer.critic_warmup,
        correction=RolloutCorrection.of(algorithm),
        agreement=build_agreement(section),
    )


def sft_policy_plan(config: SFTConfig) -> PolicyPlan:
    """One update per step with the negative log-likelihood as its loss."""
    clip, terms = config.engine.grad_clip, loss_terms(SFT_POLICY_LOSS)
    loss = LossConfig(terms, "token-mean", scale=1.0, temperature=1.0, grad_clip=clip)
    budget = sft_budget(config.data, config.model, config.engine.fsdp_config)
    updates = UpdatePlan(config.data.train_batch_size, epochs=1, shuffle=False, seed=0, budget=budget)
    return PolicyPlan(loss, updates)


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


def training_temperature(rollout: RolloutConfig) -> float:
    """The temperature of all log-probs: that of sampling; 1 if responses are greedy."""
    return rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0


def policy_terms(
    actor: ActorConfig, correction: RolloutCorrectionConfig, distillation: DistillationConfig
) -> tuple[LossTerm, ...]:
    """The terms of the policy's loss."""
    name = (BYPASS_LOSSES[correction.loss_type] if correction.bypass_mode else None) or actor.policy_loss.loss_mode
    if ":" in name:  # workers find a custom file from any directory
        find_policy_loss(name)  # rejected with the name that the user wrote
        name = str(Path(name).expanduser().absolute())
    kl_form = actor.kl_loss_type if actor.use_kl_loss else None
    teaching = teaching_term(distillation) if distillation.enabled else None
    return loss_terms(
        name if distillation.rewarded else None, actor.entropy_coeff, kl_form, actor.kl_loss_coef, teaching
    )


def teaching_term(distillation: DistillationConfig) -> LossTerm:
    """The term by which the policy learns from its teachers."""
    loss, mask = distillation.distillation_loss, "taught" if distillation.leaves_out else ""
    form, parameters = str(loss.loss_mode), {"most": loss.loss_max_clamp}
    term = SAMPLED_TEACHER
    if form in EXACT_FORMS:
        term = replace(EXACT_TEACHER, divergence=Divergence(form, loss.beta))
    elif form == TOP_FORM:
        term = replace(TOP_TEACHER, divergence=Divergence(TOP_FORM, least=loss.log_prob_min_clamp))
    else:
        parameters |= {"form": form}
        if loss.use_policy_gradient:
            low, high = loss.clip_ratio_low, loss.clip_ratio_high
            clip = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": DUAL_CLIP}
            term, parameters = TEACHER_REWARD, parameters | {"clip": clip}
    if len(names := tuple(distillation.teachers)) > 1:  # a step has metrics of each
        term, parameters = replace(term, reads=(*term.reads, TEACHER)), parameters | {"names": names}
    return replace(term, weight=loss.distillation_loss_coef, mask=mask, parameters=parameters)


def policy_loss_config(config: PPOConfig) -> LossConfig:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    bypass = RolloutCorrection.of(config.algorithm) if correction.bypass_mode else None
    if bypass is not None and not BYPASS_LOSSES[correction.loss_type]:
        bypass = replace(bypass, level=None)  # the ratio to the rollout's log-probs is in the policy loss already
    terms = policy_terms(actor, correction, config.distillation)
    teachers = config.distillation.teachers if any(term.against == TEACHER for term in terms) else ()
    return LossConfig(
        terms,
        parameters={key: vars(actor)[key] for key in ACTOR_KEYS}
        | {key: vars(actor.policy_loss)[key] for key in PARAMETERS}
        | {OWN: config.own},
        aggregation=actor.loss_agg_mode,
        scale=actor.loss_scale_factor or 1.0,
        temperature=training_temperature(config.actor_rollout_ref.rollout),
        grad_clip=actor.grad_clip,
        correction=bypass,
        teachers=tuple(f"{TEACHERS}{name}" for name in teachers),
    )


def engine_fingerprint(model: ModelConfig, rollout: RolloutConfig, *further: object) -> str:
    """Fingerprint of everything but request and weights that determines a response and, with the `further`, its
    fields."""
    routes = ["routes"] if rollout.enable_rollout_routing_replay else []  # stored responses must then have them
    engine = rollout.dtype, asdict(rollout.engine_kwargs), model.override_config, model.lora_alpha
    return fingerprint(*engine, *routes, *further)


def score_fingerprint(reward: RewardConfig, data: str) -> str:
    """Fingerprint of everything but the response that determines a score. Files of custom reward functions count, but
    not the files that these import or read."""
    return fingerprint(asdict(reward), reward_code(reward), data, code_fingerprint())


def reward_files(reward: RewardConfig) -> list[Path]:
    """The files of custom reward functions and of the judge's template."""
    scripts = (SCRIPT.fullmatch(str(value)) for value in flatten(asdict(reward)).values())
    files = [script_path(script[1]) for script in scripts if script] + [Path(reward.judge.template).expanduser()]
    return [file for file in files if file.is_file()]


def reward_code(reward: RewardConfig) -> list[str]:
    """The hashes of the files of custom reward functions."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in reward_files(reward)]


def contents_to_save(
    section: ActorRolloutRefConfig, critic: CriticConfig, algorithm: Algorithm
) -> dict[str, list[str]]:
    """The parts saved of each model that changes: a frozen one has a state of its own only if it follows the policy."""
    contents = {"actor": section.actor.checkpoint.save_contents, "critic": critic.checkpoint.save_contents}
    contents |= {name: ["model"] for name in algorithm.copies}
    return {name: parts for name, parts in contents.items() if name in algorithm.models}
