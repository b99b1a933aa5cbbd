"""Checks of the algorithm, the rewards, the data and the loggers: settings that conflict or have no effect. The
contents of files are checked when they are read."""

import re

from hybridrl.config.catalog import BYPASS_LOSSES, DEFAULT_POLICY_LOSS, ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from hybridrl.config.checks.engine import MODE, UNTRUNCATED
from hybridrl.config.checks.model import absolute
from hybridrl.config.findings import Checker, nearest
from hybridrl.config.judge import ROUTER, TOKENIZER
from hybridrl.config.schema import ActorConfig, ActorRolloutRefConfig, DataConfig, SFTTrainerConfig
from hybridrl.config.schema_parts import AlgorithmConfig, FilterGroupsConfig, RewardConfig, RolloutCorrectionConfig
from hybridrl.config.values import DIAGNOSES, LOGGERS, REWARD_MANAGERS, rule_code
from hybridrl.plugins import names

# Custom functions are not imported here: they may read any field, and their other facts are unknown.
CUSTOM_ESTIMATOR = Estimator("", "", reads=("values", "reward_parts"))
CUSTOM_LOSS = PolicyLoss("", "")
WANDB_REJECTS, WANDB_LENGTH = r"[/\\#?%:]", 128  # in names of projects
# Logging backends of verl, SkyRL and AReaL that hybridrl does not have.
OTHER_LOGGERS = ("vemlp_wandb", "rl_insight", "aim")

ESTIMATOR, CORRECTION, FILTER = "algorithm.adv_estimator", "algorithm.rollout_correction", "algorithm.filter_groups"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{section}" for section in ("actor", "rollout", "ref"))
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
MANAGER = "reward.reward_manager"


def check_estimator(algorithm: AlgorithmConfig, n: int, check: Checker, *, val_only: bool) -> None:
    check, name = check.at("algorithm"), algorithm.adv_estimator
    entry = ESTIMATORS.get(name, CUSTOM_ESTIMATOR)
    if entry.compares_group and n == 1 and not val_only:
        cause = f"{ESTIMATOR}={name} compares responses to the same prompt; in a group of one every advantage is 0, so "
        check.warn(f"{ROLLOUT}.n .adv_estimator", cause + "nothing can be learned", f"set {ROLLOUT}.n=8")
    if entry.reads_probabilities and algorithm.rollout_correction.bypass_mode:
        cause = f"{ESTIMATOR}={name} needs the trainer's own probabilities, which that mode does not compute"
        check.error(f"{CORRECTION}.bypass_mode .adv_estimator", cause, f"set {CORRECTION}.bypass_mode=false")
    keys, weights, key = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, "algorithm.gdpo_reward_keys"
    if entry.name and "reward_parts" in entry.reads:
        if not keys:
            cause = f"name the reward components that it normalizes one by one, such as {key}=[format,accuracy]"
            check.error(".adv_estimator .gdpo_reward_keys", cause, "the reward function returns them in its dict")
        if algorithm.use_kl_in_reward:
            check.idle(".use_kl_in_reward .adv_estimator", f"with {ESTIMATOR}={name}, which only reads the components")
    if keys and "reward_parts" not in entry.reads:
        check.idle(".gdpo_reward_keys .adv_estimator", f"with {ESTIMATOR}={name}")
    if weights and len(weights) != len(keys):
        cause = f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(keys)} {key}"
        check.error(".gdpo_reward_weights .gdpo_reward_keys", cause, "give one weight per key, or none", valued=False)


def check_filter(filtering: FilterGroupsConfig, n: int, data: DataConfig, steps: int | None, check: Checker) -> None:
    """Check dynamic sampling and the batches it takes; `steps` is trainer.total_training_steps."""
    if filtering.enable and n == 1:
        cause = f"{FILTER}.enable=true has no effect with {ROLLOUT}.n=1: no responses to compare"
        check.warn(f"{FILTER}.enable {ROLLOUT}.n", cause, valued=False)
    if not filtering.enable and filtering.metric is not None:
        check.idle(f"{FILTER}.metric {FILTER}.enable", f"without {FILTER}.enable=true")
    if data.drop_last and (filtering.enable or steps):
        why = "with dynamic sampling, whose steps use up as many prompts as they need" if filtering.enable else ""
        why = why or "with trainer.total_training_steps, as each of these has all its prompts"
        check.idle(f"data.drop_last {FILTER}.enable trainer.total_training_steps", why)
    if not filtering.enable and data.gen_batch_size not in (None, data.train_batch_size):
        check.idle(f"data.gen_batch_size {FILTER}.enable", f"without {FILTER}.enable=true")


