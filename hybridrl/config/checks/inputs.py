"""Checks of rewards, data and loggers; the contents of files are checked when they are read."""

from hybridrl.config.findings import Checker
from hybridrl.config.keys import nearest
from hybridrl.config.schema import DataConfig, SFTTrainerConfig
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.config.values import LOGGERS, REWARD_MANAGERS

# Logging backends of verl, SkyRL and AReaL that hybridrl does not have.
OTHER_LOGGERS = ("swanlab", "mlflow", "vemlp_wandb", "clearml", "trackio", "rl_insight", "aim")

MANAGER = "reward.reward_manager"


def check_data(data: DataConfig, check: Checker) -> None:
    for key, path, name, name_key in (
        ("data.custom_cls.path", data.custom_cls.path, data.custom_cls.name, "data.custom_cls.name"),
        ("data.sampler.class_path", data.sampler.class_path, data.sampler.class_name, "data.sampler.class_name"),
    ):
        if path and not name:
            check.error((key, name_key), "the class in it is not named", f"set {name_key}")
        if name and not path:
            check.warn((name_key, key), f"has no effect without {key}")
        if path and data.train_weights:
            check.error(
                ("data.train_weights", key),
                f"{key.rpartition('.')[0]} decides by itself which rows are sampled",
                "leave the weights out",
            )
    if data.train_weights and len(data.train_weights) != len(data.train_files):
        count = f"data.train_files has {len(data.train_files)} entries"
        check.error(("data.train_weights", "data.train_files"), count, "give one weight per entry")


def resolve_loggers(trainer: SFTTrainerConfig, check: Checker) -> None:
    """Leave out other systems' loggers with a warning; reject unknown names."""
    known = [name for name in trainer.logger if name in LOGGERS]
    others = [name for name in trainer.logger if name in OTHER_LOGGERS]
    for name in trainer.logger:
        if name not in (*LOGGERS, *OTHER_LOGGERS):
            similar = nearest(name, [*LOGGERS], count=1)
            hint = f"did you mean {similar[0]}?" if similar else ""
            cause = f"trainer.logger={name}: choose among {', '.join(LOGGERS)}"
            check.findings.error("conflict", cause, hint, keys="trainer.logger", value=name)
    if others:
        trainer.logger = known or ["console"]
        check.warn(
            "trainer.logger",
            f"{', '.join(others)} {'are' if others[1:] else 'is'} not supported and left out; metrics go to "
            f"{', '.join(trainer.logger)} and metrics.jsonl",
        )


def check_reward(reward: RewardConfig, check: Checker) -> None:
    _check_manager(reward, check)
    _check_limits(reward, check)
    buffer, key = reward.reward_kwargs.overlong_buffer_cfg, "reward.reward_kwargs.overlong_buffer_cfg"
    if buffer.enable and reward.reward_manager.name != "dapo":
        check.warn((f"{key}.enable", f"{MANAGER}.name"), f"has no effect without {MANAGER}.name=dapo")
    elif buffer.enable and buffer.len > (longest := reward.reward_kwargs.max_resp_len):
        check.error(
            (f"{key}.len", "reward.reward_kwargs.max_resp_len"),
            f"responses have at most max_resp_len={longest} tokens",
            f"set a part of that, such as {max(longest // 5, 1)}",
        )
    for name, weight in reward.weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            check.error(f"reward.weights.{name}", "expected a number")
    for name, path in reward.functions.items():
        if not isinstance(path, str) or ".py" not in path:
            check.error(f"reward.functions.{name}", "expected path/to/file.py:function")
    if reward.clip_range and (len(reward.clip_range) != 2 or reward.clip_range[0] >= reward.clip_range[1]):
        check.error("reward.clip_range", "expected the least and the greatest score", "set [-1.0, 1.0], for example")
    if reward.scale == 0:
        check.error("reward.scale", "every score would be 0", "set 1.0 to leave scores unchanged")
    if reward.sandbox_fusion.url:
        check.error(
            "reward.sandbox_fusion.url",
            "remote sandboxes are not supported",
            "leave it out to run programs in the local sandbox, or set reward.custom_reward_function.path to a "
            "function that calls it",
        )


def _check_manager(reward: RewardConfig, check: Checker) -> None:
    manager = reward.reward_manager
    if manager.source == "importlib":
        if manager.module.path is None:
            keys = (f"{MANAGER}.source", f"{MANAGER}.module.path")
            check.error(keys, "the manager's file is not set", f"set {MANAGER}.module.path to the .py file with it")
        return
    if manager.module.path is not None:
        check.warn(f"{MANAGER}.module.path", f"has no effect without {MANAGER}.source=importlib")
    if manager.name not in REWARD_MANAGERS:
        similar = nearest(manager.name, list(REWARD_MANAGERS), count=1)
        check.error(
            f"{MANAGER}.name",
            f"choose {' | '.join(REWARD_MANAGERS)}",
            (f"did you mean {similar[0]}? " if similar else "")
            + f"For a custom manager set {MANAGER}.source=importlib and {MANAGER}.module.path",
        )
    if manager.name == "batch" and reward.custom_reward_function.path is None:
        check.error(
            (f"{MANAGER}.name", "reward.custom_reward_function.path"),
            "the built-in rewards score responses one by one",
            f"set {MANAGER}.name=naive, or reward.custom_reward_function.path to a function of data_sources, "
            "solution_strs, ground_truths, extra_infos",
        )


def _check_limits(reward: RewardConfig, check: Checker) -> None:
    """Rate limits, which verl has for the manager rate_limited only."""
    limits = {"max_concurrent": reward.max_concurrent > 1, "max_rpm": reward.max_rpm, "max_tpm": reward.max_tpm}
    if reward.reward_manager.source == "importlib" or reward.reward_manager.name != "rate_limited":
        for name in (name for name, is_set in limits.items() if is_set):
            check.warn((f"reward.{name}", f"{MANAGER}.name"), f"has no effect without {MANAGER}.name=rate_limited")
    elif reward.on_error != "zero":
        check.warn(
            (f"{MANAGER}.name", "reward.on_error"),
            "a response whose call fails is left out of the step; reward.on_error=zero scores it 0, as verl does",
        )
