"""Settings of the algorithm that cannot work together, and settings that have no effect given the others."""

from hybridrl.config.catalog import (
    BYPASS_LOSSES,
    DEFAULT_POLICY_LOSS,
    ESTIMATORS,
    POLICY_LOSSES,
    Estimator,
    PolicyLoss,
)
from hybridrl.config.findings import Findings
from hybridrl.config.schema import PPOConfig

# Custom functions are not imported here: they may read anything, and nothing else is known about them.
CUSTOM_ESTIMATOR = Estimator("", "", reads=("values", "reward_parts"))
CUSTOM_LOSS = PolicyLoss("", "")

ESTIMATOR, CORRECTION = "algorithm.adv_estimator", "algorithm.rollout_correction"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{section}" for section in ("actor", "rollout", "ref"))
LOSS = f"{ACTOR}.policy_loss"


def check_algorithm(config: PPOConfig, findings: Findings) -> None:
    _check_estimator(config, findings)
    _check_reward_components(config, findings)
    _check_sampling(config, findings)
    _check_bypass(config, findings)
    _check_correction(config, findings)
    _check_policy_loss(config, findings)
    _check_window(config, findings)
    _check_kl(config, findings)


def _check_estimator(config: PPOConfig, findings: Findings) -> None:
    name, entry = _estimator(config)
    correction = config.algorithm.rollout_correction
    if entry.compares_group and config.actor_rollout_ref.rollout.n == 1 and not config.trainer.val_only:
        cause = f"{ESTIMATOR}={name} compares responses to the same prompt; in a group of one every advantage is 0, so "
        cause += "nothing can be learned"
        findings.warn("setting", cause, f"set {ROLLOUT}.n=8", keys=(f"{ROLLOUT}.n", ESTIMATOR), value=1)
    if entry.reads_probabilities and correction.bypass_mode:
        key = f"{CORRECTION}.bypass_mode"
        cause = f"{ESTIMATOR}={name} needs the trainer's own probabilities, which that mode does not compute"
        findings.error("conflict", cause, f"set {key}=false", keys=(key, ESTIMATOR), value=True)


def _check_reward_components(config: PPOConfig, findings: Findings) -> None:
    algorithm, (name, entry) = config.algorithm, _estimator(config)
    keys, weights, key = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, "algorithm.gdpo_reward_keys"
    if entry.name and entry.reads_reward_parts:
        if not keys:
            cause = f"name the reward components that it normalizes one by one, such as {key}=[format,accuracy]"
            fix = "the reward function returns them in its dict"
            findings.error("conflict", cause, fix, keys=(ESTIMATOR, key), value=name)
        if algorithm.use_kl_in_reward:
            cause = f"algorithm.use_kl_in_reward has no effect with {ESTIMATOR}={name}, which only reads the components"
            findings.warn("setting", cause, keys=("algorithm.use_kl_in_reward", ESTIMATOR))
    if keys and not entry.reads_reward_parts:
        findings.warn("setting", f"{key} has no effect with {ESTIMATOR}={name}", keys=(key, ESTIMATOR))
    if weights and len(weights) != len(keys):
        cause = f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(keys)} {key}"
        findings.error(
            "conflict", cause, "give one weight per key, or none", keys=("algorithm.gdpo_reward_weights", key)
        )


def _check_sampling(config: PPOConfig, findings: Findings) -> None:
    filtering, key = config.algorithm.filter_groups, "algorithm.filter_groups"
    enable, samples = f"{key}.enable", f"{ROLLOUT}.n"
    if filtering.enable and config.actor_rollout_ref.rollout.n == 1:
        cause = f"{enable}=true has no effect with {samples}=1: no responses to compare"
        findings.warn("setting", cause, keys=(enable, samples))
    if not filtering.enable and filtering.metric is not None:
        findings.warn("setting", f"{key}.metric has no effect without {enable}=true", keys=(f"{key}.metric", enable))
    if not filtering.enable and config.data.gen_batch_size not in (None, config.data.train_batch_size):
        cause = f"data.gen_batch_size has no effect without {enable}=true"
        findings.warn("setting", cause, keys=("data.gen_batch_size", enable))


def _check_bypass(config: PPOConfig, findings: Findings) -> None:
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    bypass, loss_type = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"
    replaces_loss, loss = BYPASS_LOSSES[correction.loss_type], config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        if replaces_loss:
            cause = f"{loss_type}={correction.loss_type} has no effect without {bypass}=true"
            findings.warn("setting", cause, keys=(loss_type, bypass))
        return
    if correction.rollout_is and not replaces_loss:
        cause = (
            f"{CORRECTION}.rollout_is has no effect with bypass_mode and loss_type={correction.loss_type}: the ratio "
        )
        findings.warn("setting", cause + "already corrects", keys=(f"{CORRECTION}.rollout_is", bypass, loss_type))
    if replaces_loss and loss != DEFAULT_POLICY_LOSS:
        cause = f"{LOSS}.loss_mode={loss} has no effect: {loss_type}={correction.loss_type} is the loss"
        findings.warn("setting", cause, keys=(f"{LOSS}.loss_mode", bypass, loss_type))
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.repetition_penalty != 1:
        cause = "with top_p, top_k or repetition_penalty the rollout's log-probs are of the truncated distribution, so "
        cause += "every ratio is wrong"
        keys = (bypass, *(f"{ROLLOUT}.{name}" for name in ("top_p", "top_k", "repetition_penalty")))
        findings.warn("setting", cause, "set top_p=1, top_k=-1 and repetition_penalty=1", keys=keys, value=True)
    if correction.rollout_is_batch_normalize:
        key = f"{CORRECTION}.rollout_is_batch_normalize"
        cause = f"{key} has no effect with bypass_mode: weights are computed per micro-batch"
        findings.warn("setting", cause, keys=(key, bypass))