def check_bypass(correction: RolloutCorrectionConfig, section: ActorRolloutRefConfig, check: Checker) -> None:
    """Check bypass mode and the correction of the difference between rollout and training probabilities."""
    check, rollout = check.at(CORRECTION), section.rollout
    loss, loss_type = section.actor.policy_loss.loss_mode, correction.loss_type
    replaces_loss = BYPASS_LOSSES[loss_type] is not None
    if replaces_loss and not correction.bypass_mode:
        cause = f"{CORRECTION}.loss_type={loss_type} has no effect without {CORRECTION}.bypass_mode=true"
        check.warn(".loss_type .bypass_mode", cause, valued=False)
    if correction.bypass_mode:
        if correction.rollout_is and not replaces_loss:
            why = f"with bypass_mode and loss_type={loss_type}: the ratio already corrects"
            check.idle(".rollout_is .bypass_mode .loss_type", why)
        if replaces_loss and loss != DEFAULT_POLICY_LOSS:
            cause = f"{LOSS_MODE}={loss} has no effect: {CORRECTION}.loss_type={loss_type} is the loss"
            check.warn(f"{LOSS_MODE} .bypass_mode .loss_type", cause, valued=False)
        if correction.rollout_is_batch_normalize:
            why = "with bypass_mode: weights are computed per micro-batch"
            check.idle(".rollout_is_batch_normalize .bypass_mode", why)
    reads_rollout = "bypass_mode" if correction.bypass_mode else "rollout_is" if correction.rollout_is else "rollout_rs"
    reads = bool(vars(correction)[reads_rollout])
    truncated = reads and (rollout.top_p < 1 or rollout.top_k > 0)
    if truncated and rollout.name in UNTRUNCATED:
        # This is the purpose of bypass mode: log-probs like the trainer's, with ratios of 1 before the first update.
        if not correction.bypass_mode:
            cause = (
                f"the log-probs of {rollout.name} are of the distribution before top_p and top_k truncate it, so no "
            )
            cause += "ratio corrects for what was sampled"
            fix = f"set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1, or {CORRECTION}.bypass_mode=true"
            check.error(f".{reads_rollout} {ROLLOUT}.name {ROLLOUT}.top_p {ROLLOUT}.top_k {MODE}", cause, fix)
        truncated = False
    if truncated or (reads and rollout.repetition_penalty != 1):
        keys = f".{reads_rollout} {ROLLOUT}.top_p {ROLLOUT}.top_k {ROLLOUT}.repetition_penalty {MODE}"
        cause = "with top_p, top_k or repetition_penalty the rollout's log-probs are of the truncated distribution, so "
        cause += "every ratio is wrong: by the probability of the tokens that are kept, or by the penalty"
        check.warn(keys, cause, "set top_p=1, top_k=-1 and repetition_penalty=1")
    if correction.rollout_is and correction.rollout_is_threshold is None:
        cause = f"{CORRECTION}.rollout_is={correction.rollout_is} needs a bound"
        check.error(".rollout_is_threshold .rollout_is", cause, "set 2.0")
    correction.rollout_is_threshold = correction.rollout_is_threshold or "2.0"
    rejects = ".rollout_rs_threshold .rollout_rs"
    if correction.rollout_rs_threshold and not correction.rollout_rs:
        check.idle(rejects, f"without {CORRECTION}.rollout_rs")
    try:
        _ = correction.rejections
    except ValueError as error:
        check.error(rejects, str(error))


