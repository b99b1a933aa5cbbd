"""SkyRL's environments, by `env_class` of the rows, where `skyrl-gym` is installed."""

import importlib
import importlib.util
import inspect
import logging
import typing
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

from hybridrl.agents.environments import Environment, Message, Response, Step
from hybridrl.agents.environments.user_code import UserCodeError, contained, metrics_of, reward_of
from hybridrl.config.compose import as_section

logger = logging.getLogger(__name__)

_warned: set[type] = set()  # classes whose rewritten actions have been reported in this process


class SkyRLEnvironment(Environment):
    """An instance of SkyRL's `BaseTextEnv` for one episode."""

    def __init__(self, environment: Any, row: Mapping[str, Any]) -> None:
        super().__init__({}, row)
        self.environment = environment

    def reset(self, messages: list[Message]) -> list[Message]:
        return list(self.environment.init(messages)[0])

    def step(self, response: Response) -> Step:
        output = self.environment.step(response.text)
        kind = type(self.environment)
        if output.get("postprocessed_action") not in (None, response.text) and kind not in _warned:
            _warned.add(kind)
            cause = "%s rewrites responses (postprocessed_action); what is trained on are the sampled tokens"
            logger.warning(cause, kind.__name__)
        reward, metrics = reward_of(output["reward"], kind), numbers(output.get("metadata"), kind)
        return Step(list(output["observations"]), reward, bool(output["done"]), metrics)

    def close(self) -> Mapping[str, float]:
        try:
            return metrics_of(self.environment.get_metrics(), self.environment)
        finally:
            self.environment.close()


def environment_names() -> Collection[str]:
    """The environments of `skyrl_gym`, its own and those that `register` added; none if it is not installed."""
    return _registration().registry if importlib.util.find_spec("skyrl_gym") else ()


def make(name: str, config: Mapping[str, Any], row: Mapping[str, Any], max_turns: int | None) -> SkyRLEnvironment:
    """Make a registered environment for a row."""
    spec = _registration().registry[name]
    creator = spec.entry_point
    if isinstance(creator, str):
        module, _, member = creator.partition(":")
        creator = getattr(importlib.import_module(module), member)
    extras = _extras(row, max_turns)
    environment = importlib.import_module("skyrl_gym").make(name, env_config=_section(creator, config), extras=extras)
    return SkyRLEnvironment(environment, row)


def of_class(cls: type, config: Mapping[str, Any], row: Mapping[str, Any], max_turns: int | None) -> SkyRLEnvironment:
    """Make an environment of a class that is not registered."""
    return SkyRLEnvironment(cls(env_config=_section(cls, config), extras=_extras(row, max_turns)), row)


def numbers(values: Any, source: Any) -> dict[str, float]:
    """The metrics among values of any kind: the numbers."""
    values = values if isinstance(values, Mapping) else {}
    return metrics_of({name: value for name, value in values.items() if isinstance(value, int | float)}, source)


def _extras(row: Mapping[str, Any], max_turns: int | None) -> dict[str, Any]:
    """The columns of the row as SkyRL passes them."""
    extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
    return extras if max_turns is None or "max_turns" in extras else {**extras, "max_turns": max_turns}


def _section(creator: Any, config: Mapping[str, Any]) -> Any:
    """The configuration of an environment: of its own dataclass, for the defaults, if its constructor names one."""
    hint = None
    with suppress(UserCodeError), contained(creator):  # annotations may name what cannot be imported here
        hint = typing.get_type_hints(creator.__init__ if inspect.isclass(creator) else creator).get("env_config")
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if inspect.isclass(kind) and is_dataclass(kind)]
    return kinds[0](**config) if kinds else as_section(dict(config))


def _registration() -> Any:
    importlib.import_module("skyrl_gym")
    return importlib.import_module("skyrl_gym.envs.registration")
