"""Rollouts that are continued over steps: what goes with them, and how the age of their tokens is corrected for."""

from math import ceil

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.findings import Checker
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_rollout import SHIPPED_SHARE, WHOLE_SHARE, RolloutConfig, V1Config

V1, ROLLOUT = "trainer.v1", "actor_rollout_ref.rollout"
MODE, BOUND, OVER = f"{V1}.trainer_mode", f"{V1}.sampler.max_off_policy_threshold", f"{ROLLOUT}.over_sample_rate"


def continues_rollouts(v1: V1Config, rollout: RolloutConfig) -> bool:
    """Whether a step leaves responses unfinished that later steps continue."""
    return v1.trainer_mode != "sync" or rollout.over_sample_rate > 0


def most_in_flight(v1: V1Config, rollout: RolloutConfig, batch: int) -> int:
    """The most groups that may be started and not trained on yet; a step trains on `batch`."""
    bound = v1.sampler.max_off_policy_threshold
    # With full_determinism engines get all at once, however full they are.
    most = min(bound, 1) if rollout.full_determinism else bound
    return ceil(batch * (1 + (rollout.over_sample_rate or most)))


def resolve_asynchronous(config: PPOConfig, check: Checker) -> None:
    """Choose the correction; add findings about what does not go together."""
    v1, rollout, correction = config.trainer.v1, config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    continued = continues_rollouts(v1, rollout)
    off_policy = continued and v1.sampler.max_off_policy_threshold > 0
    chosen = correction.rollout_is
    if chosen == "auto":
        correction.rollout_is = "token" if off_policy and not correction.bypass_mode else None
    if config.separate and rollout.gpu_memory_utilization == SHIPPED_SHARE:
        rollout.gpu_memory_utilization = WHOLE_SHARE
    if rollout.nnodes and not config.separate:
        check.idle(f"{ROLLOUT}.nnodes {MODE}", f"without {MODE}=separate_async")
    if not continued:
        return
    _check_continued(config, check)
    if off_policy and chosen is None and not correction.bypass_mode:
        key = "algorithm.rollout_correction.rollout_is"
        cause = f"tokens up to {v1.sampler.max_off_policy_threshold} steps old are trained on as if they were new"
        check.warn(f"{key} {BOUND} {MODE}", cause, f"set {key}=token")


def _check_continued(config: PPOConfig, check: Checker) -> None:
    v1, rollout = config.trainer.v1, config.actor_rollout_ref.rollout
    key = OVER if v1.trainer_mode == "sync" else MODE
    if v1.sampler.max_off_policy_strategy == "drop":
        name = f"{V1}.sampler.max_off_policy_strategy"
        cause = f"wait is used for {name}=drop, which removes long responses more often than short ones: fewer prompts "
        check.warn(f"{name} {key}", f"{cause}are started, and all are trained on", valued=False)
        v1.sampler.max_off_policy_strategy = "wait"
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    if estimator is not None and "greedy_rewards" in estimator.reads:
        cause = f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares with a greedy response of the same "
        check.error(f"{key} algorithm.adv_estimator", f"{cause}weights", f"set {MODE}=sync and {OVER}=0")
    if config.reward.num_workers == 0:
        cause = "the reward would be computed between the requests of the engines"
        check.error(f"reward.num_workers {key}", cause, "leave it at null")
    if rollout.full_determinism:
        name, (machines, devices) = f"{ROLLOUT}.full_determinism", config.rollout_pool
        engines = machines * devices // rollout.tensor_model_parallel_size
        if config.data.train_batch_size % engines:
            cause = f"with {name}=true each of the {engines} engines has its share of the prompts"
            check.error(f"data.train_batch_size {name} {key}", cause, f"set a multiple of {engines}")
        if config.algorithm.filter_groups.enable:
            cause = f"the shares of the engines would differ with {name}=true"
            check.error(f"algorithm.filter_groups.enable {name} {key}", cause, f"set {name}=false")