def check_policy_loss(actor: ActorConfig, check: Checker) -> None:
    check, name = check.at(ACTOR), actor.policy_loss.loss_mode
    entry = POLICY_LOSSES.get(name, CUSTOM_LOSS)
    for key, parameter in entry.parameters.items():
        if parameter.suggestion is not None and vars(actor.policy_loss)[key] is None:
            fix = f"set {ACTOR}.policy_loss.{key}={parameter.suggestion:g}"
            check.error(f"{LOSS_MODE} .policy_loss.{key}", f"{key} has no default", fix)
    if entry.aggregation and actor.loss_agg_mode not in ("token-mean", entry.aggregation):
        cause = f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode} applies to entropy and KL only with loss_mode={name}, "
        cause += "which averages over the tokens of a row, then over rows"
        check.warn(f".loss_agg_mode {LOSS_MODE}", cause, valued=False)
    low, high = actor.clip_ratio_low or 0.0, actor.clip_ratio_high or 0.0
    if entry.clips_ratio and low == high == 0:
        cause = f"{ACTOR}.clip_ratio=0: every ratio but 1 is clipped, so that only the first update of a step learns"
        check.warn(f".clip_ratio {LOSS_MODE}", cause, f"set {ACTOR}.clip_ratio=0.2", valued=False)
    if entry.clips_ratio and high < low:
        cause = f"{ACTOR}.clip_ratio_high={high:g} is less than clip_ratio_low={low:g}: the upper side is usually the "
        check.warn(f".clip_ratio_high .clip_ratio_low {LOSS_MODE}", cause + "wider one", valued=False)
    if entry.clips_ratio == "ratio" and low >= 1:
        cause = f"{ACTOR}.clip_ratio_low={low:g}: a ratio is never below 0, so that side does not clip"
        check.warn(f".clip_ratio_low {LOSS_MODE}", cause, valued=False)


def check_kl(algorithm: AlgorithmConfig, section: ActorRolloutRefConfig, check: Checker) -> None:
    check = check.at("algorithm")
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if not algorithm.use_kl_in_reward:
        if algorithm.kl_ctrl.type == "adaptive":
            cause = f"algorithm.kl_ctrl.type=adaptive has no effect without {in_reward}=true"
            check.warn(f".kl_ctrl.type {in_reward}", cause, valued=False)
        if algorithm.kl_ctrl.kl_coef not in (0, 0.001):
            check.idle(f".kl_ctrl.kl_coef {in_reward}", f"without {in_reward}=true")
    if section.actor.kl_loss_coef not in (0, 0.001) and not section.actor.use_kl_loss:
        check.idle(f"{ACTOR}.kl_loss_coef {in_loss}", f"without {in_loss}=true")
    if algorithm.use_kl_in_reward and section.actor.use_kl_loss:
        cause = "KL against the reference policy counts twice: in the reward and in the loss"
        check.warn(f"{in_reward} {in_loss}", cause, valued=False)
    if not algorithm.use_kl_in_reward and not section.actor.use_kl_loss:
        why = ": no KL against the reference policy is in use"
        if section.ref.refresh_freq > 0:
            check.idle(f"{REF}.refresh_freq {in_reward} {in_loss}", why)
        if section.ref.model.path != section.model.path:  # both paths are absolute by now
            check.idle(f"{REF}.model.path {in_reward} {in_loss}", why)