def _check_correction(config: PPOConfig, findings: Findings) -> None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_is and correction.rollout_is_threshold is None:
        key, weights = f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is"
        cause = f"{weights}={correction.rollout_is} needs a bound"
        findings.error("conflict", cause, "set 2.0", keys=(key, weights), value="null")
    correction.rollout_is_threshold = correction.rollout_is_threshold or "2.0"
    if correction.rollout_rs_threshold and not correction.rollout_rs:
        key, rejections = f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_rs"
        findings.warn("setting", f"{key} has no effect without {rejections}", keys=(key, rejections))


def _check_policy_loss(config: PPOConfig, findings: Findings) -> None:
    actor, (name, entry) = config.actor_rollout_ref.actor, _policy_loss(config)
    for key, parameter in entry.parameters.items():
        if parameter.suggestion is not None and vars(actor.policy_loss)[key] is None:
            fix = f"set {LOSS}.{key}={parameter.suggestion:g}"
            keys = (f"{LOSS}.loss_mode", f"{LOSS}.{key}")
            findings.error("conflict", f"{key} has no default", fix, keys=keys, value=name)
    if entry.aggregation and actor.loss_agg_mode not in ("token-mean", entry.aggregation):
        cause = (
            f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode} applies to entropy and KL only with loss_mode={name}, which "
        )
        cause += "averages over the tokens of a row, then over rows"
        findings.warn("setting", cause, keys=(f"{ACTOR}.loss_agg_mode", f"{LOSS}.loss_mode"))


def _check_window(config: PPOConfig, findings: Findings) -> None:
    actor, (_, entry) = config.actor_rollout_ref.actor, _policy_loss(config)
    low, high = actor.clip_ratio_low or 0.0, actor.clip_ratio_high or 0.0
    keys = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{LOSS}.loss_mode")
    if entry.clips_ratio and high < low:
        cause = f"{keys[1]}={high:g} is less than clip_ratio_low={low:g}: the upper side is usually the wider one"
        findings.warn("setting", cause, keys=(keys[1], keys[0], keys[2]))
    if entry.clips_ratio == "ratio" and low >= 1:
        cause = f"{keys[0]}={low:g}: a ratio is never below 0, so that side does not clip"
        findings.warn("setting", cause, keys=(keys[0], keys[2]))


def _check_kl(config: PPOConfig, findings: Findings) -> None:
    algorithm, section = config.algorithm, config.actor_rollout_ref
    actor, ref, control = section.actor, section.ref, algorithm.kl_ctrl
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if control.type == "adaptive" and not algorithm.use_kl_in_reward:
        cause = f"algorithm.kl_ctrl.type=adaptive has no effect without {in_reward}=true"
        findings.warn("setting", cause, keys=("algorithm.kl_ctrl.type", in_reward))
    if control.kl_coef not in (0, 0.001) and not algorithm.use_kl_in_reward:
        cause = f"algorithm.kl_ctrl.kl_coef has no effect without {in_reward}=true"
        findings.warn("setting", cause, keys=("algorithm.kl_ctrl.kl_coef", in_reward))
    if actor.kl_loss_coef not in (0, 0.001) and not actor.use_kl_loss:
        cause = f"{ACTOR}.kl_loss_coef has no effect without {in_loss}=true"
        findings.warn("setting", cause, keys=(f"{ACTOR}.kl_loss_coef", in_loss))
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        cause = "KL against the reference policy counts twice: in the reward and in the loss"
        findings.warn("setting", cause, keys=(in_reward, in_loss))
    if algorithm.use_kl_in_reward or actor.use_kl_loss:
        return
    idle = {f"{REF}.refresh_freq": ref.refresh_freq > 0, f"{REF}.model.path": ref.model.path != section.model.path}
    for key in (key for key, is_set in idle.items() if is_set):  # both paths are absolute by now
        cause = f"{key} has no effect: no KL against the reference policy is in use"
        findings.warn("setting", cause, keys=(key, in_reward, in_loss))


def _estimator(config: PPOConfig) -> tuple[str, Estimator]:
    name = config.algorithm.adv_estimator
    return name, ESTIMATORS.get(name, CUSTOM_ESTIMATOR)


def _policy_loss(config: PPOConfig) -> tuple[str, PolicyLoss]:
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    return name, POLICY_LOSSES.get(name, CUSTOM_LOSS)
