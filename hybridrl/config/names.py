"""Key names: the tree of valid ones, old names and what they became, the nearest valid ones to a mistyped one."""

import dataclasses
import difflib
import typing
from collections.abc import Iterator

OLD_NAMES = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_fn": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_kwargs": "reward.custom_reward_function.reward_kwargs",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "rollout": "actor_rollout_ref.rollout",
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
}


def current_name(key: str) -> str:
    """The present name of a key that carries an old one; any other key unchanged."""
    for old, new in OLD_NAMES.items():
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key


def leaves(section: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every key of a schema with its full name, and whether it holds a free-form mapping."""
    for name, hint in typing.get_type_hints(section).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), key + ".")
        else:
            yield key, typing.get_origin(hint) is dict


def nearest(key: str, known: list[str], count: int = 3) -> list[str]:
    """The valid keys most like a mistyped one: alike as a whole, or in their last part."""
    last = key.rsplit(".", 1)[-1]
    score = {
        name: max(
            difflib.SequenceMatcher(None, key, name).ratio(),
            0.95 * difflib.SequenceMatcher(None, last, name.rsplit(".", 1)[-1]).ratio(),
        )
        for name in known
    }
    return [name for name in sorted(score, key=lambda name: -score[name]) if score[name] > 0.6][:count]
