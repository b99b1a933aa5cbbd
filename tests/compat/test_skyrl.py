"""SkyRL's environments and rows; they need skyrl-gym, as from `pip install --no-deps skyrl-gym func_timeout`."""

import asyncio

import pytest

from hybridrl.agents.environments import Response
from hybridrl.agents.environments.load import ENVIRONMENTS, check_environments
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of

skyrl_gym = pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")

CUSTOM = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from dataclasses import dataclass

@dataclass
class EchoConfig:
    mark: str = "!"

class Echo(BaseTextEnv):
    def __init__(self, env_config: EchoConfig, extras={}):
        super().__init__()
        self.mark, self.max_turns = env_config.mark, extras["max_turns"]

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "go"}], {}

    def step(self, action):
        self.turns += 1
        done = self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": action + self.mark}]
        return BaseTextEnvStepOutput(observations=observations, reward=0.5, done=done, metadata={"turns": self.turns})

    def get_metrics(self):
        return {"turns": self.turns, "name": "echo"}
"""
GSM8K = {"env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 3}}


def test_an_installed_environment_runs_and_agrees_with_the_built_in_one() -> None:
    theirs = made(GSM8K, environments_of())
    assert type(theirs.environment).__module__.startswith("skyrl_gym")
    ours = ENVIRONMENTS["gsm8k_multi_turn"]({}, GSM8K)
    asked = [{"role": "user", "content": "q"}]
    assert theirs.reset(asked) == asked
    for turn, text in enumerate(["#### 71", "none", "#### 72"]):
        step = theirs.step(Response(text))
        same = asyncio.run(ours.step(Response(text, turn=turn)))
        assert (step.done, len(step.messages)) == (same.done, len(same.messages))
        assert step.reward == pytest.approx(same.reward)
    assert theirs.close() == {"steps": 3.0}


def test_a_class_by_path_and_a_registered_one_run_with_their_configuration(tmp_path) -> None:
    file = tmp_path / "echo.py"
    file.write_text(CUSTOM)
    settings = environments_of(environment=f"{file}:Echo", environment_kwargs={"mark": "?"}, max_assistant_turns=2)
    check_environments(settings, [{}])
    environment = made({}, settings)
    assert environment.reset([])[0]["content"] == "go"
    first, second = environment.step(Response("a")), environment.step(Response("b"))
    assert (first.messages[0]["content"], first.metrics, second.done) == ("a?", {"turns": 1.0}, True)
    assert environment.close() == {"turns": 2.0}

    library = tmp_path / "registers.py"
    library.write_text(f"{CUSTOM}\nimport skyrl_gym\nskyrl_gym.register(id='echo', entry_point=Echo)")
    kwargs = {"echo": {"mark": ";"}}
    settings = environments_of(libraries=(str(library),), environment_kwargs=kwargs, max_assistant_turns=2)
    environment = made({"env_class": "echo"}, settings)
    assert environment.step(Response("a")).messages[0]["content"] == "a;"
