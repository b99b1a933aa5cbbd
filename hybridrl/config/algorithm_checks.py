"""Which settings of the algorithm cannot work together, and which change nothing as the others are."""

from collections.abc import Callable

from hybridrl.config.error import Refusals
from hybridrl.config.schema import PPOConfig

Note = Callable[[str], None]

# Those that compare an answer with the others to the same prompt.
GROUP_ESTIMATORS = {
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
}
TOKEN_BASELINES = {"optimal_token_baseline", "tir_optimal_token_baseline"}
# Losses that add up in their own way whatever loss_agg_mode says, as in verl.
OWN_AGGREGATION = {"gspo", "sapo", "geo_mean", "gmpo"}


# Losses that leave a token out where its ratio has left [1 - clip_ratio_low, 1 + clip_ratio_high].
WINDOWED = {"vanilla", "gspo", "geo_mean", "gmpo", "clip_cov"}


def check_algorithm(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    _check_estimator(config, note, wrong)
    _check_sampling(config, note)
    _check_correction(config, note, wrong)
    _note_idle_losses(config, note)
    _note_clip_order(config, note)
    chosen = config.actor_rollout_ref.actor.policy_loss
    if chosen.loss_mode == "dro" and chosen.dro_beta is None:
        key = "actor_rollout_ref.actor.policy_loss"
        wrong.add(f"{key}.loss_mode=dro: the weight of its penalty has no default; set {key}.dro_beta=0.1")


def _check_estimator(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    algorithm, answers = config.algorithm, config.actor_rollout_ref.rollout.n
    name, keys, weights = algorithm.adv_estimator, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name in GROUP_ESTIMATORS and answers == 1 and not config.trainer.val_only:
        note(
            f"actor_rollout_ref.rollout.n=1: algorithm.adv_estimator={name} compares answers to the same prompt; in a "
            "group of one every advantage is 0, so nothing can be learnt; set actor_rollout_ref.rollout.n=8"
        )
    if name == "gdpo" and not keys:
        wrong.add(
            "algorithm.adv_estimator=gdpo: name the parts of the reward that it normalises one by one, such as "
            "algorithm.gdpo_reward_keys=[format,accuracy]; the reward function returns them in its dict"
        )
    if weights and len(weights) != len(keys):
        wrong.add(
            f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(keys)} algorithm.gdpo_reward_keys; give "
            "one weight a key, or none"
        )
    if name == "gdpo" and algorithm.use_kl_in_reward:
        note("algorithm.use_kl_in_reward has no effect with algorithm.adv_estimator=gdpo, which reads the parts alone")
    if keys and name != "gdpo":
        note(f"algorithm.gdpo_reward_keys has no effect with algorithm.adv_estimator={name}")


def _check_sampling(config: PPOConfig, note: Note) -> None:
    chosen = config.algorithm.filter_groups
    if chosen.enable and config.actor_rollout_ref.rollout.n == 1:
        note("algorithm.filter_groups.enable=true has no effect with actor_rollout_ref.rollout.n=1: no answers differ")
    if not chosen.enable and chosen.metric is not None:
        note("algorithm.filter_groups.metric has no effect without algorithm.filter_groups.enable=true")
    if not chosen.enable and config.data.gen_batch_size not in (None, config.data.train_batch_size):
        note("data.gen_batch_size has no effect without algorithm.filter_groups.enable=true")


def _note_clip_order(config: PPOConfig, note: Note) -> None:
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    low, high = actor.clip_ratio_low or 0.0, actor.clip_ratio_high or 0.0
    if actor.policy_loss.loss_mode not in WINDOWED:
        return
    if high < low:
        note(f"{key}.clip_ratio_high={high:g} is less than clip_ratio_low={low:g}: the wider side is usually the upper")
    if low >= 1 and actor.policy_loss.loss_mode not in ("geo_mean", "gmpo"):  # theirs is in the log-ratio
        note(f"{key}.clip_ratio_low={low:g}: a ratio is never below 0, so that side does not clip")


def _check_correction(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    chosen, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    estimator = config.algorithm.adv_estimator
    if chosen.bypass_mode and estimator in TOKEN_BASELINES:
        wrong.add(
            f"{key}.bypass_mode=true: algorithm.adv_estimator={estimator} needs the trainer's own probabilities, which "
            f"that mode does not compute; set {key}.bypass_mode=false"
        )
    if chosen.bypass_mode and chosen.rollout_is and chosen.loss_type == "ppo_clip":
        note(f"{key}.rollout_is has no effect with bypass_mode and loss_type=ppo_clip: the ratio corrects by itself")
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if chosen.bypass_mode and chosen.loss_type == "reinforce" and loss != "vanilla":
        note(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} has no effect: {key}.loss_type=reinforce is the loss"
        )
    sampling = config.actor_rollout_ref.rollout
    if chosen.bypass_mode and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.repetition_penalty != 1):
        note(
            f"{key}.bypass_mode=true: with top_p, top_k or repetition_penalty the rollout's log-probs are of the cut "
            "distribution, so every ratio is off; set top_p=1, top_k=-1 and repetition_penalty=1"
        )
    if chosen.rollout_is and chosen.rollout_is_threshold is None:
        wrong.add(f"{key}.rollout_is_threshold=null: {key}.rollout_is={chosen.rollout_is} needs a bound; set 2.0")
    chosen.rollout_is_threshold = chosen.rollout_is_threshold or "2.0"
    if chosen.loss_type == "reinforce" and not chosen.bypass_mode:
        note(f"{key}.loss_type=reinforce has no effect without {key}.bypass_mode=true")
    if chosen.bypass_mode and chosen.rollout_is_batch_normalize:
        note(f"{key}.rollout_is_batch_normalize has no effect with bypass_mode: weights are made pass by pass")
    if chosen.rollout_rs_threshold and not chosen.rollout_rs:
        note(f"{key}.rollout_rs_threshold has no effect without {key}.rollout_rs")


def _note_idle_losses(config: PPOConfig, note: Note) -> None:
    algorithm, section = config.algorithm, config.actor_rollout_ref
    actor, ref = section.actor, section.ref
    loss = actor.policy_loss.loss_mode
    if loss in OWN_AGGREGATION and actor.loss_agg_mode not in ("token-mean", "seq-mean-token-mean"):
        note(
            f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode} is for entropy and KL alone with "
            f"loss_mode={loss}, which averages rows and, in them, tokens"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        note("algorithm.kl_ctrl.type=adaptive has no effect without algorithm.use_kl_in_reward=true")
    if algorithm.kl_ctrl.kl_coef not in (0, 0.001) and not algorithm.use_kl_in_reward:
        note("algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward=true")
    if actor.kl_loss_coef not in (0, 0.001) and not actor.use_kl_loss:
        note("actor_rollout_ref.actor.kl_loss_coef has no effect without actor_rollout_ref.actor.use_kl_loss=true")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        note("KL against the reference policy counts twice: in the reward and in the loss")
    if not (algorithm.use_kl_in_reward or actor.use_kl_loss):
        if ref.refresh_freq > 0:
            note("actor_rollout_ref.ref.refresh_freq has no effect: no KL against the reference policy is in use")
        if ref.model.path != section.model.path:  # both absolute by now
            note("actor_rollout_ref.ref.model.path has no effect: no KL against the reference policy is in use")
