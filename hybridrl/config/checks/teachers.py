"""Frozen models that teach the policy or score its responses: fill in values, reject what cannot work."""

from dataclasses import replace

from hybridrl.config.checks.model import absolute, check_model
from hybridrl.config.findings import Checker
from hybridrl.config.schema import PPOConfig
from hybridrl.config.teachers import EXACT_FORMS, DistillationConfig

SCORED = "reward.reward_model"
LOSS, MODELS, KEY = "distillation.distillation_loss", "distillation.teacher_models", "distillation.teacher_key"
NAME_ONE = f"add {MODELS}.teacher_model.model_path=..."
OTHERS = "*"  # the key of a teacher of all rows that no other one teaches


def resolve_distillation(config: PPOConfig, hint: str, check: Checker) -> None:
    """Fill in and check teachers. `hint`: the fix for overlong rows."""
    section, rollout = config.distillation, config.actor_rollout_ref.rollout
    if not section.enabled:
        if section.teacher_models:
            check.idle(f"{MODELS} distillation.enabled", "without distillation.enabled=true")
        return
    _check_names(section, check)
    for name, teacher in section.teachers.items():
        model = replace(config.actor_rollout_ref.model, path=teacher.model_path, lora_rank=0, lora_adapter_path=None)
        check_model(f"{MODELS}.{name}.model", model, rollout.max_model_len or 0, hint, check)
        teacher.model_path = absolute(model.path)
    _check_loss(config, check)


def resolve_reward_model(config: PPOConfig, hint: str, check: Checker) -> None:
    """Fill in and check the reward model. `hint`: the fix for overlong rows."""
    reward, section = config.reward, config.reward.reward_model
    if not section.enable:
        if section.model_path is not None:
            check.idle(f"{SCORED}.model_path {SCORED}.enable", f"without {SCORED}.enable=true")
        return
    if section.model_path is None:
        check.error(f"{SCORED}.enable", "no model is named", f"set {SCORED}.model_path")
        return
    longest = 0 if section.truncation == "left" else config.actor_rollout_ref.rollout.max_model_len or 0
    plain = replace(config.actor_rollout_ref.model, path=section.model_path, override_config={}, lora_rank=0)
    model = replace(plain, lora_adapter_path=None)
    check_model(f"{SCORED}.model", model, longest, f"{hint}, or set {SCORED}.truncation=left", check)
    section.model_path = absolute(model.path)
    if "reward_model" in {*reward.weights, *reward.functions}:
        cause = "the reward model has this name among the reward's components"
        check.error(["reward.weights.reward_model"], cause, f"set its weight by {SCORED}.weight")
    if config.algorithm.filter_groups.enable:
        cause = "it needs scores while responses are sampled, and a reward model scores once all of them have ended"
        key = "algorithm.filter_groups.enable"
        check.error(f"{key} {SCORED}.enable", cause, f"set {key}=false")


def _check_names(section: DistillationConfig, check: Checker) -> None:
    """Check that each row can have one teacher."""
    named, keyed = section.teacher_models, {name: teacher.key for name, teacher in section.teacher_models.items()}
    if not section.teachers:
        check.error("distillation.enabled", "no teacher has a model", NAME_ONE)
    for name, teacher in named.items():
        if teacher.model_path is None and teacher.key is None:
            fix = f"set {MODELS}.{name}.model_path, or {MODELS}.{name}.key for rows without a teacher"
            check.error(f"{MODELS}.{name}", "it has neither a model nor a key", fix, valued=False)
        elif len(named) > 1 and teacher.key is None:
            cause = f"with {len(named)} teachers, each needs the value of {KEY}={section.teacher_key} in its rows"
            check.error(f"{MODELS}.{name} {KEY}", cause, f"set {MODELS}.{name}.key", valued=False)
    for key in sorted({key for key in keyed.values() if key is not None}):
        if len(names := [name for name, other in keyed.items() if other == key]) > 1:
            cause = f"{' and '.join(names)} have the same key={key}, and a row has one teacher"
            check.error([f"{MODELS}.{name}.key" for name in names], cause, "give each another key", valued=False)


def _check_loss(config: PPOConfig, check: Checker) -> None:
    """Check the loss, which null makes a forward KL: a reverse KL teaches nothing that the policy never samples."""
    loss, check = config.distillation.distillation_loss, check.at(LOSS)
    loss.loss_mode = loss.loss_mode or ("k1" if loss.use_policy_gradient else "forward_kl")
    exact = loss.loss_mode in EXACT_FORMS
    if loss.use_policy_gradient and exact:
        cause = "a divergence over the whole vocabulary has no sampled token to reward"
        fix = f"set {LOSS}.loss_mode=k1, or use_policy_gradient=false"
        check.error(".use_policy_gradient .loss_mode", cause, fix)
    if loss.loss_mode in ("k1", "kl") and not loss.use_policy_gradient:
        cause = "as a loss its gradient does not depend on the teacher"
        check.error(".loss_mode .use_policy_gradient", cause, f"set {LOSS}.use_policy_gradient=true, or loss_mode=k2")
    if loss.beta != 0.5 and loss.loss_mode != "jsd":
        check.idle(".beta .loss_mode", f"without {LOSS}.loss_mode=jsd")
    if loss.use_task_rewards:
        return
    if loss.distillation_loss_coef != 1:
        check.idle(".distillation_loss_coef .use_task_rewards", ": it weighs the distillation next to task rewards")
        loss.distillation_loss_coef = 1.0
    without = f"without task rewards ({LOSS}.use_task_rewards=false)"
    for key, used in {
        "critic.enable": check.values["critic"]["enable"] is True,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
    }.items():
        if used:
            check.error(f"{key} .use_task_rewards", f"nothing learns from it {without}", f"set {key}=false")