def check_data(data: DataConfig, check: Checker) -> None:
    for key, path, name, name_key in (
        ("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, "data.custom_cls.name"),
        ("data.sampler.class_path", data.sampler.class_path, data.sampler.class_name, "data.sampler.class_name"),
    ):
        if path and not name:
            check.error(f"{key} {name_key}", "the class in it is not named", f"set {name_key}")
        if name and not path:
            check.warn(f"{name_key} {key}", f"has no effect without {key}")
        if path and data.train_weights:
            cause = f"{key.rpartition('.')[0]} decides by itself which rows are sampled"
            check.error(f"data.train_weights {key}", cause, "leave the weights out")
    others = {"data.train_weights": data.train_weights, "data.sampler.class_path": data.sampler.class_path}
    for key, value in others.items() if data.curriculum != "off" else ():
        if value:
            check.error(f"data.curriculum {key}", "both determine the order of rows", "set data.curriculum=off")
    if data.train_weights and len(data.train_weights) != len(data.train_files):
        count = f"data.train_files has {len(data.train_files)} entries"
        check.error("data.train_weights data.train_files", count, "give one weight per entry")


def resolve_loggers(trainer: SFTTrainerConfig, check: Checker) -> None:
    """Leave out other systems' loggers with a warning; reject unknown names."""
    names = [name for name in trainer.logger if name in LOGGERS or ":" in name]
    others = [name for name in trainer.logger if name in OTHER_LOGGERS]
    for name in trainer.logger:
        if name not in (*names, *OTHER_LOGGERS):
            cause = f"trainer.logger={name}: choose among {', '.join(LOGGERS)}, path/to/file.py:Class"
            check.findings.error("conflict", cause, _meant(name, LOGGERS), keys="trainer.logger", value=name)
    if others:
        trainer.logger = names or ["console"]
        cause = f"{', '.join(others)} {'are' if others[1:] else 'is'} not supported and left out; metrics go to "
        check.warn("trainer.logger", cause + f"{', '.join(trainer.logger)} and metrics.jsonl")
    project = trainer.project_name
    if "wandb" in trainer.logger and (accepted := re.sub(WANDB_REJECTS, "-", project)[:WANDB_LENGTH]) != project:
        cause = f"W&B accepts names of up to {WANDB_LENGTH} characters, without any of / \\ # ? % :"
        check.error("trainer.project_name trainer.logger", cause, f"set trainer.project_name={accepted}")


def check_diagnoses(trainer: SFTTrainerConfig, check: Checker) -> None:
    """Check the codes of diagnoses: built-in rules, and custom rules, whose codes must be new."""
    check, custom = check.at("trainer"), [rule_code(name) for name in trainer.health_rules]
    for number, code in enumerate(custom):
        if code in DIAGNOSES or code in custom[:number]:
            cause = f"trainer.health_rules: there is a rule {code} already"
            check.error(".health_rules", cause, "give the function another name", valued=False)
    for code in trainer.on_diagnosis:
        if code not in (*DIAGNOSES, *custom):
            codes = (*DIAGNOSES, *custom)
            cause = f"trainer.on_diagnosis: no rule has the code {code}: choose {' | '.join(codes)}"
            check.error(".on_diagnosis .health_rules", cause, _meant(code, codes), valued=False)


def resolve_reward(reward: RewardConfig, check: Checker) -> None:
    """Fill in the function's usual name and the time that a judge needs; check the reward and its manager."""
    function, check = reward.custom_reward_function, check.at("reward")
    function.name = function.name or "compute_score"
    if reward.name and function.path:
        keys, fix = ".name .custom_reward_function.path", "leave one of them out"
        check.error(keys, "a built-in and a custom reward for the same rows", fix)
    _check_reward_manager(reward, check)
    _resolve_server(reward, check)
    _resolve_judge(reward, check)
    buffer, longest = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    if buffer.enable and reward.reward_manager.name != "dapo":
        keys = ".reward_kwargs.overlong_buffer_cfg.enable .reward_manager.name"
        check.warn(keys, f"has no effect without {MANAGER}.name=dapo")
    elif buffer.enable and not 0 < buffer.len <= longest:
        keys = ".reward_kwargs.overlong_buffer_cfg.len .reward_kwargs.max_resp_len"
        fix = f"set a part of that, such as {max(longest // 5, 1)}"
        check.error(keys, f"responses have at most max_resp_len={longest} tokens", fix)
    for name, weight in reward.weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            check.error([f".weights.{name}"], "expected a number")
    for name, path in reward.functions.items():
        if not isinstance(path, str) or ".py" not in path:
            check.error([f".functions.{name}"], "expected path/to/file.py:function")
    if reward.clip_range and (len(reward.clip_range) != 2 or reward.clip_range[0] >= reward.clip_range[1]):
        check.error(".clip_range", "expected the least and the greatest score", "set [-1.0, 1.0], for example")
    if reward.scale == 0:
        check.error(".scale", "every score would be 0", "set 1.0 to leave scores unchanged")
    if reward.sandbox_fusion.url:
        fix = "leave it out to run programs in the local sandbox, or set reward.custom_reward_function.path to a "
        fix += "function that calls it"
        check.error(".sandbox_fusion.url", "remote sandboxes are not supported", fix)


def _check_reward_manager(reward: RewardConfig, check: Checker) -> None:
    manager, custom = reward.reward_manager, reward.reward_manager.source == "importlib"
    if custom and manager.module.path is None:
        keys = ".reward_manager.source .reward_manager.module.path"
        check.error(keys, "the manager's file is not set", f"set {MANAGER}.module.path to the .py file with it")
    if not custom and manager.module.path is not None:
        check.warn(".reward_manager.module.path", f"has no effect without {MANAGER}.source=importlib")
    managers = (*REWARD_MANAGERS, *names("reward_manager"))
    if not custom and manager.name not in managers:
        fix = f"{_meant(manager.name, managers)} For a custom manager set {MANAGER}.source=importlib and "
        fix = f"{fix}{MANAGER}.module.path".lstrip()
        check.error(".reward_manager.name", f"choose {' | '.join(managers)}", fix)
    several = manager.name in ("batch", "group") and not (manager.name == "group" and reward.judge.base_url)
    if not custom and several and reward.custom_reward_function.path is None:
        fix = f"set {MANAGER}.name=naive, or reward.custom_reward_function.path to a function of data_sources, "
        fix += "solution_strs, ground_truths, extra_infos"
        cause = "the built-in rewards score responses one by one"
        check.error(".reward_manager.name .custom_reward_function.path", cause, fix)
    # Rate limits, which verl has for the manager rate_limited only.
    limits = {"max_concurrent": reward.max_concurrent > 1, "max_rpm": reward.max_rpm, "max_tpm": reward.max_tpm}
    if reward.judge.base_url is not None:  # they limit its calls
        return
    if custom or manager.name != "rate_limited":
        for name in (name for name, is_set in limits.items() if is_set):
            check.warn(f".{name} .reward_manager.name", f"has no effect without {MANAGER}.name=rate_limited")
    elif reward.on_error != "zero":
        cause = "a response whose call fails is left out of the step; reward.on_error=zero scores it 0, as verl does"
        check.warn(".reward_manager.name .on_error", cause)


def _resolve_server(reward: RewardConfig, check: Checker) -> None:
    """Check a custom function that calls a model's server itself, as with verl's generative reward models: training
    ranks compute none then."""
    parameters, section = reward.server_parameters, reward.reward_model
    if not parameters:
        return
    if reward.judge.base_url is None and (section.enable or parameters.get(ROUTER)):
        serve = f"hybridrl serve model.path={section.model_path or '...'} port=8001"
        cause = f"the custom function names {' and '.join(parameters)}: it calls a model's server, and none is named"
        fix = f"start it: {serve}, and set reward.judge.base_url=http://127.0.0.1:8001/v1"
        check.error(".judge.base_url .custom_reward_function.path", cause, fix, valued=False)
    if section.model_path is None and parameters.get(TOKENIZER):
        cause, fix = f"the custom function needs {TOKENIZER}", "set it to the model that the server has"
        check.error(".reward_model.model_path .custom_reward_function.path", cause, fix)
    if section.enable:
        cause = "the custom function calls its server, so the training ranks load no reward model"
        check.findings.info("setting", cause, keys="reward.reward_model.enable")
    section.enable, section.model_path = False, section.model_path and absolute(section.model_path)


def _resolve_judge(reward: RewardConfig, check: Checker) -> None:
    """Check the judge, and raise reward.timeout to the time of all its attempts."""
    judge, manager = reward.judge, reward.reward_manager
    if judge.base_url is None and judge.model is not None:
        check.idle(".judge.model .judge.base_url", "without reward.judge.base_url")
    if judge.base_url is None or not reward.judged:
        return
    if judge.model is None:
        fix = f"set reward.judge.model to a name that the server lists: curl {judge.base_url.rstrip('/')}/models"
        check.error(".judge.model .judge.base_url", "the judge's model is not named", fix)
    if "judge" in reward.functions:
        check.error(["reward.functions.judge"], "the judge of reward.judge has this name", "choose another name")
    if manager.source == "register" and manager.name == "batch":
        cause = "batch scores the responses of a step in one call, and a judge each one"
        check.error(".reward_manager.name .judge.base_url", cause, f"set {MANAGER}.name=naive")
    if judge.compares:
        if manager.source == "register" and manager.name == "naive":
            check.findings.info(
                "setting", f"{MANAGER}.name=group: the judge compares responses", keys=f"{MANAGER}.name"
            )
            manager.name = "group"
        elif manager.name != "group":
            cause = "the judge's template compares the responses to a prompt, which only group scores together"
            check.error(".judge.template .reward_manager.name", cause, f"set {MANAGER}.name=group")
    if reward.timeout < judge.longest:
        cause = f"reward.timeout={judge.longest:g} instead of {reward.timeout:g}: the judge may need as long with "
        cause += f"{judge.retries} retries"
        check.findings.info("setting", cause, keys="reward.timeout")
        reward.timeout = judge.longest


def _meant(name: str, valid: tuple[str, ...]) -> str:
    similar = nearest(name, list(valid), count=1)
    return f"did you mean {similar[0]}?" if similar else ""
