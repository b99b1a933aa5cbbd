"""Frozen models that teach the policy or score its responses: fill in values, reject what cannot work."""

from dataclasses import replace

from hybridrl.config.checks.model import absolute, check_model
from hybridrl.config.findings import Checker
from hybridrl.config.schema import PPOConfig
from hybridrl.config.teachers import BASE, EXACT_FORMS, OWN, POLICY, TOP_FORM, DistillationConfig

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
        if teacher.model_path in (None, POLICY, BASE):
            continue
        model = replace(config.actor_rollout_ref.model, path=teacher.model_path, lora_rank=0, lora_adapter_path=None)
        check_model(f"{MODELS}.{name}", model, rollout.max_model_len or 0, hint, check, ".model_path")
        teacher.model_path = absolute(model.path)
    _check_own(config, check)
    if section.endpoints and rollout.do_sample and rollout.temperature not in (0, 1):
        cause = "a teacher behind an endpoint gives log-probs at temperature 1, which no other one follows from"
        fix = "set it to 1, or give the teacher a model_path"
        check.error("actor_rollout_ref.rollout.temperature distillation.teacher_models", cause, fix)
    _check_loss(config, check)


def _check_own(config: PPOConfig, check: Checker) -> None:
    """Check teachers that are the policy itself, and contexts."""
    for name, teacher in config.distillation.teachers.items():
        here = check.at(f"{MODELS}.{name}")
        if teacher.base_url and (early := [name for name in teacher.context or () if ":" not in name]):
            cause = f"{early[0]} is known after the scores, and its log-probs are requested as soon as a response ends"
            here.error(".context .base_url", cause, "name columns alone, as column:NAME, or give it a model_path")
        if teacher.prompt == OWN and teacher.model_path in (None, POLICY, BASE):
            here.error(".prompt .model_path", "it has no chat template of its own", f"leave {MODELS}.{name}.prompt out")
        if teacher.ema is not None and teacher.model_path != POLICY:
            here.error(".ema .model_path", "an average is one of the policy's weights", f"set model_path={POLICY}")
        elif teacher.ema is not None and config.actor_rollout_ref.model.lora_rank:
            key, cause = "actor_rollout_ref.model.lora_rank", "an average of an adapter is not supported"
            here.error(f".ema {key}", cause, f"set {key}=0, or model_path={BASE} without ema")
        if teacher.model_path == POLICY and teacher.ema is None and not teacher.context:
            cause = "the policy is equal to itself, so it learns nothing from itself"
            here.error(".model_path", cause, f"set {MODELS}.{name}.context=[sibling,feedback], or ema=0.05")
        if "sibling" in (teacher.context or ()) and config.actor_rollout_ref.rollout.n == 1:
            key = "actor_rollout_ref.rollout.n"
            here.error(f".context {key}", "a prompt has no other responses", f"set {key}=8, or name another source")
        for option in ("template", "threshold"):
            if vars(teacher)[option] is not None and not teacher.context:
                here.idle(f".{option} .context", f"without {MODELS}.{name}.context")


def resolve_reward_model(config: PPOConfig, hint: str, check: Checker) -> None:
    """Fill in and check the reward model. `hint`: the fix for overlong rows."""
    reward, section = config.reward, config.reward.reward_model
    if not section.enable:
        if section.model_path is not None and not reward.server_parameters:
            check.idle(f"{SCORED}.model_path {SCORED}.enable", f"without {SCORED}.enable=true")
        return
    if section.model_path is None:
        check.error(f"{SCORED}.model_path {SCORED}.enable", "no model is named", f"set {SCORED}.model_path")
        return
    longest = 0 if section.truncation == "left" else config.actor_rollout_ref.rollout.max_model_len or 0
    plain = replace(config.actor_rollout_ref.model, path=section.model_path, override_config={}, lora_rank=0)
    model = replace(plain, lora_adapter_path=None)
    check_model(SCORED, model, longest, f"{hint}, or set {SCORED}.truncation=left", check, ".model_path")
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
        place = f"{MODELS}.{name}"
        if teacher.model_path and teacher.base_url:
            fix = f"leave {place}.base_url out"
            check.error(f"{place}.base_url {place}.model_path", "it has a model_path too", fix)
        for key in ("served_name", "api_key_env"):
            if vars(teacher)[key] and not teacher.base_url:
                check.idle(f"{place}.{key} {place}.base_url", f"without {place}.base_url")
        if name not in section.teachers and teacher.key is None:
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
    """Check the loss, which null makes a forward KL: a reverse KL teaches nothing that the policy never samples. A
    teacher that is the policy with a context samples the same. With a teacher behind an endpoint it is k1 as a reward,
    for which log-probs of sampled tokens are enough."""
    loss, check, endpoints = config.distillation.distillation_loss, check.at(LOSS), config.distillation.endpoints
    loss.use_policy_gradient |= loss.loss_mode is None and bool(endpoints)
    informed = any(teacher.context for teacher in config.distillation.teachers.values())
    exact = "reverse_kl" if informed else "forward_kl"
    loss.loss_mode = loss.loss_mode or ("k1" if loss.use_policy_gradient else exact)
    if loss.loss_mode == TOP_FORM and not endpoints:
        check.warn(".loss_mode", "in the training ranks it is forward_kl, over the whole vocabulary")
        loss.loss_mode = "forward_kl"
    top = loss.loss_mode == TOP_FORM
    if loss.loss_mode in EXACT_FORMS and endpoints:
        cause = f"it needs the whole vocabulary, and {', '.join(endpoints)} gives log-probs of single tokens"
        fix = f"set {LOSS}.loss_mode={TOP_FORM}, or a model_path in place of base_url"
        check.error(f".loss_mode {MODELS}", cause, fix)
    if top and len(endpoints) < len(config.distillation.teachers):
        cause, fix = "a teacher with a model_path sends no most probable tokens", f"set {LOSS}.loss_mode=k1"
        check.error(f".loss_mode {MODELS}", cause, f"{fix} and use_policy_gradient=true")
    for key, default in {"topk": 32, "log_prob_min_clamp": None}.items():
        if vars(loss)[key] != default and not top:
            check.idle(f".{key} .loss_mode", f"without {LOSS}.loss_mode={TOP_FORM} and teachers behind endpoints")
    if loss.use_policy_gradient and (top or loss.loss_mode in EXACT_FORMS):
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
    config.reward.on_error, config.reward.max_fault_rate = "zero", 1.0  # a score is only logged
    without = f"without task rewards ({LOSS}.use_task_rewards=false)"
    for key, used in {
        "critic.enable": check.values["critic"]["enable"] is True,
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "algorithm.filter_groups.enable": config.algorithm.filter_groups.enable,
    }.items():
        if used:
            check.error(f"{key} .use_task_rewards", f"nothing learns from it {without}", f"set {key}=false")
