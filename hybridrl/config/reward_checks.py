"""The reward's keys against one another; what a file of the user's holds is seen when it is loaded."""

from collections.abc import Callable

from hybridrl.config.error import Refusals
from hybridrl.config.names import nearest
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.config.values import REWARD_MANAGERS

Note = Callable[[str], None]

_MANAGER = "reward.reward_manager"


def check_reward(reward: RewardConfig, note: Note, wrong: Refusals) -> None:
    """Add to `wrong` what cannot work; say which settings have no effect."""
    _check_manager(reward, note, wrong)
    _check_limits(reward, note)
    _check_overlong(reward, note, wrong)
    _check_weights(reward, wrong)
    if reward.clip_range and (len(reward.clip_range) != 2 or reward.clip_range[0] >= reward.clip_range[1]):
        wrong.add(f"reward.clip_range={reward.clip_range}: give the least and the greatest score, such as [-1.0, 1.0]")
    if reward.scale == 0:
        wrong.add("reward.scale=0: every score would be 0; set 1.0 to leave scores as they are")
    if reward.sandbox_fusion.url:
        wrong.add(
            f"reward.sandbox_fusion.url={reward.sandbox_fusion.url}: remote sandboxes are not supported; leave it out, "
            "and programs run in the sandbox here, or set reward.custom_reward_function.path to a function that asks it"
        )


def _check_manager(reward: RewardConfig, note: Note, wrong: Refusals) -> None:
    manager = reward.reward_manager
    if manager.source == "importlib":
        if manager.module.path is None:
            wrong.add(f"{_MANAGER}.source=importlib: set {_MANAGER}.module.path to the .py file with the manager")
        return
    if manager.module.path is not None:
        note(f"{_MANAGER}.module.path has no effect without {_MANAGER}.source=importlib")
    if manager.name not in REWARD_MANAGERS:
        meant = nearest(manager.name, list(REWARD_MANAGERS), count=1)
        wrong.add(
            f"{_MANAGER}.name={manager.name}: choose {' | '.join(REWARD_MANAGERS)}"
            + (f"; did you mean {meant[0]}?" if meant else "")
            + f", or set {_MANAGER}.source=importlib and {_MANAGER}.module.path for one of your own"
        )
    if manager.name == "batch" and reward.custom_reward_function.path is None:
        wrong.add(
            f"{_MANAGER}.name=batch: the built-in rewards judge answers one by one; set {_MANAGER}.name=naive, or "
            "reward.custom_reward_function.path to a function of data_sources, solution_strs, ground_truths, "
            "extra_infos"
        )


def _check_limits(reward: RewardConfig, note: Note) -> None:
    """verl has these for the manager rate_limited alone."""
    limits = {"max_concurrent": reward.max_concurrent > 1, "max_rpm": reward.max_rpm, "max_tpm": reward.max_tpm}
    manager = reward.reward_manager
    if manager.source == "importlib" or manager.name != "rate_limited":
        for name in (name for name, given in limits.items() if given):
            note(f"reward.{name} has no effect without {_MANAGER}.name=rate_limited")
    elif reward.on_error != "zero":
        note(
            "reward.reward_manager.name=rate_limited: an answer whose call fails is left out of the step; "
            "reward.on_error=zero scores it 0, as verl does"
        )


def _check_overlong(reward: RewardConfig, note: Note, wrong: Refusals) -> None:
    buffer, longest = reward.reward_kwargs.overlong_buffer_cfg, reward.reward_kwargs.max_resp_len
    if buffer.enable and reward.reward_manager.name != "dapo":
        note("reward.reward_kwargs.overlong_buffer_cfg has no effect without reward.reward_manager.name=dapo")
    elif buffer.enable and buffer.len > longest:
        wrong.add(
            f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len}: answers have at most max_resp_len={longest} "
            f"tokens; set a part of that, such as {max(longest // 5, 1)}"
        )


def _check_weights(reward: RewardConfig, wrong: Refusals) -> None:
    for name, weight in reward.weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            wrong.add(f"reward.weights.{name}={weight}: expected a number")
    for name, path in reward.functions.items():
        if not isinstance(path, str) or ".py" not in path:
            wrong.add(f"reward.functions.{name}={path}: expected path/to/file.py:function")
